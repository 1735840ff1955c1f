"""Constructed records: what bounds them is known, so the verdict must name it."""

from __future__ import annotations

import pytest

from gsm.measure.probe import Evidence, Growth, judge, request_shares, sparkline, step_parts
from gsm.measure.profile import PARTS
from gsm.results import Profile, Spread

GROWING = Growth(us_per_token=10, low=9, high=11, intercept_ms=60)
FLAT = Growth(us_per_token=0.1, low=-2, high=2, intercept_ms=60)


def profile(linear: float, attention: float, host: float, *, sum_error: float = 0.0, **more: float) -> Profile:
    parts = dict.fromkeys(PARTS, 0.0) | {"linear": linear, "attention": attention, "host": host, **more}
    total = sum(parts.values())
    step = total / (1 + sum_error)
    return Profile(
        context_tokens=4096,
        num_steps=96,
        step_ms=Spread(median=step, min=step, max=step),
        parts_ms=parts,
        host_parts_ms={"Norm": host},
        sum_ms=total,
        sum_error=sum_error,
        other_share=parts["other"] / step,
        explains_step=abs(sum_error) <= 0.05 and parts["other"] / step <= 0.1,
    )


def evidence(profile: Profile | None, growth: Growth | None = GROWING, **more) -> Evidence:
    return Evidence(**{"ttft_ms": 1000.0, "new_tokens": 1024, "num_steps": 512, **more}, profile=profile, growth=growth)


@pytest.mark.parametrize(
    ("measured", "kind"),
    [
        (profile(60, 10, 10), "weights"),
        (profile(20, 90, 10), "kv"),
        (profile(5, 5, 40), "overhead"),
        (profile(20, 30, 10, selection=20, mass=10, cache_writes=20), "kv"),  # together, not alone
        (profile(20, 5, 15, smoothing=25), "overhead"),
    ],
)
def test_the_largest_part_of_a_step_is_named(measured: Profile, kind: str) -> None:
    verdict = judge(evidence(measured))
    assert verdict.kind == kind
    assert "after 4096 tokens" in verdict.sentence


def test_a_long_prompt_with_a_short_answer_is_prefill_bound() -> None:
    verdict = judge(evidence(profile(60, 10, 10), ttft_ms=40_000, new_tokens=64))
    assert verdict.kind == "prefill"
    assert "89%" in verdict.because
    assert judge(evidence(profile(60, 10, 10), ttft_ms=40_000, new_tokens=4096)).kind == "weights"


@pytest.mark.parametrize(
    ("given", "because"),
    [
        (evidence(None, num_steps=16), "only 16 steps"),
        (evidence(profile(60, 10, 10), num_steps=31), "only 31 steps"),
        (evidence(profile(60, 10, 10), other_cpu_share=0.4), "others used 40%"),
        (evidence(profile(60, 10, 10, sum_error=0.2)), "sum to 120%"),
        (evidence(profile(60, 10, 10, other=12)), "13% belong to no part"),
        (evidence(profile(40, 42, 10)), "nearly the same"),
        (evidence(profile(20, 90, 10), FLAT), "does not measurably grow"),
        (evidence(profile(20, 90, 10), None), "does not measurably grow"),
    ],
)
def test_what_cannot_be_told_is_said_with_the_reason(given: Evidence, because: str) -> None:
    verdict = judge(given)
    assert verdict.kind == "cannot_tell"
    assert because in verdict.sentence


def test_growth_hidden_by_noise_is_found_against_an_empty_cache() -> None:
    measured = profile(20, 90, 10)
    assert judge(evidence(measured, FLAT, length_share=0.7)).kind == "kv"
    assert judge(evidence(measured, FLAT, length_share=0.1)).kind == "cannot_tell"


def test_shares_of_a_request_sum_to_one() -> None:
    shares = request_shares(2000, 101, profile(10, 6, 4))
    assert shares.prefill == pytest.approx(0.5)
    assert shares.weights == pytest.approx(0.25)
    assert shares.prefill + shares.weights + shares.kv + shares.overhead == pytest.approx(1)


def test_every_part_of_a_profile_belongs_to_one_group() -> None:
    ones = dict.fromkeys(PARTS, 1.0)
    assert sum(step_parts(profile(1, 1, 1).model_copy(update={"parts_ms": ones})).values()) == len(PARTS)


def test_growth_reads_in_milliseconds() -> None:
    assert GROWING.at(4000) == pytest.approx(100)


def test_the_line_of_text_starts_at_zero() -> None:
    assert sparkline(()) == ""
    assert sparkline((8.0, 4.0, 1.0), 60) == "█▅▂"
    assert len(sparkline(tuple(range(1, 1001)), 60)) <= 60
