"""Profile one session: where a decode step's time goes.

Blocks of steps take turns: plain ones that say how long a step takes, timed ones that say where it goes, and, for
sparse attention, timed ones that read the same pages without choosing them: the fused kernel cannot be timed inside.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from gsm.integrations.transformers.timing import ATTENTION, HOST, Replay
from gsm.measure.profile.steps import BLOCK_STEPS, Stepper
from gsm.quality import ModelSession
from gsm.results import Profile, Spread
from gsm.stats import summary

PARTS = ("linear", "attention", "selection", "mass", "cache_writes", "smoothing", "host", "other")
MAX_SUM_ERROR, MAX_OTHER_SHARE = 0.05, 0.10  # beyond these a profile does not explain its step


@dataclass
class Blocks:
    """Seconds per step of plain blocks; seconds per step by label of timed ones and of those without choosing."""

    plain_s: list[float] = field(default_factory=list)
    timed: list[dict[str, float]] = field(default_factory=list)
    replayed: list[dict[str, float]] = field(default_factory=list)

    def label_ms(self) -> dict[str, float]:
        """Medians over blocks in ms per step; choosing pages is what a replay of the choice saves."""
        labels = {label for block in self.timed for label in block}
        by_label = {label: _median_ms([block.get(label, 0.0) for block in self.timed]) for label in labels}
        if self.replayed:
            attention = by_label.get(ATTENTION, 0.0)
            without_choosing = _median_ms([block.get(ATTENTION, 0.0) for block in self.replayed])
            by_label["selection"] = max(0.0, attention - without_choosing)
            by_label[ATTENTION] = attention - by_label["selection"]
        return by_label


NUM_ROUNDS = 3
MAX_STEPS = BLOCK_STEPS * (2 + 3 * NUM_ROUNDS)  # how far past its prompt a profile decodes


def profile_session(session: ModelSession, token: torch.Tensor, num_rounds: int = NUM_ROUNDS) -> Profile:
    """Decode greedily from ``token`` [batch, 1] on a prefilled ``session`` and say where the time goes.

    Every round takes a plain and a timed block of 16 steps, with sparse attention one more; two blocks before them are
    thrown away.
    """
    context_tokens, stepper, replay, blocks = session.num_tokens, Stepper(session, token), Replay(), Blocks()
    stepper.plain_block()
    stepper.timed_block(replay)
    choosing = replay.is_ready
    for _ in range(num_rounds):
        seconds = stepper.plain_block()
        blocks.plain_s.append(sum(seconds) / len(seconds))
        blocks.timed.append(stepper.timed_block(replay))
        if choosing:
            replay.active = True
            blocks.replayed.append(stepper.timed_block(replay))
            replay.active = False
    return summarise(blocks, context_tokens)


def summarise(blocks: Blocks, context_tokens: int) -> Profile:
    """The record of some blocks, of which at least one is plain and one timed."""
    by_label = blocks.label_ms()
    host = {label.split(".", 1)[1]: ms for label, ms in by_label.items() if label.startswith(f"{HOST}.")}
    parts = {part: by_label.get(part, 0.0) for part in PARTS}
    parts[HOST] = sum(host.values())
    step_ms, sum_ms = _median_ms(blocks.plain_s), sum(parts.values())
    sum_error, other_share = sum_ms / step_ms - 1, parts["other"] / step_ms
    return Profile(
        context_tokens=context_tokens,
        num_steps=BLOCK_STEPS * (len(blocks.plain_s) + len(blocks.timed) + len(blocks.replayed)),
        step_ms=Spread(**summary([1e3 * s for s in blocks.plain_s])),
        parts_ms=parts,
        host_parts_ms=dict(sorted(host.items(), key=lambda item: -item[1])),
        sum_ms=sum_ms,
        sum_error=sum_error,
        other_share=other_share,
        explains_step=abs(sum_error) <= MAX_SUM_ERROR and other_share <= MAX_OTHER_SHARE,
    )


def _median_ms(seconds: Sequence[float]) -> float:
    return 1e3 * (summary(seconds)["median"] or 0.0)
