"""The reasoning section: how much of a long chain of thought stays in memory, by thinking effort (SPEC K10)."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from pydantic import Field, field_validator, model_validator

from gsm.config.section import Section
from gsm.errors import InputError

# DeepSeek's scale (FACTS): low 50, high 75, max 100; its API maps the other names of OpenAI's onto these.
EFFORTS = {
    "none": 0,
    "minimal": 50,
    "low": 50,
    "medium": 75,
    "high": 75,
    "xhigh": 75,
    "ultra": 100,
    "max": 100,
}
# (opening, closing): DeepSeek and Qwen; gpt-oss channels; Magistral; Cohere; Kimi; Seed; and plain words
MARKERS = (
    ("<think>", "</think>"),
    ("<|channel|>analysis<|message|>", "<|end|>"),
    ("[THINK]", "[/THINK]"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("◁think▷", "◁/think▷"),
    ("<seed:think>", "</seed:think>"),
    ("<thinking>", "</thinking>"),
    ("<reasoning>", "</reasoning>"),
)
DISCOURSE = (
    "Wait", "So", "Next", "Now", "First", "Second", "Third", "Then", "Finally", "However", "But", "Therefore", "Thus",
    "Hence", "Hmm", "Alternatively", "Okay", "Ok", "Actually", "Let", "Step", "Again", "Also",
)  # fmt: skip


class EffortLevel(Section):
    """Shares of the finished thinking, counted from its newest step backwards."""

    keep: float = Field(
        ge=0.0, le=1.0, description="that can still be read once the thought is over; the rest is dropped"
    )
    running: float = Field(default=1.0, ge=0.0, le=1.0, description="the same while it runs; the newest of it")
    heavy: float = Field(
        default=0.5, ge=0.0, le=1.0, description="of `keep`, chosen by attention mass and not by age, head by head"
    )
    int8: float = Field(default=0.1, ge=0.0, le=1.0, description="of all of it, that is not int4 yet while thinking")


class ReasoningConfig(Section):
    """Grading of think segments.

    Finished early steps go down first (int8, then int4), later ones later; when thinking ends it goes one tier down:
    int8 to int4, and of what is int4 the share that is not kept is dropped. Nothing is dropped while later steps still
    build on it unless ``running`` is below 1 (benchmarks/LOG.md has the price). Everything outside think segments is
    protected: never int4, never dropped.
    """

    enabled: bool = False
    effort: int | str = Field(default="high", description="of requests that say nothing: a name, or 1 to 100")
    none: EffortLevel = EffortLevel(keep=0.0, int8=0.0)
    low: EffortLevel = EffortLevel(keep=0.2)
    high: EffortLevel = EffortLevel(keep=0.38)
    max: EffortLevel = EffortLevel(keep=0.66)
    min_tokens: int = Field(default=256, ge=0, description="newest tokens of a running thought that are never dropped")
    markers: tuple[tuple[str, str], ...] = MARKERS
    discourse: tuple[str, ...] = Field(default=DISCOURSE, description="first words of a new step")

    @field_validator("effort")
    @classmethod
    def _known_effort(cls, value: int | str) -> int | str:
        try:
            effort_number(value)
        except InputError as error:
            raise ValueError(str(error)) from None
        return value

    @model_validator(mode="after")
    def _consistent(self) -> ReasoningConfig:
        if any(not opening or not closing for opening, closing in self.markers):
            raise ValueError("reasoning.markers holds an empty marker, which would be found everywhere; leave it out")
        if any(not word.strip() for word in self.discourse):
            raise ValueError("reasoning.discourse holds an empty word; leave it out")
        return self

    @property
    def weighs(self) -> bool:
        """Whether attention mass must be recorded."""
        return self.enabled and any(level.keep * level.heavy for level in (self.none, self.low, self.high, self.max))

    def level(self, effort: int | str | None = None) -> EffortLevel:
        """The shares of an effort; numbers between the named ones are interpolated. Raises InputError."""
        number = effort_number(self.effort if effort is None else effort)
        points = ((0, self.none), (50, self.low), (75, self.high), (100, self.max))
        for (left, low), (right, high) in pairwise(points):
            if number <= right:
                weight = (number - left) / (right - left)
                blend = {
                    name: getattr(low, name) * (1 - weight) + getattr(high, name) * weight
                    for name in ("keep", "running", "heavy", "int8")
                }
                return EffortLevel(**blend)
        return self.max


def effort_number(effort: Any) -> int:
    """0 (none) to 100 (max) for a name or a number. Raises InputError."""
    name = str(effort).strip().lower()
    if name in EFFORTS:
        return EFFORTS[name]
    if name.isascii() and name.isdigit() and 1 <= int(name) <= 100:
        return int(name)
    raise InputError(f"reasoning effort {effort!r} is unknown; use none, low, high, max or a number from 1 to 100")
