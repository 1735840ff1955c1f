"""`gsm convert gqa`: what it writes, says and refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import gsm.convert.gqa as convert
from gsm.cli.convert import command
from gsm.convert import ConvertSpec, convert_gqa
from gsm.errors import InputError
from gsm.models import LoadedModel


@pytest.fixture
def small(demo: LoadedModel, tiny_model: Any, monkeypatch: pytest.MonkeyPatch) -> LoadedModel:
    """The demo model's tokenizer on a random model of its vocabulary."""
    model = tiny_model("llama", vocab_size=demo.model.config.vocab_size, max_position_embeddings=1024)
    loaded = LoadedModel(model, demo.tokenizer, "small", "small", demo.arch)
    monkeypatch.setattr(convert, "load_model", lambda *args, **kwargs: loaded)
    return loaded


def test_it_writes_a_checkpoint_and_says_what_it_cost(small: LoadedModel, tmp_path: Path) -> None:
    out, file = tmp_path / "pooled", tmp_path / "r.json"
    arguments = ["gqa", "small", "--kv-heads", "1", "-o", str(out), "--windows", "2", "--json", str(file)]
    result = CliRunner().invoke(command, [*arguments, "--uptrain", "topics", "--steps", "2"], catch_exceptions=False)
    assert result.exit_code == 0
    assert "50% saved" in result.output
    assert "not trained on" in result.output
    assert json.loads((out / "config.json").read_text())["num_key_value_heads"] == 1
    assert (out / "tokenizer.json").exists()
    record = json.loads(file.read_text())
    assert record["kv_heads_before"] == 2
    assert record["uptrain"]["steps"] == 2
    assert record["uptrain"]["text_sha256"] != record["evaluation_sha256"]
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_an_existing_directory_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="exists already"):
        convert_gqa(ConvertSpec("demo", 1, str(tmp_path)))
    with pytest.raises(InputError, match="create it first"):
        convert_gqa(ConvertSpec("demo", 1, str(tmp_path / "a" / "b")))
