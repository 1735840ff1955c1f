"""Bytes of weights, whatever a quantiser keeps them in."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from gsm.models.weights import stored_bytes, weight_bytes, weight_read_bytes


def test_weights_read_per_step(tiny_model: Any) -> None:
    for tied in (True, False):
        model = tiny_model("llama", tie_word_embeddings=tied)
        everything = sum(p.nbytes for p in model.parameters())  # a tied matrix is listed once
        table = model.get_input_embeddings().weight.nbytes
        assert weight_read_bytes(model) == (everything if tied else everything - table + table // 128)


def test_packed_buffers_count_and_derived_ones_do_not() -> None:
    """GPTQ's layers have no parameters: codes, zeros and scales are buffers of the checkpoint."""
    layer = nn.Module()
    layer.register_buffer("qweight", torch.zeros(64, 16, dtype=torch.int32))
    layer.register_buffer("scales", torch.zeros(4, 16, dtype=torch.float16))
    layer.register_buffer("mask", torch.zeros(512, 512), persistent=False)
    layer.register_buffer("bias", None)
    assert weight_bytes(nn.Sequential(layer, layer)) == 64 * 16 * 4 + 4 * 16 * 2


def test_a_wrapped_tensor_counts_what_it_holds() -> None:
    class Packed:
        """What torchao's tensors offer: a claim of the unpacked size, and the names of what they hold."""

        nbytes = 4096

        def __init__(self) -> None:
            self.codes, self.scale = torch.zeros(1024, dtype=torch.int8), torch.zeros(4)

        def __tensor_flatten__(self) -> tuple[list[str], None]:
            return ["codes", "scale"], None

    packed: Any = Packed()
    assert stored_bytes(packed) == 1024 + 16
