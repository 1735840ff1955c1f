"""Pooling kv heads: exact where heads were equal, loadable by plain transformers, honest about the loss."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from gsm.convert.compare import compare, evaluation_windows
from gsm.convert.gqa import pooled_model
from gsm.convert.pool import pool_heads, pooled_config
from gsm.convert.uptrain import uptrain
from gsm.errors import ConfigError, InputError, UnsupportedModel
from gsm.quality import no_progress

FAMILIES = [
    ("llama", {"attention_bias": True}),
    ("qwen2", {}),  # biases on q, k, v
    ("qwen3", {}),  # a norm per head
    ("olmo2", {}),  # a norm over all heads
    ("phi3", {}),  # q, k and v in one matrix
    ("gemma2", {}),
]


def with_equal_heads(model: Any, groups: int) -> Any:
    """Make the kv heads of every group equal, so that pooling must not change the function."""
    config = model.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    for name, tensor in model.state_dict().items():
        rows = config.num_key_value_heads * head_dim
        part = tensor[config.num_attention_heads * head_dim :] if "qkv_proj" in name else tensor
        for piece in part.split(rows) if "qkv_proj" in name else (part,):
            if any(key in name for key in ("k_proj", "v_proj", "k_norm", "qkv_proj")) and piece.shape[0] == rows:
                heads = piece.view(groups, -1, head_dim, *piece.shape[1:])
                heads.copy_(heads[:, :1].clone().expand_as(heads))
    return model


@pytest.mark.parametrize(("family", "overrides"), FAMILIES)
def test_equal_heads_are_pooled_without_any_loss(family: str, overrides: dict[str, Any], tiny_model: Any) -> None:
    model = tiny_model(family, num_key_value_heads=4, **overrides)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if name.endswith("bias"):
                tensor.normal_(generator=torch.Generator().manual_seed(len(name)))
        with_equal_heads(model, groups=2)
    ids = torch.randint(2, 128, (2, 40), generator=torch.Generator().manual_seed(0))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    pooled = pooled_model(model, 2)
    with torch.no_grad():
        expected, got = model(ids).logits, pooled(ids).logits
    # a norm over all heads sees half of them, at the same mean square
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    cache = pooled(ids, use_cache=True).past_key_values
    assert cache.layers[0].keys.shape[1] == 2


def test_pooling_is_the_mean_of_neighbours_in_the_same_dtype() -> None:
    heads = torch.randn(6, 4, 5)
    pooled = pool_heads(heads.flatten(0, 1), before=6, after=2)
    torch.testing.assert_close(pooled.view(2, 4, 5), heads.view(2, 3, 4, 5).mean(1))
    assert pool_heads(torch.randn(8).half(), 4, 1).dtype == torch.float16


@pytest.mark.parametrize("num_kv_heads", [3, 4, 8])
def test_groups_that_are_not_equal_are_refused(num_kv_heads: int, tiny_model: Any) -> None:
    model = tiny_model("llama", num_key_value_heads=4)
    with pytest.raises(ConfigError, match="use 1 or 2"):
        pooled_config(model.config, num_kv_heads)


@pytest.mark.parametrize("family", ["gpt_neox", "deepseek_v3"])
def test_families_without_kv_heads_to_pool_are_refused(family: str, tiny_model: Any) -> None:
    with pytest.raises(UnsupportedModel, match=r"no num_key_value_heads|no kv heads"):
        pooled_config(tiny_model(family).config, 1)


def test_a_saved_checkpoint_is_loaded_by_plain_transformers(tmp_path: Path, tiny_model: Any) -> None:
    pooled = pooled_model(tiny_model("llama", num_key_value_heads=4), 1)
    pooled.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    ids = torch.arange(2, 30)[None]
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, pooled(ids).logits)
    assert loaded.config.num_key_value_heads == 1


def test_uptraining_brings_back_part_of_the_loss_and_touches_attention_only(tiny_model: Any) -> None:
    """Kv heads that differ by a factor only: what pooling loses, q_proj and o_proj can give back."""
    teacher = tiny_model("llama", num_key_value_heads=4)
    with torch.no_grad():
        with_equal_heads(teacher, groups=1)
        for layer in teacher.model.layers:
            for linear in (layer.self_attn.k_proj, layer.self_attn.v_proj):
                linear.weight.view(4, 16, -1).mul_(torch.tensor([0.4, 0.8, 1.2, 1.6]).view(4, 1, 1))
    student = pooled_model(teacher, 1)
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(2, 128, (6000,), generator=generator)
    windows = evaluation_windows(torch.randint(2, 128, (1200,), generator=generator), 2)
    lost = compare(teacher, {"student": student}, windows, no_progress)["student"]
    frozen = {n: p.clone() for n, p in student.named_parameters() if "self_attn" not in n}
    before = {n: p.clone() for n, p in teacher.named_parameters()}
    done = uptrain(teacher, student, ids, steps=60, batch=2, progress=no_progress)
    after = compare(teacher, {"student": student}, windows, no_progress)["student"]
    assert after.kl < 0.85 * lost.kl
    assert done.last_loss < done.first_loss
    assert all(torch.equal(p, frozen[n]) for n, p in student.named_parameters() if n in frozen)
    assert all(torch.equal(p, before[n]) for n, p in teacher.named_parameters())
    assert all(p.requires_grad and p.grad is None for p in student.parameters())


def test_an_identical_model_loses_nothing(tiny_model: Any) -> None:
    model = tiny_model("llama")
    windows = evaluation_windows(torch.randint(2, 128, (1100,)), 2)
    result = compare(model, {"same": model}, windows, no_progress)
    assert result["same"].ratio == pytest.approx(1.0)
    assert result["same"].kl == pytest.approx(0.0, abs=1e-6)
    assert result["same"].top1_agreement == 1.0


def test_short_texts_are_told(tiny_model: Any) -> None:
    with pytest.raises(InputError, match="evaluation text has 10 tokens"):
        evaluation_windows(torch.arange(10), 2)
    model = SimpleNamespace()
    with pytest.raises(InputError, match="training text has 10"):
        uptrain(model, model, torch.arange(10), 2, 1, no_progress)
