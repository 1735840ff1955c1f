"""Where time goes: nested labels, each charged with its own time only."""

from __future__ import annotations

import functools
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])
OTHER = "other"


class SelfTimer:
    """Charges every moment to the innermost running label, so that the labels sum to the time measured.

    ``wait`` is called at every change of label: on a GPU it must block until the device is done. One thread only.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter, wait: Callable[[], None] | None = None):
        self._clock, self._wait = clock, wait
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._labels = [OTHER]
        self._since: float | None = None

    def start(self) -> None:
        """Begin to measure; what no label claims goes to "other"."""
        self._seconds.clear()
        self._since = self._now()

    def stop(self) -> dict[str, float]:
        """Seconds by label since `start`."""
        self._charge()
        self._since = None
        return dict(self._seconds)

    def timed(self, label: str, function: F) -> F:
        """``function``, its own time charged to ``label`` while measuring."""

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if self._since is None:
                return function(*args, **kwargs)
            self._charge()
            self._labels.append(label)
            try:
                return function(*args, **kwargs)
            finally:
                if self._since is not None:
                    self._charge()
                self._labels.pop()

        return call  # type: ignore[return-value]

    def _now(self) -> float:
        if self._wait is not None:
            self._wait()
        return self._clock()

    def _charge(self) -> None:
        assert self._since is not None
        now = self._now()
        self._seconds[self._labels[-1]] += now - self._since
        self._since = now
