"""Peak memory of a long prompt, each arm in a process of its own (CASES B10)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import json, sys
sys.path.insert(0, {tests!r})
import torch
from support_models import build_tiny_model
import gsm
from gsm.integrations.transformers import prefill
from gsm.measure.bench.memory import PeakMemory

torch.set_num_threads(1)
length, arm = int(sys.argv[1]), sys.argv[2]
model = build_tiny_model("llama", num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=8, head_dim=64,
                         max_position_embeddings=length + 64)
ids = torch.randint(3, 128, (1, length))
config = gsm.load_config({{"cache": {{"warm": {{"codec": arm}}}}}}) if arm != "plain" else None
with torch.inference_mode():
    model(ids[:, :64])
    peak = PeakMemory()
    if config is None:
        from transformers import DynamicCache
        prefill(model, ids, DynamicCache(config=model.config), 512)
    else:
        with gsm.attach(model, config):
            prefill(model, ids, gsm.Cache(model, config), 512)
print(json.dumps(peak.rss_bytes()))
"""


def _peak_bytes(length: int, arm: str) -> int:
    program = PROGRAM.format(tests=str(Path(__file__).parent.parent))
    done = subprocess.run(
        [sys.executable, "-c", program, str(length), arm], capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
    return int(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.slow
@pytest.mark.parametrize("length", [4096, 16384, 32768])
def test_int8_peaks_below_full_precision(length: int) -> None:
    peaks = {arm: _peak_bytes(length, arm) for arm in ("int8", "none", "plain")}
    assert peaks["int8"] < peaks["none"], peaks
    assert peaks["int8"] < peaks["plain"], peaks
