"""Deliberately broken runs of real models: each cause is found by its name, and a healthy run gets a clean bill."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from gsm.config import load_config
from gsm.integrations.transformers import Cache
from gsm.measure.diagnose import Diagnosis, Subject
from gsm.smoothing import calibrate
from support_models import TinyModel

PROMPT, FORCED = 320, 24


@pytest.fixture
def model(tiny_model: TinyModel) -> Any:
    return tiny_model("llama", max_position_embeddings=2048, num_hidden_layers=2)


def ids(count: int, seed: int = 0) -> Tensor:
    return torch.randint(2, 128, (count,), generator=torch.Generator().manual_seed(seed))


def diagnose(model: Any, config: dict[str, Any], prompt_tokens: int = PROMPT, max_kl: float = 0.01) -> Diagnosis:
    settings = load_config(config)
    tokens = ids(prompt_tokens + FORCED)
    samples = ids(8 * 64, seed=1).view(8, 64) if settings.smoothing.active else None
    subject = Subject(
        model=model,
        prompt=tokens[:prompt_tokens],
        forced=tokens[prompt_tokens:],
        samples=samples,
        calibration=calibrate(model, samples) if samples is not None and settings.smoothing.enable else None,
        num_generated=16,
    )
    diagnosis = Diagnosis(subject, settings, decode=lambda tokens: " ".join(map(str, tokens)), max_kl=max_kl)
    diagnosis.run()
    return diagnosis


def causes(diagnosis: Diagnosis) -> list[str]:
    return [item.cause for item in diagnosis.findings if not item.advice]


def test_a_healthy_run_has_no_cause(model: Any) -> None:
    diagnosis = diagnose(model, {"cache": {"hot_size": 64, "recent_tokens": 32, "backend": "torch"}})
    assert causes(diagnosis) == []
    assert {item.what for item in diagnosis.checked} >= {"positions the model was told", "KV memory"}


def test_evicted_key_tokens_are_found_with_what_keeps_them(model: Any) -> None:
    cache = {"policy": "threshold", "threshold": 0.2, "cold": "drop", "hot_size": 32, "recent_tokens": 32,
             "warm": {"codec": "none"}, "backend": "torch"}  # fmt: skip
    diagnosis = diagnose(model, {"cache": cache}, max_kl=1e-3)
    found = next(item for item in diagnosis.findings if item.cause == "key-tokens-evicted")
    assert "pages were dropped" in found.evidence
    assert "position" in found.evidence
    assert "threshold" in found.remedy


def test_a_window_that_forgets_is_told_to_keep_more(model: Any) -> None:
    cache = {"policy": "recent", "cold": "drop", "hot_size": 32, "recent_tokens": 32, "backend": "torch",
             "warm": {"codec": "none"}}  # fmt: skip
    diagnosis = diagnose(model, {"cache": cache}, max_kl=1e-3)
    assert "key-tokens-evicted" in causes(diagnosis)


def test_wrong_positions_are_found(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = Cache.get_seq_length

    def kept_tokens_only(self: Cache, layer_idx: int = 0) -> int:  # the classical mistake after an eviction
        length = honest(self, layer_idx)
        return length if length < PROMPT else length - 64

    monkeypatch.setattr(Cache, "get_seq_length", kept_tokens_only)
    diagnosis = diagnose(model, {"cache": {"hot_size": 64, "recent_tokens": 32, "backend": "torch"}})
    found = next(item for item in diagnosis.findings if item.cause == "positions-misaligned")
    assert f"position {PROMPT - 64} for the token at position {PROMPT}" in found.evidence


def test_statistics_that_grow_are_found(model: Any) -> None:
    cache = {"page_size": 1, "observation_window": 64, "policy": "threshold", "threshold": 0.001, "hot_size": 64,
             "recent_tokens": 32, "backend": "torch"}  # fmt: skip
    found = next(item for item in diagnose(model, {"cache": cache}).findings if item.cause == "statistics-too-large")
    assert "64 observations for every 1 tokens" in found.evidence


def test_a_hot_zone_that_covers_everything_is_named(model: Any) -> None:
    diagnosis = diagnose(model, {"cache": {"hot_size": 512, "backend": "torch"}})
    assert "hot-zone-too-large" in [item.cause for item in diagnosis.findings]


def test_too_small_a_budget_is_found(model: Any) -> None:
    cache = {"hot_size": 32, "recent_tokens": 16, "backend": "torch", "warm": {"codec": "none"},
             "sparse": {"enabled": True, "budget_tokens": 64}}  # fmt: skip
    assert "budget-too-small" in causes(diagnose(model, {"cache": cache}, max_kl=1e-4))


@pytest.fixture
def quantised_keys(model: Any) -> Iterator[Any]:
    """A model whose runtime compresses K itself: 4 bits per channel, as KV-quantising frameworks do."""

    def to_grid(module: Any, args: Any, output: Tensor) -> Tensor:
        return ((output * 1.75).round().clamp(-7, 7)) / 1.75

    handles = [layer.self_attn.k_proj.register_forward_hook(to_grid) for layer in model.model.layers]
    yield model
    for handle in handles:
        handle.remove()


def test_double_compression_is_told_from_a_coarse_codec(quantised_keys: Any, tiny_model: TinyModel) -> None:
    cache = {"hot_size": 32, "recent_tokens": 32, "backend": "torch", "warm": {"codec": "int4"}}
    assert "double-compression" in causes(diagnose(quantised_keys, {"cache": cache}, max_kl=1e-6))
    other = tiny_model("llama", max_position_embeddings=2048, num_hidden_layers=2)
    assert "codec-too-coarse" in causes(diagnose(other, {"cache": cache}, max_kl=1e-6))


def test_a_layer_that_is_not_finite_is_named(model: Any) -> None:
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[0, 0] = float("inf")
    found = diagnose(model, {"cache": {"hot_size": 64, "recent_tokens": 32, "backend": "torch"}}).findings[0]
    assert found.cause == "model-not-finite"
    assert "model.layers.1.mlp.up_proj" in found.evidence


def window(**settings: Any) -> dict[str, Any]:
    section = {"enable": True, "method": "window", "target_layers": "all", "precision": "fp32", "allow_unsafe": True}
    return {"cache": {"hot_size": 64, "recent_tokens": 32, "backend": "torch"}, "smoothing": {**section, **settings}}


def test_smoothing_in_too_little_precision_is_found(model: Any) -> None:
    with torch.no_grad():  # activations beyond what float16 can hold, harmless in float32
        model.model.layers[0].mlp.up_proj.weight *= 1e6
        model.model.layers[0].mlp.down_proj.weight *= 1e-6
    assert causes(diagnose(model, window(precision="fp16"))) == ["smoothing-precision"]


@pytest.mark.slow
def test_over_smoothing_is_found_with_its_module(model: Any) -> None:
    diagnosis = diagnose(model, window(smooth_strength=0.9, window_size=16), max_kl=1e-3)
    found = next(item for item in diagnosis.findings if item.cause == "over-smoothing")
    assert "model.layers." in found.evidence


def test_smoothing_that_buys_nothing_is_found(model: Any) -> None:
    assert "smoothing-overhead" in causes(diagnose(model, window(smooth_strength=0.05, window_size=8)))


@pytest.mark.slow
def test_too_large_a_window_is_found(tiny_model: TinyModel) -> None:
    wide = tiny_model("llama", max_position_embeddings=2048, num_hidden_layers=2, hidden_size=256,
                      intermediate_size=2048)  # fmt: skip
    assert "window-too-large" in causes(diagnose(wide, window(smooth_strength=0.05, window_size=512)))


def test_a_window_that_hits_short_sequences_differently_is_found(model: Any) -> None:
    diagnosis = diagnose(model, window(smooth_strength=0.9, window_size=64, warmup="skip"), max_kl=1e-3)
    assert "window-not-relative" in causes(diagnosis)
    assert "batch-leak" not in causes(diagnosis)
