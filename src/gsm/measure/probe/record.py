"""What a probe found. Times in ms, for the whole batch."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from gsm.results import Environment, Profile, Record, Workload

Kind = Literal["kv", "weights", "overhead", "prefill", "cannot_tell"]


class Growth(Record):
    """Time per token: ``intercept_ms + us_per_token * length / 1000``, with the slope's 95 % interval."""

    us_per_token: float
    low: float
    high: float
    intercept_ms: float

    def at(self, context_tokens: float) -> float:
        """Milliseconds of a step after ``context_tokens``."""
        return self.intercept_ms + self.us_per_token * context_tokens / 1e3


class Shares(Record):
    """The request's time, 0 to 1 each: prefill, and the new tokens' by what they wait for. They sum to 1.

    ``kv`` is attention with everything that chooses, weighs and writes the cache; ``overhead`` is what neither reads
    weights nor cache: small operations, Python, smoothing.
    """

    prefill: float
    weights: float
    kv: float
    overhead: float


class Verdict(Record):
    """What bounds this request, and why; ``cannot_tell`` gives the reason for that."""

    kind: Kind
    because: str

    @property
    def sentence(self) -> str:
        names = {
            "kv": "KV-bound",
            "weights": "Weight-bound",
            "overhead": "Overhead-bound",
            "prefill": "Prefill-bound",
            "cannot_tell": "Cannot tell",
        }
        return f"{names[self.kind]}, because {self.because}."


class Lever(Record):
    """One thing to change: what it is expected to give at one context length, and what it gave.

    Gains are plain time per token / time per token with the lever (for ``batch``: of throughput). ``error`` compares
    the gains: predicted / measured - 1.
    """

    name: str
    context_tokens: int
    how: str = Field(description="what the prediction rests on")
    plain_ms: float
    predicted_ms: float
    predicted_gain: float
    measured_plain_ms: float | None = None
    measured_ms: float | None = None
    measured_gain: float | None = None
    error: float | None = None


class ProbeResult(Record):
    """`gsm probe`: what bounds a request on this machine, and what would help."""

    environment: Environment
    workload: Workload
    ttft_ms: float
    context_tokens: tuple[int, ...] = Field(description="length before each token that was timed without timers")
    token_ms: tuple[float, ...]
    growth: Growth | None
    profile: Profile | None
    shares: Shares | None
    empty_ms: float | None = Field(default=None, description="a plain step with an empty cache, in turns with full_ms")
    full_ms: float | None = Field(
        default=None, description="a plain step at the length asked for that is nearest to the request's"
    )
    verdict: Verdict
    cheaper_first: tuple[str, ...] = ()
    levers: tuple[Lever, ...] = ()
    interrupted: bool = False
    notes: tuple[str, ...] = ()
