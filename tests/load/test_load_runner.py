import asyncio
import random

import pytest

from gsm.errors import ConfigError
from gsm.measure.load.record import Failure, RequestRecord
from gsm.measure.load.runner import MAX_FAILURES_IN_A_ROW, Phase, Schedule, run_phase


class FakeServer:
    """Answers when it is told to, and remembers what was asked; its clock only moves when it is moved."""

    def __init__(self, answers_at_once: bool = True, failure: Failure | None = None, takes_s: float = 0.0) -> None:
        self.now_s = 1000.0
        self.asked: list[tuple[int, float]] = []
        self.in_flight = self.peak = 0
        self.answer = asyncio.Event()
        if answers_at_once:
            self.answer.set()
        self.failure = failure
        self.takes_s = takes_s

    def clock(self) -> float:
        return self.now_s

    async def send(self, index: int, due_s: float) -> RequestRecord:
        self.asked.append((index, due_s))
        self.in_flight += 1
        self.peak = max(self.peak, self.in_flight)
        start_s = self.now_s
        try:
            await asyncio.sleep(0)
            await self.answer.wait()
            self.now_s += self.takes_s
        finally:
            self.in_flight -= 1
        return RequestRecord(due_s, start_s, end_s=self.now_s, failure=self.failure, finish_reason="stop")


def run(schedule: Schedule, **server_settings: object) -> tuple[Phase, FakeServer]:
    async def main() -> tuple[Phase, FakeServer]:
        server = FakeServer(**server_settings)  # type: ignore[arg-type]
        return await run_phase(server.send, schedule, clock=server.clock), server

    return asyncio.run(main())


def test_a_closed_loop_sends_every_prompt_once_and_keeps_its_concurrency() -> None:
    phase, server = run(Schedule(concurrency=4, num_requests=19))
    assert [index for index, _ in server.asked] == list(range(19))
    assert server.peak == 4
    assert len(phase.samples) == phase.num_started == 19
    assert phase.stopped_by == "requests"
    assert phase.num_cancelled == 0


def test_fewer_requests_than_workers() -> None:
    phase, server = run(Schedule(concurrency=64, num_requests=3))
    assert server.peak == len(phase.samples) == 3


def test_no_request_starts_after_the_duration_but_those_in_flight_finish() -> None:
    phase, _ = run(Schedule(concurrency=1, num_requests=1000, duration_s=10.0), takes_s=3.0)
    assert len(phase.samples) == 4  # at 0, 3, 6 and 9 s
    assert phase.stopped_by == "duration"
    assert phase.duration_s == pytest.approx(12.0)


def test_arrivals_are_a_poisson_process_and_do_not_wait_for_answers() -> None:
    async def main() -> tuple[Phase, FakeServer]:
        server = FakeServer(answers_at_once=False)
        running = asyncio.ensure_future(
            run_phase(server.send, Schedule(rate=50_000.0, num_requests=300, seed=5), clock=server.clock)
        )
        while len(server.asked) < 300:
            server.now_s += 1.0  # far ahead of every arrival
            await asyncio.sleep(0)
        server.answer.set()
        return await running, server

    phase, server = asyncio.run(main())
    assert server.peak == 300
    assert len(phase.samples) == 300
    gaps = random.Random("arrivals/5")
    due_s = phase.start_s
    for _, sent_s in server.asked:
        due_s += gaps.expovariate(50_000.0)
        assert sent_s == pytest.approx(due_s)
    assert min(sample.queue_s for sample in phase.samples) > 0, "late starts show in the queue time"


def test_concurrency_caps_what_is_in_flight_at_a_rate() -> None:
    _, server = run(Schedule(rate=10_000.0, concurrency=3, num_requests=50))
    assert server.peak <= 3
    assert len(server.asked) == 50


def test_a_server_that_only_fails_is_given_up() -> None:
    phase, server = run(Schedule(concurrency=2, num_requests=100_000), failure=Failure("http_500", "broken"))
    assert phase.stopped_by == "failures"
    assert MAX_FAILURES_IN_A_ROW <= len(server.asked) <= MAX_FAILURES_IN_A_ROW + 2
    assert phase.num_failed == len(server.asked)


@pytest.mark.parametrize("schedule", [Schedule(concurrency=2, num_requests=9), Schedule(rate=1e4, num_requests=9)])
def test_stopping_keeps_what_is_done_and_cancels_what_is_in_flight(schedule: Schedule) -> None:
    async def main() -> tuple[Phase, FakeServer]:
        server, stop, num_fast = FakeServer(answers_at_once=False), asyncio.Event(), 3

        async def send(index: int, due_s: float) -> RequestRecord:
            if index < num_fast:
                return RequestRecord(due_s, server.now_s, end_s=server.now_s, finish_reason="stop")
            return await server.send(index, due_s)

        running = asyncio.ensure_future(run_phase(send, schedule, stop, clock=server.clock))
        while server.in_flight < 2:
            server.now_s += 1.0
            await asyncio.sleep(0)
        stop.set()
        return await running, server

    phase, server = asyncio.run(main())
    assert phase.stopped_by == "interrupt"
    assert len(phase.samples) == 3
    assert phase.num_cancelled >= 2
    assert server.in_flight == 0


def test_a_stop_before_the_start_sends_nothing() -> None:
    async def main() -> tuple[Phase, FakeServer]:
        server, stop = FakeServer(), asyncio.Event()
        stop.set()
        return await run_phase(server.send, Schedule(), stop), server

    phase, server = asyncio.run(main())
    assert (phase.stopped_by, server.asked) == ("interrupt", [])


@pytest.mark.parametrize("schedule", [Schedule(concurrency=3), Schedule(rate=1e4)])
def test_a_bug_in_sending_is_not_swallowed(schedule: Schedule) -> None:
    async def broken(index: int, due_s: float) -> RequestRecord:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        asyncio.run(run_phase(broken, schedule))


@pytest.mark.parametrize(
    "settings",
    [
        {"concurrency": 0},
        {"concurrency": 10_001},
        {"rate": 0.0},
        {"rate": -1.0},
        {"num_requests": 0},
        {"num_requests": 10**9},
        {"duration_s": 0.0},
        {"duration_s": float("nan")},
    ],
)
def test_impossible_schedules_are_refused(settings: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        Schedule(**settings)  # type: ignore[arg-type]
