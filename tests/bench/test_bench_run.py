"""The whole benchmark, in real processes, on a tiny model."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest

from gsm.errors import InputError, MeasurementError, ModelError
from gsm.measure.bench import BenchSpec, bench, run
from gsm.measure.bench.process import WorkerProcess
from gsm.measure.bench.spec import Job
from gsm.measure.bench.worker import Worker
from support_measure import save_tiny_model

NO_QUALITY = {"num_windows": 0, "needles_per_depth": 0, "wait_s": 0.0, "unchunked": False, "threads": 1}


@pytest.fixture(scope="session")
def tiny_directory(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_model(tmp_path_factory.mktemp("tiny")))


def test_speed_memory_and_quality_side_by_side(tiny_directory: str) -> None:
    spec = BenchSpec(
        tiny_directory, 160, new_tokens=4, runs=2, batch_size=2, num_windows=2, needles_per_depth=1, chunk_tokens=64,
        arms=("transformers", "full"), wait_s=0, threads=1, profile=True,
    )  # fmt: skip
    result = bench(spec)
    assert [arm.name for arm in result.arms] == ["transformers", "full"]
    assert not result.interrupted
    for arm in result.arms:
        assert len(arm.samples.ttft_ms) == len(arm.samples.tpot_ms) == 2
        assert arm.ttft_ms.min <= arm.ttft_ms.median <= arm.ttft_ms.max
        assert arm.kv_bytes > 0
        assert arm.kv_pool_bytes >= arm.kv_bytes
        assert arm.quality.n_windows == 2
        assert arm.quality.n_needles == 3
        assert arm.bound.kv_read_bytes <= arm.kv_bytes
        assert arm.profile.context_tokens == 160
        assert arm.profile.parts_ms["linear"] > 0
        assert arm.profile.sum_ms == pytest.approx(sum(arm.profile.parts_ms.values()))
        assert arm.config is None if arm.name == "transformers" else arm.config["cache"]["page_size"] == 16
    plain, full = result.arms
    assert plain.peak_rss_bytes is not None
    assert plain.ttft_unchunked_ms.median > 0
    assert full.ttft_unchunked_ms is None
    assert full.quality.kl < 1e-9
    assert plain.attended_tokens_mean == pytest.approx(162)
    environment = result.environment
    assert environment.threads == 1
    assert environment.model == Path(tiny_directory).name
    assert environment.noisy is (environment.other_cpu_share > 0.1)
    assert environment.memory_bandwidth_bytes_per_s > 0


class InThisProcess:
    """A worker without a process of its own, for what does not depend on one; the measuring is real."""

    def __init__(self, job: Job):
        self.arm, self.pid = job.arm, os.getpid()
        self.worker = Worker(job)
        self.ready = self.worker.ready()
        self.closed = False

    def ask(self, request: str) -> dict:
        return getattr(self.worker, request)()

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def no_processes(monkeypatch: pytest.MonkeyPatch) -> list[InThisProcess]:
    """Workers made during the test, in order."""
    made: list[InThisProcess] = []

    def make(job: Job) -> InThisProcess:
        made.append(InThisProcess(job))
        return made[-1]

    monkeypatch.setattr(run, "WorkerProcess", make)
    return made


def test_one_after_the_other_where_memory_is_short(
    tiny_directory: str, monkeypatch: pytest.MonkeyPatch, no_processes: list[InThisProcess]
) -> None:
    monkeypatch.setattr(run, "_MEMORY_MARGIN", 1e12)
    result = bench(BenchSpec(tiny_directory, 32, new_tokens=2, runs=1, arms=("transformers", "tiers"), **NO_QUALITY))
    assert any("one after the other" in note for note in result.notes)
    assert any("not a result" in note for note in result.notes)
    assert all(len(arm.samples.ttft_ms) == 1 and arm.quality is None for arm in result.arms)
    assert [worker.closed for worker in no_processes] == [True, True]


def test_an_interrupt_keeps_complete_runs(tiny_directory: str, no_processes: list[InThisProcess]) -> None:
    def interrupt(label: str, done: int, total: int) -> None:
        if label == "run 2: tiers":
            raise KeyboardInterrupt

    spec = BenchSpec(tiny_directory, 32, new_tokens=2, runs=3, arms=("transformers", "tiers"), **NO_QUALITY)
    result = bench(spec, interrupt)
    assert result.interrupted
    assert [len(arm.samples.ttft_ms) for arm in result.arms] == [2, 1]
    assert result.arms[0].peak_rss_bytes is None
    assert all(worker.closed for worker in no_processes)


def test_an_interrupt_before_anything_is_complete_is_an_interrupt(
    tiny_directory: str, no_processes: list[InThisProcess]
) -> None:
    def interrupt(label: str, done: int, total: int) -> None:
        if label.startswith("warm-up"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        bench(BenchSpec(tiny_directory, 32, runs=1, arms=("transformers",), **NO_QUALITY), interrupt)
    assert all(worker.closed for worker in no_processes)


def test_arms_take_turns_and_warm_up_is_thrown_away(tiny_directory: str, no_processes: list[InThisProcess]) -> None:
    labels: list[str] = []
    spec = BenchSpec(tiny_directory, 32, new_tokens=2, runs=2, arms=("transformers", "full"), **NO_QUALITY)
    result = bench(spec, lambda label, done, total: labels.append(label))
    steps = [label for label in dict.fromkeys(labels) if label.startswith(("warm-up", "run"))]
    assert steps == [
        "warm-up: transformers", "warm-up: full", "run 1: transformers", "run 1: full", "run 2: transformers",
        "run 2: full",
    ]  # fmt: skip
    assert [len(arm.samples.ttft_ms) for arm in result.arms] == [2, 2]


def test_what_cannot_work_is_refused_before_anything_is_timed(
    tiny_directory: str, tmp_path: Path, no_processes: list[InThisProcess]
) -> None:
    labels: list[str] = []

    def progress(label: str, done: int, total: int) -> None:
        labels.append(label)

    with pytest.raises(InputError, match="trained for 1024 positions"):
        bench(BenchSpec(tiny_directory, 1020, **NO_QUALITY), progress)
    with pytest.raises(InputError, match="measuring quality after 1000 tokens"):
        bench(BenchSpec(tiny_directory, 1000, new_tokens=2, wait_s=0), progress)
    with pytest.raises(ModelError):
        bench(BenchSpec(str(tmp_path / "missing"), 32, **NO_QUALITY), progress)
    with pytest.raises(InputError, match="dtype"):
        bench(BenchSpec(tiny_directory, 32, dtype="int3", **NO_QUALITY), progress)
    assert all(label.startswith("loading") for label in labels)


def test_errors_and_the_end_of_a_process_are_told_in_one_sentence(tiny_directory: str) -> None:
    worker = WorkerProcess(BenchSpec(tiny_directory, 32, **NO_QUALITY).job("transformers"))
    try:
        with pytest.raises(MeasurementError, match="arm 'transformers' failed with AttributeError") as caught:
            worker.ask("nonsense")
        assert "\n" not in str(caught.value)
        with pytest.raises(MeasurementError, match="ended with code 0"):
            worker.ask("run")
    finally:
        worker.close()
    assert not [c for c in psutil.Process().children() if "gsm.measure.bench.worker" in " ".join(c.cmdline())]


def test_errors_of_the_process_keep_their_kind(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="missing"):
        WorkerProcess(BenchSpec(str(tmp_path / "missing"), 32, **NO_QUALITY).job("transformers"))


def test_a_profile_that_leaves_the_window_is_refused_at_once(tiny_directory: str) -> None:
    with pytest.raises(InputError, match="a profile decodes 176 tokens after the prompt"):
        bench(BenchSpec(tiny_directory, 900, new_tokens=4, profile=True, **NO_QUALITY))
