"""Sequences over pages: contents, tiers, sharing, cropping, taking steps back."""

from __future__ import annotations

import pytest
import torch
from kv_model import LAYERS, Tokens, append, assert_holds, make_config, pages_in_use, random_tokens, stored, write

from gsm.core.batch import Span
from gsm.errors import KVError, OutOfPages
from gsm.kv.manager import KVManager

CODECS = ("none", "int8")


class Store:
    """A manager beside its model; every helper checks integrity."""

    def __init__(self, max_pages: int | None = None, **settings: object) -> None:
        self.manager = KVManager(LAYERS, make_config(**settings), max_pages)
        self.generator = torch.Generator().manual_seed(3)
        self.model: dict[int, Tokens] = {}

    def add(self, *lengths: int) -> int:
        slot = self.manager.add_sequence()
        self.model[slot] = Tokens.none()
        for length in lengths:
            self.append(slot, length)
        return slot

    def append(self, slot: int, length: int) -> None:
        k, v = random_tokens(length, self.generator)
        append(self.manager, {slot: (k, v)})
        self.model[slot] = self.model[slot].plus(k, v)
        self.check()

    def fork(self, slot: int) -> int:
        twin = self.manager.fork(slot)
        self.model[twin] = self.model[slot]
        self.check()
        return twin

    def crop(self, slot: int, num_tokens: int) -> None:
        self.manager.crop(slot, num_tokens)
        self.model[slot] = self.model[slot].first(num_tokens)
        self.check()

    def check(self) -> None:
        self.manager.check_integrity()
        for slot, tokens in self.model.items():
            assert_holds(self.manager, slot, tokens)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("hot_size", [4, 9, 32])
def test_contents_survive_prefill_and_decode(codec: str, page_size: int, hot_size: int) -> None:
    store = Store(page_size=page_size, hot_size=hot_size, warm={"codec": codec})
    store.add(37, *[1] * 40, 5, 1, 1)


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_tiers_hold_what_they_should(page_size: int) -> None:
    store = Store(page_size=page_size, hot_size=16, sink_tokens=2)
    store.add(100, *[1] * 20)
    config = store.manager.config
    stats = store.manager.stats()
    streams = LAYERS * 2
    first_hot = (120 // page_size * page_size - 16) // page_size
    hot = -(-120 // page_size) - first_hot + config.num_sink_pages
    assert stats.pages_by_tier["hot"] == hot * streams
    assert stats.pages_by_tier["warm"] == (first_hot - config.num_sink_pages) * streams
    assert stats.num_demoted == stats.pages_by_tier["warm"]
    assert stats.kv_bytes <= stats.kv_pool_bytes


def test_without_a_codec_every_page_stays_as_it_is() -> None:
    store = Store(warm={"codec": "none"}, hot_size=4)
    slot = store.add(61)
    tokens, _ = stored(store.manager, slot)
    assert torch.equal(tokens.k, store.model[slot].k)
    assert torch.equal(tokens.v, store.model[slot].v)


def test_codes_do_not_depend_on_how_the_tokens_came() -> None:
    k, v = random_tokens(50, torch.Generator().manual_seed(1))
    results = []
    for cuts in ([50], [7, 13, 30], [1] * 50):
        manager = KVManager(LAYERS, make_config())
        slot = manager.add_sequence()
        for k_part, v_part in zip(k.split(cuts, dim=2), v.split(cuts, dim=2), strict=True):
            append(manager, {slot: (k_part, v_part)})
        results.append(stored(manager, slot)[0])
    for other in results[1:]:
        assert torch.equal(results[0].k[:, :, :40], other.k[:, :, :40])
        assert torch.equal(results[0].v[:, :, :40], other.v[:, :, :40])


def test_a_step_serves_ragged_sequences() -> None:
    store = Store()
    slots = [store.add(11), store.add(), store.add(30)]
    for lengths in ((5, 9, 1), (1, 1, 1), (1, 1, 1), (2, 1, 1)):
        new = {slot: random_tokens(n, store.generator) for slot, n in zip(slots, lengths, strict=True)}
        append(store.manager, new)
        for slot, (k, v) in new.items():
            store.model[slot] = store.model[slot].plus(k, v)
        store.check()


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("length", [3, 8, 33])
def test_forks_share_pages_until_they_write(codec: str, length: int) -> None:
    store = Store(warm={"codec": codec})
    slot = store.add(length)
    before = pages_in_use(store.manager)
    twin = store.fork(slot)
    assert pages_in_use(store.manager) == before
    store.append(twin, 1)
    store.append(slot, 2)
    store.append(twin, 20)
    third = store.fork(twin)
    store.manager.free(slot)
    del store.model[slot]
    store.check()
    store.append(third, 17)
    for left in (twin, third):
        store.manager.free(left)
    assert not any(pages_in_use(store.manager))


def test_a_twin_keeps_full_precision_while_it_wants_it() -> None:
    store = Store(hot_size=8)
    slot = store.add(16)
    twin = store.fork(slot)
    store.append(slot, 40)  # demotes pages that are still hot for the twin
    tokens, _ = stored(store.manager, twin)
    assert torch.equal(tokens.k[:, :, 8:], store.model[twin].k[:, :, 8:])
    store.crop(slot, 14)  # reopens a page that the twin shares: the twin's claim must survive
    tokens, _ = stored(store.manager, twin)
    assert torch.equal(tokens.k[:, :, 8:], store.model[twin].k[:, :, 8:])
    store.manager.free(twin)
    del store.model[twin]
    store.check()


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("keep", [0, 1, 4, 13, 31, 32, 47, 48, 60])
def test_crop_then_grow(codec: str, page_size: int, keep: int) -> None:
    store = Store(page_size=page_size, hot_size=8, warm={"codec": codec})
    slot = store.add(60)
    store.crop(slot, keep)
    store.append(slot, 1)
    store.append(slot, 30)
    store.crop(slot, keep + 2)
    store.append(slot, 5)
    store.crop(slot, 0)
    assert not any(pages_in_use(store.manager))


def test_tokens_that_stay_are_never_quantised_again() -> None:
    for codec in ("int8", "int4"):
        store = Store(page_size=16, hot_size=16, recent_tokens=16, warm={"codec": codec})
        k, v = random_tokens(64, store.generator)
        slot = store.manager.add_sequence()
        append(store.manager, {slot: (k, v)})
        coded, _ = stored(store.manager, slot)
        for keep in (23, 21, 19):  # reopen the same page again and again, each time with other new tokens
            store.manager.crop(slot, keep)
            k, v = random_tokens(50, store.generator)
            append(store.manager, {slot: (100 * k, 100 * v)})
            store.manager.check_integrity()
        tokens, _ = stored(store.manager, slot)
        assert torch.equal(tokens.k[:, :, :19], coded.k[:, :, :19])
        assert torch.equal(tokens.v[:, :, :19], coded.v[:, :, :19])
        assert store.manager.counters["reopened"] == LAYERS * 2


def test_crop_only_shortens() -> None:
    store = Store()
    slot = store.add(9)
    for wrong in (-1, 10):
        with pytest.raises(KVError, match=r"crop only shortens"):
            store.manager.crop(slot, wrong)
    store.check()


@pytest.mark.parametrize("layers", [0, 1, LAYERS])
def test_an_aborted_step_leaves_everything_as_it_was(layers: int) -> None:
    store = Store()
    slots = [store.add(21), store.add(3)]
    before = pages_in_use(store.manager)
    new = {slot: random_tokens(19, store.generator) for slot in slots}
    step = write(store.manager, new, layers)
    step.abort()
    step.commit()  # whichever comes first ends the step
    store.check()
    assert pages_in_use(store.manager) == before
    store.append(slots[0], 30)


def test_an_aborted_first_step_can_be_repeated() -> None:
    store = Store()
    slot = store.add()
    write(store.manager, {slot: random_tokens(10, store.generator)}, layers=1).abort()
    store.manager.check_integrity()
    assert not any(pages_in_use(store.manager))
    store.append(slot, 12)
    store.append(slot, 12)


def test_pages_run_out_before_anything_changes() -> None:
    store = Store(max_pages=10)
    slot, other = store.add(30), store.add(7)
    assert store.manager.can_append({slot: 2, other: 1})
    assert not store.manager.can_append({slot: 3})
    before = pages_in_use(store.manager)
    for spans in ([Span(slot, 0, 0, 3)], [Span(other, 0, 0, 1), Span(slot, 1, 0, 40)]):
        with pytest.raises(OutOfPages, match="limited to"):
            store.manager.begin(spans)
        store.check()
        assert pages_in_use(store.manager) == before
    store.append(slot, 2)
    store.manager.free(other)
    del store.model[other]
    store.append(slot, 8)


def test_running_out_during_the_first_forward_pass() -> None:
    store = Store(max_pages=3)
    slot = store.add()
    assert not store.manager.can_append({slot: 13})
    with pytest.raises(OutOfPages):
        write(store.manager, {slot: random_tokens(13, store.generator)})


def test_unknown_sequences_are_refused() -> None:
    store = Store()
    with pytest.raises(KVError, match="sequence 5 does not exist"):
        store.manager.fork(5)
    slot = store.add(4)
    store.manager.free(slot)
    with pytest.raises(KVError, match="was freed"):
        store.manager.begin([Span(slot, 0, 0, 1)])


def test_sequences_without_tokens_can_be_forked_cropped_and_freed() -> None:
    store = Store()
    store.add(5)
    empty = store.add()
    twin = store.fork(empty)
    store.crop(twin, 0)
    store.manager.free(empty)
    store.manager.free(twin)
    store.manager.check_integrity()


def test_a_thousand_sequences_leave_no_trace() -> None:  # CASES D4
    store = Store(hot_size=4)
    keeper = store.add(10)
    store.add(3)
    counts, reserved = pages_in_use(store.manager), None
    for turn in range(1000):
        slot = store.manager.add_sequence()
        append(store.manager, {slot: random_tokens(1 + turn % 23, store.generator)})
        twin = store.manager.fork(slot if turn % 2 else keeper)
        if turn % 3 == 0:
            append(store.manager, {twin: random_tokens(1, store.generator)})
        store.manager.free(slot)
        store.manager.free(twin)
        assert pages_in_use(store.manager) == counts
        if turn == 100:
            reserved = store.manager.stats().kv_pool_bytes
    assert store.manager.stats().kv_pool_bytes == reserved
    store.check()


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_recent_keeps_sinks_and_the_hot_zone_only(page_size: int) -> None:
    store = Store(page_size=page_size, hot_size=16, sink_tokens=2, policy="recent", cold="drop")
    slot = store.manager.add_sequence()
    expected = Tokens.none()
    for length in (50, 1, 1, 1, 30, 3, 1):
        k, v = random_tokens(length, store.generator)
        append(store.manager, {slot: (k, v)})
        expected = expected.plus(k, v)
        store.manager.check_integrity()
        tokens, there = stored(store.manager, slot)
        hot_start = max(0, len(expected) - 16)
        assert there[:, :, hot_start:].all()
        assert there[:, :, :2].all()
        assert torch.equal(tokens.k[there], expected.k[there])
    assert there.sum(-1).max() <= 16 + 2 * page_size + store.manager.config.num_sink_pages * page_size
    store.manager.free(slot)
    assert not any(pages_in_use(store.manager))


@pytest.mark.parametrize("keep", [33, 30, 21, 9, 3])
def test_a_crop_below_the_hot_zone_keeps_what_was_dropped_dropped(keep: int) -> None:
    store = Store(page_size=4, hot_size=8, policy="recent", cold="drop")
    slot = store.manager.add_sequence()
    k, v = random_tokens(60, store.generator)
    append(store.manager, {slot: (k, v)})
    before = stored(store.manager, slot)[1]
    store.manager.crop(slot, keep)
    store.manager.check_integrity()
    assert torch.equal(stored(store.manager, slot)[1], before[:, :, :keep])
    new_k, new_v = random_tokens(3, store.generator)
    append(store.manager, {slot: (new_k, new_v)})
    store.manager.check_integrity()
    tokens, there = stored(store.manager, slot)
    assert torch.equal(there[:, :, :keep], before[:, :, :keep])
    assert there[:, :, keep:].all()
    assert torch.equal(tokens.k[:, :, keep:], new_k)
    if keep > 9:  # crop again inside the page that was opened anew: its new tokens are not swallowed by the gap
        store.manager.crop(slot, keep - 1)
        append(store.manager, {slot: (new_k, new_v)})
        tokens, there = stored(store.manager, slot)
        assert there[:, :, keep - 1 :].all()
        assert torch.equal(tokens.k[:, :, keep - 1 :], new_k)
    store.manager.free(slot)
    assert not any(pages_in_use(store.manager))
