"""Load a model and its tokenizer, ready for decoding on the CPU or a CUDA device."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gsm.arch import ModelArch, describe
from gsm.errors import InputError, ModelError
from gsm.models.checkpoint import Checkpoint, read_checkpoint
from gsm.models.memory import require_memory
from gsm.models.quantised import quantization_config
from gsm.models.quiet import quiet_transformers
from gsm.models.sizes import DTYPE_BYTES
from gsm.models.sources import DEMO, demo_gguf_path, resolve_source

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

DTYPES = {
    "float32": "float32", "fp32": "float32", "bfloat16": "bfloat16", "bf16": "bfloat16",
    "float16": "float16", "fp16": "float16", "auto": "auto",
}  # fmt: skip


@dataclass(frozen=True)
class LoadedModel:
    """A model in eval mode with its tokenizer. ``path`` is the local directory, or the hub id it came from."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    name: str
    path: Path | str
    arch: ModelArch


def load_model(
    source: str | Path,
    *,
    dtype: str = "float32",
    threads: int | None = None,
    device: str = "cpu",
    quantization: str | None = None,
) -> LoadedModel:
    """Load ``source``: "demo", a model directory, a .gguf file, or a hub id (only then may a download happen).

    ``dtype`` is float32, bfloat16, float16 or auto (as stored). ``threads`` sets torch's thread count for this
    process. ``device`` is cpu, cuda or cuda:N. ``quantization`` quantises the weights while loading (a name of
    `gsm.models.quantised`); a checkpoint that is quantised needs nothing. Attention runs through torch's sdpa where
    the model has it.
    Raises ModelError or InputError, each with the remedy.
    """
    dtype = _check_dtype(dtype)
    _check_device(device)
    _set_threads(threads)
    quantiser = quantization_config(quantization) if quantization is not None else None
    path = resolve_source(source)
    config: Any = None
    if isinstance(path, Path):
        checkpoint = read_checkpoint(path)
        config = checkpoint.config
        require_memory(_loaded_bytes(checkpoint, dtype), f"loading {path.name} in {dtype}", device)
    try:
        with quiet_transformers():
            tokenizer = _load_tokenizer(path)
            is_quantised = quantiser is not None or "quantization_config" in (config or {})
            model = _load_weights(path, dtype, device, quantized=is_quantised, quantiser=quantiser)
    except ModelError:
        raise
    except Exception as error:  # the one seam where transformers' and torch's errors become ours
        raise _translate(error, source, device) from error
    return LoadedModel(model.eval(), tokenizer, _name(source, path), path, describe(model.config))


def load_tokenizer(source: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a model, without its weights. Raises ModelError with the remedy."""
    path = resolve_source(source)
    try:
        with quiet_transformers():
            return _load_tokenizer(path)
    except ModelError:
        raise
    except Exception as error:
        raise _translate(error, source, "cpu") from error


def _check_dtype(dtype: str) -> str:
    name = DTYPES.get(str(dtype).removeprefix("torch."))
    if name is None:
        raise InputError(f"dtype {dtype!r} is unknown; use float32, bfloat16, float16 or auto")
    return name


def _check_device(device: str) -> None:
    import torch

    try:
        kind = torch.device(device).type
    except RuntimeError:
        raise InputError(f"device {device!r} is unknown; use cpu, cuda or cuda:N") from None
    if kind == "cuda" and not torch.cuda.is_available():
        raise InputError(f"device {device!r} was asked for, but this torch ({torch.__version__}) sees no CUDA device")


def _set_threads(threads: int | None) -> None:
    if threads is None:
        return
    if threads < 1:
        raise InputError(f"threads is {threads}; it must be at least 1")
    import torch

    torch.set_num_threads(threads)


def _loaded_bytes(checkpoint: Checkpoint, dtype: str) -> int:
    """Bytes of the weights once loaded. A quantised or unknown file is taken at its size on disk."""
    width = DTYPE_BYTES.get(dtype)
    if width is None or not checkpoint.num_elements or "quantization_config" in checkpoint.config:
        return checkpoint.num_bytes
    return checkpoint.num_elements * width


def _load_tokenizer(path: Path | str) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(path), local_files_only=_local_only(path))
    except Exception as error:
        if isinstance(path, Path):
            raise ModelError(f"{path} has no usable tokenizer ({_first_line(error)}); add tokenizer.json") from error
        raise


def _load_weights(
    path: Path | str, dtype: str, device: str, *, quantized: bool, quantiser: Any = None
) -> PreTrainedModel:
    import torch
    from transformers import AutoModelForCausalLM

    kwargs: dict[str, Any] = {
        "dtype": "auto" if dtype == "auto" else getattr(torch, dtype),
        "local_files_only": _local_only(path),
    }
    if quantiser is not None:
        kwargs["quantization_config"] = quantiser
    if quantized:
        kwargs["device_map"] = {"": device}  # quantised layers are built on their device and cannot be moved later
    try:
        model = AutoModelForCausalLM.from_pretrained(str(path), attn_implementation="sdpa", **kwargs)
    except ValueError as error:
        if "scaled_dot_product_attention" not in str(error):
            raise
        model = AutoModelForCausalLM.from_pretrained(str(path), attn_implementation="eager", **kwargs)
    return model if quantized else _move(model, device)


def _move(model: PreTrainedModel, device: str) -> PreTrainedModel:
    target: torch.device | str = device
    return model if device == "cpu" else model.to(target)  # type: ignore[arg-type]


def _local_only(path: Path | str) -> bool:
    return isinstance(path, Path) or os.environ.get("HF_HUB_OFFLINE", "0").upper() in {"1", "TRUE", "YES", "ON"}


def _translate(error: Exception, source: str | Path, device: str) -> ModelError:
    """One sentence for whatever transformers, huggingface_hub, safetensors or torch raised."""
    text = _first_line(error)
    lowered = str(error).lower()
    if isinstance(error, MemoryError) or "out of memory" in lowered or "can't allocate memory" in lowered:
        return ModelError(f"loading {source} ran out of memory on {device}; use a smaller dtype or model")
    if "offline" in lowered or "couldn't connect" in lowered or "cached" in lowered or "connection" in lowered:
        return ModelError(f"{source} is not on this machine and cannot be downloaded ({text}); give a local directory")
    if "not a valid model identifier" in lowered or "repository not found" in lowered or "401" in lowered:
        return ModelError(f"the hub has no model {source!r} that you may read; check the name or give a local path")
    return ModelError(f"{source} cannot be loaded: {text}")


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__


def _name(source: str | Path, path: Path | str) -> str:
    if str(source) == DEMO:
        return demo_gguf_path().stem.split(".")[0]
    if isinstance(path, str):
        return path
    origin = Path(source)
    return origin.stem if origin.suffix == ".gguf" else path.resolve().name
