"""What tuning measured and decided. The evidence file is also the state: a run that is taken up again reads it."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from gsm.results import Environment, Quality, Record, Spread, Tolerance


class Measured(Record):
    """One contestant of a bout: speed and quality on the same tokens, memory at the last of them."""

    name: str
    config: dict[str, Any] | None = Field(description="None for plain transformers")
    tpot_ms: Spread
    block_ms: tuple[float, ...] = Field(description="ms per token of each block, in the order of the text")
    prefill_ms: float
    kv_bytes: int
    attended_tokens_mean: float | None = None
    quality: Quality | None = None


class Bout(Record):
    """Contestants that took turns on the same text: ``block_ms`` of two of them are pairs."""

    key: str
    third: str
    prompt_tokens: int
    contestants: tuple[Measured, ...]
    seconds: float
    other_cpu_share: float | None = None


class Change(Record):
    """A relative change with its 95 % interval; -0.1 is a tenth less."""

    mean: float
    low: float
    high: float


class Comparison(Record):
    """A candidate against the state it would replace, at one length."""

    prompt_tokens: int
    time: Change
    noise: float = Field(description="what two identical contestants differed by here, relative")
    kv_bytes: float = Field(description="relative change")
    faster: bool
    slower: bool
    failures: tuple[str, ...] = ()

    @property
    def holds(self) -> bool:
        """Whether nothing speaks against the candidate here."""
        return not self.failures and not self.slower


class Candidate(Record):
    """One value of one variable: how far it came, and why it stopped there."""

    value: str
    config: dict[str, Any]
    comparisons: tuple[Comparison, ...] = ()
    accepted: bool = False
    gain: float = 0.0
    reason: str = ""


class Step(Record):
    """One variable, everything else as at the start."""

    variable: str
    question: str
    start_value: str
    candidates: tuple[Candidate, ...]
    chosen: str | None = None
    skipped: str | None = Field(default=None, description="why nothing was tried")


class TuneResult(Record):
    """`gsm tune`: every measurement, every decision, and what they led to."""

    environment: Environment
    task: str
    fingerprint: str = Field(description="of everything that decides a measurement; a state of another is not used")
    lengths: tuple[int, ...]
    tolerance: Tolerance
    text: str
    text_sha256: dict[str, str]
    start: dict[str, Any]
    bouts: tuple[Bout, ...] = ()
    noise: dict[int, float] = Field(default_factory=dict)
    baseline: Candidate | None = Field(default=None, description="the start against plain transformers")
    steps: tuple[Step, ...] = ()
    combined: tuple[Candidate, ...] = ()
    proposed: dict[str, Any] | None = None
    against_plain: tuple[Comparison, ...] = ()
    conclusion: str = ""
    interrupted: bool = False
    notes: tuple[str, ...] = ()
