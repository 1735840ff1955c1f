"""Everything about a load test but the server: what is sent, when, and what is kept."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from gsm.errors import ConfigError
from gsm.measure.load.runner import Schedule
from gsm.measure.load.target import Target
from gsm.measure.load.workload import Workload

WARMUP_AT_A_RATE = 8


@dataclass(frozen=True)
class LoadPlan:
    """A workload on a schedule. `goodput_ms` are limits by metric name; see `metrics.parse_goodput`."""

    workload: Workload
    schedule: Schedule
    num_warmup: int | None = None  # None: one per worker, so that every connection is open
    goodput_ms: Mapping[str, float] = field(default_factory=dict)
    keep_details: bool = False  # per-request arrays and texts in the result

    def __post_init__(self) -> None:
        if self.num_warmup is not None and self.num_warmup < 0:
            raise ConfigError(f"the warm-up is a number of requests from 0, got {self.num_warmup}")

    @property
    def warmup(self) -> int:
        """How many requests are sent and dropped before the measured ones."""
        if self.num_warmup is not None:
            return self.num_warmup
        return WARMUP_AT_A_RATE if self.schedule.rate else self.schedule.max_in_flight

    def check(self, target: Target) -> None:
        """Raises ConfigError for goodput that cannot be seen in a response which is not streamed."""
        unseen = {"ttft", "tpot"} & self.goodput_ms.keys()
        if unseen and not target.stream:
            raise ConfigError(f"goodput by {' and '.join(sorted(unseen))} needs a streamed response; drop --no-stream")
