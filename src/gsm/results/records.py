"""Frozen records of measurements. What was not measured is None (JSON null, "n/a" on the terminal), never 0.

The fields named in the product's frozen JSON shape keep their names and meaning; further fields may be added, each with
a default, so that older files stay readable. docs/measuring.md explains every field.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, Field


class Record(BaseModel):
    """A frozen record; unknown keys are errors, so that a typo or a foreign file is noticed."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Spread(Record):
    """Median with the smallest and largest sample; all None without samples."""

    median: float | None = None
    min: float | None = None
    max: float | None = None


class Environment(Record):
    """Where and how a result was taken."""

    python: str
    torch: str | None
    transformers: str | None
    gsm: str
    platform: str
    cpu: str
    cores: int
    threads: int | None = None
    memory_bytes: int
    device: str = "cpu"
    model: str | None = None
    dtype: str | None = None
    command: str
    started_at: str = Field(description="UTC, ISO 8601")
    load_average_before: tuple[float, float, float] | None = None
    load_average_after: tuple[float, float, float] | None = None
    other_cpu_share: float | None = Field(default=None, description="CPU time others used while we measured, 0 to 1")
    noisy: bool | None = Field(default=None, description="True when others used the machine while we measured")
    memory_bandwidth_bytes_per_s: float | None = None


class Workload(Record):
    """What every arm was given."""

    prompt_tokens: int
    new_tokens: int
    runs: int
    batch_size: int
    warmup_runs: int = 0
    prefill_chunk_tokens: int | None = None
    text_sha256: str | None = None


class NeedlePair(Record):
    """One needle case, paired with the full cache on the same haystacks and questions."""

    asked: int
    reference_found: int
    found: int
    lost: int = Field(description="found by the full cache, not by this arm")
    gained: int = Field(description="found by this arm, not by the full cache")

    @classmethod
    def of(cls, full: Sequence[bool], own: Sequence[bool]) -> NeedlePair:
        """From what the full cache and this arm found, question by question."""
        both = list(zip(full, own, strict=True))
        return cls(
            asked=len(both),
            reference_found=sum(full),
            found=sum(own),
            lost=sum(f and not o for f, o in both),
            gained=sum(o and not f for f, o in both),
        )


class Quality(Record):
    """One arm against the full cache of plain transformers, on the same tokens.

    ``nll_delta`` and ``kl`` are in nats per token, ``top1_agreement`` and the needle figures are shares from 0 to 1.
    ``needle_prefill``: the question is part of the prefill. ``needle_late``: it arrives, token by token, after the
    cache has been compressed. ``n_needles`` counts needles per case.
    """

    nll_delta: float | None = None
    kl: float | None = None
    kl_ci95: tuple[float, float] | None = None
    top1_agreement: float | None = None
    needle_prefill: float | None = None
    needle_late: float | None = None
    n_windows: int = 0
    n_needles: int = 0
    window_tokens: int | None = None
    prefill_pair: NeedlePair | None = None
    late_pair: NeedlePair | None = None
    notes: tuple[str, ...] = ()


class Bound(Record):
    """The physical floor of a decode step: bytes that must be read, at the memory bandwidth measured beside it."""

    weight_bytes: int
    kv_read_bytes: int
    tpot_ms: float | None


class Samples(Record):
    """The raw samples behind the spreads, one per complete run."""

    ttft_ms: tuple[float, ...] = ()
    tpot_ms: tuple[float, ...] = ()


class Profile(Record):
    """Where a decode step's time goes, in ms per step: medians over blocks of 16 steps.

    ``parts_ms`` has linear, attention, selection, mass, cache_writes, smoothing, host and other (what nothing claims);
    ``host_parts_ms`` splits host by what ran. ``step_ms`` is taken without timers inside, so ``sum_error``, the sum of
    the parts relative to it, shows what the timers cost.
    """

    context_tokens: int
    num_steps: int
    step_ms: Spread
    parts_ms: dict[str, float]
    host_parts_ms: dict[str, float]
    sum_ms: float
    sum_error: float = Field(description="(sum of the parts - step) / step")
    other_share: float = Field(description="other / step")
    explains_step: bool = Field(description="the sum is within 5 % of the step and other at most 10 % of it")


class ArmResult(Record):
    """Speed, memory and quality of one arm."""

    name: str
    config: dict[str, Any] | None = Field(description="None for plain transformers")
    ttft_ms: Spread = Spread()
    tpot_ms: Spread = Spread()
    kv_bytes: int | None = None
    kv_pool_bytes: int | None = None
    peak_rss_bytes: int | None = None
    peak_device_bytes: int | None = None
    attended_tokens_mean: float | None = None
    quality: Quality | None = None
    ttft_unchunked_ms: Spread | None = None
    bytes_by_tier: dict[str, int] | None = None
    bound: Bound | None = None
    samples: Samples = Samples()
    profile: Profile | None = None


class BenchResult(Record):
    """`gsm bench`: several arms on one machine, same prompt, same model."""

    environment: Environment
    workload: Workload
    arms: tuple[ArmResult, ...]
    interrupted: bool = False
    notes: tuple[str, ...] = ()


class Tolerance(Record):
    """What `gsm eval` accepts. ``kl`` is held against the upper end of the interval, in nats per token."""

    kl: float = 0.01
    needles_lost: int = Field(
        default=1, description="needles per case that the full cache finds and the config may lose"
    )


class EvalResult(Record):
    """`gsm eval`: quality of one config against a tolerance."""

    environment: Environment
    workload: Workload
    config: dict[str, Any] | None
    tolerance: Tolerance
    quality: Quality
    passed: bool
    failures: tuple[str, ...] = ()
    interrupted: bool = False


class GenerateResult(Record):
    """`gsm generate`: the text with what it cost."""

    environment: Environment
    config: dict[str, Any] | None
    text: str
    prompt_tokens: int
    new_tokens: int
    ttft_ms: float | None
    tpot_ms: float | None
    kv_bytes: int | None
    kv_pool_bytes: int | None
    attended_tokens_mean: float | None
