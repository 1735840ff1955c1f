"""`gsm plan` on the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from gsm.cli.plan import command
from gsm.errors import ConfigError, GsmError, InputError, ModelError

CONFIG = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "dtype": "bfloat16",
}


def run(*arguments: str) -> str:
    result = CliRunner().invoke(command, arguments, catch_exceptions=False, env={"COLUMNS": "160"})
    assert result.exit_code == 0
    return result.output


def test_numbers_alone_and_json(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    sizes = ("--memory", "24GB", "--weights", "8GB", "--reserve", "4GB")
    out = run("--layers", "32", "--kv-heads", "8", "--head-dim", "128", *sizes, "--json", str(file))
    assert "91,552" in out
    assert "2 x 8 x 128 x 2 B" in out
    assert "12.00 GB = 11.18 GiB" in out
    written = json.loads(file.read_text())
    assert written["kv_bytes_per_token"] == 131072
    assert written["capacities"][0]["max_tokens"] == 91552


def test_a_config_file(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))
    out = run(str(path), "--memory", "24GiB", "--context", "16384")
    assert "131,072" in out
    assert "16.1 GB" in out  # 8.03 billion parameters in bfloat16
    assert "Verdict" in out
    assert "gsm bench" in out


def test_the_demo_needs_no_options() -> None:
    out = run("demo")
    assert "free in this machine's memory" in out or "free on" in out
    assert "46,080" in out


@pytest.mark.parametrize(
    ("arguments", "kind", "word"),
    [
        ((), InputError, "either MODEL"),
        (("demo", "--layers", "3"), InputError, "either MODEL"),
        (("--layers", "3"), InputError, "either MODEL"),
        (("nothing-here",), ModelError, "does not exist"),
        (("demo", "--memory", "12G"), InputError, "12GB or 12GiB"),
        (("demo", "--dtype", "float7"), InputError, "float7"),
        (("demo", "--config", "no.yaml"), ConfigError, "does not exist"),
        (("demo", "--json", "/no/such/folder/x.json"), InputError, "folder"),
    ],
)
def test_wrong_use(arguments: tuple[str, ...], kind: type[GsmError], word: str) -> None:
    result = CliRunner().invoke(command, arguments)
    assert isinstance(result.exception, kind)
    assert word in str(result.exception)
