import ctypes

import numba
import numpy as np
import pytest
import torch
from numba import carray, types

from gsm.core import memory, team
from gsm.core.team import add_to, pointer, prefetch, run_team

NUM_ITEMS = 64


@numba.cfunc(types.void(types.CPointer(types.int64)), cache=True)
def _count(arguments):
    block = carray(arguments, 2)  # address of the counter, address of what the items count up
    seen = carray(pointer(block[1]), NUM_ITEMS, np.int64)
    while True:
        item = add_to(block[0], 1)
        if item >= NUM_ITEMS:
            break
        prefetch(block[1] + 8 * item)
        seen[item] += 1


def _run():
    counter, seen = np.zeros(1, np.int64), np.zeros(NUM_ITEMS, np.int64)
    block = np.array([counter.ctypes.data, seen.ctypes.data], np.int64)
    run_team(_count.address, block.ctypes.data)
    return int(counter[0]), seen


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_a_team_takes_every_item_once(two_threads):
    counter, seen = _run()
    assert (seen == 1).all()
    entered = counter - NUM_ITEMS  # every thread that came asked once too often
    assert entered == (2 if team._fork_function() is not None else 1)


def test_without_a_known_openmp_library_the_calling_thread_does_it(two_threads, monkeypatch):
    monkeypatch.setattr(team, "_fork_function", lambda: None)
    counter, seen = _run()
    assert (seen == 1).all()
    assert counter == NUM_ITEMS + 1


def test_it_is_the_library_that_torch_uses():
    fork = team._fork_function()
    libraries = team._loaded_libraries("libgomp") + team._loaded_libraries("libiomp5")
    assert (fork is not None) == any(hasattr(ctypes.CDLL(path), "GOMP_parallel") for path in libraries)
    assert team._loaded_libraries("no-such-library") == []


def test_advice_about_memory_changes_no_content():
    block = torch.arange(2**20)
    memory.advise_huge_pages(block.data_ptr() + 8, block.numel() * 8 - 8)
    memory.advise_huge_pages(block.data_ptr(), 4096)  # too small for it
    assert torch.equal(block, torch.arange(2**20))
