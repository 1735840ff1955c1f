"""One load test from check to result: a first request, a warm-up that is thrown away, the measured phase."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from gsm.measure.load.client import LoadClient
from gsm.measure.load.plan import LoadPlan
from gsm.measure.load.record import RequestRecord
from gsm.measure.load.report import Effort, build_result, run_header, secrets_of
from gsm.measure.load.runner import Phase, Schedule, Send, run_phase, stop_on_interrupt, watch_lag
from gsm.measure.load.target import Target

PROGRESS_PERIOD_S = 0.5

OnProgress = Callable[[str, Schedule, Phase], None]  # (name of the phase, what is planned, what is done so far)


def run_load(target: Target, plan: LoadPlan, on_progress: OnProgress | None = None) -> dict[str, Any]:
    """Measures one server and returns its result (see `report.build_result`).

    Ctrl-C ends the measurement and keeps what is done. Raises MeasurementError when the server does not answer a first
    request, ConfigError or InputError for what cannot be sent.
    """
    plan.check(target)
    return run_header("load", secrets_of(target)) | asyncio.run(_load(target, plan, on_progress))


async def _load(target: Target, plan: LoadPlan, on_progress: OnProgress | None) -> dict[str, Any]:
    stop, phase, effort = asyncio.Event(), Phase(), Effort()
    with stop_on_interrupt(stop):
        async with (
            open_arm(target, plan, stop, on_progress) as arm,
            measuring(effort),
            reporting(on_progress, "measuring", plan.schedule, phase),
        ):
            await run_phase(arm.send_from("measured"), plan.schedule, stop, phase)
    return build_result(arm.client.target, plan, [phase], arm.notes, effort)


@dataclass
class Arm:
    """A warmed-up connection to one server."""

    client: LoadClient
    plan: LoadPlan
    notes: list[str]

    def send_from(self, stream: str, first: int = 0) -> Send:
        """Sends the prompts of one stream of the workload, counted from `first`."""

        def send(index: int, due_s: float) -> Awaitable[RequestRecord]:
            return self.client.send(self.plan.workload.prompt(stream, first + index), due_s)

        return send


@contextlib.asynccontextmanager
async def open_arm(
    target: Target, plan: LoadPlan, stop: asyncio.Event, on_progress: OnProgress | None, label: str = ""
) -> AsyncIterator[Arm]:
    """Checks the server with a first request and warms it up; nothing of that is in the result."""
    async with LoadClient(target, plan.schedule.max_in_flight, plan.keep_details) as client:
        arm = Arm(client, plan, await _unless_stopped(client.prepare(), stop))
        if plan.warmup:
            schedule = Schedule(min(plan.schedule.max_in_flight, plan.warmup), num_requests=plan.warmup)
            phase = Phase()
            async with reporting(on_progress, f"warming up {label}".rstrip(), schedule, phase):
                await run_phase(arm.send_from("warmup"), schedule, stop, phase)
        yield arm


async def _unless_stopped(preparing: Awaitable[list[str]], stop: asyncio.Event) -> list[str]:
    """The notes of the preparation, or none when it was interrupted."""
    prepared, stopped = asyncio.ensure_future(preparing), asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait([prepared, stopped], return_when=asyncio.FIRST_COMPLETED)
        return prepared.result() if prepared.done() else []
    finally:
        prepared.cancel()
        stopped.cancel()


@contextlib.asynccontextmanager
async def measuring(effort: Effort) -> AsyncIterator[None]:
    """Adds to `effort` what the client itself costs and how late it runs meanwhile."""
    watching = asyncio.ensure_future(watch_lag(effort.lags_s))
    cpu_s = time.process_time()
    try:
        yield
    finally:
        effort.cpu_s += time.process_time() - cpu_s
        watching.cancel()


@contextlib.asynccontextmanager
async def reporting(on_progress: OnProgress | None, name: str, schedule: Schedule, phase: Phase) -> AsyncIterator[None]:
    """Calls `on_progress` twice a second and once at the end."""

    async def tick(show: OnProgress) -> None:
        while True:
            show(name, schedule, phase)
            await asyncio.sleep(PROGRESS_PERIOD_S)

    ticking = asyncio.ensure_future(tick(on_progress)) if on_progress else None
    try:
        yield
    finally:
        if ticking and on_progress:
            ticking.cancel()
            on_progress(name, schedule, phase)
