"""`gsm bench`: several arms side by side, so that the numbers can be trusted (docs/measuring.md)."""

from gsm.measure.bench.arms import ARMS, DEFAULT_ARMS, PLAIN, ArmSpec, resolve_arm, resolve_arms
from gsm.measure.bench.run import bench, quality_plan
from gsm.measure.bench.spec import BenchSpec

__all__ = [
    "ARMS",
    "DEFAULT_ARMS",
    "PLAIN",
    "ArmSpec",
    "BenchSpec",
    "bench",
    "quality_plan",
    "resolve_arm",
    "resolve_arms",
]
