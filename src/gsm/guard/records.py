"""What the guard found, as plain data that can be printed and stored."""

from __future__ import annotations

from pydantic import Field

from gsm.config.smoothing import SmoothingConfig
from gsm.results import Environment, Record, Spread


class Change(Record):
    """A mean with the ends of its 95 % interval."""

    mean: float
    low: float
    high: float


class Verdict(Record):
    """A changed model against the original on the same tokens. Judged on the upper ends of the intervals.

    ``perplexity_change`` is relative (0.01 = 1 % worse); ``kl`` is in nats per token, a lower bound that is tight to
    the reference's 256 likeliest tokens; ``short_change`` is the perplexity change on sequences of at most 32 tokens.
    All of them are None when the changed model's output is not finite.
    """

    num_tokens: int
    perplexity_before: float
    perplexity_after: float | None = None
    perplexity_change: Change | None = None
    kl: Change | None = None
    top1: float | None = None
    short_change: Change | None = None
    finite: bool = True
    failures: list[str] = Field(default_factory=list)

    @property
    def passed(self) -> bool:
        return not self.failures


class Step(Record):
    """One evaluated change of a parameter: what was tried and what came of it."""

    what: str
    num_active: int
    passed: bool
    perplexity_change: float | None
    kl: float | None


class Outcome(Record):
    """The end of a guarded run: the accepted settings, the modules rolled back, and the evidence.

    ``accepted`` is false when even the last resort missed the tolerance: then nothing is smoothed.
    """

    accepted: bool
    config: SmoothingConfig
    culprits: list[str] = Field(default_factory=list)
    rolled_back: list[str] = Field(default_factory=list)
    verdict: Verdict
    steps: list[Step] = Field(default_factory=list)


class Speed(Record):
    """Original against changed model, in turn. ``products`` are one block's matrix products on 512 rows.

    ``own_cost_ms_per_token`` is what smoothing itself adds to a decode step (0 when it is folded into weights). The
    ``linear`` figures are the original's with GSM's linear layers (`gsm.linear`), which lose nothing: what int8 must
    beat to be worth its price.
    """

    prompt_tokens: int
    prefill_s_before: Spread
    prefill_s_after: Spread
    decode_ms_before: Spread
    decode_ms_after: Spread
    products_ms_before: Spread
    products_ms_after: Spread
    own_cost_ms_per_token: float
    prefill_s_linear: Spread | None = None
    decode_ms_linear: Spread | None = None

    @property
    def prefill_gain(self) -> float:
        """How many times faster prefill is."""
        return _ratio(self.prefill_s_before, self.prefill_s_after)

    @property
    def decode_gain(self) -> float:
        """How many times faster a decode step at short context is."""
        return _ratio(self.decode_ms_before, self.decode_ms_after)

    @property
    def gains_over_linear(self) -> tuple[float, float]:
        """The same two against the original with GSM's linear layers (or plain ones, where those were not timed)."""
        return (
            _ratio(self.prefill_s_linear or self.prefill_s_before, self.prefill_s_after),
            _ratio(self.decode_ms_linear or self.decode_ms_before, self.decode_ms_after),
        )


class Tails(Record):
    """Excess kurtosis over the sites that smoothing can act on, the first token of each sample left out."""

    median: float
    largest: float
    largest_at: str


class SiteChoice(Record):
    """Whether a site is smoothed, and the measured reason."""

    name: str
    chosen: bool
    reason: str


class SmoothResult(Record):
    """`gsm smooth`: everything from calibration to the verdict."""

    environment: Environment
    text_hashes: dict[str, str]
    choices: list[SiteChoice]
    left_out: dict[str, str] = Field(default_factory=dict)
    int8_modules: list[str] = Field(default_factory=list)
    max_logit_change: float | None = None
    outcome: Outcome | None = None
    tails_before: Tails | None = None
    tails_after: Tails | None = None
    speed: Speed | None = None
    weight_bytes_before: int
    weight_bytes_after: int | None = None
    worth_it: bool | None = None
    conclusion: str
    exported_to: str | None = None
    notes: list[str] = Field(default_factory=list)


def _ratio(before: Spread, after: Spread) -> float:
    if not before.median or not after.median:
        return 0.0
    return before.median / after.median
