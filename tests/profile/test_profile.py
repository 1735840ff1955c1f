from __future__ import annotations

import pytest
import torch

from gsm.config import load_config
from gsm.integrations.transformers.timing import Replay, timed_parts
from gsm.measure.profile import PARTS, Blocks, SelfTimer, profile_session, summarise
from gsm.quality import GsmArm, PlainArm

SPARSE = {
    "cache": {
        "hot_size": 64, "sink_tokens": 4, "recent_tokens": 32, "sparse": {"enabled": True, "budget_tokens": 96},
    }
}  # fmt: skip
EVICT = {"cache": {"preset": "evict"}}


class Clock:
    """Time passes only when somebody says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def work(self, seconds: float) -> None:
        self.now += seconds


def test_nested_labels_get_their_own_time_only_and_sum_to_the_whole() -> None:
    clock = Clock()
    timer = SelfTimer(clock)
    inner = timer.timed("inner", lambda: clock.work(2))

    def outer_body() -> str:
        clock.work(1)
        inner()
        inner()
        clock.work(4)
        return "value"

    outer = timer.timed("outer", outer_body)
    timer.start()
    clock.work(10)
    assert outer() == "value"
    assert timer.stop() == {"other": 10, "outer": 5, "inner": 4}


def test_a_failure_inside_leaves_the_timer_usable() -> None:
    clock = Clock()
    timer = SelfTimer(clock)

    def fail() -> None:
        clock.work(3)
        raise ValueError("no")

    timer.start()
    with pytest.raises(ValueError, match="no"):
        timer.timed("bad", fail)()
    clock.work(1)
    assert timer.stop() == {"bad": 3, "other": 1}


def test_nothing_is_measured_outside_start_and_stop() -> None:
    clock = Clock()
    timer = SelfTimer(clock)
    work = timer.timed("x", lambda: clock.work(1))
    work()
    timer.start()
    assert timer.stop() == {"other": 0}


def block(linear: float, attention: float, norm: float, other: float = 0.0) -> dict[str, float]:
    return {"linear": linear, "attention": attention, "host.Norm": norm, "other": other}


def test_parts_are_shares_of_the_step_and_choosing_is_what_a_replay_saves() -> None:
    timed = [block(0.06, 0.03, 0.01), block(0.6, 0.3, 0.1), block(0.06, 0.03, 0.01)]  # a slow moment in the middle
    replayed = [block(0.06, 0.02, 0.01), block(0.6, 0.2, 0.1), block(0.06, 0.02, 0.01)]
    profile = summarise(Blocks([0.1, 1.0, 0.1], timed, replayed), 4096)
    assert set(profile.parts_ms) == set(PARTS)
    assert profile.parts_ms["linear"] == pytest.approx(60)
    assert profile.parts_ms["attention"] == pytest.approx(20)
    assert profile.parts_ms["selection"] == pytest.approx(10)
    assert profile.parts_ms["host"] == profile.host_parts_ms["Norm"] == pytest.approx(10)
    assert profile.sum_ms == pytest.approx(100)
    assert profile.sum_error == pytest.approx(0)
    assert profile.explains_step


@pytest.mark.parametrize(("linear", "other"), [(0.05, 0.0), (0.07, 0.02), (0.085, 0.005)])
def test_a_profile_that_does_not_explain_its_step_says_so(linear: float, other: float) -> None:
    profile = summarise(Blocks([0.1], [block(linear, 0.01, 0.01, other)]), 100)
    assert not profile.explains_step


def prefilled(arm, num_tokens: int = 200):
    ids = torch.randint(1, 128, (1, num_tokens), generator=torch.Generator().manual_seed(0))
    return arm.open(), ids


@pytest.mark.parametrize("config", [None, {}, SPARSE, EVICT])
def test_every_part_that_ran_is_seen_and_the_model_is_left_as_it_was(tiny_model, config) -> None:
    model = tiny_model("llama")
    arm = PlainArm(model) if config is None else GsmArm(model, load_config(config), name="x")
    opened, ids = prefilled(arm)
    with opened as session:
        token = session.prefill(ids).argmax(-1, keepdim=True)
        profile = profile_session(session, token, num_rounds=1)
        assert profile.parts_ms["linear"] > 0
        assert profile.parts_ms["attention"] > 0
        assert profile.parts_ms["cache_writes"] > 0
        assert profile.parts_ms["smoothing"] == 0
        assert profile.host_parts_ms["LlamaRMSNorm"] > 0
        assert profile.context_tokens == 200
        if config is not SPARSE:
            assert profile.parts_ms["selection"] == 0
        assert (profile.parts_ms["mass"] > 0) == (config is EVICT)
        assert "update" not in vars(session.cache)
    assert all("forward" not in vars(module) for module in model.modules())


def test_timing_changes_no_number(tiny_model) -> None:
    model = tiny_model("llama")
    timer = SelfTimer()
    logits = []
    for timed in (False, True):
        opened, ids = prefilled(GsmArm(model, load_config(SPARSE), name="x"))
        with opened as session:
            session.prefill(ids)
            if timed:
                with timed_parts(model, session.cache, timer):
                    logits.append(session.step(ids[:, :1]))
            else:
                logits.append(session.step(ids[:, :1]))
    assert torch.equal(logits[0], logits[1])


@pytest.mark.parametrize("backend", ["numba", "torch"])
def test_a_replayed_step_attends_the_same_pages(tiny_model, backend) -> None:
    """The step after a choice, and the same step with the pages of that choice: equal as long as the choice is."""
    model = tiny_model("llama")
    config = load_config({"cache": {**SPARSE["cache"], "backend": backend}})
    opened, ids = prefilled(GsmArm(model, config, name="x"))
    with opened as session:
        session.prefill(ids)
        twin = session.fork()
        replay, timer = Replay(), SelfTimer()
        with timed_parts(model, session.cache, timer, replay):
            chosen = session.step(ids[:, :1])
        assert replay.is_ready
        replay.active = True
        with timed_parts(model, twin.cache, timer, replay):
            replayed = twin.step(ids[:, :1])
        assert torch.allclose(chosen, replayed, atol=1e-5)
        wrong = {index: (pages.flip(-1) * 0 + torch.arange(pages.shape[-1]), n) for index, (pages, n) in
                 replay.chosen.items()}  # fmt: skip
        replay.chosen = wrong
        with timed_parts(model, twin.cache, timer, replay):
            assert not torch.allclose(chosen, twin.step(ids[:, :1]), atol=1e-3)
        twin.close()


def test_eager_attention_is_told_from_host(tiny_model) -> None:
    model = tiny_model("llama", attn="eager")
    opened, ids = prefilled(PlainArm(model), 60)
    with opened as session:
        token = session.prefill(ids).argmax(-1, keepdim=True)
        assert profile_session(session, token, num_rounds=1).parts_ms["attention"] > 0
