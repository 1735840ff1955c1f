"""Quantising weights while they are loaded, by the back ends that transformers drives."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

from gsm.errors import InputError, ModelError


def _bitsandbytes_8bit() -> Any:
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(load_in_8bit=True)


def _bitsandbytes_4bit() -> Any:
    import torch
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)


def _torchao_int8() -> Any:
    from torchao.quantization import Int8WeightOnlyConfig
    from transformers import TorchAoConfig

    return TorchAoConfig(Int8WeightOnlyConfig())


# what a user types -> (package it needs, transformers' config)
QUANTISATIONS: dict[str, tuple[str, Callable[[], Any]]] = {
    "bnb-8bit": ("bitsandbytes", _bitsandbytes_8bit),
    "bnb-4bit": ("bitsandbytes", _bitsandbytes_4bit),
    "torchao-int8": ("torchao", _torchao_int8),
}


def quantization_config(name: str) -> Any:
    """transformers' config for a name of `QUANTISATIONS`. Raises InputError or ModelError (package missing)."""
    if name not in QUANTISATIONS:
        raise InputError(f"quantisation {name!r} is unknown; use one of {', '.join(QUANTISATIONS)}")
    package, make = QUANTISATIONS[name]
    if importlib.util.find_spec(package) is None:
        raise ModelError(f"{name} needs the package {package}, which is not installed; pip install {package}")
    return make()
