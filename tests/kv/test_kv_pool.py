"""The pool of units: exact counts, growth, limits."""

from __future__ import annotations

import pytest
import torch

from gsm.errors import KVIntegrityError, OutOfPages
from gsm.kv.pool import UnitPool

SPEC = {"x": ((3,), torch.float32), "y": ((), torch.int8)}
CPU = torch.device("cpu")


def _owners(pool: UnitPool, *held: torch.Tensor) -> torch.Tensor:
    owners = torch.zeros(pool.capacity, dtype=torch.long)
    for ids in held:
        owners.index_add_(0, ids, torch.ones_like(ids))
    return owners


def test_ids_are_distinct_and_counted() -> None:
    pool = UnitPool(SPEC, CPU, capacity=8)
    a, b = pool.allocate(5), pool.allocate(3)
    assert sorted([*a.tolist(), *b.tolist()]) == list(range(8))
    assert (pool.num_used, pool.num_free) == (8, 0)
    pool.check(_owners(pool, a, b), "test")


def test_a_unit_is_free_only_when_its_last_owner_leaves() -> None:
    pool = UnitPool(SPEC, CPU, capacity=4)
    ids = pool.allocate(3)
    pool.retain(ids[:2])
    assert pool.release(ids).tolist() == [int(ids[2])]
    assert pool.num_used == 2
    assert sorted(pool.release(ids[:2]).tolist()) == sorted(ids[:2].tolist())
    assert pool.num_used == 0
    pool.check(_owners(pool), "test")


def test_growth_keeps_contents_and_counts() -> None:
    pool = UnitPool(SPEC, CPU, capacity=2)
    ids = pool.allocate(2)
    pool.fields["x"][ids] = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    more = pool.allocate(7)
    assert pool.capacity >= 9
    assert pool.fields["x"][ids].tolist() == [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]
    assert not set(ids.tolist()) & set(more.tolist())
    pool.check(_owners(pool, ids, more), "test")


def test_a_limit_refuses_in_one_sentence_and_changes_nothing() -> None:
    pool = UnitPool(SPEC, CPU, capacity=2, max_units=4)
    ids = pool.allocate(3)
    assert pool.can_allocate(1)
    assert not pool.can_allocate(2)
    before = (pool.capacity, pool.num_free, pool.refs.clone())
    with pytest.raises(OutOfPages, match="limited to 4"):
        pool.allocate(2)
    assert (pool.capacity, pool.num_free) == before[:2]
    assert torch.equal(pool.refs, before[2])
    pool.release(ids)
    assert len(pool.allocate(4)) == 4


def test_no_memory_is_out_of_pages_and_changes_nothing() -> None:
    pool = UnitPool({"big": ((1 << 40,), torch.float32), "small": ((), torch.int8)}, CPU, capacity=0)
    with pytest.raises(OutOfPages, match="no memory on cpu"):
        pool.allocate(1 << 10)
    assert (pool.capacity, pool.num_free) == (0, 0)


def test_bytes_of_a_unit_are_known_before_there_is_one() -> None:
    empty = UnitPool(SPEC, CPU, capacity=0)
    assert empty.unit_bytes == UnitPool(SPEC, CPU, capacity=3).unit_bytes == 3 * 4 + 1 + 4 + 4


def test_check_finds_a_lost_owner_and_a_damaged_free_list() -> None:
    pool = UnitPool(SPEC, CPU, capacity=4)
    ids = pool.allocate(2)
    with pytest.raises(KVIntegrityError, match="0 owners but a count of 1"):
        pool.check(_owners(pool, ids[:1]), "page")
    pool.num_free -= 1
    with pytest.raises(KVIntegrityError, match="free list"):
        pool.check(_owners(pool, ids), "page")


def test_a_thousand_allocations_leave_no_trace() -> None:  # CASES D4
    pool = UnitPool(SPEC, CPU, capacity=16)
    generator = torch.Generator().manual_seed(0)
    capacity = None
    for turn in range(1000):
        held = [pool.allocate(int(n)) for n in torch.randint(0, 9, (4,), generator=generator)]
        pool.retain(held[0])
        for ids in (held[0], *held):
            pool.release(ids)
        assert pool.num_used == 0
        if turn == 500:
            capacity = pool.capacity
    assert pool.capacity == capacity
    pool.check(_owners(pool), "test")


def test_a_pool_made_in_inference_mode_can_be_written_outside_it() -> None:
    with torch.inference_mode():
        pool = UnitPool(SPEC, CPU, capacity=2)
        ids = pool.allocate(3)
    pool.fields["x"][ids] = 1.0
    pool.release(ids)
    assert pool.num_used == 0
