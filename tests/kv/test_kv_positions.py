"""Every token of every sequence is accounted for: where it is, or why and when it went."""

from __future__ import annotations

import json

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule
from kv_model import HEADS, LAYERS, Tokens, append, make_config, pages_in_use, random_tokens, stored, write

from gsm.errors import KVError
from gsm.kv.manager import KVManager
from gsm.kv.positions import HOT, REMOVED, WARM, PositionMap
from gsm.kv.removal import REASONS, removal_code, removed_at, removed_by


@pytest.mark.parametrize("num_tokens", [1, 17, 8192, 10_000_000, 268_000_000])
@pytest.mark.parametrize("reason", REASONS)
def test_a_removal_fits_into_a_table_entry(num_tokens: int, reason: str) -> None:
    entry = torch.tensor([removal_code(num_tokens, reason), -1, 5], dtype=torch.int32)
    assert removed_at(entry).tolist() == [num_tokens, -1, -1]
    assert removed_by(entry).tolist() == [REASONS.index(reason), -1, -1]


def test_the_tiers_of_a_sequence() -> None:
    manager = KVManager(LAYERS, make_config(page_size=4, hot_size=8))
    slot = manager.add_sequence()
    append(manager, {slot: random_tokens(41, torch.Generator().manual_seed(0))})
    positions = manager.explain(slot)
    tokens = positions.tokens_by_tier()
    assert tokens.shape == (LAYERS, HEADS, 41)
    assert (tokens[..., :4] == HOT).all()  # the sink page
    assert (tokens[..., 4:32] == WARM).all()
    assert (tokens[..., 32:] == HOT).all()
    assert positions.shares() == {"hot": 13 / 41, "warm": 28 / 41, "cold": 0.0, "removed": 0.0}
    place = positions.token(10)[0]
    assert (place.layer, place.head, place.tier, place.page, place.stored) == (0, 0, "warm", 2, "int8")
    assert {p.stored for p in positions.token(40)} == {"full precision"}
    group = manager.groups[0]
    assert int(group.pages.fields["warm"][place.page_id]) == place.unit
    for wrong in (-1, 41):
        with pytest.raises(KVError, match="has 41"):
            positions.token(wrong)


def test_a_removed_token_says_why_and_when() -> None:
    manager = KVManager(LAYERS, make_config(page_size=4, hot_size=8, policy="recent", cold="drop"))
    slot, generator = manager.add_sequence(), torch.Generator().manual_seed(0)
    append(manager, {slot: random_tokens(40, generator)})
    for _ in range(20):
        append(manager, {slot: random_tokens(1, generator)})
    positions = manager.explain(slot)
    first, later = positions.token(9), positions.token(35)
    assert len(first) == LAYERS * HEADS
    assert {(p.tier, p.removed_by, p.removed_at) for p in first} == {("removed", "recent", 40)}
    assert {(p.tier, p.removed_by, p.removed_at) for p in later} == {("removed", "recent", 44)}
    assert {p.tier for p in positions.token(59)} == {"hot"}
    removals = positions.removals()
    assert sum(group["num_tokens"] for group in removals) == positions.shares()["removed"] * 60 * LAYERS * HEADS
    summary = json.loads(json.dumps(positions.to_dict()))
    assert summary["num_streams"] == LAYERS * HEADS
    assert [sum(page) for page in zip(*summary["streams_by_page"].values(), strict=True)] == [LAYERS * HEADS] * 15
    assert manager.explain(manager.add_sequence()).to_dict()["num_tokens"] == 0


class PositionMachine(RuleBasedStateMachine):
    """Random appends, decode steps with random mass, drops, crops and forks.

    `gone[slot]` remembers the first explanation of every removed (layer, head, token): it must never change again, and
    must name the length at which the token was first missed.
    """

    slots = Bundle("slots")

    @initialize(
        policy=st.sampled_from(
            [
                {"policy": "threshold", "threshold": 0.5},
                {"policy": "threshold", "threshold_relative": 2.0, "warm_size": 12},
                {"policy": "budget", "warm_size": 8},
                {"policy": "recent"},
                {"policy": "recent", "sink_mass": 0.9},
            ]
        ),
        layout=st.sampled_from(
            [("none", 1, "drop"), ("none", 4, "drop"), ("int8", 1, "drop"), ("int8", 4, "drop"), ("int8", 8, "int4")]
        ),
        sinks=st.sampled_from([0, 3]),
        seed=st.integers(0, 1000),
    )
    def start(self, policy: dict[str, object], layout: tuple[str, int, str], sinks: int, seed: int) -> None:
        codec, page_size, cold = layout
        if cold == "int4" and policy["policy"] == "recent":
            policy = {"policy": "threshold", "threshold": 0.5}  # recent calls everything cold, which is refused
        config = make_config(page_size=page_size, sink_tokens=sinks, cold=cold, warm={"codec": codec}, **policy)
        self.manager = KVManager(LAYERS, config)
        self.model: dict[int, Tokens] = {}
        self.gone: dict[int, torch.Tensor] = {}
        self.length_before: dict[int, int] = {}
        self.generator = torch.Generator().manual_seed(seed)

    def _step(self, slot: int, length: int) -> None:
        k, v = random_tokens(length, self.generator)
        self.model[slot] = self.model[slot].plus(k, v)
        step = write(self.manager, {slot: (k, v)})
        num_pages = -(-len(self.model[slot]) // self.manager.config.page_size)
        for layer in range(LAYERS):
            mass = torch.rand(1, HEADS, num_pages, generator=self.generator)
            if self.manager.needs_mass and length == 1:
                step.observe(layer, torch.arange(num_pages).expand(1, HEADS, -1), mass)
            elif self.manager.needs_mass:
                step.observe_span(layer, 0, mass)
        step.commit()

    @rule(target=slots, length=st.integers(1, 40))
    def add(self, length: int) -> int:
        slot = self.manager.add_sequence()
        self.model[slot], self.gone[slot] = Tokens.none(), torch.full((LAYERS, HEADS, 0), -1)
        self.length_before[slot] = 0
        self._step(slot, length)
        return slot

    @rule(slot=slots, length=st.integers(1, 40))
    def grow(self, slot: int, length: int) -> None:
        self._step(slot, length)

    @rule(slot=slots, steps=st.integers(1, 30))
    def decode(self, slot: int, steps: int) -> None:
        for _ in range(steps):
            self._step(slot, 1)

    @rule(slot=slots, fraction=st.floats(0, 1))
    def crop(self, slot: int, fraction: float) -> None:
        keep = int(len(self.model[slot]) * fraction)
        self.manager.crop(slot, keep)
        self.model[slot] = self.model[slot].first(keep)
        self.gone[slot] = self.gone[slot][..., :keep]
        self.length_before[slot] = min(self.length_before[slot], keep)

    @rule(slot=slots, back=st.integers(1, 9))
    def crop_a_little(self, slot: int, back: int) -> None:
        self.crop(slot, max(0, len(self.model[slot]) - back) / max(1, len(self.model[slot])))

    @rule(target=slots, slot=slots)
    def fork(self, slot: int) -> int:
        twin = self.manager.fork(slot)
        self.model[twin], self.gone[twin] = self.model[slot], self.gone[slot].clone()
        self.length_before[twin] = self.length_before[slot]
        return twin

    @rule(target=slots, slot=consumes(slots))
    def free(self, slot: int) -> object:
        self.manager.free(slot)
        del self.model[slot]
        return multiple()

    @invariant()
    def every_token_is_accounted_for(self) -> None:
        if not hasattr(self, "manager"):
            return
        self.manager.check_integrity()
        for slot, expected in self.model.items():
            self._check(slot, expected)

    def _check(self, slot: int, expected: Tokens) -> None:
        n = len(expected)
        positions = self.manager.explain(slot)
        tiers = positions.tokens_by_tier()
        assert tiers.shape == (LAYERS, HEADS, n)
        assert (tiers >= 0).all()
        if n == 0:
            return
        assert sum(positions.shares().values()) == pytest.approx(1.0)
        tokens, there = stored(self.manager, slot)
        assert torch.equal(tiers != REMOVED, there)
        if self.manager.config.warm.codec == "none":
            assert torch.equal(tokens.k[there], expected.k[there])
        if self.manager.config.cold == "int4":
            assert there.all()
            assert (tokens.k - expected.k).abs().max() <= 0.4  # half a step of int4 over random keys
        self._check_removals(slot, positions, tiers, n)
        config = self.manager.config
        if not expected.was_cropped:
            assert there[..., : config.sink_tokens].all()
            assert there[..., max(0, n - config.hot_size) :].all()
        counted = sum(group["num_tokens"] for group in positions.removals())
        assert counted == int((tiers == REMOVED).sum())

    def _check_removals(self, slot: int, positions: PositionMap, tiers: torch.Tensor, n: int) -> None:
        past = torch.nn.functional.pad(self.gone[slot], (0, n - self.gone[slot].shape[-1]), value=-1)
        assert (tiers[past >= 0] == REMOVED).all()  # what went stays away
        codes = positions.codes.repeat_interleave(positions.page_size, -1)[..., :n]
        when = removed_at(codes)
        fresh = (tiers == REMOVED) & (past < 0)
        assert (when[fresh] >= self.length_before[slot]).all()
        assert (when[fresh] <= n).all()
        assert (removed_by(codes)[tiers == REMOVED] >= 0).all()
        if fresh.any():
            layer, head, token = fresh.nonzero()[-1].tolist()
            place = positions.token(token)[layer * HEADS + head]
            assert (place.tier, place.removed_at) == ("removed", int(when[layer, head, token]))
        self.gone[slot], self.length_before[slot] = torch.where(fresh, when, past), n

    def teardown(self) -> None:
        if hasattr(self, "manager"):
            for slot in list(self.model):
                self.manager.free(slot)
            assert not any(pages_in_use(self.manager))
            assert not any(group.gaps for group in self.manager.groups)


TestPositions = PositionMachine.TestCase
TestPositions.settings = settings(
    max_examples=20,
    stateful_step_count=15,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)
