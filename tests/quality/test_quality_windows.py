from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gsm.errors import InputError
from gsm.quality import PlainArm, WindowPlan, teacher_forced
from gsm.quality.teacher_forced import _starts
from support_measure import RuleArm


def scores_of(reference, arm, ids, plan):
    return [score for _, scores in teacher_forced(reference, [arm], ids, plan) for score in scores]


def test_the_full_cache_is_no_distance_from_itself(tiny_model) -> None:
    model = tiny_model("llama")
    ids = torch.randint(0, 128, (400,), generator=torch.Generator().manual_seed(1))
    plan = WindowPlan(50, num_windows=3, window_tokens=8, windows_per_prefill=2)
    scores = scores_of(PlainArm(model, chunk_tokens=16), PlainArm(model, name="again", chunk_tokens=16), ids, plan)
    assert len(scores) == 3
    assert all(s.kl < 1e-9 and abs(s.nll_delta) < 1e-5 and s.top1 == 1 for s in scores)  # passes round differently


def test_scores_equal_an_independent_computation(tiny_model) -> None:
    """Two different models: KL, NLL difference and agreement from one forward pass over everything."""
    one, other = tiny_model("llama", seed=1), tiny_model("llama", seed=2)
    ids = torch.randint(0, 128, (90,), generator=torch.Generator().manual_seed(2))
    plan = WindowPlan(20, num_windows=2, window_tokens=16, windows_per_prefill=2)
    scores = scores_of(PlainArm(one, chunk_tokens=7), PlainArm(other, name="other", chunk_tokens=7), ids, plan)
    with torch.no_grad():
        p, q = (m(ids[None, :53]).logits[0].double().log_softmax(-1) for m in (one, other))
    for window, score in enumerate(scores):
        rows = slice(20 + 16 * window, 36 + 16 * window)
        target = ids[21 + 16 * window : 37 + 16 * window, None]
        kl = torch.nn.functional.kl_div(q[rows], p[rows], log_target=True, reduction="none").sum(-1).mean()
        assert score.kl == pytest.approx(float(kl), rel=1e-4)
        assert score.nll_delta == pytest.approx(float((p[rows] - q[rows]).gather(1, target).mean()), rel=1e-3)
        assert score.top1 == float((p[rows].argmax(-1) == q[rows].argmax(-1)).double().mean())


def test_every_forced_token_is_one_step_after_one_prefill() -> None:
    arm = RuleArm("a", lambda calls: torch.zeros(8))
    plan = WindowPlan(10, num_windows=2, window_tokens=4, windows_per_prefill=2)
    list(teacher_forced(RuleArm("full", lambda calls: torch.zeros(8)), [arm], torch.arange(100) % 8, plan))
    (calls,) = arm.log
    assert [kind for kind, _ in calls] == ["prefill"] + ["step"] * 8
    assert [i for _, ids in calls for i in ids] == [i % 8 for i in range(18)]


@given(text=st.integers(1, 5000), prompt=st.integers(1, 600), windows=st.integers(1, 20), shared=st.integers(1, 4))
def test_no_token_is_scored_twice(text: int, prompt: int, windows: int, shared: int) -> None:
    plan = WindowPlan(prompt, windows, window_tokens=32, windows_per_prefill=shared)
    try:
        starts = _starts(text, plan)
    except InputError:
        return
    scored = [range(s + prompt, s + prompt + 32 * shared) for s in starts]
    assert len(starts) == -(-windows // shared)
    assert all(a.stop <= b.start for a, b in itertools.pairwise(scored))
    assert starts[-1] + plan.fed_tokens + 1 <= text


def test_too_short_a_text_is_refused_with_the_length_needed() -> None:
    arm = RuleArm("a", lambda calls: torch.zeros(8))
    plan = WindowPlan(100, num_windows=4, window_tokens=32)
    with pytest.raises(InputError, match="has 120 tokens, but 4 windows after 100 need 229"):
        list(teacher_forced(arm, [arm], torch.zeros(120, dtype=torch.long), plan))
    list(teacher_forced(arm, [arm], torch.zeros(229, dtype=torch.long), plan))
