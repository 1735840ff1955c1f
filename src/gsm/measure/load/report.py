"""The result of a load test as a flat record: the keys of `vllm bench serve`, ours, and notes that say what to mind."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ConfigDict

from gsm.measure.load.metrics import METRICS, MIN_SAMPLES_FOR_P99, aggregate
from gsm.measure.load.plan import LoadPlan
from gsm.measure.load.runner import MAX_FAILURES_IN_A_ROW, Phase
from gsm.measure.load.samples import Sample
from gsm.measure.load.target import Target, is_secret_header
from gsm.results import Record, collect_environment
from gsm.stats import percentile

WORRYING_LAG_MS = 5.0
WORRYING_QUEUE_SHARE = 0.01


class LoadResult(Record):
    """A result file of `gsm load`; its many flat keys are explained in docs/load.md."""

    model_config = ConfigDict(frozen=True, extra="allow", allow_inf_nan=False)

    kind: str


@dataclass
class Effort:
    """What measuring cost: CPU seconds of this process, and how late its event loop woke up each time."""

    cpu_s: float = 0.0
    lags_s: list[float] = field(default_factory=list)


def build_result(
    target: Target, plan: LoadPlan, phases: Sequence[Phase], notes: Iterable[str], effort: Effort
) -> dict[str, Any]:
    """One server's record: settings, figures over the pooled samples of all phases, the client's own cost, notes."""
    samples = [sample for phase in phases for sample in phase.samples]
    duration_s = sum(phase.duration_s for phase in phases)
    result = describe_run(target, plan, sum(phase.num_started for phase in phases))
    result["stopped_by"] = phases[-1].stopped_by if phases else "interrupt"
    result["cancelled"] = sum(phase.num_cancelled for phase in phases)
    result |= aggregate(samples, duration_s, plan.goodput_ms)
    result |= _client_cost(effort, duration_s, result["total_output_tokens"])
    if plan.keep_details:
        result |= details(samples)
    result["notes"] = [*notes, *notes_on(result, plan)]
    return result


def describe_run(target: Target, plan: LoadPlan, num_started: int) -> dict[str, Any]:
    schedule = plan.schedule
    return {
        "backend": "openai-chat" if target.api == "chat" else "openai",
        "endpoint_type": "openai-chat" if target.api == "chat" else "openai",
        "model_id": target.model,
        "target": target.describe(),
        "workload": plan.workload.describe(),
        "num_prompts": num_started,
        "request_rate": "inf" if schedule.rate is None else schedule.rate,
        "burstiness": 1.0,
        "max_concurrency": schedule.max_in_flight,
        "seed": schedule.seed,
        "num_warmup_dropped": plan.warmup,
        "goodput_ms": dict(plan.goodput_ms) or None,
    }


def run_header(kind: str, hidden: Iterable[str]) -> dict[str, Any]:
    """Kind of result, machine and command line; `hidden` texts (credentials) do not appear in it."""
    environment = collect_environment().model_dump()
    words = [Path(sys.argv[0]).name, *sys.argv[1:]]
    for secret in filter(None, hidden):
        words = [word.replace(secret, "(hidden)") for word in words]
    environment["command"] = shlex.join(words)
    return {"kind": kind, "date": environment["started_at"], "environment": environment}


def secrets_of(target: Target) -> list[str]:
    """Texts that no report may show."""
    userinfo = target.url.partition("://")[2].rpartition("@")[0]
    return [value for name, value in target.headers.items() if is_secret_header(name)] + [userinfo]


def details(samples: Sequence[Sample]) -> dict[str, Any]:
    """One entry per request, in the arrays that `vllm bench serve --save-detailed` writes (seconds)."""
    return {
        "input_lens": [sample.num_prompt_tokens for sample in samples],
        "output_lens": [sample.num_output_tokens for sample in samples],
        "ttfts": [sample.ttft_s for sample in samples],
        "itls": [list(sample.itls_s) for sample in samples],
        "latencies": [sample.e2el_s for sample in samples],
        "start_times": [sample.start_s for sample in samples],
        "queue_times": [sample.queue_s for sample in samples],
        "generated_texts": [sample.answer for sample in samples],
        "reasoning_texts": [sample.reasoning for sample in samples],
        "errors": [sample.failure.message if sample.failure else "" for sample in samples],
    }


def notes_on(result: Mapping[str, Any], plan: LoadPlan) -> list[str]:
    """Sentences about what limits these numbers."""
    notes = [f"1 check and {plan.warmup} warm-up requests were sent first and are not in any figure"]
    notes += _notes_on_the_end(result)
    notes += _notes_on_samples(result)
    reused = result["num_prompts"] / result["workload"].get("num_distinct_prompts", float("inf"))
    if reused > 1:
        notes.append("there were more requests than distinct prompts; a prefix cache answers the repeated ones faster")
    if (lag := result["client_lag_p99_ms"]) is not None and lag > WORRYING_LAG_MS:
        notes.append(
            f"this client itself ran up to {lag:.0f} ms late (P99); its machine is too busy to measure that well"
        )
    queue, e2el = result["mean_queue_ms"], result["mean_e2el_ms"]
    if queue is not None and e2el and queue > WORRYING_QUEUE_SHARE * e2el:
        notes.append(f"requests waited {queue:.0f} ms on average before they were sent; TTFT and E2E leave that out")
    return notes


def _notes_on_the_end(result: Mapping[str, Any]) -> list[str]:
    notes = []
    if result["stopped_by"] == "interrupt":
        notes.append(f"interrupted; {result['cancelled']} requests in flight were cancelled and are not counted")
    if result["stopped_by"] == "failures":
        notes.append(f"stopped after {MAX_FAILURES_IN_A_ROW} failures in a row")
    if result["failed"]:
        notes.append(f"{result['failed']} requests failed; latencies and throughput are those of the successful ones")
    return notes


def _notes_on_samples(result: Mapping[str, Any]) -> list[str]:
    notes = []
    shown = [name for name in METRICS if name != "queue"]
    if not result["num_ttft_reasoning_samples"]:
        shown.remove("ttft_answer")  # the same as ttft then
    few = [name for name in shown if 0 < result[f"num_{name}_samples"] < MIN_SAMPLES_FOR_P99]
    if few:
        notes.append(
            f"P99 of {', '.join(few)} rests on fewer than {MIN_SAMPLES_FOR_P99} samples: little more than the maximum"
        )
    if chunks := result["tokens_counted_by"].get("chunks"):
        notes.append(f"{chunks} responses came without usage; each of their chunks is counted as one token")
    if silent := result["completed"] - result["num_ttft_samples"]:
        what = "were not streamed" if not result["target"]["stream"] else "held no text"
        notes.append(f"{silent} responses {what} and have no TTFT, TPOT and ITL")
    return notes


def _client_cost(effort: Effort, duration_s: float, num_tokens: int) -> dict[str, Any]:
    """CPU of this process while measuring, also in per cent of a core per 100 output tokens per second."""
    lag_s = percentile(effort.lags_s, 99)
    return {
        "client_cpu_s": effort.cpu_s,
        "client_cpu_share": effort.cpu_s / duration_s if duration_s > 0 else None,
        "client_cpu_percent_per_100_tokens_per_s": 1e4 * effort.cpu_s / num_tokens if num_tokens else None,
        "client_lag_p99_ms": None if lag_s is None else 1e3 * lag_s,
    }
