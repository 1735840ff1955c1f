"""Folding must not change what a model computes, for every family the table knows; and must be undone exactly."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gsm.config.smoothing import SmoothingConfig
from gsm.errors import AttachError, ConfigError, ModelError, UnsupportedModel
from gsm.smoothing import Calibration, apply, calibrate
from gsm.smoothing.channel import channel_fold, channel_sites
from gsm.smoothing.edits import Edits
from gsm.smoothing.int8 import RotatedLinear
from gsm.smoothing.orthogonal import paley, spreading_matrix, sylvester
from gsm.smoothing.sites import find_sites, norm_kind

PLAIN = ["llama", "qwen2", "qwen3", "mistral", "gemma", "phi3", "granite", "smollm3"]
MIXTURES = ["mixtral", "qwen2_moe", "qwen3_moe"]
CHANNEL_FAMILIES = [*PLAIN, *MIXTURES, "gemma2", "gemma3_text"]
ROTATE_FAMILIES = [*PLAIN, *MIXTURES]


@pytest.fixture
def lively(tiny_model: Any) -> Any:
    """A tiny model whose norms and biases are no longer ones and zeros, so that folding them wrongly shows."""

    def build(family: str, **overrides: Any) -> Any:
        model = tiny_model(family, **overrides)
        generator = torch.Generator().manual_seed(7)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "norm" in name or name.endswith("bias"):
                    parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.2)
        return model

    return build


def ids_for(model: Any, rows: int = 4, length: int = 24) -> torch.Tensor:
    return torch.randint(1, model.config.vocab_size, (rows, length), generator=torch.Generator().manual_seed(1))


def logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=ids, use_cache=False).logits


def check_preserved(model: Any, config: dict[str, Any], tolerance: float) -> None:
    ids = ids_for(model)
    before, state = logits(model, ids), {name: p.detach() for name, p in model.named_parameters()}
    tied = model.config.tie_word_embeddings
    with apply(model, config, samples=ids) as applied:
        changed = sum(p is not state.get(name) for name, p in model.named_parameters())
        assert changed > 3 * model.config.num_hidden_layers
        assert applied.max_logit_change is not None
        assert (logits(model, ids) - before).abs().max() <= tolerance
    after = dict(model.named_parameters())
    assert list(after) == list(state)
    assert all(after[name].data_ptr() == state[name].data_ptr() for name in state)
    assert model.config.tie_word_embeddings == tied
    assert torch.equal(logits(model, ids), before)


@pytest.mark.parametrize("family", CHANNEL_FAMILIES)
def test_channel_preserves_the_function(lively: Any, family: str) -> None:
    check_preserved(lively(family), {"enable": True, "method": "channel", "alpha": 0.7}, 2e-4)


@pytest.mark.parametrize("family", ROTATE_FAMILIES)
def test_rotate_preserves_the_function(lively: Any, family: str) -> None:
    check_preserved(lively(family), {"enable": True, "method": "rotate"}, 2e-4)


@pytest.mark.parametrize("method", ["channel", "rotate"])
def test_tied_embeddings_and_many_query_heads_per_value_head(lively: Any, method: str) -> None:
    model = lively("llama", tie_word_embeddings=True, num_attention_heads=8, num_key_value_heads=2, head_dim=8)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    check_preserved(model, {"enable": True, "method": method}, 2e-4)
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_a_mixture_of_experts_is_unchanged_router_included(tiny_model: Any) -> None:
    model = tiny_model("mixtral", num_local_experts=4)
    ids = ids_for(model)
    routed: list[torch.Tensor] = []
    handle = model.model.layers[1].mlp.gate.register_forward_hook(lambda m, a, out: routed.append(out[0]))
    try:
        before = logits(model, ids)
        with apply(model, {"enable": True, "method": "channel"}, samples=ids) as applied:
            assert (logits(model, ids) - before).abs().max() <= 1e-5 * before.abs().max()
        assert torch.allclose(routed[0], routed[-1], atol=1e-5)
        assert "stacked experts" in applied.left_out["model.layers.0.mlp.experts.down_proj"]
    finally:
        handle.remove()


def test_a_channel_that_is_always_zero_keeps_a_finite_scale(lively: Any) -> None:
    model = lively("llama")
    with torch.no_grad():
        model.model.layers[0].input_layernorm.weight[5] = 0.0
        model.model.layers[1].mlp.up_proj.weight[3] = 0.0
        model.model.layers[1].mlp.down_proj.weight[:, 4] = 0.0
    check_preserved(model, {"enable": True, "method": "channel", "alpha": 1.0}, 2e-4)
    check_preserved(model, {"enable": True, "method": "channel", "alpha": 0.0}, 2e-4)


def test_search_never_chooses_worse_than_doing_nothing(lively: Any) -> None:
    model = lively("llama")
    ids = ids_for(model, 16)
    with torch.no_grad():
        model.model.layers[0].input_layernorm.weight[5] *= 100  # an outlier channel
    exact = logits(model, ids)
    errors = {}
    for name, config in (("plain", {}), ("channel", {"enable": True, "method": "channel"})):
        with apply(model, {**config, "int8": "dynamic"}, samples=ids):
            errors[name] = float((logits(model, ids) - exact).pow(2).mean())
    assert errors["channel"] < 0.7 * errors["plain"]


def test_excluded_and_named_sites_are_left_alone(lively: Any) -> None:
    model = lively("llama")
    ids = ids_for(model)
    config = SmoothingConfig(enable=True, method="channel", target_layers=("*layers.0*",))
    with apply(model, config, samples=ids, exclude=["model.layers.0.mlp.down_proj"]) as applied:
        assert applied.smoothed == [
            "model.layers.0.input_layernorm",
            "model.layers.0.self_attn.o_proj",
            "model.layers.0.post_attention_layernorm",
        ]
    with (
        pytest.raises(ConfigError, match="matches no site"),
        apply(model, config.model_copy(update={"target_layers": ("*nope*",)}), samples=ids),
    ):
        pass


def test_the_online_rotation_is_placed_and_can_be_switched_off(lively: Any) -> None:
    model = lively("llama")
    for online in (True, False):
        with apply(model, {"enable": True, "method": "rotate", "online_rotation": online}):
            found = [module for module in model.modules() if isinstance(module, RotatedLinear)]
            assert len(found) == (model.config.num_hidden_layers if online else 0)


def test_unknown_models_and_post_norms_are_refused_with_a_way_out(tiny_model: Any) -> None:
    with pytest.raises(UnsupportedModel, match="known layout"):
        find_sites(tiny_model("gpt_neox"))
    for family in ("gemma2", "qwen3_next"):
        with pytest.raises(UnsupportedModel, match="use channel"), apply(tiny_model(family), {"enable": True}):
            pass


def test_calibration_is_needed_and_the_config_is_never_changed(lively: Any) -> None:
    model = lively("llama")
    config = SmoothingConfig(enable=True, method="channel", int8="dynamic")
    raw: dict[str, Any] = {"smoothing": {"enable": True, "method": "channel", "int8": "dynamic"}}
    with pytest.raises(ConfigError, match="gsm calibrate"), apply(model, config):
        pass
    other = lively("qwen2")
    for each in (model, other):
        for source in (config, raw):
            with apply(each, source, samples=ids_for(each)):
                pass
    assert config == SmoothingConfig(enable=True, method="channel", int8="dynamic")
    assert raw == {"smoothing": {"enable": True, "method": "channel", "int8": "dynamic"}}


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize("config", [{"enable": True, "method": "rotate", "int8": "static"}, {"int8": "dynamic"}])
def test_an_error_in_the_middle_of_applying_gives_every_byte_back(
    lively: Any, monkeypatch: pytest.MonkeyPatch, error: type[BaseException], config: dict[str, Any]
) -> None:
    model = lively("llama", tie_word_embeddings=True)
    ids = ids_for(model)
    before, objects = logits(model, ids), dict(model.named_modules())
    tensors = {name: (p, p.clone()) for name, p in model.named_parameters(remove_duplicate=False)}
    for k in (1, 5, 14):
        calls = 0
        original = Edits._swap

        def failing(self: Edits, *args: Any, k: int = k, original: Any = original) -> None:
            nonlocal calls
            calls += 1
            original(self, *args)
            if calls == k:
                raise error

        monkeypatch.setattr(Edits, "_swap", failing)
        with pytest.raises(error), apply(model, config, samples=ids):
            raise AssertionError("the error was lost")
        monkeypatch.undo()
        assert calls == k
        assert dict(model.named_modules()) == objects
        after = dict(model.named_parameters(remove_duplicate=False))
        assert all(after[name] is p and torch.equal(p, copy) for name, (p, copy) in tensors.items())
        assert torch.equal(logits(model, ids), before)


def test_an_interrupt_while_undoing_is_raised_only_after_everything_is_back(lively: Any) -> None:
    model = lively("llama")
    edits, layer = Edits(model), model.model.layers[0]
    old, calls = layer.mlp, 0
    edits.set_module("model.layers.0.mlp", torch.nn.Identity())
    edits.set_parameter("model.norm.weight", torch.zeros_like(model.model.norm.weight))
    undo_last = edits._undo_last

    def interrupted() -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise KeyboardInterrupt
        undo_last()

    edits._undo_last = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        edits.undo()
    assert len(edits) == 0
    assert layer.mlp is old
    assert not torch.equal(model.model.norm.weight, torch.zeros_like(model.model.norm.weight))


def test_a_fold_that_changes_the_function_is_noticed_and_undone(lively: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = lively("llama")
    ids = ids_for(model)
    before = logits(model, ids)

    def broken(*args: Any, **kwargs: Any) -> Any:
        fold = channel_fold(*args, **kwargs)
        fold.change("model.layers.0.self_attn.q_proj.weight", lambda w: w * 1.5)
        return fold

    monkeypatch.setattr("gsm.smoothing.context.channel_fold", broken)
    config = {"enable": True, "method": "channel"}
    with pytest.raises(ModelError, match="changed the model's logits"), apply(model, config, samples=ids):
        pass
    assert torch.equal(logits(model, ids), before)


def test_applying_twice_is_refused(lively: Any) -> None:
    model = lively("llama")
    with (
        apply(model, {"enable": True, "method": "rotate"}),
        pytest.raises(AttachError, match="already applied"),
        apply(model, {"int8": "dynamic"}),
    ):
        pass


def test_int8_after_window_smoothing_is_the_wrong_order(lively: Any) -> None:
    model = lively("llama")
    with (
        apply(model, {"enable": True, "method": "window"}, samples=ids_for(model)),
        pytest.raises(AttachError, match="quantise first, then smooth"),
        apply(model, {"int8": "dynamic"}),
    ):
        pass


def test_norms_are_told_apart_by_what_they_do(tiny_model: Any) -> None:
    assert norm_kind(tiny_model("llama").model.norm) == "plain"
    assert norm_kind(tiny_model("gemma").model.norm) == "one_plus"
    assert norm_kind(torch.nn.LayerNorm(64)) == "layer"
    assert norm_kind(torch.nn.Linear(64, 64)) is None


def test_value_scales_are_shared_by_the_query_heads_of_a_group(lively: Any) -> None:
    model = lively("llama")
    sites, _ = channel_sites(find_sites(model))
    site = next(site for site in sites if site.name.endswith("o_proj"))
    assert (site.num_kv_heads, site.groups) == (2, 2)


@pytest.mark.parametrize("n", [1, 2, 12, 28, 36, 60, 96, 576, 1536, 7, 43 * 4])
def test_spreading_matrices_are_orthogonal_and_spread(n: int) -> None:
    matrix = spreading_matrix(n)
    assert torch.allclose(matrix @ matrix.T, torch.eye(n, dtype=torch.float64), atol=1e-9)
    if n not in (7, 43 * 4):
        assert torch.allclose(matrix.abs(), torch.full_like(matrix, n**-0.5))


def test_paley_orders() -> None:
    assert paley(10) is None
    assert paley(20) is not None
    assert torch.equal(sylvester(1), torch.ones(1, 1, dtype=torch.float64))


def test_calibration_survives_its_file(lively: Any, tmp_path: Any) -> None:
    model = lively("llama")
    ids = ids_for(model)
    calibration = calibrate(model, ids, gradients=True, name="tiny")
    calibration.save(tmp_path / "c.json")
    again = Calibration.load(tmp_path / "c.json")
    assert again == calibration
    config = {"enable": True, "method": "channel", "alpha": 0.5}
    with apply(model, config, calibration=again):
        one = [p.clone() for p in model.parameters()]
    with apply(model, config, samples=ids):
        assert all(torch.equal(a, b) for a, b in zip(one, model.parameters(), strict=True))
