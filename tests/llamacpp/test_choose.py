"""What a full window forgets, and how keys are read from a saved state."""

from __future__ import annotations

import struct
from itertools import pairwise

import numpy as np
import pytest

from gsm.errors import InputError, UnsupportedModel
from gsm.integrations.llamacpp.choose import Protected, choose_ranges, sameness, shifted
from gsm.integrations.llamacpp.state import SavedKeys, read_keys


def _keys(vectors: np.ndarray, layers: int = 2) -> SavedKeys:
    return SavedKeys(np.arange(len(vectors)), (vectors.astype(np.float32),) * layers)


def _total(ranges: list[tuple[int, int]]) -> int:
    return sum(last - first for first, last in ranges)


def test_without_keys_the_oldest_unprotected_tokens_go() -> None:
    assert choose_ranges(100, 20, Protected(4, 30), None) == [(4, 24)]
    assert choose_ranges(100, 20, Protected(4, 30, ((10, 16),)), None) == [(4, 10), (16, 30)]


def test_blocks_that_look_like_all_others_go_first() -> None:
    vectors = np.ones((96, 8))
    vectors[32:64] = np.random.default_rng(0).normal(size=(32, 8))  # distinctive
    scores = sameness(_keys(vectors))
    assert scores[32:64].mean() < scores[:32].mean()
    assert choose_ranges(96, 32, Protected(0, 0), _keys(vectors), block=32) in ([(0, 32)], [(64, 96)])


@pytest.mark.parametrize("num_to_free", [1, 17, 40, 66])
def test_exactly_as_many_as_asked_and_never_a_protected_one(num_to_free: int) -> None:
    rng = np.random.default_rng(num_to_free)
    protected = Protected(5, 20, ((40, 49),))
    ranges = choose_ranges(100, num_to_free, protected, _keys(rng.normal(size=(100, 8))), block=8)
    assert _total(ranges) == num_to_free
    mask = protected.mask(100)
    assert not any(mask[first:last].any() for first, last in ranges)
    assert all(a[1] < b[0] for a, b in pairwise(ranges))


def test_too_much_protected_is_told() -> None:
    with pytest.raises(InputError, match="80 of 100 tokens must be forgotten but all except 75 are protected"):
        choose_ranges(100, 80, Protected(5, 20), None)


def test_ranges_move_up_with_what_was_before_them() -> None:
    assert shifted([(50, 60), (5, 8)], [(10, 20), (30, 35)]) == ((35, 45), (5, 8))
    assert shifted([(15, 40)], [(10, 20)]) == ((10, 30),)


def _state(rows: list[bytes], kind: int, positions: list[int], streams: int = 1, ids: int = 1) -> bytes:
    """A sequence of one layer per entry of `rows`, as llama.cpp saves it (values left out: they are not read)."""
    data = struct.pack("<IiI", 0, 0, streams) + struct.pack("<I", len(positions))
    data += b"".join(struct.pack("<iIi", position, ids, 0) for position in positions)
    data += struct.pack("<II", 1, len(rows))
    return data + b"".join(struct.pack("<iQ", kind, len(row) // len(positions)) + row for row in rows)


@pytest.mark.parametrize(("kind", "dtype"), [(0, "<f4"), (1, "<f2")])
def test_keys_are_read_in_order_of_position(kind: int, dtype: str) -> None:
    keys = np.arange(24, dtype=np.float32).reshape(3, 8)
    saved = read_keys(_state([keys.astype(dtype).tobytes()] * 2, kind, [5, 4, 9]))
    assert saved.positions.tolist() == [4, 5, 9]
    assert len(saved.layers) == 2
    assert np.array_equal(saved.layers[1], keys[[1, 0, 2]])


def test_quantised_and_bfloat16_keys_are_decoded() -> None:
    block = np.float16(0.5).tobytes() + np.arange(-16, 16, dtype=np.int8).tobytes()
    saved = read_keys(_state([block * 2], 8, [0, 1]))
    assert np.array_equal(saved.layers[0], np.tile(0.5 * np.arange(-16, 16), (2, 1)))
    halves = (np.array([1.5, -2.0], np.float32).view(np.uint32) >> 16).astype("<u2")
    assert read_keys(_state([halves.tobytes()], 30, [0])).layers[0].tolist() == [[1.5, -2.0]]


@pytest.mark.parametrize(
    "data",
    [
        _state([b"\0" * 8], 1, [0], streams=2),
        _state([b"\0" * 8], 1, [0], ids=2),
        _state([b"\0" * 8], 2, [0]),
        _state([b"\0" * 8], 1, [0])[:-3],
        b"\0" * 7,
    ],
    ids=["streams", "shared cells", "type", "cut", "short"],
)
def test_another_layout_is_refused(data: bytes) -> None:
    with pytest.raises(UnsupportedModel, match="use --forget oldest"):
        read_keys(data)
