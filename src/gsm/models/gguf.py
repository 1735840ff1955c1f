"""Convert a .gguf file once to a float32 Hugging Face directory in the cache.

transformers can load GGUF, but dequantises on every load (about ten seconds for the demo model) or, if asked to keep
the blocks, unpacks every weight in every forward pass. A converted directory loads in a second and can be shared.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from gsm.errors import ModelError
from gsm.models.memory import require_memory
from gsm.models.quiet import quiet_transformers

CONVERTER_VERSION = 1  # raise it when the converted files change, so that old ones are not used
_MAGIC = b"GGUF"
_SAMPLES, _SAMPLE_BYTES = 16, 1 << 20


def convert_gguf(path: Path, cache: Path) -> Path:
    """Return the converted directory for ``path``, converting on the first call.

    Safe when several processes ask at once (one converts, the others wait) and when one is killed half way: the
    directory appears under its final name only when it is complete. Raises ModelError.
    """
    from filelock import FileLock

    target = converted_directory(path, cache)
    if target.is_dir():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{target}.lock"):
            if not target.is_dir():  # another process may have finished while we waited
                _convert_into(path, target)
    except OSError as error:
        raise ModelError(f"cannot write the converted model to {target}: {error}; set GSM_CACHE_DIR") from None
    return target


def converted_directory(path: Path, cache: Path) -> Path:
    """Where the converted ``path`` lies or will lie. Raises ModelError if it is no GGUF file."""
    _check_header(path)
    return cache / "models" / f"{path.stem}-{_fingerprint(path)}-v{CONVERTER_VERSION}"


def _convert_into(path: Path, target: Path) -> None:
    require_memory(num_parameters(path) * 4 * 2, f"converting {path.name}")
    print(f"gsm: converting {path.name} to {target} (once)", file=sys.stderr, flush=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        _write_checkpoint(path, partial)
        os.replace(partial, target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _write_checkpoint(path: Path, folder: Path) -> None:
    with quiet_transformers():
        model, tokenizer = _read(path)
        model.config._name_or_path = path.stem
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def _read(path: Path) -> tuple[Any, Any]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    file: dict[str, Any] = {"gguf_file": path.name, "local_files_only": True}
    try:
        model = AutoModelForCausalLM.from_pretrained(path.parent, **file, **_dequantize(), dtype=torch.float32)
        return model, AutoTokenizer.from_pretrained(path.parent, **file)
    except ImportError as error:
        raise ModelError(f"reading {path.name} needs more packages: {error}; pip install 'gsm-infer[gguf]'") from None
    except Exception as error:  # transformers and gguf raise many kinds for a file they cannot read
        raise ModelError(f"{path} cannot be read as a GGUF model ({_first_line(error)}); is it complete?") from error


def _dequantize() -> dict[str, Any]:
    """The keyword that unpacks the weights; before GgufConfig existed transformers always did."""
    import transformers

    config = getattr(transformers, "GgufConfig", None)
    return {"quantization_config": config(dequantize=True)} if config else {}


def _check_header(path: Path) -> None:
    try:
        with path.open("rb") as file:
            magic = file.read(4)
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from None
    if magic != _MAGIC:
        raise ModelError(f"{path} is not a GGUF file: it starts with {magic!r} instead of {_MAGIC!r}")


def _fingerprint(path: Path) -> str:
    """Identify a file's content by its size and evenly spaced samples; hashing 20 GB on every load would cost more."""
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        for index in range(_SAMPLES):
            file.seek(index * max(0, size - _SAMPLE_BYTES) // (_SAMPLES - 1))
            digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:12]


def num_parameters(path: Path) -> int:
    """Total weights in the file; raises ModelError when the tensor table or the data is cut off."""
    try:
        from gguf import GGUFReader
    except ImportError:
        raise ModelError("reading a .gguf file needs the gguf package; pip install 'gsm-infer[gguf]'") from None
    try:
        return sum(int(tensor.n_elements) for tensor in GGUFReader(str(path)).tensors)
    except Exception as error:  # the reader indexes past the end of a cut file: ValueError, IndexError, ...
        raise ModelError(
            f"{path} is a damaged or truncated GGUF file ({_first_line(error)}); download it again"
        ) from None


def _first_line(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:160]}" if text else type(error).__name__
