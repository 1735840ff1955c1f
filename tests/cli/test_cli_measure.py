"""The commands from the outside: exit codes, one-sentence errors, files, help without torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import gsm.cli
from gsm.cli.demo import demo_spec, verdict
from gsm.cli.generate import TextDeltas, encode_prompt, stream
from gsm.config import load_config
from gsm.errors import InputError
from gsm.measure.evaluate import EvalSpec, evaluate
from gsm.models import LoadedModel, load_model
from gsm.results import (
    ArmResult,
    BenchResult,
    EvalResult,
    GenerateResult,
    Quality,
    Spread,
    Tolerance,
    Workload,
    collect_environment,
)
from gsm.results import read_result as read
from support_measure import save_tiny_model


@pytest.fixture(scope="session")
def tiny_directory(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_model(tmp_path_factory.mktemp("tiny")))


@pytest.fixture
def gsm_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Run `gsm ARGS` in this process: (exit code, standard output, standard error)."""

    def run(*args: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["gsm", *map(str, args)])
        with pytest.raises(SystemExit) as ended:
            gsm.cli.main()
        out, err = capsys.readouterr()
        return int(ended.value.code or 0), out, err

    return run


def test_help_is_there_without_torch() -> None:
    script = (
        "import sys, gsm.cli\n"
        "for command in ('bench', 'eval', 'generate', 'demo'):\n"
        "    try: gsm.cli.gsm([command, '--help'])\n"
        "    except SystemExit as end: assert not end.code\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "--prompt-tokens" in done.stdout


BAD_INPUT = [
    (("bench", "TINY", "--arms", "sparce"), "did you mean 'sparse'"),
    (("bench", "TINY", "--arms", "full,full"), "given twice"),
    (("bench", "TINY", "--arms", ","), "no arm was given"),
    (("bench", "TINY", "--arms", "missing.yaml"), "does not exist"),
    (("bench", "TINY", "--runs", "0"), "0 is not in the range"),
    (("bench", "TINY", "--dtype", "int3"), "'int3' is not one of"),
    (("bench", "TINY", "--json", "no/such/folder/r.json"), "folder that does not exist"),
    (("bench",), "Missing argument 'MODEL'"),
    (("eval", "TINY"), "Missing option '--config'"),
    (("eval", "TINY", "--config", "transformers"), "is the full cache itself"),
    (("eval", "TINY", "--config", "tiers", "--windows", "0", "--needles", "0"), "neither windows nor needles"),
    (("eval", "TINY", "--config", "tiers", "--prompt-tokens", "1000"), "a prompt of at most 896"),
    (("eval", "TINY", "--config", "tiers", "--text", "missing.txt"), "text file missing.txt does not exist"),
    (("eval", "TINY", "--config", "BAD_CONFIG"), "did you mean 'hot_size'"),
    (("eval", "no/such/model", "--config", "tiers"), "no/such/model"),
    (("generate", "TINY"), "exactly one of --prompt and --prompt-file"),
    (("generate", "TINY", "--prompt", "a", "--prompt-file", "b"), "exactly one of"),
    (("generate", "TINY", "--prompt", "  "), "the prompt is empty"),
    (("generate", "TINY", "--prompt-file", "missing.txt"), "missing.txt does not exist"),
    (("generate", "TINY", "--prompt", "a", "--config", "transformers"), "is plain transformers"),
    (("generate", "TINY", "--prompt", "a", "--max-new-tokens", "5000"), "trained for 1024 positions"),
    (("generate", "TINY", "--prompt", "a", "--temperature", "-1"), "-1.0 is not in the range"),
    (("generate", "TINY", "--prompt", "a", "--threads", "0"), "0 is not in the range"),
    (("generate", "TINY", "--prompt", "a", "--device", "tpu:9"), "device"),
]


@pytest.mark.parametrize(
    ("args", "said"), BAD_INPUT, ids=lambda value: " ".join(value) if isinstance(value, tuple) else ""
)
def test_bad_input_is_one_sentence_and_exit_code_2(
    gsm_command, tiny_directory: str, tmp_path: Path, args: tuple[str, ...], said: str
) -> None:
    bad = tmp_path / "bad.yaml"
    bad.write_text("cache: {hot_sizes: 3}")
    names = {"TINY": tiny_directory, "BAD_CONFIG": bad}
    code, out, err = gsm_command(*(names.get(arg, arg) for arg in args))
    assert code == 2
    assert out == ""
    last = err.strip().splitlines()[-1]
    assert said in last
    assert "Traceback" not in err


def test_generate_streams_what_it_reports(gsm_command, tiny_directory: str, tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    args = ("--prompt", "Once upon a time", "--max-new-tokens", 12, "--no-chat", "--json", path, "--threads", 1)
    code, out, err = gsm_command("generate", tiny_directory, *args)
    assert code == 0
    result = read(path, GenerateResult)
    assert out == result.text + "\n"
    assert result.new_tokens == 12
    assert result.ttft_ms > 0
    assert result.tpot_ms > 0
    assert result.kv_bytes > 0
    assert "12 new tokens" in err


def test_generate_equals_plain_transformers(demo: LoadedModel) -> None:
    ids = encode_prompt(demo, "What is the capital of France?", None)
    pieces: list[str] = []
    result = stream(demo, load_config(None), ids, on_text=pieces.append, max_new_tokens=16)
    expected = demo.model.generate(ids, max_new_tokens=16, do_sample=False)[0, ids.shape[1] :]
    assert result.text == "".join(pieces) == demo.tokenizer.decode(expected, skip_special_tokens=True)
    assert "Paris" in result.text
    assert demo.model.config._attn_implementation == "sdpa"


def test_sampling_follows_the_seed(tiny_directory: str) -> None:
    tiny = load_model(tiny_directory)
    ids = encode_prompt(tiny, "Hello", False)

    def sample(seed: int) -> str:
        settings = {"max_new_tokens": 12, "temperature": 1.5, "seed": seed}
        return stream(tiny, load_config(None), ids, on_text=lambda piece: None, **settings).text

    assert sample(1) == sample(1) != sample(2)


@pytest.mark.parametrize("text", ["naïve café — 你好，世界 🙂👩‍👩‍👧 end", "日本語のテキスト", "🙂", " a  b\n\n c"])  # noqa: RUF001
def test_pieces_joined_are_the_whole_and_never_half_a_character(demo: LoadedModel, text: str) -> None:
    ids = demo.tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
    pieces: list[str] = []
    deltas = TextDeltas(demo.tokenizer, 3, pieces.append)
    deltas.put(ids[:, :1].repeat(1, 3))  # the prompt
    for token in ids[0]:
        deltas.put(token[None])
    deltas.end()
    assert "".join(pieces) == deltas.text == demo.tokenizer.decode(ids[0]) == text
    assert not any("\ufffd" in piece for piece in pieces)
    assert len(deltas.times_s) == ids.shape[1]


def test_a_text_that_ends_in_half_a_character_is_still_told(demo: LoadedModel) -> None:
    ids = demo.tokenizer("🙂", add_special_tokens=False).input_ids[:-1]
    pieces: list[str] = []
    deltas = TextDeltas(demo.tokenizer, 0, pieces.append)
    for token in ids:
        deltas.put(pytest.importorskip("torch").tensor([token]))
    assert pieces == []
    deltas.end()
    assert "".join(pieces) == demo.tokenizer.decode(ids)


def test_one_token_has_no_time_per_token(demo: LoadedModel) -> None:
    deltas = TextDeltas(demo.tokenizer, 0, lambda piece: None)
    assert deltas.ttft_ms is None
    deltas.put(pytest.importorskip("torch").tensor([5]))
    assert deltas.ttft_ms is not None
    assert deltas.tpot_ms is None


def test_a_chat_template_is_used_where_there_is_one(demo: LoadedModel) -> None:
    chat, plain = (demo.tokenizer.decode(encode_prompt(demo, "Hi", wanted)[0]) for wanted in (None, False))
    assert "<|im_start|>user\nHi" in chat
    assert plain == "Hi"


def test_eval_passes_or_misses_by_its_tolerance(gsm_command, tiny_directory: str, tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    common = ("eval", tiny_directory, "--config", "full", "--prompt-tokens", 160, "--windows", 2, "--needles", 1)
    code, out, _ = gsm_command(*common, "--json", path)
    assert code == 0
    assert "Passed." in out
    content = json.loads(path.read_text())
    assert content["passed"] is True
    assert content["quality"]["kl"] < 1e-9
    lossy = tmp_path / "lossy.yaml"
    lossy.write_text("cache: {policy: recent, cold: drop, hot_size: 32, recent_tokens: 16, sink_tokens: 0}")
    code, out, _ = gsm_command(*common, "--config", lossy, "--tolerance-kl", "1e-9", "--json", path)
    assert code == 1
    assert "Missed: KL may be" in out
    result = read(path, EvalResult)
    assert not result.passed
    assert result.failures
    assert result.tolerance.kl == 1e-9


def test_an_interrupted_eval_keeps_what_is_complete(tiny_directory: str) -> None:
    def progress(label: str, done: int, total: int) -> None:
        if label == "quality: full" and done == 4:  # the full cache and the arm, twice
            raise KeyboardInterrupt

    tolerance = Tolerance(kl=1.0, needles_lost=1)
    spec = EvalSpec(tiny_directory, "full", 160, tolerance, num_windows=6, windows_per_prefill=1, needles_per_depth=0)
    result = evaluate(spec, progress)
    assert result.interrupted
    assert not result.passed
    assert result.quality.n_windows == 2
    assert any("interrupted after 2 windows" in failure for failure in result.failures)


def test_bench_without_quality_says_that_it_is_no_result(gsm_command, tiny_directory: str, tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    code, out, _ = gsm_command(
        "bench", tiny_directory, "--prompt-tokens", 32, "--new-tokens", 2, "--runs", 1, "--arms", "transformers",
        "--no-quality", "--wait", 0, "--json", path, "--threads", 1,
    )  # fmt: skip
    assert code == 0
    assert "these numbers alone are not a result" in out
    assert "n/a" in out
    assert read(path, BenchResult).arms[0].quality is None


def demo_result(**sparse) -> BenchResult:
    def arm(name: str, tpot: float | None, **more) -> ArmResult:
        return ArmResult(name=name, config=None, tpot_ms=Spread(median=tpot, min=tpot, max=tpot), **more)

    arms = (
        arm("transformers", 100.0, kv_bytes=1000), arm("sparse", **{"tpot": 50.0, "kv_bytes": 350, **sparse}),
    )  # fmt: skip
    work = Workload(prompt_tokens=4096, new_tokens=32, runs=2, batch_size=1)
    return BenchResult(environment=collect_environment(), workload=work, arms=arms)


def test_the_verdict_is_honest() -> None:
    assert "2.00 times as fast" in verdict(demo_result())
    assert "35% of its KV bytes" in verdict(demo_result())
    assert "2.00 times slower" in verdict(demo_result(tpot=200.0))
    assert "was not measured" in verdict(demo_result())
    assert "0.003 nats" in verdict(demo_result(quality=Quality(kl=0.003, n_windows=2)))
    assert "No verdict" in verdict(demo_result(tpot=None))


def test_the_demo_fits_the_demo_model() -> None:
    for quick in (True, False):
        spec = demo_spec(quick)
        assert spec.model == "demo"
        assert spec.prompt_tokens + max(spec.new_tokens, 128 * spec.windows_per_prefill) <= 8192


def test_an_unreadable_prompt_file_is_refused(tmp_path: Path) -> None:
    from gsm.cli.generate import read_prompt

    (tmp_path / "p").write_bytes(b"\xff\xfe\xff")
    with pytest.raises(InputError, match="not UTF-8"):
        read_prompt(None, str(tmp_path / "p"))
    with pytest.raises(InputError, match="cannot be read"):
        read_prompt(None, str(tmp_path))
