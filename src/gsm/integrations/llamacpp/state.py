"""Reading keys out of a saved llama.cpp sequence (`llama_state_seq_get_data`).

Layout (llama.cpp, llama-kv-cache.cpp, `state_write`), little endian:

    u32 magic, i32 sequence id, u32 number of streams
    per stream: u32 cells
        per cell:  i32 position, u32 number of ids, that many i32 ids
        u32 "V is transposed", u32 layers
        per layer: i32 type of K, u64 bytes of a row, then one row per cell
        values follow; they are not read here
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gsm.errors import UnsupportedModel

_F32, _F16, _Q8_0, _BF16 = 0, 1, 8, 30  # enum ggml_type
_HEADER = struct.Struct("<IiI")
_MAX_LAYERS = 1000  # of a number read from a buffer whose layout we may have got wrong


@dataclass(frozen=True)
class SavedKeys:
    """Positions int64 `[n]`, ascending, and the keys of each layer, float32 `[n, kv heads x head_dim]`."""

    positions: NDArray[np.int64]
    layers: tuple[NDArray[np.float32], ...]


def read_keys(data: bytes | memoryview, every: int = 1) -> SavedKeys:
    """Keys of every `every`-th layer of a saved sequence. Raises UnsupportedModel for another layout."""
    try:
        return _read(memoryview(data), every)
    except (struct.error, ValueError, IndexError) as error:
        raise UnsupportedModel(
            f"the saved state of this model has a layout GSM cannot read ({error}); use --forget oldest, which needs "
            "no keys"
        ) from None


def _read(data: memoryview, every: int) -> SavedKeys:
    _, _, num_streams = _HEADER.unpack_from(data)
    if num_streams != 1:
        raise ValueError(f"{num_streams} streams")
    offset = _HEADER.size
    (num_cells,) = struct.unpack_from("<I", data, offset)
    positions, offset = _positions(data, offset + 4, num_cells)
    _, num_layers = struct.unpack_from("<II", data, offset)
    offset += 8
    if not 0 < num_layers <= _MAX_LAYERS:
        raise ValueError(f"{num_layers} layers")
    layers = []
    for layer in range(num_layers):
        kind, row_bytes = struct.unpack_from("<iQ", data, offset)
        offset += 12
        rows = data[offset : offset + num_cells * row_bytes]
        if len(rows) < num_cells * row_bytes:
            raise ValueError("the buffer ends early")
        if layer % every == 0:
            layers.append(_decode(rows, num_cells, kind))
        offset += num_cells * row_bytes
    order = np.argsort(positions, kind="stable")
    return SavedKeys(positions[order], tuple(keys[order] for keys in layers))


def _positions(data: memoryview, offset: int, num_cells: int) -> tuple[NDArray[np.int64], int]:
    """Every cell has one sequence id here: we save a single sequence."""
    cells = np.frombuffer(data, dtype="<i4", count=3 * num_cells, offset=offset).reshape(num_cells, 3)
    if num_cells and not bool((cells[:, 1] == 1).all()):
        raise ValueError("cells that belong to several sequences, or carry more than a position")
    return cells[:, 0].astype(np.int64), offset + 12 * num_cells


def _decode(rows: memoryview, num_cells: int, kind: int) -> NDArray[np.float32]:
    if kind == _F32:
        return np.frombuffer(rows, dtype="<f4").reshape(num_cells, -1)
    if kind == _F16:
        return np.frombuffer(rows, dtype="<f2").reshape(num_cells, -1).astype(np.float32)
    if kind == _BF16:
        bits = np.frombuffer(rows, dtype="<u2").astype(np.uint32) << 16
        return bits.view(np.float32).reshape(num_cells, -1)
    if kind == _Q8_0:  # blocks of a float16 scale and 32 codes
        blocks = np.frombuffer(rows, dtype=np.dtype([("scale", "<f2"), ("codes", "i1", (32,))]))
        values = blocks["scale"].astype(np.float32)[:, None] * blocks["codes"].astype(np.float32)
        return values.reshape(num_cells, -1)
    raise ValueError(f"keys of ggml type {kind}, known are f32, f16, bf16 and q8_0")
