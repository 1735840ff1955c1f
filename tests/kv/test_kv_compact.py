"""Compaction in the store: keys as if computed at their new positions, contents kept, positions explained."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from kv_model import HEADS, K_DIM, LAYERS, append, make_config, random_tokens, stored, write
from torch import Tensor

from gsm.core.rotary import Rotary
from gsm.errors import ConfigError, KVError
from gsm.kv.compact import Compactor, make_compactor, most_moves
from gsm.kv.manager import KVManager

LIMIT = 48
ROTARY = Rotary(tuple(10.0 ** (-2 * i / K_DIM) for i in range(K_DIM // 2)))


def make_manager(limit: int = LIMIT, rotary: Rotary = ROTARY, **settings: Any) -> KVManager:
    defaults = {"policy": "recent", "cold": "drop", "positions": "compact", "hot_size": 16, "warm": {"codec": "none"}}
    manager = KVManager(LAYERS, make_config(**{**defaults, **settings}))
    manager.compactor = Compactor((rotary,) * LAYERS, limit)
    return manager


class Plain:
    """Every token a sequence ever had: keys before rotation, values."""

    def __init__(self, rotary: Rotary = ROTARY) -> None:
        self.rotary = rotary
        self.k, self.v = random_tokens(0, torch.Generator())

    def turned(self, k: Tensor, positions: Tensor) -> Tensor:
        """`k [LAYERS, HEADS, n, d]` rotated to `positions [n]` or `[LAYERS, HEADS, n]`."""
        positions = positions.expand(k.shape[:-1]).reshape(-1)
        return self.rotary.moved(k.reshape(-1, 1, K_DIM), positions).view(k.shape)

    def grow(self, manager: KVManager, slot: int, num_tokens: int, generator: torch.Generator) -> None:
        """New tokens, rotated to the positions the store gives them."""
        k, v = random_tokens(num_tokens, generator)
        place = manager.num_tokens(slot)
        if manager.compactor is not None and place + num_tokens > manager.compactor.limit:
            manager.compactor.cut(manager, slot)
            place = manager.num_tokens(slot)
        append(manager, {slot: (self.turned(k, torch.arange(place, place + num_tokens)), v)})
        self.k, self.v = torch.cat((self.k, k), 2), torch.cat((self.v, v), 2)


def check(manager: KVManager, slot: int, plain: Plain, atol: float = 1e-4) -> Any:
    """Every kept token's key is its own, rotated to its compact position; values are untouched. Returns the map."""
    manager.check_integrity()
    places = manager.explain(slot)
    assert places.num_tokens == plain.k.shape[2]
    assert places.num_positions == manager.num_tokens(slot)
    tokens, there = stored(manager, slot)
    seen = torch.zeros_like(there)
    for layer, head in itertools.product(range(LAYERS), range(HEADS)):
        column = places.column[layer, head].repeat_interleave(places.page_size)[: places.num_tokens]
        logical = (column >= 0).nonzero().flatten()
        compact = column[logical] * places.page_size + logical % places.page_size
        expected = plain.turned(plain.k, torch.zeros(1, dtype=torch.long))[layer, head, logical]
        expected = plain.rotary.moved(expected.unsqueeze(1), compact).squeeze(1)
        torch.testing.assert_close(tokens.k[layer, head, compact], expected, atol=atol, rtol=1e-4)
        torch.testing.assert_close(tokens.v[layer, head, compact], plain.v[layer, head, logical], atol=atol, rtol=1e-4)
        seen[layer, head, compact] = True
    assert torch.equal(seen, there)  # the map names every token the store holds, and no other
    return places


@pytest.mark.parametrize("pairs", [False, True])
@pytest.mark.parametrize("partial", [False, True])
def test_kept_keys_are_as_if_computed_at_their_new_positions(pairs: bool, partial: bool) -> None:
    rotary = Rotary(ROTARY.frequencies[: K_DIM // 4 if partial else None], pairs)
    manager, plain, generator = make_manager(rotary=rotary), Plain(rotary), torch.Generator().manual_seed(0)
    slot = manager.add_sequence()
    for num_tokens in [20, *[7, 1, 1, 5, 12] * 12]:
        plain.grow(manager, slot, num_tokens, generator)
        assert manager.num_tokens(slot) <= LIMIT
    places = check(manager, slot, plain)
    assert manager.compactor is not None
    assert manager.compactor.num_cuts >= 5
    assert int((places.column >= 0).sum(-1).max()) * 4 <= 16 + 4 + 3 * 4


def test_every_token_is_explained_with_both_numbers() -> None:
    manager, plain, generator = make_manager(), Plain(), torch.Generator().manual_seed(1)
    slot = manager.add_sequence()
    for _ in range(40):
        plain.grow(manager, slot, 5, generator)
    places = manager.explain(slot)
    first, gone, last = (places.token(position)[0] for position in (0, 50, 199))
    assert (first.tier, first.compact_position) == ("hot", 0)
    assert (gone.tier, gone.compact_position, gone.removed_by) == ("removed", None, "recent")
    assert 50 + 16 <= (gone.removed_at or 0) <= 50 + 16 + 8  # logical length at that moment
    assert last.compact_position == manager.num_tokens(slot) - 1
    total = sum(group["num_tokens"] for group in places.removals()) // (LAYERS * HEADS)
    assert total == 200 - int((places.tokens_by_tier()[0, 0] != 3).sum())
    state = manager.sequences[slot]
    assert state.cut is not None
    assert state.cut.nbytes < 4 * 200  # all streams forget alike: one number per page explains them


@pytest.mark.parametrize("codec", ["int8", "int4"])
def test_coded_pages_move_too_within_the_stated_error(codec: str) -> None:
    settings = {"page_size": 8, "hot_size": 8, "warm_size": 24, "warm": {"codec": codec}}
    manager, plain, generator = make_manager(limit=80, **settings), Plain(), torch.Generator().manual_seed(2)
    slot = manager.add_sequence()
    for _ in range(60):
        plain.grow(manager, slot, 8, generator)
    assert manager.compactor is not None
    assert manager.compactor.num_recoded > 0
    moves = most_moves(manager.config, 80)
    span = float(plain.k.abs().max())
    step = span / 254 if codec == "int8" else 2 * span / 30
    check(manager, slot, plain, atol=(moves + 1) * 2**0.5 * step * 1.05)  # a rotation may turn an error by sqrt 2


def test_values_and_their_codes_never_change_when_pages_move() -> None:
    settings = {"page_size": 8, "hot_size": 8, "warm_size": 24, "warm": {"codec": "int4"}}
    manager, plain, generator = make_manager(limit=80, **settings), Plain(), torch.Generator().manual_seed(3)
    slot = manager.add_sequence()
    while manager.num_tokens(slot) < 72:
        plain.grow(manager, slot, 8, generator)
    before, there = stored(manager, slot)
    kept = before.v[there].view(LAYERS, HEADS, -1, before.v.shape[-1])
    assert manager.compactor is not None
    assert manager.compactor.cut(manager, slot) > 0
    after, there = stored(manager, slot)
    assert torch.equal(after.v[there].view(kept.shape), kept)


def test_a_shared_page_moves_for_one_owner_only() -> None:
    for settings in ({}, {"page_size": 8, "hot_size": 8, "warm_size": 16, "warm": {"codec": "int8"}}):
        manager, plain, generator = make_manager(limit=64, **settings), Plain(), torch.Generator().manual_seed(4)
        slot = manager.add_sequence()
        while manager.num_tokens(slot) < 56:
            plain.grow(manager, slot, 8, generator)
        twin = manager.fork(slot)
        before, _ = stored(manager, twin)
        assert manager.compactor is not None
        assert manager.compactor.cut(manager, slot) > 0
        after, _ = stored(manager, twin)
        assert torch.equal(before.k, after.k)
        assert torch.equal(before.v, after.v)
        check(manager, slot, plain, atol=1e-4 if not settings else 0.2)
        manager.check_integrity()
        manager.free(twin)
        for _ in range(10):
            plain.grow(manager, slot, 8, generator)
        manager.free(slot)
        manager.check_integrity()
        assert manager.stats().kv_bytes == 0


def test_heads_that_dropped_different_pages_are_packed_each_for_itself() -> None:
    """A policy by attention mass: the streams of a sequence keep different old pages."""
    manager = make_manager(limit=64, policy="budget", warm_size=8, hot_size=16)
    plain, generator = Plain(), torch.Generator().manual_seed(5)
    slot = manager.add_sequence()
    for _ in range(30):
        plain.grow(manager, slot, 4, generator)
        state = manager.sequences[slot]
        for group in manager.groups:  # what attention would have seen, at random
            pages = torch.arange(state.num_complete).expand(1, HEADS, -1)
            for layer in group.rows:
                mass = torch.rand(pages.shape, generator=generator)
                group.observe(group.places(layer, torch.tensor([slot]), pages).flatten(), mass.flatten())
        plain.grow(manager, slot, 1, generator)
        check(manager, slot, plain)
    places = manager.explain(slot)
    assert manager.compactor is not None
    assert manager.compactor.num_cuts >= 2
    old = places.column[..., 1:-6]
    assert not torch.equal(old[0, 0] >= 0, old[1, 1] >= 0)  # really different
    assert (places.column[..., -4:] == places.column[:1, :1, -4:]).all()  # and new tokens agree on positions


def test_cropping_behind_the_cut_works_and_in_front_of_it_is_refused() -> None:
    manager, plain, generator = make_manager(), Plain(), torch.Generator().manual_seed(6)
    slot = manager.add_sequence()
    while manager.compactor is not None and manager.compactor.num_cuts < 3:
        plain.grow(manager, slot, 9, generator)
    length = manager.num_tokens(slot)
    manager.crop(slot, length - 5)
    plain.k, plain.v = plain.k[:, :, :-5], plain.v[:, :, :-5]
    check(manager, slot, plain)
    with pytest.raises(KVError, match="were compacted"):
        manager.crop(slot, 3)
    check(manager, slot, plain)
    plain.grow(manager, slot, 5, generator)
    check(manager, slot, plain)
    manager.crop(slot, 0)
    assert manager.num_logical_tokens(slot) == 0
    manager.check_integrity()


def test_what_cannot_fit_is_told_before_anything_happens() -> None:
    manager, plain, generator = make_manager(), Plain(), torch.Generator().manual_seed(7)
    slot = manager.add_sequence()
    plain.grow(manager, slot, 40, generator)
    k, v = random_tokens(45, generator)
    with pytest.raises(KVError, match="feed at most"):
        write(manager, {slot: (k, v)})
    check(manager, slot, plain)
    bare = KVManager(LAYERS, manager.config)
    with pytest.raises(ConfigError, match="rotary"):
        append(bare, {bare.add_sequence(): random_tokens(4, generator)})


def test_an_aborted_step_after_a_cut_leaves_a_sound_sequence() -> None:
    manager, plain, generator = make_manager(), Plain(), torch.Generator().manual_seed(8)
    slot = manager.add_sequence()
    plain.grow(manager, slot, 46, generator)
    step = write(manager, {slot: random_tokens(8, generator)}, layers=1)
    assert manager.compactor is not None
    assert manager.compactor.num_cuts == 1
    step.abort()
    check(manager, slot, plain)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"policy": "keep_all", "cold": "keep"}, "nothing is dropped"),
        ({"policy": "threshold", "threshold": 0.1, "cold": "keep"}, "nothing is dropped"),
    ],
)
def test_compaction_without_forgetting_is_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make_config(positions="compact", **settings)


def test_a_window_that_fills_the_model_is_refused(tiny_model: Any) -> None:
    from gsm.arch import describe

    arch = describe(tiny_model("llama", max_position_embeddings=128).config)
    config = make_config(positions="compact", policy="recent", cold="drop", hot_size=120)
    with pytest.raises(ConfigError, match=r"keep at most \d+"):
        make_compactor(config, arch)
    assert make_compactor(make_config(), arch) is None
