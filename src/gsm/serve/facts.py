"""What the guard and the live page want to know of one finished answer. Plain numbers, no text."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

from gsm.engine import Engine, Sequence
from gsm.kv.report import sequence_bytes

_EARLY_TOKENS = 4
_NGRAM = 4


@dataclass(frozen=True, slots=True)
class Facts:
    """One choice that ended by itself or by an error. Times in seconds, None where there was nothing to time."""

    epoch: int
    at_s: float  # time.monotonic()
    num_prompt_tokens: int
    num_cached_tokens: int
    num_tokens: int  # generated
    is_error: bool
    num_nonfinite: int
    is_early: bool  # the model ended it within its first tokens
    repetition: float  # share of its 4-grams that it had said before
    ttft_s: float | None
    itl_s: float | None  # mean time between its tokens
    bytes_per_token: float | None

    @property
    def ttft_stratum(self) -> int:
        """Answers whose uncached prompts are about as long take about as long to begin."""
        return int(math.log2(max(16, self.num_prompt_tokens - self.num_cached_tokens)))

    @property
    def length_stratum(self) -> int:
        return int(math.log2(max(16, self.num_prompt_tokens + self.num_tokens)))


def facts_of(engine: Engine, sequence: Sequence) -> Facts | None:
    """Of a sequence that just ended and still has its pages; None for one that its client or the queue ended."""
    request, reason = sequence.request, sequence.finish_reason
    if reason not in ("stop", "length", "error"):
        return None
    answer = sequence.token_ids[sequence.num_prompt_tokens :]
    ttft = itl = None
    if sequence.first_token_s is not None and sequence.last_token_s is not None:
        ttft = sequence.first_token_s - request.arrival_s
        if len(answer) > 1:
            itl = (sequence.last_token_s - sequence.first_token_s) / (len(answer) - 1)
    held = None
    if reason != "error" and sequence.slot is not None:
        held = sequence_bytes(engine.manager, sequence.slot) / max(1, engine.manager.num_tokens(sequence.slot))
    ended_itself = reason == "stop" and sequence.detokenizer.stop_reason is None
    return Facts(
        epoch=request.epoch,
        at_s=time.monotonic(),
        num_prompt_tokens=sequence.num_prompt_tokens,
        num_cached_tokens=request.num_cached_tokens,
        num_tokens=len(answer),
        is_error=reason == "error",
        num_nonfinite=sequence.num_nonfinite,
        is_early=ended_itself and len(answer) <= _EARLY_TOKENS,
        repetition=repetition(answer),
        ttft_s=ttft,
        itl_s=itl,
        bytes_per_token=held,
    )


def repetition(token_ids: list[int]) -> float:
    """Share of the 4-grams that occurred before; 0 for answers too short to tell."""
    grams = [tuple(token_ids[i : i + _NGRAM]) for i in range(len(token_ids) - _NGRAM + 1)]
    return 1.0 - len(set(grams)) / len(grams) if len(grams) >= _NGRAM else 0.0
