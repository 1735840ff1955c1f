"""From times to a verdict. Pure: a table of numbers in, one sentence out."""

from __future__ import annotations

from dataclasses import dataclass

from gsm.measure.probe.record import Growth, Shares, Verdict
from gsm.results import Profile

KV_PARTS = ("attention", "selection", "mass", "cache_writes")
OVERHEAD_PARTS = ("host", "smoothing", "other")
MIN_STEPS = 32  # fewer timed steps say nothing
PREFILL_SHARE = 0.5
MIN_LEAD = 1.15  # the largest part must be this many times the second
_LABELS = {"weights": "reading weights", "kv": "attention and cache", "overhead": "small operations and Python"}


@dataclass(frozen=True)
class Evidence:
    """What was measured of one request. ``other_cpu_share`` is what others used of the machine meanwhile, or None."""

    ttft_ms: float
    new_tokens: int
    num_steps: int
    profile: Profile | None
    growth: Growth | None
    other_cpu_share: float | None = None
    length_share: float | None = None  # of a step: what it takes longer than with an empty cache


def step_parts(profile: Profile) -> dict[str, float]:
    """Milliseconds of a step by what it waits for: weights, kv, overhead."""
    parts = profile.parts_ms
    return {
        "weights": parts["linear"],
        "kv": sum(parts[name] for name in KV_PARTS),
        "overhead": sum(parts[name] for name in OVERHEAD_PARTS),
    }


def request_shares(ttft_ms: float, new_tokens: int, profile: Profile) -> Shares:
    """How the request's time divides; ``profile`` stands for all its new tokens."""
    parts = {name: ms * (new_tokens - 1) for name, ms in step_parts(profile).items()}
    total = ttft_ms + sum(parts.values())
    return Shares(prefill=ttft_ms / total, **{name: ms / total for name, ms in parts.items()})


def judge(evidence: Evidence, noisy_share: float = 0.1) -> Verdict:
    """Name the bottleneck, or say what keeps us from it."""
    doubt = _doubt(evidence, noisy_share)
    if doubt is not None:
        return Verdict(kind="cannot_tell", because=doubt)
    assert evidence.profile is not None
    shares = request_shares(evidence.ttft_ms, evidence.new_tokens, evidence.profile)
    if shares.prefill > PREFILL_SHARE:
        return Verdict(
            kind="prefill",
            because=f"{shares.prefill:.0%} of the request's time passes before its first token",
        )
    return _judge_step(evidence.profile, evidence.growth, evidence.length_share)


def _doubt(evidence: Evidence, noisy_share: float) -> str | None:
    if evidence.num_steps < MIN_STEPS or evidence.profile is None:
        return f"only {evidence.num_steps} steps were timed and {MIN_STEPS} are needed; generate more tokens"
    if evidence.other_cpu_share is not None and evidence.other_cpu_share > noisy_share:
        return f"others used {evidence.other_cpu_share:.0%} of the machine meanwhile; repeat it on a quiet one"
    profile = evidence.profile
    if not profile.explains_step:
        return (
            f"the parts of a step sum to {1 + profile.sum_error:.0%} of it and {profile.other_share:.0%} belong to no "
            "part; repeat it on a quiet machine"
        )
    return None


def _judge_step(profile: Profile, growth: Growth | None, length_share: float | None) -> Verdict:
    parts = step_parts(profile)
    first, second = sorted(parts, key=lambda name: -parts[name])[:2]
    total = sum(parts.values())
    if parts[first] < MIN_LEAD * parts[second]:
        return Verdict(
            kind="cannot_tell",
            because=(
                f"{_LABELS[first]} ({parts[first] / total:.0%} of a step) and {_LABELS[second]} "
                f"({parts[second] / total:.0%}) take nearly the same time: each alone gains little"
            ),
        )
    share = f"{_LABELS[first]} takes {parts[first] / total:.0%} of a step after {profile.context_tokens} tokens"
    if first == "kv":
        if growth is not None and growth.low > 0:
            share += f" and grows by {growth.us_per_token:.3g} us with each token"
        elif length_share is not None and length_share > parts["kv"] / total / 2:
            share += f", and {length_share:.0%} of a step goes with its context"
        else:
            return Verdict(
                kind="cannot_tell",
                because=f"{share}, but time does not measurably grow with length; probe a longer stretch",
            )
    return Verdict(kind=first, because=share)  # type: ignore[arg-type]
