"""Loading models: the demo really speaks, directories are checked before anything large is read."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from gsm.errors import InputError, ModelError
from gsm.models import LoadedModel, count_parameters, load_model, resolve_source


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, demo: LoadedModel, tiny_model: Any) -> Path:
    """A tiny random model as a complete directory in two shards, with the demo's tokenizer."""
    path = tmp_path_factory.mktemp("saved") / "tiny-llama"
    tiny_model("llama").save_pretrained(path, max_shard_size="100KB")
    demo.tokenizer.save_pretrained(path)
    return path


@pytest.fixture
def copied(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "model"))


def test_the_demo_speaks(demo: LoadedModel) -> None:
    assert demo.model.dtype == torch.float32
    assert not demo.model.training
    assert demo.model.config._attn_implementation == "sdpa"
    assert demo.arch.kv_bytes_per_token(2) == 23040
    assert demo.arch.num_parameters_estimate == pytest.approx(134.5e6, rel=0.01)
    ids = demo.tokenizer("The capital of France is", return_tensors="pt").input_ids
    out = demo.model.generate(ids, max_new_tokens=4, do_sample=False)
    assert "Paris" in demo.tokenizer.decode(out[0])


def test_natural_text_is_long_enough(text_ids: torch.Tensor) -> None:
    assert text_ids.ndim == 1
    assert len(text_ids) > 100_000


@pytest.mark.parametrize(
    ("dtype", "expected"), [("float32", torch.float32), ("bf16", torch.bfloat16), ("auto", torch.float32)]
)
def test_a_directory_loads_in_the_asked_dtype(saved: Path, dtype: str, expected: torch.dtype) -> None:
    loaded = load_model(saved, dtype=dtype)
    assert loaded.model.dtype == expected
    assert (loaded.name, loaded.path) == ("tiny-llama", saved)
    assert loaded.arch.model_type == "llama"


def test_threads_are_set(saved: Path) -> None:
    before = torch.get_num_threads()
    try:
        load_model(saved, threads=1)
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


def test_parameters_are_counted_without_weights(saved: Path) -> None:
    config = json.loads((saved / "config.json").read_text())
    model = load_model(saved).model
    assert count_parameters(config) == sum(parameter.numel() for parameter in model.parameters())
    assert count_parameters({"model_type": "brand_new"}) is None


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ({"dtype": "float8"}, "float8"),
        ({"threads": 0}, "threads"),
        ({"device": "gpu"}, "gpu"),
        pytest.param(
            {"device": "cuda"}, "CUDA", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA is here")
        ),
    ],
)
def test_bad_arguments(saved: Path, arguments: dict[str, Any], word: str) -> None:
    with pytest.raises(InputError, match=word):
        load_model(saved, **arguments)


@pytest.mark.parametrize("source", ["no/such/place", "/no/such/place", "nothing"])
def test_a_missing_source(source: str) -> None:
    with pytest.raises(ModelError, match="does not exist"):
        load_model(source)


def test_an_empty_name() -> None:
    with pytest.raises(ModelError, match="empty"):
        load_model("")


def test_a_mistyped_demo() -> None:
    with pytest.raises(ModelError, match="did you mean 'demo'"):
        resolve_source("dmeo")


def test_a_hub_id_is_not_asked_for_when_offline() -> None:
    assert resolve_source("nobody/nothing-at-all") == "nobody/nothing-at-all"
    with pytest.raises(ModelError, match="not on this machine"):
        load_model("nobody/nothing-at-all")


def test_a_mistyped_path_is_not_a_hub_id(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(saved.parent.parent)
    with pytest.raises(ModelError, match="does not exist"):
        resolve_source(f"{saved.parent.name}/tinny-llama")


def test_one_file_of_a_model(saved: Path) -> None:
    with pytest.raises(ModelError, match="give its directory"):
        load_model(saved / "config.json")
    with pytest.raises(ModelError, match="is not a model"):
        load_model(saved / "tokenizer.json")


def test_an_empty_directory(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no config\.json"):
        load_model(tmp_path)


def test_a_config_without_weights(copied: Path) -> None:
    for file in [*copied.glob("*.safetensors"), *copied.glob("*.index.json")]:
        file.unlink()
    with pytest.raises(ModelError, match="no weights"):
        load_model(copied)


def test_a_missing_shard(copied: Path) -> None:
    shards = sorted(copied.glob("*.safetensors"))
    assert len(shards) > 1
    shards[1].unlink()
    with pytest.raises(ModelError, match=f"lacks 1 of {len(shards)} weight files.*{shards[1].name}"):
        load_model(copied)


@pytest.mark.parametrize("keep", [0, 4, 60, -10])
def test_a_truncated_shard(copied: Path, keep: int) -> None:
    shard = sorted(copied.glob("*.safetensors"))[0]
    shard.write_bytes(shard.read_bytes()[:keep])
    with pytest.raises(ModelError, match="truncated safetensors"):
        load_model(copied)


def test_broken_json(copied: Path) -> None:
    (copied / "config.json").write_text("{")
    with pytest.raises(ModelError, match="JSON"):
        load_model(copied)


def test_a_config_that_does_not_fit_the_weights(copied: Path) -> None:
    config = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps({**config, "hidden_size": 32, "head_dim": 8}))
    with pytest.raises(ModelError, match="cannot be loaded"):
        load_model(copied)


def test_no_tokenizer(copied: Path) -> None:
    for file in copied.glob("*token*"):
        file.unlink()
    with pytest.raises(ModelError, match="tokenizer"):
        load_model(copied)


def test_an_unknown_family(copied: Path) -> None:
    config = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps({**config, "model_type": "brand_new"}))
    with pytest.raises(ModelError, match="brand_new"):
        load_model(copied)


def test_too_little_memory_is_told_before_loading(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gsm.models.memory.available_bytes", lambda device="cpu": 1000)
    with pytest.raises(ModelError, match=r"memory.*smaller dtype"):
        load_model(saved)
