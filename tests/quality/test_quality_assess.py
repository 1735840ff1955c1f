from __future__ import annotations

import pytest
import torch

from gsm.errors import InputError
from gsm.quality import Assessment, QualityPlan, WindowPlan
from support_measure import RuleArm


def noisy_arm(name: str, scale: float) -> RuleArm:
    def rule(calls) -> torch.Tensor:
        seen = sum(len(ids) for _, ids in calls)
        base = torch.randn(50, generator=torch.Generator().manual_seed(seen))
        return base + scale * torch.randn(50, generator=torch.Generator().manual_seed(10_000 + seen))

    return RuleArm(name, rule)


PLAN = QualityPlan(WindowPlan(10, num_windows=16, window_tokens=4, windows_per_prefill=2), None)
IDS = torch.arange(1000) % 50


def test_more_noise_is_more_distance_and_the_interval_holds_the_mean() -> None:
    assessment = Assessment(noisy_arm("full", 0), [noisy_arm("a", 0.1), noisy_arm("b", 1.0)], None, IDS, PLAN)
    assessment.run()
    quality = assessment.results()
    assert 0 < quality["a"].kl < quality["b"].kl
    assert quality["b"].kl_ci95[0] < quality["b"].kl < quality["b"].kl_ci95[1]
    assert quality["full"].kl == 0
    assert quality["full"].kl_ci95 == (0, 0)
    assert quality["a"].n_windows == 16
    assert quality["a"].notes == ()


def test_nothing_measured_is_none_and_never_zero() -> None:
    quality = Assessment(noisy_arm("full", 0), [noisy_arm("a", 0.1)], None, IDS, PLAN).results()["a"]
    for name in ("nll_delta", "kl", "kl_ci95", "top1_agreement", "needle_prefill", "needle_late"):
        assert getattr(quality, name) is None
    assert (quality.n_windows, quality.n_needles) == (0, 0)


def test_an_interrupt_keeps_complete_windows() -> None:
    def progress(label: str, done: int, total: int) -> None:
        if done == 6:
            raise KeyboardInterrupt

    assessment = Assessment(noisy_arm("full", 0), [noisy_arm("a", 0.1)], None, IDS, PLAN, progress)
    with pytest.raises(KeyboardInterrupt):
        assessment.run()
    quality = assessment.results()["a"]
    assert quality.n_windows == 6
    assert any("an impression" in note for note in quality.notes)


def test_one_window_has_no_interval() -> None:
    plan = QualityPlan(WindowPlan(10, num_windows=1, window_tokens=4), None)
    assessment = Assessment(noisy_arm("full", 0), [noisy_arm("a", 0.1)], None, IDS, plan)
    assessment.run()
    assert assessment.results()["a"].kl_ci95 is None


def test_a_plan_stays_inside_the_model_window() -> None:
    assert QualityPlan.make(7680, max_positions=8192).windows.windows_per_prefill == 2
    assert QualityPlan.make(8000, max_positions=8192).windows.windows_per_prefill == 1
    assert QualityPlan.make(8130, num_windows=0, max_positions=8192).windows is None
    with pytest.raises(InputError, match="a prompt of at most 8064"):
        QualityPlan.make(8100, max_positions=8192)
