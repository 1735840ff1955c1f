"""Decisions, as pure functions of measurements: what is faster, what holds, what is accepted."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

from gsm.measure.evaluate import judge as quality_failures
from gsm.results import Tolerance
from gsm.stats import bootstrap_mean_ci
from gsm.tune.records import Change, Comparison, Measured

STALL = 3.0
MIN_BYTES_GAIN = 0.02  # less memory is counted, not timed: no noise, but below this it is not worth a setting


def relative_change(before: Sequence[float], after: Sequence[float]) -> Change:
    """Mean of ``after / before - 1`` over pairs, with its 95 % interval.

    A block that took three times its contestant's median is a stall of the machine: its pair is left out, whichever of
    the two it hit.
    """
    limits = [STALL * statistics.median(blocks) for blocks in (before, after)]
    pairs = [(a, b) for a, b in zip(before, after, strict=True) if a <= limits[0] and b <= limits[1]]
    interval = bootstrap_mean_ci([b / a - 1 for a, b in pairs])
    return Change(mean=interval.mean, low=interval.low, high=interval.high)


def noise_of(one: Measured, twin: Measured) -> float:
    """How far apart two identical contestants may seem: the outer end of their interval, either way round."""
    change = relative_change(one.block_ms, twin.block_ms)
    return max(abs(change.low), abs(change.high))


def compare(before: Measured, after: Measured, length: int, noise: float, tolerance: Tolerance) -> Comparison:
    """``after`` against ``before`` at one length. Time counts only where it leaves both its interval and the noise."""
    time = relative_change(before.block_ms, after.block_ms)
    quality = after.quality
    failures = list(quality_failures(quality, tolerance)) if quality else ["quality was not measured"]
    if quality and "the output is not finite" in quality.notes:
        failures = ["the output is not finite"]
    elif quality and not quality.n_needles:
        failures.append("needles were not measured")
    return Comparison(
        prompt_tokens=length,
        time=time,
        noise=noise,
        kv_bytes=after.kv_bytes / before.kv_bytes - 1,
        faster=time.high < 0 and -time.mean > noise,
        slower=time.low > 0 and time.mean > noise,
        failures=tuple(failures),
    )


def gain(comparison: Comparison) -> float:
    """The gain at a length in one number: time saved plus memory saved, each as a share and only where it counts."""
    saved_time = -comparison.time.mean if comparison.faster else 0.0
    saved_bytes = -comparison.kv_bytes if comparison.kv_bytes <= -MIN_BYTES_GAIN else 0.0
    return saved_time + saved_bytes


def why_not(comparison: Comparison) -> str:
    """What speaks against a candidate at this length; empty when nothing does."""
    at = f"at {comparison.prompt_tokens} tokens"
    if comparison.failures:
        return f"{at}: " + "; ".join(comparison.failures)
    if comparison.slower:
        return f"{at}: slower by {comparison.time.mean:.1%} ({comparison.time.low:.1%} to {comparison.time.high:.1%})"
    return ""


def why(comparison: Comparison) -> str:
    """What a candidate gains at its full length, or that this is nothing beyond the noise."""
    words = []
    if comparison.faster:
        time = comparison.time
        words.append(f"{-time.mean:.1%} less time per token ({-time.high:.1%} to {-time.low:.1%})")
    if comparison.kv_bytes <= -MIN_BYTES_GAIN:
        words.append(f"{-comparison.kv_bytes:.0%} less KV memory")
    if words:
        return ", ".join(words)
    return (
        f"no gain beyond the noise: time {comparison.time.mean:+.1%} (noise {comparison.noise:.1%}), "
        f"KV memory {comparison.kv_bytes:+.1%}"
    )


def best(gains: Iterable[tuple[str, float]]) -> str | None:
    """The name with the largest gain above zero."""
    ranked = sorted(((value, name) for name, value in gains if value > 0), reverse=True)
    return ranked[0][1] if ranked else None
