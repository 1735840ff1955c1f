"""Quantised weights: attach works, and with the full cache nothing changes.

Each back end is an optional package; without it its tests are skipped.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from generation import FULL, prompt, run, run_gsm, small
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.cache_utils import QuantizedCache

import gsm
from gsm.errors import AttachError, InputError, ModelError
from gsm.integrations.transformers.refusals import check_cache
from gsm.models import LoadedModel, load_model
from gsm.models import quantised as quantised_module
from gsm.models.quantised import QUANTISATIONS, quantization_config


def _needs(package: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(importlib.util.find_spec(package) is None, reason=f"{package} is not installed")


def _check(model: PreTrainedModel, ids: torch.Tensor, new_tokens: int = 16) -> None:
    """Full cache: the tokens of the same quantised model without GSM. Tiers and sparse: it runs and holds together.

    Back ends that round activations too turn a difference in the last bit into one of a whole step, so logits may be as
    far apart as the model's own are when it reads the prompt in two chunks.
    """
    plain, ours = run(model, ids, new_tokens), run_gsm(model, FULL, ids, new_tokens)
    assert torch.equal(ours[0], plain[0])
    model.generation_config.prefill_chunk_size = ids.shape[1] // 2
    chunked = run(model, ids, new_tokens)
    model.generation_config.prefill_chunk_size = None
    assert _distance(ours, plain) <= max(1e-3, 1.5 * _distance(chunked, plain))
    config = small(sparse={"enabled": True, "budget_tokens": 32})
    _, logits = run_gsm(model, config, ids, new_tokens)
    assert torch.isfinite(logits).all()


def _distance(one: tuple[torch.Tensor, torch.Tensor], other: tuple[torch.Tensor, torch.Tensor]) -> float:
    """Largest difference of logits up to the first token that differs."""
    same = (one[0] == other[0]).all(0)[-other[1].shape[1] :]
    num_equal = other[1].shape[1] if bool(same.all()) else int((~same).nonzero()[0]) + 1
    difference = (one[1] - other[1])[:, :num_equal].abs()
    return float(difference[torch.isfinite(difference)].max())


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param(n, marks=_needs(package)) for n, (package, _) in QUANTISATIONS.items()])
def test_weights_quantised_while_loading(name: str, text_ids: torch.Tensor) -> None:
    loaded = load_model("demo", quantization=name)
    assert any("Linear" not in type(m).__name__ or type(m) is not torch.nn.Linear for m in loaded.model.modules())
    _check(loaded.model, text_ids[None, :200])


def test_gguf_blocks_kept_as_they_are(demo_gguf: Path, text_ids: torch.Tensor) -> None:
    """transformers can keep a GGUF file's own blocks; few tokens, because it unpacks every weight in every step."""
    model = AutoModelForCausalLM.from_pretrained(demo_gguf.parent, gguf_file=demo_gguf.name, dtype=torch.float32).eval()
    _check(model, text_ids[None, :40], new_tokens=3)


@_needs("gptqmodel")
@pytest.mark.slow
def test_gptq(tmp_path: Path, tiny_model: Any, demo: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tiny checkpoint quantised by gptqmodel and loaded through transformers."""
    monkeypatch.setenv("GPTQMODEL_CPU_WORKERS", "2")  # its own default on two cores is too few for it to start
    from gptqmodel import GPTQModel, QuantizeConfig

    source, target = tmp_path / "plain", tmp_path / "gptq"
    tiny_model(
        "llama", num_hidden_layers=2, hidden_size=128, num_attention_heads=4, head_dim=32, intermediate_size=256
    ).save_pretrained(source)
    demo.tokenizer.save_pretrained(source)  # gptqmodel wants one, whatever it says
    rows = [{"input_ids": prompt(64, seed=s)[0].tolist(), "attention_mask": [1] * 64} for s in range(8)]
    quantiser = GPTQModel.load(str(source), QuantizeConfig(bits=4, group_size=32), device="cpu")
    quantiser.quantize(rows, batch_size=1)
    quantiser.save(str(target))
    model = AutoModelForCausalLM.from_pretrained(target, device_map={"": "cpu"}, dtype=torch.float32).eval()
    assert any(hasattr(module, "qweight") for module in model.modules())
    _check(model, prompt(60))


@pytest.fixture(scope="session")
def demo_gguf() -> Path:
    from gsm.models.sources import demo_gguf_path

    return demo_gguf_path()


def test_unknown_quantisation_is_refused() -> None:
    with pytest.raises(InputError, match="quantisation 'int3' is unknown; use one of bnb-8bit"):
        load_model("demo", quantization="int3")


def test_a_missing_back_end_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantised_module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match="needs the package bitsandbytes"):
        quantization_config("bnb-4bit")


SCHEME = {"quant_method": "compressed-tensors", "kv_cache_scheme": {"num_bits": 8, "type": "float"}}


def test_a_checkpoint_that_quantises_its_kv_is_not_coded_twice(tiny_model: Any) -> None:
    model = tiny_model("llama")
    model.config.quantization_config = SCHEME
    with pytest.raises(AttachError, match=r"quantises its KV itself \(kv_cache_scheme: 8 float\)"), gsm.attach(model):
        pass
    with gsm.attach(model, small(warm={"codec": "none"}, policy="recent", cold="drop")):  # eviction is fine
        run(model, prompt(30), 4)


def test_a_quantised_cache_is_refused() -> None:
    """What `cache_implementation="quantized"` builds; building one needs a package of its own."""
    with pytest.raises(AttachError, match="QuantizedCache of this call quantises the KV cache already"):
        check_cache(QuantizedCache.__new__(QuantizedCache))
