"""One engine of vLLM inside this process, driven token by token: what quality measurements need of it.

vLLM chooses the next token where nobody else can: in the middle of a step. So the engine steps in a thread of its own,
and a logits processor hands every row of logits out and waits for the token to go on with.
"""

from __future__ import annotations

import itertools
import os
import queue
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gsm.config import GsmConfig
from gsm.errors import EngineError
from gsm.integrations.vllm.live import KEY, Live, live_of

FORCED = "gsm_forced"  # name of the request argument that asks for it
_TURNS: dict[str, Turn] = {}


@dataclass
class Turn:
    """A request whose tokens are chosen from outside."""

    prompt: list[int]
    logits: queue.Queue[Tensor | BaseException] = field(default_factory=lambda: queue.Queue(1))
    tokens: queue.Queue[int | None] = field(default_factory=lambda: queue.Queue(1))  # None: no more
    open: bool = True

    def first(self) -> Tensor:
        """Logits `[vocab]` after the prompt."""
        return self._take()

    def next(self, token: int) -> Tensor:
        """Feed a token on the decode path; logits `[vocab]` after it."""
        self.tokens.put(token)
        return self._take()

    def _take(self) -> Tensor:
        found = self.logits.get()
        if isinstance(found, BaseException):
            self.open = False
            raise EngineError(f"vLLM stopped in the middle of a step: {found}") from found
        return found


class ForcedTokens:
    """A logits processor of vLLM. Rows of requests without the argument are left alone."""

    is_done: Callable[[str], bool]

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self.rows: dict[int, str] = {}

    @classmethod
    def validate_params(cls, sampling_params: Any) -> None:
        """Nothing to refuse."""

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: Any) -> None:
        if batch_update is None:
            return
        for index in batch_update.removed:
            self.rows.pop(index, None)
        for index, parameters, _, _ in batch_update.added:
            name = (parameters.extra_args or {}).get(FORCED)
            self.rows.pop(index, None)
            if name is not None:
                self.rows[index] = name
        for one, two, direction in batch_update.moved:
            first, second = self.rows.pop(one, None), self.rows.pop(two, None)
            if first is not None:
                self.rows[two] = first
            if second is not None and direction.name == "SWAP":
                self.rows[one] = second

    def apply(self, logits: Tensor) -> Tensor:
        for row, name in self.rows.items():
            turn = _TURNS.get(name)
            if turn is None or not type(self).is_done(name):
                continue  # a chunk in the middle of a prompt
            turn.logits.put(logits[row].float().clone())
            token = turn.tokens.get()
            if token is not None:
                logits[row] = -torch.inf
                logits[row, token] = 0.0
        return logits


@contextmanager
def numba_hidden() -> Iterator[None]:
    """While an engine starts in a process that has imported numba already.

    vLLM 0.32 looks through all loaded modules for kernels and trips over an object of llvmlite whose `__dict__` is no
    dict. Workers import numba after that look, so this matters to a second engine in one process only.
    """
    name = "llvmlite.binding.ffi"
    module = sys.modules.pop(name, None)
    try:
        yield
    finally:
        if module is not None:
            sys.modules[name] = module


class VllmEngine:
    """vLLM in this process, with GSM's classes in place. `options` go to vLLM as they are."""

    def __init__(self, source: str, config: GsmConfig | None, **options: Any) -> None:
        if "vllm" not in sys.modules:
            os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        from vllm import LLM

        from gsm.integrations.vllm.plugin import register

        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        os.environ.setdefault("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "1")  # the last logits follow the last position
        register()
        if config is not None:
            options["additional_config"] = {KEY: config.model_dump(mode="json", exclude_unset=True)}
        with numba_hidden():
            self.llm = LLM(model=source, logits_processors=[_processor()], **options)
        self.engine = self.llm.llm_engine
        self.core = self.engine.engine_core.engine_core
        self.live: Live | None = live_of(self.engine.vllm_config)
        self._names = itertools.count()
        self._work: queue.Queue[tuple[str, Turn] | None] = queue.Queue()
        self._turn: Turn | None = None
        self._idle = threading.Event()
        self._idle.set()
        ForcedTokens.is_done = self._is_done
        self._num_threads = torch.get_num_threads()
        threading.Thread(target=self._run, daemon=True).start()

    def turn(self, prompt: list[int]) -> Turn:
        """Begin a request; the one before it ends."""
        self.end_turn()
        name = f"gsm-{next(self._names)}"
        turn = self._turn = _TURNS[name] = Turn(prompt)
        self._idle.clear()
        self._work.put((name, turn))
        return turn

    def end_turn(self) -> None:
        """End the request at hand, if any, and wait until the engine is idle."""
        if self._turn is not None and self._turn.open:
            self._turn.open = False
            self._turn.tokens.put(None)
        self._turn = None
        self._idle.wait()

    def reload(self, config: GsmConfig) -> None:
        """Change the live config between turns. Raises ConfigError."""
        assert self.live is not None
        self.end_turn()
        if config != self.live.config:
            self.live.reload(config.model_dump(mode="json", exclude_unset=True))

    def close(self) -> None:
        """Stop the engine; a process may have one at a time."""
        self.end_turn()
        self._work.put(None)
        self.engine.engine_core.shutdown()

    def used_blocks(self) -> int:
        """Blocks that requests hold now."""
        managers = self.core.scheduler.kv_cache_manager.coordinator.single_type_managers
        return sum(not b.is_null for m in managers for blocks in m.req_to_blocks.values() for b in blocks)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in all layers of a group."""
        groups = self.core.scheduler.kv_cache_config.kv_cache_groups
        return sum(len(group.layer_names) * group.kv_cache_spec.page_size_bytes for group in groups) // len(groups)

    def _is_done(self, name: str) -> bool:
        """Whether this step completes everything the request has so far."""
        request = next((r for key, r in self.core.scheduler.requests.items() if key.startswith(name)), None)
        return request is not None and request.num_computed_tokens >= request.num_tokens

    def _run(self) -> None:
        while True:
            item = self._work.get()
            if item is None:
                return
            name, turn = item
            try:
                self._serve(name, turn)
            except BaseException as error:  # whoever waits for logits must hear of it
                turn.logits.put(error)
            finally:
                _TURNS.pop(name, None)
                self._idle.set()

    def _serve(self, name: str, turn: Turn) -> None:
        from vllm import SamplingParams

        room = self.engine.model_config.max_model_len - len(turn.prompt)
        parameters = SamplingParams(
            temperature=0.0, max_tokens=max(1, room), ignore_eos=True, detokenize=False, extra_args={FORCED: name}
        )
        self.engine.add_request(name, {"prompt_token_ids": turn.prompt}, parameters)
        torch._C.set_num_threads(self._num_threads)  # its own setting in every thread; vLLM planned for this one
        while turn.open and self.engine.has_unfinished_requests():
            self.engine.step()
        self.engine.abort_request([name])
        while self.engine.has_unfinished_requests():
            self.engine.step()
        if turn.open:  # whoever feeds more than fits must not wait for ever
            turn.logits.put(EngineError("the request has reached the longest length the engine was started for"))


def _processor() -> type:
    """`ForcedTokens` as vLLM's own kind of class."""
    from vllm.v1.sample.logits_processor import LogitsProcessor

    return type("ForcedTokens", (ForcedTokens, LogitsProcessor), {})
