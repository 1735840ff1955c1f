from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from gsm.errors import MeasurementError
from gsm.measure.bench import machine
from gsm.measure.bench.machine import CpuMeter, benchmark_lock, wait_for_quiet
from gsm.measure.bench.memory import PeakMemory
from gsm.quality import no_progress

MIB = 2**20


def test_one_benchmark_at_a_time(tmp_path: Path) -> None:
    path, seen = tmp_path / "lock", []
    with benchmark_lock(0, no_progress, path):

        def second() -> None:
            try:
                with benchmark_lock(0.01, no_progress, path):
                    seen.append("entered")
            except MeasurementError as error:
                seen.append(str(error))

        thread = threading.Thread(target=second)
        thread.start()
        thread.join()
    assert "another benchmark has held" in seen[0]
    with benchmark_lock(0, no_progress, path):
        pass


def test_a_machine_that_stays_busy_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.psutil, "cpu_percent", lambda interval: 80.0)
    labels = []
    assert not wait_for_quiet(0, lambda label, done, total: labels.append(label))
    monkeypatch.setattr(machine.psutil, "cpu_percent", lambda interval: 3.0)
    assert wait_for_quiet(0, no_progress)


def test_others_are_counted_and_our_own_processes_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    busy = iter([100.0, 107.0])
    clock = iter([0.0, 10.0])
    own = {os.getpid(): iter([1.0, 2.0]), child.pid: iter([5.0, 9.0])}
    monkeypatch.setattr(machine, "_busy_seconds", lambda: next(busy))
    monkeypatch.setattr(machine.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(machine.psutil, "cpu_count", lambda: 2)
    monkeypatch.setattr(CpuMeter, "_own_seconds", lambda self: sum(next(own[p.pid]) for p in self._processes))
    meter = CpuMeter([child.pid])
    assert meter.other_share() == pytest.approx(0.1)  # (7 - 1 - 4) of 10 s on 2 cores
    child.communicate(b"\n")


@pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="peak resident memory is read from Linux's /proc"
)
def test_peak_memory_forgets_what_came_before_and_sees_what_was_freed() -> None:
    torch.ones(400 * MIB // 4)  # freed at once; must not count
    peak = PeakMemory()
    assert peak.rss_bytes() < 40 * MIB
    torch.ones(100 * MIB // 4)
    assert 90 * MIB < peak.rss_bytes() < 150 * MIB


def test_without_proc_the_peak_is_unknown_and_not_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    from gsm.measure.bench import memory

    monkeypatch.setattr(memory, "_CLEAR_REFS", Path("/nonexistent/clear_refs"))
    assert PeakMemory().rss_bytes() is None
    monkeypatch.setattr(memory, "_STATUS", Path("/nonexistent/status"))
    assert memory._status_bytes("VmHWM") is None
