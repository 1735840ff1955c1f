"""`gsm bench` and `gsm eval` with `--engine vllm`, as commands, on the demo model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.usefixtures("vllm_installed")


def gsm(folder: Path, *arguments: str) -> dict[str, Any]:
    file = folder / "result.json"
    command = [str(Path(sys.executable).with_name("gsm")), *arguments, "demo", "--engine", "vllm", "--json", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=580, env={**os.environ, "COLUMNS": "120"})
    assert file.exists(), done.stderr[-2000:]
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def test_bench_times_stock_vllm_and_an_arm(tmp_path: Path) -> None:
    sizes = ("--prompt-tokens", "2560", "--new-tokens", "8", "--runs", "1", "--wait", "0")
    found = gsm(tmp_path, "bench", "--arms", "sparse", *sizes)
    stock, sparse = found["arms"]
    assert (stock["name"], sparse["name"]) == ("stock", "sparse")
    assert stock["tpot_ms"]["median"] > 0
    assert sparse["tpot_ms"]["median"] > 0
    assert 0 < sparse["attended_tokens_mean"] < 2560


def test_eval_compares_with_everything_read(tmp_path: Path) -> None:
    sizes = ("--prompt-tokens", "1024", "--windows", "4", "--needles", "0")
    found = gsm(tmp_path, "eval", "--config", "sparse", *sizes)
    assert found["quality"]["n_windows"] == 4
    assert 0 <= found["quality"]["kl"] < 0.1
