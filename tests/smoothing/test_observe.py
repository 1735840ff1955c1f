"""Calibration sees the right places, keeps sinks apart, and leaves no trace."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from gsm.config.smoothing import SmoothingConfig
from gsm.errors import ConfigError, InputError, MeasurementError
from gsm.smoothing import Calibration, calibrate, choose_sites, cut_samples
from gsm.smoothing.observe import int8_error, observe
from gsm.smoothing.select import rollback_order


@pytest.fixture(scope="module")
def model(tiny_model: Any) -> Any:
    return tiny_model("llama")


@pytest.fixture(scope="module")
def samples(model: Any) -> torch.Tensor:
    return torch.randint(1, model.config.vocab_size, (12, 20), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def calibration(model: Any, samples: torch.Tensor) -> Calibration:
    return calibrate(model, samples, gradients=True, name="tiny")


def test_statistics_equal_those_of_the_whole_activation(model: Any, samples: torch.Tensor) -> None:
    seen: list[torch.Tensor] = []
    handle = model.model.layers[1].mlp.down_proj.register_forward_pre_hook(lambda m, args: seen.append(args[0]))
    try:
        with torch.no_grad():
            model(input_ids=samples)
    finally:
        handle.remove()
    x = seen[0].double()
    stats = calibrate(model, samples, num_sink_tokens=2).sites["model.layers.1.mlp.down_proj:input"]
    body, flat = x[:, 2:].flatten(), x.flatten()
    assert stats.num_tokens == samples.numel()
    assert stats.max == pytest.approx(float(flat.abs().max()))
    assert stats.max_body == pytest.approx(float(body.abs().max()))
    assert stats.variance == pytest.approx(float(flat.var(correction=0)), rel=1e-5)
    kurtosis = float(((body - body.mean()) ** 4).mean() / body.var(correction=0) ** 2 - 3)
    assert stats.kurtosis_body == pytest.approx(kurtosis, rel=1e-4)
    assert stats.sink_share == pytest.approx(float(x[:, :2].pow(2).sum() / x.pow(2).sum()), rel=1e-5)
    energy = x.pow(2).flatten(0, 1).sum(0)
    assert (stats.top_channel, stats.top_channel_share) == (
        int(energy.argmax()),
        pytest.approx(float(energy.max() / energy.sum()), rel=1e-5),
    )
    assert stats.channel_max == pytest.approx(x.abs().flatten(0, 1).amax(0).tolist())


def test_every_site_of_every_block_is_there_and_hooks_are_gone(model: Any, calibration: Calibration) -> None:
    assert len(calibration.sites) == 6 * model.config.num_hidden_layers
    assert {site.kind for site in calibration} == {
        "residual", "attn_norm", "attn_out_input", "attn_out_output", "mlp_norm", "mlp_out_input",
    }  # fmt: skip
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_gradients_reach_activations_but_never_weights(
    model: Any, samples: torch.Tensor, calibration: Calibration
) -> None:
    assert all(site.sensitivity is not None and site.sensitivity > 0 for site in calibration)
    assert all(parameter.grad is None and parameter.requires_grad for parameter in model.parameters())
    name = "model.layers.2.mlp.down_proj"
    kept: list[Any] = []

    def watch(module: Any, args: Any) -> None:
        args[0].retain_grad()
        kept.append(args[0])

    handle = model.get_submodule(name).register_forward_pre_hook(watch)
    expected = torch.zeros((), dtype=torch.float64)
    try:
        for sample in samples:
            logits = model(input_ids=sample[None]).logits
            torch.nn.functional.cross_entropy(logits[0, :-1], sample[1:]).backward()
            x = kept.pop()
            expected += (x.grad.double() ** 2 * int8_error(x.detach()).double() ** 2).sum()
    finally:
        handle.remove()
        model.zero_grad()
    site = calibration.sites[f"{name}:input"]
    assert site.sensitivity == pytest.approx(float(expected) / samples.numel(), rel=1e-3)


def test_a_mixture_is_observed_where_it_can_be(tiny_model: Any) -> None:
    model = tiny_model("qwen2_moe")
    ids = torch.randint(1, model.config.vocab_size, (4, 10))
    calibration = calibrate(model, ids)
    assert not any("experts.down_proj" in site.name for site in calibration)
    shared = calibration.sites["model.layers.0.mlp.shared_expert.down_proj:input"]
    assert shared.num_tokens == 40


def test_choices_come_with_their_reason(calibration: Calibration, model: Any) -> None:
    choices = choose_sites(calibration, SmoothingConfig(method="window"))
    sites = calibration.of_kind("attn_out_input", "mlp_out_input")
    best = max(sites, key=lambda site: site.kurtosis_body)
    assert sum(choice.chosen for choice in choices) == 2  # a quarter of six, rounded up
    assert next(choice for choice in choices if choice.name == best.name).reason.startswith("rank 1 of 6 by kurtosis")
    by_sensitivity = choose_sites(calibration, SmoothingConfig(method="channel", target_layers="sensitivity"))
    assert sum(choice.chosen for choice in by_sensitivity) == 3
    without = calibrate(model, torch.randint(1, 100, (2, 8)))
    with pytest.raises(ConfigError, match="--gradients"):
        choose_sites(without, SmoothingConfig(target_layers="sensitivity"))
    names = [site.name for site in sites]
    ordered = rollback_order(calibration, names)
    assert sorted(ordered) == sorted(names)
    values = [next(site.sensitivity for site in sites if site.name == name) for name in ordered]
    assert values == sorted(values, reverse=True)


def test_a_site_whose_tail_is_the_first_token_is_called_sink_driven(model: Any, samples: torch.Tensor) -> None:
    layer = model.model.layers[0].mlp.down_proj

    def spike(module: Any, args: Any) -> Any:
        x = args[0].clone()
        x[:, 0, 3] = 1e3
        return (x,)

    handle = layer.register_forward_pre_hook(spike)
    try:
        calibration = calibrate(model, samples)
    finally:
        handle.remove()
    site = calibration.sites["model.layers.0.mlp.down_proj:input"]
    assert site.sink_driven
    assert site.kurtosis > 50 * site.kurtosis_body
    choice = choose_sites(calibration, SmoothingConfig(method="window"))[1]
    assert choice.name == site.name
    assert "sink-driven" in choice.reason


def test_bad_input_is_refused(model: Any, tmp_path: Path) -> None:
    with pytest.raises(MeasurementError, match="shape"):
        observe(model, torch.zeros(3, 1, dtype=torch.long))
    with pytest.raises(InputError, match="less than one sample"):
        cut_samples(torch.arange(5), 4, 8)
    broken = tmp_path / "broken.json"
    for text in ("{", "[]", json.dumps({"format": "gsm-calibration-1"})):
        broken.write_text(text)
        with pytest.raises(InputError):
            Calibration.load(broken)
    with pytest.raises(InputError, match="cannot be read"):
        Calibration.load(tmp_path / "missing.json")


def test_activations_that_overflow_are_refused(model: Any, samples: torch.Tensor) -> None:
    handle = model.model.layers[1].register_forward_pre_hook(lambda m, args: (args[0] * 1e38 * 1e10, *args[1:]))
    try:
        with pytest.raises(MeasurementError, match="not finite"):
            calibrate(model, samples)
    finally:
        handle.remove()


def test_samples_are_spread_over_the_text() -> None:
    rows = cut_samples(torch.arange(1000), 4, 10)
    assert rows[:, 0].tolist() == [0, 330, 660, 990]
    assert cut_samples(torch.arange(35), 100, 10).shape == (3, 10)
