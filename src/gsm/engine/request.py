"""A request, its choices, and what the engine says about them.

A `Request` is one call of a user; every one of its `n` choices is a `Sequence`, one object with all the counters of its
life. The scheduler moves sequences, the KV store knows them by `slot`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from gsm.config import GsmConfig, SparseConfig
from gsm.engine.detokenize import Detokenizer
from gsm.engine.params import SamplingParams
from gsm.engine.sampler import SamplerState
from gsm.engine.speculate import PromptLookup
from gsm.integrations.transformers.grading import Grader, Lowered
from gsm.kv.manager import KVManager
from gsm.kv.prefix import Chain

if TYPE_CHECKING:
    from gsm.engine.epochs import Epoch

FinishReason = Literal["stop", "length", "abort", "error", "timeout"]


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural logarithm of the probability of a token, before temperature and penalties, and of the likeliest ones."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # (token id, log-probability), the likeliest first


@dataclass(slots=True)
class TokenEvent:
    """What one step brought for one choice. `text` may be empty: a character or a stop string may still be open."""

    request_id: str
    index: int
    token_ids: list[int]
    text: str
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None  # the stop string or token id that ended it
    error: str | None = None


@dataclass(slots=True, eq=False)
class Request:
    """One call. `terms` are the epoch it was added with: a frozen object that never changes under it."""

    request_id: str
    prompt_ids: list[int]
    sampling: SamplingParams
    terms: Epoch
    sparse: SparseConfig
    is_scored: bool = False  # whether its answer is to be read again exactly (`shadow`)
    tenant: str = ""  # who waits in turn with whom
    salt: str = ""  # who may share prefix pages with whom
    deadline_s: float | None = None  # latest `time.monotonic()` at which it may leave the queue
    arrival_s: float = field(default_factory=time.monotonic)
    first_scheduled_s: float | None = None
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    sequences: list[Sequence] = field(default_factory=list)
    effort: int | str | None = None  # of its reasoning; None is the config's
    lowered: Lowered | None = None  # old turns whose pages go down once the prompt is computed

    @property
    def config(self) -> GsmConfig:
        return self.terms.config

    @property
    def epoch(self) -> int:
        return self.terms.number

    @property
    def is_finished(self) -> bool:
        return all(sequence.finish_reason is not None for sequence in self.sequences)

    @property
    def recomputes_in_bulk(self) -> bool:
        """Whether generated tokens may be computed anew like a prompt: only where that gives the same keys."""
        cache = self.config.cache
        if self.config.reasoning.enabled or self.lowered is not None:
            return False
        return cache.warm.codec == "none" and cache.cold == "keep" and not self.sparse.enabled

    @property
    def leader(self) -> Sequence:
        """The choice that computes the prompt; the others are forked from it."""
        return self.sequences[0]


@dataclass(slots=True, eq=False)
class Sequence:
    """One choice: `token_ids` are prompt and answer, of which the first `num_computed` are in the KV store."""

    request: Request
    index: int
    detokenizer: Detokenizer
    sampler: SamplerState
    token_ids: list[int]
    lookup: PromptLookup | None = None
    slot: int | None = None
    num_computed: int = 0
    finish_reason: FinishReason | None = None
    chain: Chain | None = None  # the names of its pages in the prefix index
    num_indexed_pages: int = 0
    grader: Grader | None = None  # brings its pages down by what its tokens are
    recorded: list[TokenLogprobs] = field(default_factory=list)  # of every token, where the answer is to be scored
    num_nonfinite: int = 0  # tokens picked from logits that hold a NaN or an infinity
    first_token_s: float | None = None  # `time.monotonic()`
    last_token_s: float | None = None

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt_ids)

    @property
    def num_generated(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_remaining(self) -> int:
        """Known tokens that are not in the KV store yet: 1 while decoding."""
        return len(self.token_ids) - self.num_computed

    def grade(self, manager: KVManager) -> None:
        """Tell the grader what was computed, so that pages go down."""
        if self.grader is not None and self.slot is not None:
            self.grader.advance(manager, self.slot, self.token_ids[self.grader.num_seen : self.num_computed])

    @property
    def is_unforked(self) -> bool:
        """Whether it computes the prompt of choices that are still to be forked from it."""
        return self.num_generated == 0 and self is self.request.leader

    @property
    def records(self) -> bool:
        """Whether what the model thought of its tokens is kept: of one choice per request."""
        return self.request.is_scored and self.index == 0

    @property
    def is_decoding(self) -> bool:
        return self.slot is not None and self.num_remaining == 1 and self.num_computed >= self.num_prompt_tokens


@dataclass(slots=True)
class Work:
    """What one sequence does in a step: its next `num_tokens` known tokens, then `draft` to be checked."""

    sequence: Sequence
    num_tokens: int
    draft: Seq[int] = ()

    @property
    def ids(self) -> list[int]:
        s = self.sequence
        return [*s.token_ids[s.num_computed : s.num_computed + self.num_tokens], *self.draft]

    @property
    def samples(self) -> bool:
        """Whether the step reaches the end of what is known, so that a token is to be picked."""
        return self.num_tokens == self.sequence.num_remaining
