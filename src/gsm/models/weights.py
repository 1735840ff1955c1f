"""Bytes of a model's weights as they lie in memory, quantised or not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel


def weight_bytes(model: Any) -> int:
    """Bytes of every parameter and of every buffer that belongs to the checkpoint (GPTQ keeps its weights in those).

    Each tensor counts once, tied or not. What a library keeps beside a weight as a plain attribute (bitsandbytes'
    scales, below 2 % of it) is not seen.
    """
    return sum(map(stored_bytes, {id(tensor): tensor for tensor in _tensors(model)}.values()))


def weight_read_bytes(model: PreTrainedModel) -> int:
    """Bytes of weights that one decode step reads: all, but of an untied embedding only one row."""
    head = model.get_output_embeddings()
    weight = getattr(model.get_input_embeddings(), "weight", None)
    tied = head is not None and getattr(head, "weight", None) is weight
    if weight is None or tied or not any(tensor is weight for tensor in _tensors(model)):
        return weight_bytes(model)
    table = stored_bytes(weight)
    return weight_bytes(model) - table + table // int(weight.shape[0])


def stored_bytes(tensor: Tensor) -> int:
    """Bytes in memory. A tensor that wraps others (torchao's) claims what it would take unpacked; theirs count."""
    parts: Any = getattr(tensor, "__tensor_flatten__", None)
    if parts is None:
        return int(tensor.nbytes)
    return sum(stored_bytes(getattr(tensor, name)) for name in parts()[0])


def _tensors(model: Any) -> Iterator[Tensor]:
    yield from model.parameters()
    for module in model.modules():
        derived = module._non_persistent_buffers_set  # rotary tables, masks
        yield from (t for name, t in module._buffers.items() if t is not None and name not in derived)
