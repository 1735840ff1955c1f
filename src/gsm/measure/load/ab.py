"""Two arms on the same schedule, in interleaved rounds, and the paired differences between them.

The unit of pairing is the round, not the request: requests of one round share the server's load and are not
independent, so an interval over them would claim more than was seen. In every round each arm runs its share of the
requests by itself, in the order A B, B A, A B, ... so that a drift of the machine falls on both alike.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

from gsm.errors import ConfigError
from gsm.measure.load.metrics import pool
from gsm.measure.load.plan import LoadPlan
from gsm.measure.load.report import Effort, build_result, run_header, secrets_of
from gsm.measure.load.runner import Phase, run_phase, stop_on_interrupt
from gsm.measure.load.session import Arm, OnProgress, measuring, open_arm, reporting
from gsm.measure.load.target import Target
from gsm.stats import mean, paired_difference

LATENCIES = ("ttft", "tpot", "itl", "e2el")
DEFAULT_ROUNDS = 10
CONFIDENCE = 0.95

Rounds = list[tuple[Phase, Phase]]  # the phases of arm A and arm B
Side = tuple[Arm, str, Effort]  # an arm with the stream of prompts it sends and what sending costs us


def run_comparison(
    targets: tuple[Target, Target],
    labels: tuple[str, str],
    plan: LoadPlan,
    num_rounds: int | None = None,
    on_progress: OnProgress | None = None,
) -> dict[str, Any]:
    """Measures two arms, `plan.schedule.num_requests` requests each; returns both results with `paired` beside them.

    Raises ConfigError when the requests do not suffice for two rounds; otherwise like `session.run_load`.
    """
    for target in targets:
        plan.check(target)
    rounds = split_rounds(plan, num_rounds)
    hidden = [secret for target in targets for secret in secrets_of(target)]
    return run_header("load_ab", hidden) | asyncio.run(_compare(targets, labels, plan, rounds, on_progress))


def split_rounds(plan: LoadPlan, num_rounds: int | None = None) -> list[int]:
    """How many requests each round has per arm: at least one per worker, the rest spread evenly."""
    total, least = plan.schedule.num_requests, plan.schedule.concurrency or 1
    count = min(DEFAULT_ROUNDS, total // least) if num_rounds is None else num_rounds
    if count < 2 or count * least > total:
        needed = max(2, count) * least
        raise ConfigError(f"{max(2, count)} rounds at this concurrency need {needed} requests per arm, got {total}")
    return [total // count + (index < total % count) for index in range(count)]


async def _compare(
    targets: tuple[Target, Target],
    labels: tuple[str, str],
    plan: LoadPlan,
    sizes: Sequence[int],
    on_progress: OnProgress | None,
) -> dict[str, Any]:
    stop, efforts = asyncio.Event(), (Effort(), Effort())
    rounds: Rounds = []
    with stop_on_interrupt(stop):
        async with (
            open_arm(targets[0], plan, stop, on_progress, "A") as first,
            open_arm(targets[1], plan, stop, on_progress, "B") as second,
        ):
            sides = tuple(zip((first, second), _streams(targets), efforts, strict=True))
            await _run_rounds(sides, plan, sizes, stop, on_progress, rounds)
    results = [
        build_result(arm.client.target, plan, [pair[side] for pair in rounds], arm.notes, efforts[side])
        for side, arm in enumerate((first, second))
    ]
    complete = [pair for pair in rounds if all(phase.stopped_by == "requests" for phase in pair)]
    return {
        "labels": {"A": labels[0], "B": labels[1]},
        "num_rounds_planned": len(sizes),
        "num_rounds": len(complete),
        "stopped_by": next((p.stopped_by for pair in rounds for p in pair if p.stopped_by != "requests"), "requests"),
        "confidence": CONFIDENCE,
        "paired": paired(complete),
        "notes": _notes(targets, complete, plan),
        "A": results[0],
        "B": results[1],
    }


async def _run_rounds(
    sides: Sequence[Side],
    plan: LoadPlan,
    sizes: Sequence[int],
    stop: asyncio.Event,
    on_progress: OnProgress | None,
    rounds: Rounds,
) -> None:
    """Fills `rounds`; ends early when stopped, when the time is over, or when a server only fails."""
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + plan.schedule.duration_s
    first = 0
    for number, size in enumerate(sizes):
        pair = (Phase(), Phase())
        rounds.append(pair)
        for side in (0, 1) if number % 2 == 0 else (1, 0):
            left_s = max(1e-9, deadline_s - loop.time())
            schedule = replace(plan.schedule, num_requests=size, duration_s=left_s, seed=plan.schedule.seed + number)
            name = f"round {number + 1}/{len(sizes)} {'AB'[side]}"
            arm, stream, effort = sides[side]
            async with measuring(effort), reporting(on_progress, name, schedule, pair[side]):
                await run_phase(arm.send_from(stream, first), schedule, stop, pair[side])
        first += size
        if any(phase.stopped_by != "requests" for phase in pair):
            return


def paired(rounds: Rounds) -> dict[str, dict[str, float | int | None] | None]:
    """For every figure the mean over rounds of B - A with its interval; None where fewer than two rounds have both."""
    names = [f"{metric}_ms" for metric in LATENCIES] + ["output_throughput", "request_throughput"]
    table = [(round_figures(a), round_figures(b)) for a, b in rounds]
    result: dict[str, dict[str, float | int | None] | None] = {}
    for name in names:
        both = [(x, y) for a, b in table if (x := a[name]) is not None and (y := b[name]) is not None]
        result[name] = None
        if len(both) >= 2:
            difference = paired_difference([x for x, _ in both], [y for _, y in both], CONFIDENCE)
            result[name] = {
                "mean_a": difference.mean_a,
                "mean_b": difference.mean_b,
                "difference": difference.difference.mean,
                "low": difference.difference.low,
                "high": difference.difference.high,
                "relative": difference.relative,
                "num_rounds": difference.num_pairs,
            }
    return result


def round_figures(phase: Phase) -> dict[str, float | None]:
    """One round of one arm: mean latencies of its successes and its throughput."""
    done = [sample for sample in phase.samples if sample.failure is None]
    figures: dict[str, float | None] = {f"{metric}_ms": mean(pool(done, metric)) for metric in LATENCIES}
    num_tokens = sum(sample.num_output_tokens for sample in done)
    figures["output_throughput"] = num_tokens / phase.duration_s if done else None
    figures["request_throughput"] = len(done) / phase.duration_s if done else None
    return figures


def _streams(targets: tuple[Target, Target]) -> tuple[str, str]:
    """Two servers get the same prompts; one server gets others of the same size, or its prefix cache would help B."""
    return ("measured/A", "measured/B") if _one_server(targets) else ("measured", "measured")


def _one_server(targets: tuple[Target, Target]) -> bool:
    first, second = (urlsplit(target.url) for target in targets)
    return (first.hostname, first.port) == (second.hostname, second.port)


def _notes(targets: tuple[Target, Target], complete: Rounds, plan: LoadPlan) -> list[str]:
    notes = ["differences are B - A, paired by round; each interval holds by itself at 95 %"]
    if len(complete) < 5:
        notes.append(f"{len(complete)} complete rounds are few; intervals of so few are rough")
    if _one_server(targets) and "num_distinct_prompts" in plan.workload.describe():
        notes.append("both arms sent the same prompts to one server; its prefix cache may favour whoever came second")
    return notes
