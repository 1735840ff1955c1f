from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

import gsm.integrations.transformers as hf
from gsm.cli.probe import command
from gsm.config import load_config
from gsm.errors import InputError
from gsm.measure.probe import Lever, ProbeResult, ProbeSpec, probe
from gsm.measure.probe.advice import cheaper_first
from gsm.measure.probe.levers import BATCH_HOW, DTYPE_HOW
from gsm.measure.probe.turns import Contender, gain, take_turns, with_noise
from gsm.quality import GsmArm, PlainArm
from support_measure import save_tiny_model


@pytest.fixture(scope="module")
def tiny_dir(tmp_path_factory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def result(tiny_dir) -> ProbeResult:
    return probe(
        ProbeSpec(
            str(tiny_dir),
            64,
            new_tokens=130,
            lengths=(128,),
            levers=("tiers", "sparse", "linear", "bfloat16", "batch"),
            verify=True,
            wait_s=0,
        )
    )


def test_a_probe_times_tokens_splits_a_step_and_asks_every_lever(result: ProbeResult) -> None:
    assert result.ttft_ms > 0
    assert len(result.token_ms) == len(result.context_tokens) == 64  # every other block of 16
    assert result.context_tokens[:17] == (*range(64, 80), 96)
    assert result.growth is not None
    assert result.growth.low <= result.growth.us_per_token <= result.growth.high
    assert result.profile is not None
    assert result.profile.parts_ms["linear"] > 0
    assert result.shares is not None
    assert [lever.name for lever in result.levers] == ["tiers", "sparse", "linear", "bfloat16", "batch 8"]
    for lever in result.levers:
        assert lever.predicted_gain == pytest.approx(lever.plain_ms / lever.predicted_ms)
        assert lever.measured_ms is not None
        assert lever.measured_gain == pytest.approx(lever.measured_plain_ms / lever.measured_ms)
        assert lever.error == pytest.approx(lever.predicted_gain / lever.measured_gain - 1)


def test_a_result_survives_its_file(result: ProbeResult) -> None:
    assert ProbeResult.model_validate_json(result.model_dump_json()) == result


def test_new_tokens_stop_at_the_window(tiny_dir) -> None:
    found = probe(ProbeSpec(str(tiny_dir), 900, new_tokens=1024, levers=(), wait_s=0))
    assert found.workload.prompt_tokens + found.workload.new_tokens <= 1024
    with pytest.raises(InputError, match="shorten the prompt"):
        probe(ProbeSpec(str(tiny_dir), 1023, new_tokens=16, levers=(), wait_s=0))
    with pytest.raises(InputError, match="does not fit"):
        probe(ProbeSpec(str(tiny_dir), 64, lengths=(1020,), wait_s=0))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"prompt_tokens": 0}, "prompt_tokens is 0"),
        ({"lengths": (0,)}, "lengths"),
        ({"levers": ("transformers",)}, "leave it out"),
        ({"levers": ("sparsee",)}, "did you mean"),
        ({"wait_s": -1}, "must not be negative"),
        ({"levers": ("int8",)}, "smooths the model"),
    ],
)
def test_impossible_probes_are_refused(wrong, message) -> None:
    with pytest.raises(InputError, match=message):
        ProbeSpec(**{"model": "demo", "prompt_tokens": 64, **wrong})


def test_the_command_prints_writes_and_draws(tiny_dir, tmp_path) -> None:
    json_path, plot = tmp_path / "p.json", tmp_path / "p.png"
    arguments = [str(tiny_dir), "--prompt-tokens", "64", "--new-tokens", "66", "--levers", "tiers", "--wait", "0"]
    run = CliRunner().invoke(command, [*arguments, "--json", str(json_path), "--plot", str(plot)])
    assert run.exit_code == 0, run.output
    assert "because" in run.output
    assert "attention and cache" in run.output
    assert set(json.loads(json_path.read_text())) >= {"verdict", "token_ms", "levers", "growth", "profile"}
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []
    bad = CliRunner().invoke(command, [str(tiny_dir), "--lengths", "2k"])
    assert bad.exit_code == 2
    assert "'2k' is not a number" in bad.output


@pytest.mark.parametrize("config", [None, {}, {"cache": {"preset": "sparse-int4"}}])
def test_noise_fills_a_cache_to_the_asked_length(tiny_model, config) -> None:
    model = tiny_model("llama", max_position_embeddings=4096)
    arm = PlainArm(model) if config is None else GsmArm(model, load_config(config), name="x")
    kv = hf.observe_kv(model, 2)
    with arm.open() as session:
        hf.fill_with_noise(session.cache, kv, 1500)
        assert session.num_tokens == 1500
        logits = session.step(torch.ones(2, 1, dtype=torch.long))
        assert logits.shape == (2, 128)
        assert torch.isfinite(logits).all()


def test_arms_take_turns_and_the_model_is_attached_only_in_its_own(tiny_model) -> None:
    model = tiny_model("llama")
    plain, ours = PlainArm(model), GsmArm(model, load_config({}), name="x")
    seen = []

    def watched(contender: Contender) -> Contender:
        def fill(session):
            seen.append(model.config._attn_implementation)
            return contender.fill(session)

        return Contender(contender.arm, fill)

    turns = take_turns([watched(with_noise(arm, 64)) for arm in (plain, ours)], rounds=3)
    assert seen == ["sdpa", "gsm"]
    assert model.config._attn_implementation == "sdpa"
    assert [len(ms) for ms in turns] == [3, 3]
    assert all(ms > 0 for turn in turns for ms in turn)


def test_a_gain_is_what_neighbours_in_time_say() -> None:
    slow_minute = 10
    assert gain([4, 4 * slow_minute, 4], [2, 2 * slow_minute, 2]) == 2


def lever(how: str, gain: float) -> Lever:
    return Lever(name="x", context_tokens=1, how=how, plain_ms=gain, predicted_ms=1, predicted_gain=gain)


def test_cheaper_things_come_first(tiny_model, demo) -> None:
    def said(*levers: Lever, batch_size: int = 1) -> str:
        return " | ".join(cheaper_first(demo, batch_size, None, levers))

    assert "1.50 times as fast" in said(lever(DTYPE_HOW, 1.5))
    assert "gains nothing on this machine" in said(lever(DTYPE_HOW, 0.9))
    assert "4.0 times as high" in said(lever(BATCH_HOW, 4.0))
    assert said(lever(BATCH_HOW, 4.0), batch_size=8) == ""
    assert said() == ""
    before = demo.model.config._attn_implementation
    demo.model.config._attn_implementation = "eager"
    try:
        assert "attn_implementation='sdpa'" in said()
    finally:
        demo.model.config._attn_implementation = before
