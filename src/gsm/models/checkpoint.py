"""Is this directory a complete model? Asked before anything large is read."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gsm.errors import ModelError

WEIGHT_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")


@dataclass(frozen=True)
class TensorInfo:
    """A tensor as its file describes it; ``dtype`` as safetensors names it ("F32", "BF16", ...)."""

    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Checkpoint:
    """The files of a model directory. ``num_elements`` and ``dtypes`` (elements per storage type, as safetensors names
    them) are known for safetensors only; ``num_bytes`` is the size of the weight files."""

    path: Path
    config: dict[str, Any]
    weights: tuple[Path, ...]
    num_bytes: int
    dtypes: dict[str, int]

    @property
    def num_elements(self) -> int:
        return sum(self.dtypes.values())


def read_checkpoint(path: Path) -> Checkpoint:
    """Read the config and the headers of the weights in directory ``path``; raise ModelError if any is unusable."""
    config = read_config_json(path)
    weights = _weight_files(path)
    dtypes: dict[str, int] = {}
    for tensor in (tensor for file in weights for tensor in read_tensors(file).values()):
        dtypes[tensor.dtype] = dtypes.get(tensor.dtype, 0) + math.prod(tensor.shape)
    return Checkpoint(path, config, weights, sum(file.stat().st_size for file in weights), dtypes)


def read_config_json(path: Path) -> dict[str, Any]:
    """The parsed config.json of directory ``path`` (or of the file itself); raises ModelError."""
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        found = ", ".join(sorted(entry.name for entry in path.iterdir())[:4]) if path.is_dir() else ""
        raise ModelError(f"{path} is not a model directory: it has no config.json ({found or 'it is empty'})")
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise ModelError(f"{file} cannot be read as JSON: {error}") from None
    if not isinstance(config, dict):
        raise ModelError(f"{file} must hold a JSON object, found {type(config).__name__}")
    return config


def read_tensors(file: Path) -> dict[str, TensorInfo]:
    """Name, dtype and shape of every tensor in a safetensors file, from its header alone; empty for other files.

    Raises ModelError if the file is damaged or cut off.
    """
    if file.suffix != ".safetensors":
        return {}
    try:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            size = file.stat().st_size
            if not 2 <= length <= size - 8:
                raise ValueError(f"its header claims {length} bytes of a {size}-byte file")
            header = json.loads(stream.read(length))
        header.pop("__metadata__", None)
        needed = 8 + length + max((entry["data_offsets"][1] for entry in header.values()), default=0)
        if size < needed:
            raise ValueError(f"it has {size} bytes of {needed}")
        return {name: TensorInfo(entry["dtype"], tuple(entry["shape"])) for name, entry in header.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{file} is a damaged or truncated safetensors file: {error}; download it again") from None


def _weight_files(path: Path) -> tuple[Path, ...]:
    for index in WEIGHT_INDEXES:
        if (path / index).is_file():
            return _indexed_files(path, path / index)
    for pattern in ("*.safetensors", "pytorch_model*.bin"):
        files = tuple(sorted(path.glob(pattern)))
        if files:
            return files
    raise ModelError(f"{path} has a config.json but no weights (*.safetensors or pytorch_model.bin); download them too")


def _indexed_files(path: Path, index: Path) -> tuple[Path, ...]:
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise ModelError(f"{index} cannot be read: {error}") from None
    missing = [name for name in names if not (path / name).is_file()]
    if missing:
        raise ModelError(
            f"{path} lacks {len(missing)} of {len(names)} weight files, the first is {missing[0]}; download them too"
        )
    return tuple(path / name for name in names)
