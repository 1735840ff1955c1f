"""When requests are sent: a closed loop of N workers, or Poisson arrivals at a rate; bounded in count and time."""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from gsm.errors import ConfigError
from gsm.measure.load.record import RequestRecord
from gsm.measure.load.samples import Sample, take_sample

MAX_REQUESTS = 1_000_000
MAX_FAILURES_IN_A_ROW = 100
DEFAULT_MAX_IN_FLIGHT = 512
LAG_PERIOD_S = 0.02

Send = Callable[[int, float], Awaitable[RequestRecord]]  # (index of the prompt, when it was due) -> what was seen
StoppedBy = Literal["requests", "duration", "interrupt", "failures"]


@dataclass(frozen=True)
class Schedule:
    """How a phase is driven.

    Without `rate` it is a closed loop: `concurrency` workers, each sending its next request when the last one ended.
    With `rate` (requests per second) arrivals are a Poisson process that does not wait for answers; `concurrency` then
    caps what is in flight, and what had to wait for that shows up in the queue times. No request starts after
    `duration_s`.
    """

    concurrency: int | None = None
    rate: float | None = None
    num_requests: int = 100
    duration_s: float = 3600.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.concurrency is not None and not 1 <= self.concurrency <= 10_000:
            raise ConfigError(f"concurrency lies between 1 and 10000, got {self.concurrency}")
        if self.rate is not None and not 0 < self.rate <= 100_000:
            raise ConfigError(f"the rate lies above 0 and at most 100000 requests per second, got {self.rate}")
        if not 1 <= self.num_requests <= MAX_REQUESTS:
            raise ConfigError(f"the number of requests lies between 1 and {MAX_REQUESTS}, got {self.num_requests}")
        if not 0 < self.duration_s <= 7 * 86400:
            raise ConfigError(f"the duration lies above 0 and at most a week, got {self.duration_s} s")

    @property
    def max_in_flight(self) -> int:
        if self.concurrency is not None:
            return self.concurrency
        return DEFAULT_MAX_IN_FLIGHT if self.rate else 1


@dataclass
class Phase:
    """What one run of a schedule gave. `samples` grows while it runs; times are on the monotonic clock."""

    start_s: float = 0.0
    end_s: float = 0.0
    samples: list[Sample] = field(default_factory=list)
    num_started: int = 0
    num_failures_in_a_row: int = 0
    num_failed: int = 0
    stopped_by: StoppedBy = "requests"

    @property
    def duration_s(self) -> float:
        return self.end_s - self.start_s

    @property
    def num_cancelled(self) -> int:
        """Requests in flight when the phase was interrupted; they count neither as completed nor as failed."""
        return self.num_started - len(self.samples)

    def add(self, record: RequestRecord) -> None:
        self.samples.append(take_sample(record))
        failed = record.failure is not None
        self.num_failed += failed
        self.num_failures_in_a_row = self.num_failures_in_a_row + 1 if failed else 0


async def run_phase(
    send: Send,
    schedule: Schedule,
    stop: asyncio.Event | None = None,
    phase: Phase | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Phase:
    """Runs one schedule to its end and returns every sample.

    Setting `stop` cancels what is in flight and keeps what is done. A given `phase` is filled in place, so that someone
    else can show its progress.
    """
    phase = phase or Phase()
    phase.start_s = phase.end_s = clock()
    if stop is not None and stop.is_set():
        phase.stopped_by = "interrupt"
        return phase
    drive = _closed_loop if schedule.rate is None else _open_loop
    driving = asyncio.ensure_future(drive(send, schedule, phase, clock))
    stopping = asyncio.ensure_future((stop or asyncio.Event()).wait())
    try:
        await asyncio.wait([driving, stopping], return_when=asyncio.FIRST_COMPLETED)
        if not driving.done():
            phase.stopped_by = "interrupt"
    finally:
        for task in (driving, stopping):
            task.cancel()
        await asyncio.wait([driving, stopping])
        phase.end_s = clock()
    if not driving.cancelled():
        driving.result()  # a bug of ours must not pass in silence
    return phase


def _may_start(schedule: Schedule, phase: Phase, clock: Callable[[], float]) -> bool:
    """Whether one more request may start; notes why not."""
    if phase.num_started >= schedule.num_requests:
        return False
    if clock() - phase.start_s >= schedule.duration_s:
        phase.stopped_by = "duration"
        return False
    if phase.num_failures_in_a_row >= MAX_FAILURES_IN_A_ROW:
        phase.stopped_by = "failures"
        return False
    return True


async def _closed_loop(send: Send, schedule: Schedule, phase: Phase, clock: Callable[[], float]) -> None:
    async def worker() -> None:
        while _may_start(schedule, phase, clock):
            index = phase.num_started
            phase.num_started += 1
            phase.add(await send(index, clock()))

    async with _cancelling_group() as tasks:
        tasks += [asyncio.ensure_future(worker()) for _ in range(min(schedule.max_in_flight, schedule.num_requests))]


async def _open_loop(send: Send, schedule: Schedule, phase: Phase, clock: Callable[[], float]) -> None:
    assert schedule.rate is not None
    gaps = random.Random(f"arrivals/{schedule.seed}")
    slots = asyncio.Semaphore(schedule.max_in_flight)

    async def one(index: int, due_s: float) -> None:
        try:
            phase.add(await send(index, due_s))
        finally:
            slots.release()

    due_s = phase.start_s
    async with _cancelling_group() as tasks:
        while _may_start(schedule, phase, clock):
            due_s += gaps.expovariate(schedule.rate)
            await asyncio.sleep(min(due_s, phase.start_s + schedule.duration_s) - clock())
            await slots.acquire()
            if not _may_start(schedule, phase, clock):
                break
            tasks.append(asyncio.ensure_future(one(phase.num_started, due_s)))
            phase.num_started += 1


@contextlib.asynccontextmanager
async def _cancelling_group() -> AsyncIterator[list[asyncio.Future[None]]]:
    """Tasks that are awaited on leaving, and cancelled together when the waiting is cancelled or one of them breaks."""
    tasks: list[asyncio.Future[None]] = []
    try:
        yield tasks
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def watch_lag(lags_s: list[float], clock: Callable[[], float] = time.perf_counter) -> None:
    """Notes how late this process wakes up: the error that its own load puts on every time it measures."""
    while True:
        due_s = clock() + LAG_PERIOD_S
        await asyncio.sleep(LAG_PERIOD_S)
        lags_s.append(max(0.0, clock() - due_s))


@contextlib.contextmanager
def stop_on_interrupt(stop: asyncio.Event) -> Iterator[None]:
    """Ctrl-C sets `stop` instead of ending the process; a second one interrupts as usual. Only in the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()
    before = signal.getsignal(signal.SIGINT)

    def handle(number: int, frame: object) -> None:
        signal.signal(signal.SIGINT, before)
        loop.call_soon_threadsafe(stop.set)

    signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
