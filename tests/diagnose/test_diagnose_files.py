"""Findings from result files: a pure function of what was measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from click.testing import CliRunner

from gsm.cli.diagnose import command
from gsm.errors import InputError
from gsm.measure.diagnose import CAUSES, diagnose_files
from gsm.measure.diagnose.signals import grid_bits, repeated_share

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def save(path: Path, content: dict[str, Any]) -> Path:
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


def causes(*paths: Path) -> list[str]:
    return [item.cause for item in diagnose_files(paths).findings]


def test_a_real_run_without_gain_names_the_other_bottleneck() -> None:
    result = diagnose_files([RESULTS / "speed-1024.json"])
    assert {"bottleneck-elsewhere", "working-memory"} <= {item.cause for item in result.findings}
    assert all(item.advice for item in result.findings)
    assert "8.2% of the bytes a step reads" in result.findings[0].evidence


def test_a_real_run_with_gain_is_not_told_to_look_elsewhere() -> None:
    assert "bottleneck-elsewhere" not in causes(RESULTS / "speed-7680.json")


def smooth(**verdict: Any) -> dict[str, Any]:
    whole = {"finite": True, "perplexity_change": None, "short_change": None, **verdict}
    config = {"precision": "fp16", "window_size": 8}
    outcome = {"accepted": False, "config": config, "culprits": ["model.layers.3.mlp.down_proj"], "verdict": whole}
    return {"choices": [], "conclusion": "", "text_hashes": {}, "outcome": outcome, "speed": None}


def test_the_guards_culprits_are_repeated_by_name(tmp_path: Path) -> None:
    found = diagnose_files([save(tmp_path / "s.json", smooth())]).findings[0]
    assert found.cause == "over-smoothing"
    assert "model.layers.3.mlp.down_proj" in found.evidence


def test_smoothing_that_is_not_finite_names_the_precision(tmp_path: Path) -> None:
    assert causes(save(tmp_path / "s.json", smooth(finite=False))) == ["smoothing-precision"]


def test_short_sequences_that_suffer_more_name_the_window(tmp_path: Path) -> None:
    change = {"perplexity_change": {"mean": 0.001}, "short_change": {"mean": 0.08}}
    assert "window-not-relative" in causes(save(tmp_path / "s.json", smooth(**change)))


def test_smoothing_that_costs_a_step_what_it_gains(tmp_path: Path) -> None:
    data = smooth()
    data["outcome"] = None
    data["speed"] = {
        "own_cost_ms_per_token": 2.0,
        "decode_ms_before": {"median": 10.0},
        "decode_ms_after": {"median": 11.9},
    }
    assert causes(save(tmp_path / "s.json", data)) == ["smoothing-overhead"]


def generated(text: str, cold: str = "keep") -> dict[str, Any]:
    return {"environment": {}, "config": {"cache": {"cold": cold}}, "text": text, "prompt_tokens": 9, "new_tokens": 9}


def test_a_text_in_a_loop_is_told_from_prose(tmp_path: Path) -> None:
    loop = "and then he said that " * 12
    assert causes(save(tmp_path / "a.json", generated(loop, cold="drop"))) == ["key-tokens-evicted"]
    assert causes(save(tmp_path / "b.json", generated(loop))) == ["repetition"]
    prose = "The cache keeps what a later question may ask for, and says so when it does not."
    assert causes(save(tmp_path / "c.json", generated(prose))) == []


def explained(**stats: Any) -> dict[str, Any]:
    numbers = {"kv_bytes": 1000, "statistics_bytes": 5, "nonfinite_pages": {}, **stats}
    return {"positions": {"share_by_tier": {"removed": 0.0}}, "stats": numbers, "environment": {}}


def test_statistics_and_broken_pages_are_read_from_an_explanation(tmp_path: Path) -> None:
    assert causes(save(tmp_path / "a.json", explained(statistics_bytes=60))) == ["statistics-too-large"]
    assert causes(save(tmp_path / "b.json", explained(nonfinite_pages={"7": 3}))) == ["codec-overflow"]


def load(concurrency: int, rate: float) -> dict[str, Any]:
    return {"kind": "load", "max_concurrency": concurrency, "output_throughput": rate, "failed": 0, "completed": 9}


def test_flat_throughput_is_seen_across_load_tests(tmp_path: Path) -> None:
    few, flat, more = (
        save(tmp_path / f"{name}.json", load(concurrency, rate))
        for name, concurrency, rate in (("a", 4, 50.0), ("b", 16, 52.0), ("c", 16, 150.0))
    )
    assert causes(few, flat) == ["bottleneck-elsewhere"]
    assert causes(few, more) == []


def test_every_cause_has_a_symptom_and_a_remedy() -> None:
    assert all(symptom and remedy for symptom, remedy in CAUSES.values())


def test_repetition_and_grids() -> None:
    import torch

    assert repeated_share([1, 2, 3] * 10) == 1.0
    assert repeated_share(list(range(30))) == 0.0
    values = torch.randn(64, 64)
    assert grid_bits(values) is None
    assert grid_bits((values * 2).round().clamp(-7, 7)) == 4


def test_the_command_tells_causes_from_advice_by_its_exit_code(tmp_path: Path) -> None:
    runner = CliRunner()
    advice = runner.invoke(command, [str(RESULTS / "speed-1024.json")], standalone_mode=False)
    assert advice.return_value == 0
    broken = save(tmp_path / "s.json", smooth())
    target = tmp_path / "d.json"
    cause = runner.invoke(command, [str(broken), "--json", str(target)], standalone_mode=False)
    assert cause.return_value == 1
    assert json.loads(target.read_text())["findings"][0]["cause"] == "over-smoothing"
    assert "remedy:" in cause.output


def test_two_models_cannot_run_one_config() -> None:
    result = CliRunner().invoke(command, ["a", "b", "--config", "tiers"])
    assert isinstance(result.exception, InputError)
