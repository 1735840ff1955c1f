"""The rollout section: how closely a new config is watched, and when it is taken back."""

from __future__ import annotations

from pydantic import Field, model_validator

from gsm.config.section import Section


class RolloutTolerance(Section):
    """How much worse than the stable config's answers a new config's may be, on average. None: not watched."""

    kl: float | None = Field(default=0.01, gt=0.0, description="nats per token, KL(exact || served)")
    top1: float | None = Field(default=0.05, gt=0.0, le=1.0, description="share of tokens with another likeliest one")
    gap: float | None = Field(default=0.05, gt=0.0, description="nats per token, log-probability of what was sampled")
    repetition: float | None = Field(default=0.15, gt=0.0, le=1.0, description="share of repeated 4-grams")
    early_stop: float | None = Field(default=0.15, gt=0.0, le=1.0, description="share of answers that end at once")
    errors: float | None = Field(default=0.05, gt=0.0, le=1.0, description="share of requests the engine failed")
    ttft: float | None = Field(default=0.5, gt=0.0, description="relative, among prompts of like uncached length")
    itl: float | None = Field(default=0.5, gt=0.0, description="relative")
    memory: float | None = Field(default=1.0, gt=0.0, description="relative, KV bytes per token")


class RolloutConfig(Section):
    """Shares are of the time the engine spends on answers; idle time is used freely."""

    guard: bool = True
    steady_share: float = Field(default=0.05, ge=0.0, le=1.0, description="of the engine's time, for shadow scoring")
    canary_share: float = Field(default=0.25, ge=0.0, le=1.0, description="the same while a new config is judged")
    steady_sample: float = Field(default=0.05, ge=0.0, le=1.0, description="share of answers that are scored")
    canary_sample: float = Field(default=1.0, ge=0.0, le=1.0, description="the same of a new config's answers")
    max_scored_tokens: int = Field(default=4096, ge=32, description="longer conversations are not scored")
    false_alarm: float = Field(default=0.01, gt=0.0, lt=0.5, description="most risk to take back a harmless config")
    promote_after: int | None = Field(
        default=60, ge=1, description="scored answers after which a reload counts as good; null: only by hand"
    )
    tolerance: RolloutTolerance = RolloutTolerance()

    @model_validator(mode="after")
    def _consistent(self) -> RolloutConfig:
        if self.canary_share < self.steady_share:
            raise ValueError(
                f"canary_share ({self.canary_share}) is below steady_share ({self.steady_share}); a config that is "
                "being judged needs at least as much scoring"
            )
        return self
