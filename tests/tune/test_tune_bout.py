"""Bouts on real (tiny, random) models: turns, pairs, scores, and the model as it was afterwards."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from click.testing import CliRunner

from gsm.cli.tune import command
from gsm.config import load_config
from gsm.errors import InputError
from gsm.models import LoadedModel, load_model
from gsm.quality import load_thirds, no_progress
from gsm.tune import BoutPlan
from gsm.tune.bout import BLOCK_TOKENS, PLAIN, Contestant, Ring
from support_measure import save_tiny_model

PLAN = BoutPlan(num_prefills=1, windows_per_prefill=2, window_tokens=16, needles_per_depth=1, chunk_tokens=128)
CACHE = {"hot_size": 64, "recent_tokens": 32, "backend": "torch"}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_model(str(save_tiny_model(tmp_path_factory.mktemp("tiny"))))


def ring(tiny: LoadedModel) -> Ring:
    return Ring(tiny, load_thirds(None), PLAN, no_progress)


def test_contestants_take_turns_on_the_same_tokens(tiny: LoadedModel) -> None:
    exact = load_config({"cache": {**CACHE, "warm": {"codec": "none"}}})
    forgetful = load_config({"cache": {**CACHE, "policy": "recent", "cold": "drop", "warm": {"codec": "none"}}})
    seats = [Contestant(PLAIN, None), Contestant("exact", exact), Contestant("forgetful", forgetful)]
    bout = ring(tiny).hold("k", "tuning", 256, seats, {"exact"})
    plain, same, lossy = bout.contestants
    blocks = PLAN.num_steps // BLOCK_TOKENS - 1  # the first warms up
    assert [len(measured.block_ms) for measured in bout.contestants] == [blocks] * 3
    assert plain.quality is not None
    assert same.quality is not None
    assert lossy.quality is not None
    assert plain.quality.kl == pytest.approx(0.0, abs=1e-12)
    assert same.quality.kl == pytest.approx(0.0, abs=1e-6)
    assert lossy.quality.kl is not None
    assert lossy.quality.kl > 10 * max(same.quality.kl or 0.0, 1e-9)
    assert lossy.kv_bytes < 0.6 * plain.kv_bytes
    assert (same.quality.n_needles, lossy.quality.n_needles) == (3, 0)
    assert tiny.model.config._attn_implementation == "sdpa"
    assert not tiny.model._forward_pre_hooks


def test_smoothed_contestants_run_one_after_the_other(tiny: LoadedModel) -> None:
    section = {"enable": True, "method": "window", "smooth_strength": 0.3, "precision": "fp32"}
    smoothed = load_config({"cache": CACHE, "smoothing": section})
    seats = [Contestant("start", load_config({"cache": CACHE})), Contestant("0.3", smoothed)]
    start, other = ring(tiny).hold("k", "tuning", 128, seats, set()).contestants
    assert len(start.block_ms) == len(other.block_ms)
    assert start.quality is not None
    assert other.quality is not None
    assert (other.quality.kl or 0.0) > (start.quality.kl or 0.0)


def test_a_length_that_does_not_fit_is_refused_with_one_that_does(tiny: LoadedModel) -> None:
    with pytest.raises(InputError, match=r"use --length 975"):
        ring(tiny).check(1024)
    ring(tiny).check(975)


@pytest.mark.slow
def test_the_command_from_end_to_end(tiny: LoadedModel, tmp_path: Path) -> None:
    base = tmp_path / "base.yaml"
    base.write_text(json.dumps({"cache": CACHE}))
    arguments = [str(tiny.model.config._name_or_path), "--task", "document", "--length", "768", "--values", "1",
                 "--prefills", "1", "--windows-per-prefill", "2", "--config", str(base), "-o", str(tmp_path / "g.yaml"),
                 "--tolerance-kl", "1"]  # fmt: skip
    first = CliRunner().invoke(command, arguments, standalone_mode=False)
    evidence = json.loads((tmp_path / "g.tune.json").read_text())
    assert first.return_value in (0, 1), first.output
    assert evidence["lengths"] == [192, 384, 768]
    assert not evidence["interrupted"]
    assert all(math.isfinite(share) for share in evidence["noise"].values())
    again = CliRunner().invoke(command, arguments, standalone_mode=False)
    assert again.return_value == first.return_value
    assert json.loads((tmp_path / "g.tune.json").read_text())["bouts"] == evidence["bouts"]
    if first.return_value == 0:
        assert load_config(tmp_path / "g.yaml") == load_config(evidence["proposed"])
