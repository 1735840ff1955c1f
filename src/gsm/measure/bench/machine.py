"""A machine fit for measuring: one benchmark at a time, a wait for quiet, and how busy others were meanwhile."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
from filelock import FileLock, Timeout

from gsm.errors import MeasurementError
from gsm.quality import Progress

NOISY_SHARE = 0.1  # others using more of the machine than this make a result noisy
LOCK_PATH = Path(tempfile.gettempdir()) / "gsm-bench.lock"


@contextmanager
def benchmark_lock(wait_s: float, progress: Progress, path: Path = LOCK_PATH) -> Iterator[None]:
    """Hold the machine's benchmark lock. Raises MeasurementError if another benchmark keeps it for ``wait_s``."""
    lock = FileLock(path)
    try:
        try:
            lock.acquire(timeout=0)
        except Timeout:
            progress("waiting for another benchmark to end", 0, 1)
            lock.acquire(timeout=wait_s)
    except Timeout:
        raise MeasurementError(
            f"another benchmark has held {path} for {wait_s:.0f} s; wait for it, or raise --wait"
        ) from None
    except OSError as error:
        raise MeasurementError(f"the benchmark lock {path} cannot be opened: {error.strerror}") from None
    try:
        yield
    finally:
        lock.release()


def wait_for_quiet(wait_s: float, progress: Progress, interval_s: float = 1.0) -> bool:
    """Wait until nobody uses more than a tenth of the machine; False when it stayed busy for ``wait_s``.

    Call it while the own processes are idle.
    """
    deadline = time.monotonic() + wait_s
    while psutil.cpu_percent(interval=interval_s) > 100 * NOISY_SHARE:
        if time.monotonic() >= deadline:
            return False
        progress("waiting for a quiet machine", 0, 1)
    return True


class CpuMeter:
    """The share of the machine that processes other than ours used since the meter was made."""

    def __init__(self, process_ids: Iterable[int]):
        self._processes = [psutil.Process(), *(psutil.Process(pid) for pid in process_ids)]
        self._own, self._all, self._start = self._own_seconds(), _busy_seconds(), time.monotonic()

    def other_share(self) -> float:
        """CPU seconds of others divided by the CPU seconds the machine had, 0 to 1."""
        capacity = (time.monotonic() - self._start) * (psutil.cpu_count() or 1)
        others = (_busy_seconds() - self._all) - (self._own_seconds() - self._own)
        return round(min(1.0, max(0.0, others / capacity)), 3) if capacity > 0 else 0.0

    def _own_seconds(self) -> float:
        return sum(_cpu_seconds(process) for process in self._processes)


def _cpu_seconds(process: psutil.Process) -> float:
    try:
        times = process.cpu_times()
    except psutil.NoSuchProcess:  # it died; whoever waits for its answer will say so
        return 0.0
    return float(times.user + times.system)


def _busy_seconds() -> float:
    times = psutil.cpu_times()
    # Stolen time belongs to other machines on the same host and slows us just as well.
    return float(sum(getattr(times, name, 0.0) for name in ("user", "nice", "system", "irq", "softirq", "steal")))
