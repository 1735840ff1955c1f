"""From samples to the numbers that are reported. Result keys are those of `vllm bench serve`, plus ours.

Percentiles are taken over the pooled raw samples of *successful* requests. What was not measured is None ("n/a").
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from gsm.errors import ConfigError
from gsm.measure.load.samples import Sample
from gsm.stats import mean, percentile

PERCENTILES = (50, 90, 95, 99)
MIN_SAMPLES_FOR_P99 = 100
GOODPUT_NAMES = ("ttft", "tpot", "e2el")

# metric -> the values (seconds) that one request contributes
METRICS: dict[str, Callable[[Sample], Iterable[float | None]]] = {
    "ttft": lambda s: (s.ttft_s,),
    "ttft_reasoning": lambda s: (s.ttft_reasoning_s,),
    "ttft_answer": lambda s: (s.ttft_answer_s,),
    "tpot": lambda s: (s.tpot_s,),
    "itl": lambda s: s.itls_s,
    "e2el": lambda s: (s.e2el_s,),
    "queue": lambda s: (s.queue_s,),
}


def pool(samples: Iterable[Sample], metric: str) -> list[float]:
    """All values of one metric in milliseconds; samples that have none contribute nothing."""
    values = METRICS[metric]
    return [1e3 * value for sample in samples for value in values(sample) if value is not None]


def aggregate(
    samples: Sequence[Sample], duration_s: float, goodput_ms: Mapping[str, float] | None = None
) -> dict[str, Any]:
    """Every figure of one measured phase that took `duration_s` from the first start to the last end."""
    done = [sample for sample in samples if sample.failure is None]
    total_input = _sum_known(sample.num_prompt_tokens for sample in done)
    total_output = sum(sample.num_output_tokens for sample in done)
    result: dict[str, Any] = {
        "duration": duration_s,
        "completed": len(done),
        "failed": len(samples) - len(done),
        "failures": failures_by_kind(samples),
        "total_input_tokens": total_input,
        "total_output_tokens": total_output,
        "total_cached_tokens": _sum_known(sample.num_cached_tokens for sample in done),
        "tokens_counted_by": dict(Counter(sample.counted_by for sample in done)),
        "request_throughput": _per_second(len(done), duration_s),
        "request_goodput": goodput(done, duration_s, goodput_ms) if goodput_ms else None,
        "output_throughput": _per_second(total_output, duration_s),
        "total_token_throughput": None if total_input is None else _per_second(total_input + total_output, duration_s),
        "max_output_tokens_per_s": peak_tokens_per_second(done),
        "max_concurrent_requests": peak_concurrency(done),
        "mean_concurrency": _per_second(sum(sample.e2el_s or 0.0 for sample in done), duration_s),
    }
    for metric in METRICS:
        result |= describe(metric, pool(done, metric))
    return result


def describe(metric: str, values_ms: Sequence[float]) -> dict[str, float | int | None]:
    """`mean_`, `median_`, `std_` and `pNN_<metric>_ms` with the number of samples they come from."""
    result: dict[str, float | int | None] = {
        f"num_{metric}_samples": len(values_ms),
        f"mean_{metric}_ms": mean(values_ms),
        f"median_{metric}_ms": percentile(values_ms, 50),
        f"std_{metric}_ms": float(np.std(values_ms)) if values_ms else None,
    }
    for q in PERCENTILES:
        result[f"p{q}_{metric}_ms"] = percentile(values_ms, q)
    return result


def failures_by_kind(samples: Iterable[Sample]) -> dict[str, dict[str, Any]]:
    """Failed requests grouped by kind, most frequent first, with one message as an example."""
    failures = [sample.failure for sample in samples if sample.failure is not None]
    example = {failure.kind: failure.message for failure in reversed(failures)}
    counts = Counter(failure.kind for failure in failures)
    return {kind: {"count": count, "example": example[kind]} for kind, count in counts.most_common()}


def parse_goodput(objectives: Iterable[str]) -> dict[str, float]:
    """`["ttft:500", "tpot:50"]` -> limits in milliseconds; raises ConfigError naming what is valid."""
    limits: dict[str, float] = {}
    for objective in objectives:
        name, _, text = objective.partition(":")
        if name not in GOODPUT_NAMES:
            raise ConfigError(f"goodput knows {', '.join(GOODPUT_NAMES)}, got {name!r}; write for example ttft:500")
        try:
            limits[name] = float(text)
        except ValueError:
            limits[name] = math.nan
        if not (0 < limits[name] < math.inf):
            raise ConfigError(f"goodput needs milliseconds above 0 after {name}:, got {text!r}; write {name}:500")
    return limits


def goodput(done: Sequence[Sample], duration_s: float, limits_ms: Mapping[str, float]) -> float | None:
    """Requests per second that met every limit. A single-token response has no TPOT and meets any (as in vLLM)."""

    def meets(sample: Sample) -> bool:
        seen = {"ttft": sample.ttft_s, "tpot": sample.tpot_s or 0.0, "e2el": sample.e2el_s}
        return all((value := seen[name]) is not None and 1e3 * value <= limit for name, limit in limits_ms.items())

    return _per_second(sum(map(meets, done)), duration_s)


def peak_concurrency(done: Iterable[Sample]) -> int:
    """The most requests in flight at one moment."""
    edges = [(s.start_s, 1) for s in done] + [(s.start_s + (s.e2el_s or 0.0), -1) for s in done]
    in_flight = peak = 0
    for _, change in sorted(edges):  # at equal times an end (-1) sorts before a start
        in_flight += change
        peak = max(peak, in_flight)
    return peak


def peak_tokens_per_second(done: Sequence[Sample]) -> float | None:
    """The most output tokens that arrived within one second, in steps of a second from the first start."""
    streamed = [sample for sample in done if sample.ttft_s is not None]
    if not streamed:
        return None
    origin = min(sample.start_s for sample in streamed)
    buckets: Counter[int] = Counter()
    for sample in streamed:
        first = sample.start_s + (sample.ttft_s or 0.0) - origin
        arrivals = first + np.concatenate([[0.0], np.cumsum(sample.itls_s)])
        buckets.update(arrivals.astype(int).tolist())
        buckets[int(first)] += max(0, sample.num_output_tokens - len(arrivals))  # the others of the first arrival
    return float(max(buckets.values()))


def _sum_known(counts: Iterable[int | None]) -> int | None:
    """The sum, or None when a server did not tell one of them."""
    known = list(counts)
    return None if not known or None in known else sum(count or 0 for count in known)


def _per_second(amount: float, duration_s: float) -> float | None:
    return amount / duration_s if duration_s > 0 else None
