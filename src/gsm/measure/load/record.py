"""What was seen of one request: the raw arrivals, before any statistic."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple


class Chunk(NamedTuple):
    """One streamed event that carried text.

    `at_s` is when the network read that contained it returned; events of one read share it. `running_tokens` is the
    server's count of output tokens so far, where it sends one with every chunk.
    """

    at_s: float
    num_reasoning_chars: int
    num_answer_chars: int
    running_tokens: int | None


class Failure(NamedTuple):
    """Why a request counts as failed: a short `kind` to group by and one sentence."""

    kind: str
    message: str


@dataclass(slots=True)
class RequestRecord:
    """Arrivals and counts of one request; all times on the client's monotonic clock, in seconds.

    `start_s` is when the request's body was written to the connection (or, if that never happened, when it was to be).
    `end_s` is the last event that carried text or a finish reason (for a whole response: its last byte). Token counts
    are the server's own (`usage`) or None where it sent none.
    """

    scheduled_s: float
    start_s: float
    end_s: float | None = None
    chunks: list[Chunk] = field(default_factory=list)
    num_prompt_tokens: int | None = None
    num_cached_tokens: int | None = None
    num_output_tokens: int | None = None
    finish_reason: str | None = None
    failure: Failure | None = None
    reasoning: str = ""
    answer: str = ""
