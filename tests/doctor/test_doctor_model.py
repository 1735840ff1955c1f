"""The model section and the command: files, quantisation, tokenizer, memory, and the exit code."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import save_file

from gsm.cli.doctor import command
from gsm.measure.doctor.model import check_model
from gsm.measure.doctor.quantisation import check_quantisation
from gsm.measure.doctor.record import Check
from gsm.models import LoadedModel, demo_gguf_path
from gsm.models.checkpoint import read_checkpoint


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, demo: LoadedModel, tiny_model: Any) -> Path:
    """A complete tiny model directory."""
    path = tmp_path_factory.mktemp("doctor") / "tiny"
    tiny_model("llama", vocab_size=49152, eos_token_id=2).save_pretrained(path)
    demo.tokenizer.save_pretrained(path)
    return path


@pytest.fixture
def copied(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "model"))


def edit_config(path: Path, **changes: Any) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, **changes}))


def by_name(checks: list[Check]) -> dict[str, Check]:
    return {check.name: check for check in checks}


def test_a_whole_model_is_ok(saved: Path) -> None:
    checks = by_name(check_model(saved))
    assert {check.status for check in checks.values()} == {"ok"}
    assert {"files", "tokenizer", "quantisation", "cache", "window", "memory", "batch"} == set(checks)
    assert "stored as F32" in checks["quantisation"].found
    assert "512 tokens" in checks["window"].found


def test_the_demo_is_ok(demo: LoadedModel) -> None:
    checks = by_name(check_model("demo"))
    assert {check.status for check in checks.values()} == {"ok"}
    assert "135 M weights" in checks["files"].found


def test_a_truncated_gguf_is_a_problem(tmp_path: Path) -> None:
    cut = tmp_path / "cut.gguf"
    with demo_gguf_path().open("rb") as source:
        cut.write_bytes(source.read(1 << 20))
    check = by_name(check_model(cut))["files"]
    assert check.status == "problem"
    assert check.remedy


@pytest.mark.parametrize(
    ("source", "word"),
    [("nothing", "does not exist"), ("nobody/nothing", "cannot be fetched"), ("dmeo", "did you mean")],
)
def test_a_missing_model_is_a_problem(source: str, word: str) -> None:
    check = by_name(check_model(source))["files"]
    assert check.status == "problem"
    assert word in f"{check.found}; {check.remedy}"
    assert check.remedy


def test_missing_and_cut_weights_are_problems(copied: Path) -> None:
    shard = next(copied.glob("*.safetensors"))
    data = shard.read_bytes()
    shard.write_bytes(data[:-100])
    assert "truncated" in by_name(check_model(copied))["files"].found
    shard.unlink()
    check = by_name(check_model(copied))["files"]
    assert check.status == "problem"
    assert "no weights" in check.found


def test_tokenizer_problems(copied: Path) -> None:
    edit_config(copied, vocab_size=100)
    assert by_name(check_model(copied))["tokenizer"].status == "problem"
    for file in copied.glob("*token*"):
        file.unlink()
    check = by_name(check_model(copied))["tokenizer"]
    assert (check.status, bool(check.remedy)) == ("problem", True)


def test_memory_and_head_room(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = next(saved.glob("*.safetensors")).stat().st_size
    for free, status in ((weights // 2, "problem"), (int(weights * 1.1), "warning"), (weights * 10, "ok")):
        monkeypatch.setattr("gsm.measure.doctor.model.default_memory", lambda free=free: (free, "free"))
        check = by_name(check_model(saved))["memory"]
        assert check.status == status
        assert status == "ok" or "bfloat16" in check.remedy


def test_a_cache_that_is_not_worth_managing_is_a_warning(tmp_path: Path) -> None:
    config = {"model_type": "mamba2", "hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 100, "num_heads": 2}
    (tmp_path / "config.json").write_text(json.dumps({**config, "head_dim": 64}))
    checks = by_name(check_model(tmp_path / "config.json"))
    assert checks["cache"].status == "warning"
    assert checks["cache"].remedy
    assert checks["files"].status == "problem"  # a config alone cannot be loaded


def quantised(
    path: Path, method: dict[str, Any] | None, tensors: dict[str, torch.Tensor], **versions: str
) -> dict[str, Check]:
    path.mkdir(exist_ok=True)
    config: dict[str, Any] = {"model_type": "llama"}
    if method is not None:
        config["quantization_config"] = method
    (path / "config.json").write_text(json.dumps(config))
    save_file(tensors, path / "model.safetensors")
    return by_name(check_quantisation(read_checkpoint(path), versions.get))


def gptq(bits: int, inputs: int = 256, outputs: int = 64, group: int = 128) -> dict[str, torch.Tensor]:
    return {
        "layer.qweight": torch.zeros(inputs * bits // 32, outputs, dtype=torch.int32),
        "layer.scales": torch.ones(inputs // group, outputs, dtype=torch.float16),
        "layer.qzeros": torch.zeros(inputs // group, outputs * bits // 32, dtype=torch.int32),
    }


def awq(bits: int, inputs: int = 256, outputs: int = 64, group: int = 128) -> dict[str, torch.Tensor]:
    return {
        "layer.qweight": torch.zeros(inputs, outputs * bits // 32, dtype=torch.int32),
        "layer.scales": torch.ones(inputs // group, outputs, dtype=torch.float16),
    }


PLAIN = {"layer.weight": torch.ones(4, 4)}


@pytest.mark.parametrize(
    ("method", "tensors", "status", "word"),
    [
        (None, PLAIN, "ok", "none"),
        (None, gptq(4), "problem", "no quantization_config"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, gptq(4), "ok", "4 bits"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, gptq(8), "problem", "holds 8 bits"),
        ({"quant_method": "gptq", "bits": 8, "group_size": 64}, gptq(8), "problem", "holds 16 bits"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, PLAIN, "problem", "no tensor is packed"),
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, awq(4), "ok", "4 bits"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, PLAIN, "ok", "while loading"),
        ({"quant_method": "magic"}, PLAIN, "warning", "unknown"),
    ],
)
def test_quantisation_config_against_the_weights(
    tmp_path: Path, method: dict[str, Any] | None, tensors: dict[str, torch.Tensor], status: str, word: str
) -> None:
    checks = quantised(tmp_path, method, tensors, gptqmodel="1.0", bitsandbytes="0.45")
    assert checks["quantisation"].status == status
    assert word in checks["quantisation"].found
    assert status == "ok" or checks["quantisation"].remedy


def test_a_missing_back_end_is_a_problem(tmp_path: Path) -> None:
    checks = quantised(tmp_path, {"quant_method": "gptq", "bits": 4, "group_size": 128}, gptq(4))
    check = checks["quantisation back end"]
    assert (check.status, check.remedy) == ("problem", "pip install gptqmodel")


def test_the_command(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gsm.measure.doctor.checkup.check_software", lambda: [])
    file = tmp_path / "doctor.json"
    good = CliRunner().invoke(command, [str(saved), "--json", str(file)], standalone_mode=False)
    assert good.return_value == 0
    assert "problems: 0" in good.output
    assert json.loads(file.read_text())["passed"] is True
    bad = CliRunner().invoke(command, ["nothing"], standalone_mode=False)
    assert bad.return_value == 1
    assert "problems: 1" in bad.output


@pytest.mark.slow  # several fresh processes import optional packages
def test_the_command_on_this_machine() -> None:
    result = CliRunner().invoke(command, ["demo"], standalone_mode=False)
    assert result.return_value == 0, result.output
    assert "transformers" in result.output
