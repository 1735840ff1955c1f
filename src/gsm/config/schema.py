"""The configuration: frozen, validated, and refused when a key is unknown or two settings contradict each other.

Names follow the SPEC; every size is in tokens unless its name says otherwise.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from gsm.config.engine import EngineConfig
from gsm.config.linear import LinearConfig
from gsm.config.presets import apply_preset
from gsm.config.prompt import PromptConfig
from gsm.config.reasoning import ReasoningConfig
from gsm.config.rollout import RolloutConfig
from gsm.config.section import Section
from gsm.config.smoothing import SmoothingConfig
from gsm.config.vllm import VllmConfig

CodecName = Literal["none", "int8", "int4"]
PolicyName = Literal["keep_all", "recent", "threshold", "budget"]
ScorerName = Literal["clusters", "anchor", "mean_sigma", "minmax"]
MIN_INT4_PAGE = 8  # tokens; below it int4 with its scales is larger than int8
BackendName = Literal["auto", "reference", "torch", "numba"]


class WarmConfig(Section):
    """How pages older than the hot zone are stored."""

    codec: CodecName = "int8"
    place: Literal["device"] = "device"


class SparseConfig(Section):
    """Which pages a decode step reads.

    ``budget_tokens`` counts sinks, recent tokens and selected older pages together. With neither budget given it is
    ``max(1024, n / 8)`` for a context of n tokens. Where a policy drops pages, n is what a head still holds on average.
    """

    enabled: bool = False
    budget_tokens: int | None = Field(default=None, ge=1)
    budget_fraction: float | None = Field(default=None, gt=0.0, le=1.0)
    scorer: ScorerName = "clusters"
    sigma: float = Field(default=2.5, ge=0.0, description="weight c of the spread in the scores (not minmax)")

    @model_validator(mode="after")
    def _one_budget(self) -> SparseConfig:
        if self.budget_tokens is not None and self.budget_fraction is not None:
            raise ValueError("budget_tokens and budget_fraction are both set; give one of them")
        return self

    def budget_for(self, num_tokens: int) -> int:
        """Tokens one kv head may attend at a context of ``num_tokens``."""
        if self.budget_tokens is not None:
            return self.budget_tokens
        if self.budget_fraction is not None:
            return max(1, int(num_tokens * self.budget_fraction))
        return max(1024, num_tokens // 8)


class CacheConfig(Section):
    """The tiered KV cache (SPEC K1-K5)."""

    preset: str | None = None
    page_size: int = Field(default=16, ge=1, le=1024)
    hot_size: int = Field(default=512, ge=1)
    warm_size: int | None = Field(default=None, ge=0)
    sink_tokens: int = Field(default=4, ge=0)
    recent_tokens: int = Field(default=128, ge=1)
    observation_window: int = Field(default=8, ge=1)
    stats_max_history: int = Field(default=64, ge=1, le=128)
    mass_decay: float | None = Field(
        default=None, gt=0.0, lt=1.0, description="weight of the past in a decayed average; replaces the window"
    )
    sink_mass: float | None = Field(
        default=None, gt=0.0, lt=1.0, description="pages with at least this attention mass are never cold"
    )
    policy: PolicyName = "keep_all"
    threshold: float | None = Field(default=None, ge=0.0, lt=1.0)
    threshold_relative: float | None = Field(default=None, ge=0.0)
    warm: WarmConfig = WarmConfig()
    cold: Literal["keep", "drop", "int4"] = "keep"
    sparse: SparseConfig = SparseConfig()
    positions: Literal["logical", "compact"] = "logical"
    prefill_chunk_tokens: int | None = Field(default=1024, ge=1)
    backend: BackendName = "auto"

    @model_validator(mode="before")
    @classmethod
    def _preset(cls, values: Any) -> Any:
        return apply_preset(values) if isinstance(values, dict) else values

    @model_validator(mode="after")
    def _consistent(self) -> CacheConfig:
        self._check_policy()
        if self.recent_tokens > self.hot_size:
            raise ValueError(
                f"recent_tokens ({self.recent_tokens}) exceeds hot_size ({self.hot_size}); "
                "recent tokens are always kept in full precision, so raise hot_size"
            )
        if "int4" in (self.warm.codec, self.cold) and self.page_size < MIN_INT4_PAGE:
            raise ValueError(
                f"int4 has one scale per channel and page, so at page_size {self.page_size} it takes more memory than "
                f"int8; use page_size >= {MIN_INT4_PAGE}, or int8"
            )
        if self.observation_window > self.stats_max_history:
            raise ValueError(
                f"observation_window ({self.observation_window}) exceeds stats_max_history ({self.stats_max_history})"
            )
        budget = self.sparse.budget_tokens
        if self.sparse.enabled and budget is not None and budget < self.smallest_budget_tokens:
            raise ValueError(
                f"sparse.budget_tokens ({budget}) is too small for the sinks, {self.recent_tokens} recent tokens and "
                f"one selected page; give at least {self.smallest_budget_tokens} or lower recent_tokens"
            )
        return self

    def _check_policy(self) -> None:
        if self.threshold is not None and self.threshold_relative is not None:
            raise ValueError("threshold and threshold_relative are both set; give one of them")
        has_threshold = self.threshold is not None or self.threshold_relative is not None
        if self.policy == "threshold" and not has_threshold:
            raise ValueError("policy 'threshold' needs threshold or threshold_relative")
        if self.policy != "threshold" and has_threshold:
            raise ValueError(f"a threshold has no effect under policy '{self.policy}'; set policy: threshold")
        if self.policy == "budget" and self.warm_size is None:
            raise ValueError("policy 'budget' needs warm_size, the number of older tokens to keep per head")
        if self.policy == "recent" and self.cold == "keep":
            raise ValueError("policy 'recent' forgets what leaves the hot zone; accept that with cold: drop")
        if self.cold == "int4" and self.warm.codec != "int8":
            raise ValueError(
                f"cold: int4 turns int8 codes into int4, but warm.codec is {self.warm.codec}; set warm.codec: int8, or "
                "store older pages as int4 from the start with warm.codec: int4 and cold: keep"
            )
        if self.policy == "recent" and self.cold == "int4":
            raise ValueError("policy 'recent' calls every older page cold; set warm.codec: int4 instead of cold: int4")
        if self.positions == "compact" and self.cold != "drop":
            raise ValueError(
                "positions: compact closes the gaps of dropped tokens, but nothing is dropped under cold: "
                f"{self.cold}; set cold: drop with policy: recent"
            )
        if self.policy == "keep_all" and self.cold != "keep":
            raise ValueError(f"policy 'keep_all' never makes a page cold; cold: {self.cold} has no effect")

    @property
    def num_sink_pages(self) -> int:
        return -(-self.sink_tokens // self.page_size)

    @property
    def num_recent_pages(self) -> int:
        """Pages that hold the last ``recent_tokens`` tokens wherever the page border falls."""
        return -(-self.recent_tokens // self.page_size) + (1 if self.page_size > 1 else 0)

    @property
    def num_hot_pages(self) -> int:
        """Pages that hold the last ``hot_size`` tokens wherever the page border falls."""
        return -(-self.hot_size // self.page_size) + (1 if self.page_size > 1 else 0)

    @property
    def smallest_budget_tokens(self) -> int:
        return (self.num_sink_pages + self.num_recent_pages + 1) * self.page_size


class GsmConfig(Section):
    """Everything GSM can be told. Sections not listed here are not built yet and therefore refused."""

    cache: CacheConfig = CacheConfig()
    smoothing: SmoothingConfig = SmoothingConfig()
    linear: LinearConfig = LinearConfig()
    engine: EngineConfig = EngineConfig()
    prompt: PromptConfig = PromptConfig()
    reasoning: ReasoningConfig = ReasoningConfig()
    rollout: RolloutConfig = RolloutConfig()
    vllm: VllmConfig = VllmConfig()

    @model_validator(mode="after")
    def _one_way_to_take_pages_out(self) -> GsmConfig:
        lowers = "reasoning.enabled" if self.reasoning.enabled else "prompt.history.mode: kv"
        if self.cache.positions == "compact" and (self.reasoning.enabled or self.prompt.history.mode == "kv"):
            raise ValueError(f"{lowers} and cache.positions: compact both take pages out; use one of them")
        return self
