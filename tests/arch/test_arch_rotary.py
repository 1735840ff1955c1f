"""Frequencies and channel layouts against each model's own rotation, for all that may be compacted."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

from gsm.arch import describe
from gsm.arch.rotary import HALVES, PAIRS, rotary_layouts
from gsm.core.rotary import Rotary
from gsm.errors import UnsupportedModel

_YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 128}
KINDS = {
    "default": {"rope_type": "default", "rope_theta": 1e4},
    "linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
    "yarn": _YARN,
    "yarn, exact borders": {**_YARN, "truncate": False, "beta_fast": 16.0, "beta_slow": 2.0},
    "llama3": {
        "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}  # fmt: skip


def model_turns(model: Any, keys: torch.Tensor, positions: torch.Tensor, layer: int) -> torch.Tensor:
    """`keys [T, d]` rotated to `positions [T]` by the model's own embedding and function."""
    rotary_module = next(m for n, m in model.named_modules() if n.endswith("rotary_emb") and "layers" not in n)
    attention = next(m for m in model.modules() if getattr(m, "layer_idx", None) == layer and hasattr(m, "config"))
    arguments = (keys[None], positions[None])
    layer_types = getattr(model.config, "layer_types", None)
    if model.config.model_type == "gemma3_text":
        cos, sin = rotary_module(*arguments, layer_types[layer])
    else:
        cos, sin = rotary_module(*arguments)
    turn = sys.modules[type(attention).__module__].apply_rotary_pos_emb
    width = 2 * cos.shape[-1] if model.config.model_type == "gpt_oss" else cos.shape[-1]
    part, rest = keys[:, :width], keys[:, width:]  # partial rotation, as the attention modules do it
    turned, _ = turn(part[None, None], part[None, None], cos, sin)
    return torch.cat((turned[0, 0], rest), dim=-1)


def check(model: Any, layers: tuple[int, ...] = (0,)) -> None:
    layouts = rotary_layouts(describe(model.config))
    for layer in layers:
        k_dim = describe(model.config).layers[layer].k_dim
        keys = torch.randn(40, k_dim, generator=torch.Generator().manual_seed(layer))
        here = torch.arange(40)
        then = torch.tensor([131] * 40) + here
        moved = Rotary(layouts[layer].frequencies, layouts[layer].pairs).moved(
            model_turns(model, keys, then, layer).unsqueeze(0), torch.tensor([-131])
        )[0]
        torch.testing.assert_close(moved, model_turns(model, keys, here, layer), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_scaling_is_the_models_own(kind: str, tiny_model: Any) -> None:
    model = tiny_model("llama", rope_parameters=KINDS[kind])
    check(model)
    found = torch.tensor(rotary_layouts(describe(model.config))[0].frequencies)
    torch.testing.assert_close(found, model.model.rotary_emb.inv_freq, atol=1e-7, rtol=1e-5)


@pytest.mark.parametrize("family", sorted((HALVES | PAIRS) - {"gemma3_text"}))
def test_every_listed_family_turns_as_the_model_does(family: str, tiny_model: Any) -> None:
    check(tiny_model(family))


def test_local_layers_have_their_own_frequencies(tiny_model: Any) -> None:
    model = tiny_model("gemma3_text")
    kinds = [layer.kind for layer in describe(model.config).layers]
    check(model, (kinds.index("sliding"), kinds.index("full")))
    layouts = rotary_layouts(describe(model.config))
    assert layouts[kinds.index("sliding")] != layouts[kinds.index("full")]


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_angles_that_depend_on_the_length_are_refused(kind: str, tiny_model: Any) -> None:
    settings = {"rope_type": kind, "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 128}
    if kind == "longrope":
        settings |= {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    with pytest.raises(UnsupportedModel, match="depend on the length"):
        rotary_layouts(describe(tiny_model("llama", rope_parameters=settings).config))


@pytest.mark.parametrize("family", ["gpt2", "smollm3"])
def test_families_whose_layout_is_not_known_are_refused(family: str, tiny_model: Any) -> None:
    with pytest.raises(UnsupportedModel, match="does not know how"):
        rotary_layouts(describe(tiny_model(family).config))
