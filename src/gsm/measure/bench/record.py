"""Samples of one arm while they come in, and the record they become."""

from __future__ import annotations

from typing import Any

from gsm.measure.bench.arms import ArmSpec
from gsm.results import ArmResult, Bound, Profile, Quality, Samples, Spread
from gsm.stats import summary


class ArmRecord:
    """Complete runs of one arm."""

    def __init__(self, arm: ArmSpec):
        self.arm = arm
        self.ttft_ms: list[float] = []
        self.tpot_ms: list[float] = []
        self.unchunked_ms: list[float] = []
        self.profile: Profile | None = None
        self._stats: dict[str, Any] = {}
        self._memory: dict[str, Any] = {}

    def add_run(self, answer: dict[str, Any]) -> None:
        self.ttft_ms.append(answer["ttft_ms"])
        if answer["tpot_ms"] is not None:
            self.tpot_ms.append(answer["tpot_ms"])
        self._stats = answer["stats"]

    def add_memory(self, answer: dict[str, Any]) -> None:
        self._memory = answer

    def result(self, floor: dict[str, Any], quality: Quality | None) -> ArmResult:
        """The record; ``floor`` holds weight_bytes, bandwidth (bytes per second) and context_tokens."""
        stats = self._stats
        return ArmResult(
            name=self.arm.name,
            config=self.arm.config_dict(),
            ttft_ms=Spread(**summary(self.ttft_ms)),
            tpot_ms=Spread(**summary(self.tpot_ms)),
            kv_bytes=stats.get("kv_bytes"),
            kv_pool_bytes=stats.get("kv_pool_bytes"),
            peak_rss_bytes=self._memory.get("peak_rss_bytes"),
            peak_device_bytes=self._memory.get("peak_device_bytes"),
            attended_tokens_mean=stats.get("attended_tokens_mean"),
            quality=quality,
            ttft_unchunked_ms=Spread(**summary(self.unchunked_ms)) if self.unchunked_ms else None,
            bytes_by_tier=stats.get("bytes_by_tier"),
            bound=self._bound(**floor),
            samples=Samples(ttft_ms=tuple(self.ttft_ms), tpot_ms=tuple(self.tpot_ms)),
            profile=self.profile,
        )

    def _bound(self, weight_bytes: int | None, bandwidth: float | None, context_tokens: int) -> Bound | None:
        """Weights once, and the attended share of the cache; page summaries are left out, so it stays a floor."""
        attended, held = self._stats.get("attended_tokens_mean"), self._stats.get("kv_bytes")
        if weight_bytes is None or attended is None or held is None:
            return None
        kv_read = round(held * min(1.0, attended / context_tokens))
        tpot_ms = 1e3 * (weight_bytes + kv_read) / bandwidth if bandwidth else None
        return Bound(weight_bytes=weight_bytes, kv_read_bytes=kv_read, tpot_ms=tpot_ms)
