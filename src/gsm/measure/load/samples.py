"""From the arrivals of one request to its latencies. The definitions of every figure of `gsm load` are here.

* TTFT: from sending to the first event with text (reasoning or answer), so a role event does not count.
* TPOT: (E2E - TTFT) / (n - 1) with n output tokens.
* ITL: one value per token after the first arrival. A gap that ended in k tokens gives k values of gap / k.
* E2E: from sending to the last event that carried text or a finish reason.

A figure that cannot be seen is None: TTFT and TPOT of a response that was not streamed, TPOT of a single token.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from gsm.measure.load.record import Chunk, Failure, RequestRecord

CountedBy = Literal["running_usage", "usage", "chunks"]


@dataclass(slots=True)
class Sample:
    """The figures of one request, in seconds; `itls_s` is compact because there is one value per token."""

    start_s: float
    queue_s: float
    failure: Failure | None = None
    e2el_s: float | None = None
    ttft_s: float | None = None
    ttft_reasoning_s: float | None = None
    ttft_answer_s: float | None = None
    tpot_s: float | None = None
    itls_s: array[float] = field(default_factory=lambda: array("d"))
    num_prompt_tokens: int | None = None
    num_cached_tokens: int | None = None
    num_output_tokens: int = 0
    counted_by: CountedBy = "usage"
    reasoning: str = ""
    answer: str = ""


def take_sample(record: RequestRecord) -> Sample:
    """The figures of one finished request; a failed one keeps only when it started and why it failed."""
    sample = Sample(record.start_s, record.start_s - record.scheduled_s, record.failure)
    if record.failure is not None or record.end_s is None:
        return sample
    counts, sample.counted_by = tokens_per_chunk(record)
    total = record.num_output_tokens or sum(counts)
    sample.num_output_tokens = total
    sample.num_prompt_tokens = record.num_prompt_tokens
    sample.num_cached_tokens = record.num_cached_tokens
    sample.reasoning, sample.answer = record.reasoning, record.answer
    sample.e2el_s = record.end_s - record.start_s
    if chunks := record.chunks:
        first_s = chunks[0].at_s
        sample.ttft_s = first_s - record.start_s
        sample.ttft_reasoning_s = _first(chunks, "num_reasoning_chars", record.start_s)
        sample.ttft_answer_s = _first(chunks, "num_answer_chars", record.start_s)
        sample.itls_s = inter_token_latencies(chunks, counts)
        if total > 1 and chunks[-1].at_s > first_s:  # all in one arrival shows no time per token
            sample.tpot_s = (record.end_s - first_s) / (total - 1)
    return sample


def inter_token_latencies(chunks: Sequence[Chunk], counts: Sequence[int]) -> array[float]:
    """One latency in seconds per token after the first arrival.

    Tokens that arrive together (in one event, or in several events of one network read) share the gap before them
    evenly. Those that came with the very first arrival have no gap and give no value.
    """
    latencies = array("d")
    arrived_s, waiting = chunks[0].at_s, 0
    for position in range(1, len(chunks)):
        at_s = chunks[position].at_s
        if at_s == arrived_s and not latencies:
            continue  # still the first arrival
        waiting += counts[position]
        if waiting == 0 or (position + 1 < len(chunks) and chunks[position + 1].at_s == at_s):
            continue
        latencies.extend([(at_s - arrived_s) / waiting] * waiting)
        arrived_s, waiting = at_s, 0
    return latencies


def tokens_per_chunk(record: RequestRecord) -> tuple[list[int], CountedBy]:
    """How many tokens each chunk carried, and how we know.

    Best are the server's running counts; else its total is shared out by the length of the texts; without any usage
    every chunk counts as one token.
    """
    chunks, total = record.chunks, record.num_output_tokens
    running = [chunk.running_tokens for chunk in chunks]
    if chunks and None not in running:
        edges = [0, *(count for count in running if count is not None)]
        deltas = [after - before for before, after in itertools.pairwise(edges)]
        if min(deltas) >= 0:
            return deltas, "running_usage"
    if not total:  # text without tokens is a usage block that was never filled in
        return [1] * len(chunks), "chunks"
    if record.finish_reason == "stop" and total == len(chunks) + 1:
        return [1] * len(chunks), "usage"  # the one token too many is the end-of-sequence token, which has no text
    return _share_out(total, [chunk.num_reasoning_chars + chunk.num_answer_chars for chunk in chunks]), "usage"


def _share_out(total: int, weights: Sequence[int]) -> list[int]:
    """`total` tokens over chunks in proportion to `weights` (largest remainder), one each at least if they suffice."""
    if not weights:
        return []
    floor = 1 if total >= len(weights) else 0
    spare = total - floor * len(weights)
    if spare == 0:
        return [floor] * len(weights)
    # Beyond its first token a chunk earns more by what its text is longer than its fair share of one token.
    exact = [max(0.0, weight * total / sum(weights) - floor) for weight in weights]
    scale = spare / sum(exact)
    shares = [int(value * scale) for value in exact]
    by_remainder = sorted(range(len(weights)), key=lambda i: (shares[i] - exact[i] * scale, i))
    for i in by_remainder[: spare - sum(shares)]:
        shares[i] += 1
    return [floor + share for share in shares]


def _first(chunks: Sequence[Chunk], field_name: str, start_s: float) -> float | None:
    return next((chunk.at_s - start_s for chunk in chunks if getattr(chunk, field_name)), None)
