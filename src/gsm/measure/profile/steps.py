"""Blocks of decode steps, plain or with their parts timed. A block is as long as a page: each completes exactly one."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from gsm.integrations.transformers.timing import Replay, timed_parts
from gsm.measure.profile.timer import SelfTimer
from gsm.quality import ModelSession

BLOCK_STEPS = 16


class Stepper:
    """Decodes greedily from ``token`` [batch, 1] on a prefilled session."""

    def __init__(self, session: ModelSession, token: torch.Tensor):
        self.session, self.token = session, token
        self._wait = synchroniser(token.device)

    def plain_block(self, num_steps: int = BLOCK_STEPS) -> list[float]:
        """Seconds of each step."""
        seconds = []
        for _ in range(num_steps):
            start = time.perf_counter()
            self._step()
            self._wait()
            seconds.append(time.perf_counter() - start)
        return seconds

    def timed_block(self, replay: Replay | None = None) -> dict[str, float]:
        """Seconds per step by label (see `timed_parts`), averaged over the block."""
        timer = SelfTimer(wait=self._wait)
        with timed_parts(self.session.model, self.session.cache, timer, replay):
            timer.start()
            for _ in range(BLOCK_STEPS):
                self._step()
            seconds = timer.stop()
        return {label: total / BLOCK_STEPS for label, total in seconds.items()}

    def _step(self) -> None:
        self.token = self.session.step(self.token).argmax(-1, keepdim=True)


def synchroniser(device: torch.device) -> Callable[[], None]:
    """What waits until everything given to ``device`` is done."""
    if device.type == "cuda":
        return lambda: torch.cuda.synchronize(device)
    return lambda: None
