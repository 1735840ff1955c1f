"""Policies as pure functions, and what the store does with their answer."""

from __future__ import annotations

import pytest
import torch
from kv_model import HEADS, LAYERS, append, make_config, pages_in_use, random_tokens, stored, write

from gsm.config import load_config
from gsm.errors import ConfigError
from gsm.kv.manager import KVManager
from gsm.kv.policies import PageFacts, beyond, make_policy
from gsm.kv.positions import COLD
from gsm.kv.rules import make_rules

NAN = float("nan")


def _facts(mass: list[float] | None, present: list[bool] | None = None, num_tokens: int = 100) -> PageFacts:
    values = None if mass is None else torch.tensor([[mass]])
    shown = present if present is not None else [True] * len(mass or [])
    return PageFacts(torch.tensor([[shown]]), values, num_tokens, page_size=4)


def _cold(answer: torch.Tensor | None) -> list[bool]:
    assert answer is not None
    return answer.flatten().tolist()


def test_keep_all_and_recent() -> None:
    assert make_policy(make_config()).cold(_facts([0.0])) is None
    assert _cold(make_policy(make_config(policy="recent", cold="drop")).cold(_facts([0.9, 0.0]))) == [True, True]


def test_absolute_threshold() -> None:
    policy = make_policy(make_config(policy="threshold", threshold=0.01))
    assert _cold(policy.cold(_facts([0.009, 0.01, 0.5, NAN, 0.0]))) == [True, False, False, False, True]


@pytest.mark.parametrize(("num_tokens", "expected"), [(100, [True, True, False]), (1000, [True, False, False])])
def test_relative_threshold_scales_with_length(num_tokens: int, expected: list[bool]) -> None:
    policy = make_policy(make_config(policy="threshold", threshold_relative=0.1))  # 0.004 at 100, 0.0004 at 1000
    assert _cold(policy.cold(_facts([0.0003, 0.003, 0.005], num_tokens=num_tokens))) == expected


def test_budget_keeps_the_heaviest_pages_and_the_unknown_ones() -> None:
    policy = make_policy(make_config(policy="budget", warm_size=8))  # two pages of four
    mass, present = [0.3, 0.1, NAN, 0.9, 0.2], [True, True, True, False, True]
    assert _cold(policy.cold(_facts(mass, present))) == [False, True, False, False, True]


def test_the_cap_without_mass_keeps_the_newest() -> None:
    assert _cold(beyond(_facts(None, [True, True, False, True]), 8)) == [True, False, False, False]
    assert _cold(beyond(_facts(None, [True, True]), 3)) == [True, True]


def test_policies_do_not_change_what_they_see() -> None:
    for name, settings in MASS_POLICIES.items():
        facts = _facts([0.1, NAN, 0.0])
        before = (facts.present.clone(), facts.mass.clone())
        make_policy(make_config(**settings)).cold(facts)
        assert torch.equal(facts.present, before[0]), name
        assert torch.equal(facts.mass.nan_to_num(9), before[1].nan_to_num(9)), name


MASS_POLICIES = {
    "threshold": {"policy": "threshold", "threshold": 0.05, "cold": "drop"},
    "relative": {"policy": "threshold", "threshold_relative": 0.5, "cold": "drop"},
    "budget": {"policy": "budget", "warm_size": 16, "cold": "drop"},
}


def test_contradictions_are_refused() -> None:
    for settings in (
        {"policy": "threshold"},
        {"policy": "threshold", "threshold": 0.1, "threshold_relative": 0.1},
        {"policy": "budget"},
        {"threshold": 0.1},
        {"policy": "recent"},
        {"policy": "recent", "cold": "int4"},
        {"policy": "threshold", "threshold": 0.1, "cold": "int4", "warm": {"codec": "none"}},
        {"warm": {"codec": "int4"}, "page_size": 4},
    ):
        with pytest.raises(ConfigError):
            load_config({"cache": settings})


class Decoder:
    """Prompts and decode steps whose attention mass is dictated by the test."""

    def __init__(self, **settings: object) -> None:
        self.manager = KVManager(LAYERS, make_config(**{"warm": {"codec": "none"}, **settings}))
        self.generator = torch.Generator().manual_seed(0)
        self.slot = self.manager.add_sequence()

    def prompt(self, length: int) -> None:
        append(self.manager, {self.slot: random_tokens(length, self.generator)})

    def decode(self, mass: torch.Tensor, steps: int = 1) -> None:
        """`mass [LAYERS, HEADS, pages]` is observed in every step, as far as there are pages."""
        for _ in range(steps):
            step = write(self.manager, {self.slot: random_tokens(1, self.generator)})
            num_pages = min(step.max_pages, mass.shape[-1])
            pages = torch.arange(num_pages).expand(1, HEADS, -1)
            for layer in range(LAYERS):
                step.observe(layer, pages, mass[layer : layer + 1, :, :num_pages])
            step.commit()
            self.manager.check_integrity()

    def held(self) -> torch.Tensor:
        """bool `[LAYERS, HEADS, pages]`."""
        return stored(self.manager, self.slot)[1][..., ::4]


def test_nothing_is_dropped_before_the_prompt_has_ended() -> None:
    store = Decoder(**MASS_POLICIES["threshold"])
    store.prompt(40)
    store.prompt(40)
    assert store.held().all()
    store.decode(torch.zeros(LAYERS, HEADS, 20))
    assert not store.held()[..., 1:17].any()


def test_single_heads_lose_their_pages_and_memory_comes_back() -> None:
    store = Decoder(**MASS_POLICIES["threshold"])
    store.prompt(80)
    before, size = pages_in_use(store.manager), store.manager.stats().kv_bytes
    mass = torch.full((LAYERS, HEADS, 20), 0.2)
    mass[1, 0, 3:9] = 0.01
    mass[2, 1, 5] = 0.01
    store.decode(mass)
    expected = torch.ones(LAYERS, HEADS, 21, dtype=torch.bool)
    expected[1, 0, 3:9] = expected[2, 1, 5] = False
    assert torch.equal(store.held(), expected)
    opened = LAYERS * HEADS
    assert pages_in_use(store.manager) == [count - 7 + opened for count in before]
    assert store.manager.stats().num_dropped == 7
    assert store.manager.stats().kv_bytes < size
    assert store.manager.num_kept_tokens(store.slot) == 81 - 7 * 4 // 6


def test_sinks_and_the_hot_zone_are_never_dropped() -> None:
    store = Decoder(**MASS_POLICIES["threshold"], sink_tokens=5)
    store.prompt(60)
    store.decode(torch.zeros(LAYERS, HEADS, 40), steps=40)
    held = store.held()
    assert held[..., :2].all()
    assert held[..., (100 - 8) // 4 :].all()
    assert not held[..., 2 : (93 - 8) // 4].any()  # judged at 61, 77 and 93 tokens


def test_a_page_nobody_looked_at_is_not_cold() -> None:
    store = Decoder(**MASS_POLICIES["threshold"])
    store.prompt(60)
    store.decode(torch.zeros(LAYERS, HEADS, 4), steps=20)  # only pages 0 to 3 are ever read
    held = store.held()
    assert not held[..., 1:4].any()
    assert held[..., 4:].all()


def test_content_sinks_survive_every_policy() -> None:
    mass = torch.full((LAYERS, HEADS, 20), 0.001)
    mass[:, 1, 7] = 0.3
    for policy in (
        {"policy": "budget", "warm_size": 0},
        {"policy": "threshold", "threshold": 0.9},
        {"policy": "recent"},
    ):
        store = Decoder(**policy, cold="drop", sink_mass=0.1, hot_size=200)
        store.prompt(80)
        store.decode(mass, steps=2)  # still inside the hot zone: observed, not judged
        assert store.held().all()
        rules = make_rules(make_config(**policy, cold="drop", sink_mass=0.1, warm={"codec": "none"}))
        for state in store.manager.sequences.values():
            state.rules = rules
        store.decode(mass, steps=32)
        held = store.held()[..., 1:15]
        assert held[:, 1, 6].all(), policy
        assert int(held.sum()) == LAYERS, policy


@pytest.mark.parametrize("policy", [*MASS_POLICIES, "recent"])
def test_warm_size_caps_every_policy(policy: str) -> None:
    settings = {**MASS_POLICIES, "recent": {"policy": "recent", "cold": "drop"}}[policy]
    store = Decoder(**{**settings, "warm_size": 16})
    store.prompt(100)
    order = torch.rand(LAYERS, HEADS, 40, generator=torch.Generator().manual_seed(5)).argsort(-1)
    mass = (order + 5) / 50.0  # distinct in float16 and above every threshold
    store.decode(mass, steps=20)
    older = store.held()[..., 1:27]
    assert (older.sum(-1) <= 4).all()
    if policy != "recent":  # the heaviest four of each head
        best = mass[..., 1:27].topk(4, dim=-1).indices
        assert older.gather(-1, best).all()


def test_without_drop_a_policy_only_advises() -> None:
    store = Decoder(**{**MASS_POLICIES["threshold"], "cold": "keep"})
    store.prompt(60)
    store.decode(torch.zeros(LAYERS, HEADS, 15), steps=20)
    assert store.held().all()


def test_recent_tokens_are_kept_under_a_cumulative_score() -> None:  # CASES A4
    """Budget = prompt length, then 50 more: the newest tokens have seen few observations and must stay."""
    store = Decoder(policy="budget", warm_size=64, cold="drop")
    store.prompt(64)
    for step in range(50):
        mass = torch.full((LAYERS, HEADS, 16), 0.5)
        store.decode(mass)
        assert store.held()[..., -2:].all(), step
    assert store.held().shape[-1] == 29


def test_more_than_the_capacity_evicts_the_lightest(  # CASES A11
) -> None:
    """A prompt exactly at capacity (sinks + warm_size + hot) and 50 more tokens: the size stays within it."""
    store = Decoder(policy="budget", warm_size=32, cold="drop", hot_size=16)
    store.prompt(4 + 32 + 16)
    mass = torch.rand(LAYERS, HEADS, 13, generator=torch.Generator().manual_seed(2))
    for _ in range(50):
        store.decode(mass)
        judged_late = 16 // 4 + 1
        assert (store.held().sum(-1) <= 1 + 8 + 4 + judged_late).all()


def test_cold_pages_become_int4_and_stay_readable() -> None:
    settings = {"policy": "threshold", "threshold": 0.05, "cold": "int4", "warm": {"codec": "int8"}, "page_size": 8}
    store = Decoder(**settings, hot_size=16)
    store.prompt(160)
    original, _ = stored(store.manager, store.slot)
    mass = torch.full((LAYERS, HEADS, 40), 0.2)
    mass[1, 0, 2:12] = mass[2, 1, 0:30] = 0.001
    store.decode(mass)
    stats = store.manager.stats()
    sinks, warm = 1, (161 - 16) // 8
    assert stats.num_chilled == stats.pages_by_tier["cold"] == 10 + (warm - sinks)
    per_page = {tier: stats.bytes_by_tier[tier] / stats.pages_by_tier[tier] for tier in ("hot", "warm", "cold")}
    assert per_page["cold"] < per_page["warm"] < per_page["hot"]
    tiers = store.manager.explain(store.slot).tokens_by_tier()[..., ::8]
    assert (tiers[1, 0, 2:12] == COLD).all()
    assert (tiers[2, 1, sinks:warm] == COLD).all()
    tokens, there = stored(store.manager, store.slot)
    assert there.all()
    assert torch.equal(tokens.k[0, :, :160], original.k[0])  # other streams are untouched
    cold_k, warm_k = tokens.k[1, 0, 16:96].unflatten(0, (10, 8)), original.k[1, 0, 16:96].unflatten(0, (10, 8))
    step = (warm_k.amax(1, keepdim=True) - warm_k.amin(1, keepdim=True)) / 15
    assert ((cold_k - warm_k).abs() <= 0.51 * step + 2e-3).all()
    assert not torch.equal(cold_k, warm_k)
    twin = store.manager.fork(store.slot)
    store.manager.crop(twin, 85)  # reopens a cold page: decoded once, never coded again
    append(store.manager, {twin: random_tokens(100, store.generator)})
    store.manager.check_integrity()
    again, _ = stored(store.manager, twin)
    assert torch.equal(again.k[:, :, :85], tokens.k[:, :, :85])
    for slot in (store.slot, twin):
        store.manager.free(slot)
    assert not any(pages_in_use(store.manager))


def test_a_page_that_a_twin_wants_in_full_precision_is_not_chilled() -> None:
    settings = {"policy": "threshold", "threshold": 0.05, "cold": "int4", "warm": {"codec": "int8"}, "page_size": 8}
    store = Decoder(**settings, hot_size=64)
    store.prompt(80)
    twin = store.manager.fork(store.slot)  # its hot zone starts at page 2
    before, _ = stored(store.manager, twin)
    store.decode(torch.zeros(LAYERS, HEADS, 40), steps=40)
    after, _ = stored(store.manager, twin)
    assert torch.equal(after.k[:, :, 16:], before.k[:, :, 16:])
    assert store.manager.stats().num_chilled == LAYERS * HEADS


def test_drops_in_one_fork_do_not_touch_the_other() -> None:
    store = Decoder(**MASS_POLICIES["threshold"])
    store.prompt(80)
    twin = store.manager.fork(store.slot)
    before = stored(store.manager, twin)[0]
    store.decode(torch.zeros(LAYERS, HEADS, 20))
    tokens, there = stored(store.manager, twin)
    assert there.all()
    assert torch.equal(tokens.k, before.k)
    store.manager.free(twin)
    store.manager.check_integrity()
    assert store.manager.num_kept_tokens(twin if twin in store.manager.sequences else store.slot) < 81
