"""`gsm calibrate` and `gsm smooth` from the outside, on a small model with real files."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM

import gsm.cli
from gsm.errors import ConfigError, InputError
from gsm.guard.speed import find_products
from gsm.smoothing import Calibration, calibrate
from gsm.smoothing.context import check_ids
from gsm.smoothing.export import check_target
from support_measure import save_tiny_model

LIMITS = "guard: {tolerance: 5.0, short_tolerance: 5.0, search_tokens: 1024, final_tokens: 2048}"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def write(tmp_path: Path) -> Any:
    def config(text: str) -> Path:
        path = tmp_path / "config.yaml"
        path.write_text(f"smoothing: {{calibration_samples: 8, sample_tokens: 32, {LIMITS}, {text}}}\n")
        return path

    return config


def run(monkeypatch: pytest.MonkeyPatch, *args: object) -> int:
    monkeypatch.setattr(sys, "argv", ["gsm", *map(str, args)])
    with pytest.raises(SystemExit) as ended:
        gsm.cli.main()
    return int(ended.value.code or 0)


def test_calibrate_writes_json_and_a_picture(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    result, picture = tmp_path / "c.json", tmp_path / "c.png"
    arguments = ["--samples", 6, "--sample-tokens", 32, "--gradients", "--json", result, "--picture", picture]
    assert run(monkeypatch, "calibrate", directory, *arguments) == 0
    assert "sink-driven" in capsys.readouterr().out
    calibration = Calibration.load(result)
    assert calibration.num_samples == 6
    assert calibration.has_gradients
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c.json", "c.png"]


def test_rotate_is_guarded_timed_and_exported(
    directory: Path, tmp_path: Path, write: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    target, result = tmp_path / "out", tmp_path / "r.json"
    config = write("enable: true, method: rotate, int8: dynamic")
    code = run(
        monkeypatch, "smooth", directory, "--config", config, "-o", target, "--json", result, "--prompt-tokens", 64
    )
    out = capsys.readouterr().out
    assert code == 0, out
    record = json.loads(result.read_text())
    assert record["outcome"]["accepted"]
    assert record["exported_to"] == str(target)
    assert record["max_logit_change"] < 1e-3
    assert record["weight_bytes_after"] < record["weight_bytes_before"]
    assert "verdict on 2048 evaluation tokens" in out
    assert "run-time rotation is off" in out
    original = AutoModelForCausalLM.from_pretrained(directory)
    exported = AutoModelForCausalLM.from_pretrained(target)
    ids = check_ids(original)
    with torch.no_grad():
        assert (original(input_ids=ids).logits - exported(input_ids=ids).logits).abs().max() < 1e-3
    assert not torch.equal(original.model.embed_tokens.weight, exported.model.embed_tokens.weight)
    assert json.loads((target / "gsm_smoothing.json").read_text())["smoothing"]["method"] == "rotate"
    with safe_open(target / "model.safetensors", "pt") as file:
        assert "lm_head.weight" in file.keys()  # noqa: SIM118
    assert not [path for path in tmp_path.iterdir() if path.name.endswith(".part")]


def test_rotate_alone_is_accepted_and_exported(
    directory: Path, tmp_path: Path, write: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    target, result = tmp_path / "out", tmp_path / "r.json"
    arguments = ("--config", write("enable: true, method: rotate"), "-o", target, "--json", result)
    code = run(monkeypatch, "smooth", directory, *arguments, "--prompt-tokens", 64)
    assert code == 0, capsys.readouterr().out
    told = json.loads(result.read_text())
    assert told["outcome"]["accepted"]
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        before, after = (
            AutoModelForCausalLM.from_pretrained(d).eval()(input_ids=ids).logits for d in (directory, target)
        )
    assert torch.allclose(before, after, atol=1e-3)


def test_settings_that_change_nothing_are_told_so(
    directory: Path, write: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write("int8: dynamic, keep_precision: ['*']")
    assert run(monkeypatch, "smooth", directory, "--config", config, "--prompt-tokens", 64) == 1
    assert "change no module" in " ".join(capsys.readouterr().out.split())


def test_a_calibration_of_another_model_is_refused(
    directory: Path, tmp_path: Path, write: Any, tiny_model: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    other = tmp_path / "other.json"
    calibrate(tiny_model("llama", hidden_size=32), torch.arange(1, 41).view(2, 20)).save(other)
    config = write("enable: true, method: window, int8: dynamic")
    assert run(monkeypatch, "smooth", directory, "--config", config, "--calibration", other) == 2
    assert "another model" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("family", ["llama", "gpt_neox", "opt"])
def test_products_are_found_in_blocks_of_any_shape(tiny_model: Any, family: str) -> None:
    model = tiny_model(family)
    x = torch.randn(1, 3, model.get_input_embeddings().weight.shape[1])
    found = find_products(model)
    assert found
    for module in found:
        module(x)


def test_window_is_reported_without_benefit_and_cannot_be_exported(
    directory: Path, tmp_path: Path, write: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write("enable: true, method: window, short_request: {max_tokens: 0}")
    assert run(monkeypatch, "smooth", directory, "--config", config, "--prompt-tokens", 64) == 0
    assert "smoothing's own cost" in capsys.readouterr().out
    assert run(monkeypatch, "smooth", directory, "--config", config, "-o", tmp_path / "x") == 2
    assert "nothing to export" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


@pytest.mark.slow
def test_a_refusal_of_the_guard_is_exit_code_1(
    directory: Path, write: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write("int8: dynamic")
    text = config.read_text().replace("tolerance: 5.0", "max_kl: 1.0e-9, tolerance: 5.0", 1)
    config.write_text(text)
    assert run(monkeypatch, "smooth", directory, "--config", config) == 1
    assert "Not accepted: KL is" in capsys.readouterr().out


def test_a_dry_run_says_what_would_happen(
    directory: Path, tmp_path: Path, write: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write("enable: true, method: channel, int8: dynamic")
    calibration = tmp_path / "c.json"
    assert run(monkeypatch, "calibrate", directory, "--samples", 4, "--json", calibration) == 0
    capsys.readouterr()
    arguments = ["--config", config, "--calibration", calibration, "--dry-run", "-o", tmp_path / "never"]
    assert run(monkeypatch, "smooth", directory, *arguments) == 0
    out = capsys.readouterr().out
    assert "Smoothed: " in out
    assert "kurtosis" in out
    assert "Dry run" in out
    assert not (tmp_path / "never").exists()


def test_a_config_that_does_nothing_and_bad_files_are_answered(
    directory: Path, tmp_path: Path, write: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "smooth", directory, "--config", write("enable: false")) == 2
    assert "smoothing is off" in capsys.readouterr().err
    assert run(monkeypatch, "smooth", directory, "--config", write("smooth_strength: 0.4")) == 2
    assert "allow_unsafe" in capsys.readouterr().err
    full = tmp_path / "full"
    full.mkdir()
    (full / "file").touch()
    with pytest.raises(InputError, match="not empty"):
        check_target(full)
    with pytest.raises(InputError, match="does not exist"):
        check_target(tmp_path / "no" / "where")
    with pytest.raises(InputError, match="is a file"):
        check_target(full / "file")


def test_a_model_with_run_time_parts_cannot_be_exported(tiny_model: Any, tmp_path: Path) -> None:
    from gsm.smoothing import apply
    from gsm.smoothing.export import export_checkpoint

    model = tiny_model("llama")
    for config in ({"int8": "dynamic"}, {"enable": True, "method": "rotate"}):
        with apply(model, config), pytest.raises(ConfigError, match="plain weights"):
            export_checkpoint(model, None, tmp_path / "x", {}, check_ids(model))
    assert list(tmp_path.iterdir()) == []
