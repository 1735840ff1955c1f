"""Calling a transformers model with a cache, whatever the keyword is named in this version."""

from __future__ import annotations

import inspect
from typing import Any

import torch
import transformers
from packaging.version import Version
from torch import Tensor
from transformers import PreTrainedModel

from gsm.errors import InputError

# Before 5.21 a `generate` that reads its prompt in chunks begins at position 0 again even when its cache is not empty.
CHUNKS_GO_ON = Version(transformers.__version__) >= Version("5.21")


def cache_kwarg(model: PreTrainedModel) -> str:
    """`cache` from transformers 5.24 on, `past_key_values` before. Decorators keep the new name in the signature."""
    parameters = inspect.signature(type(model).forward).parameters
    return "cache" if "cache" in parameters else "past_key_values"


@torch.inference_mode()
def prefill(model: PreTrainedModel, input_ids: Tensor, cache: Any, chunk_tokens: int | None = None) -> Tensor:
    """Feed `input_ids [rows, length]` to the model in chunks, filling `cache` (ours or a transformers cache).

    Returns the logits of the last token, `[rows, vocab]`. Raises InputError when the prompt does not fit the window.
    """
    length = input_ids.shape[1]
    window = model.config.get_text_config(decoder=True).max_position_embeddings
    if cache.get_seq_length() + length > window and not getattr(cache, "is_endless", False):
        total = cache.get_seq_length() + length
        raise InputError(f"the prompt needs {total} positions but the model was trained for {window}; shorten it")
    logits = None
    for chunk in input_ids.split(chunk_tokens or length, dim=1):
        logits = model(chunk, **{cache_kwarg(model): cache}, use_cache=True, logits_to_keep=1).logits
    if logits is None:
        raise InputError("the prompt is empty; give at least one token")
    return logits[:, -1]
