"""The whole command against scripted servers: what is printed, what is written, what the exit code says."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from scripted_server import DONE, Request, Script, ScriptedServer, Step, event, models, steady, usage_event

from gsm.cli.load import command
from gsm.errors import ConfigError, InputError, MeasurementError
from gsm.measure.load.report import LoadResult
from gsm.results import read_result

Answer = Callable[[Request], Script]

# What `vllm bench serve` writes with --percentile-metrics ttft,tpot,itl,e2el and --metric-percentiles 50,90,95,99.
VLLM_KEYS = {
    *("date", "endpoint_type", "backend", "model_id", "num_prompts", "request_rate", "burstiness", "max_concurrency"),
    *("duration", "completed", "failed", "total_input_tokens", "total_output_tokens", "request_throughput"),
    *("request_goodput", "output_throughput", "total_token_throughput", "max_output_tokens_per_s"),
    "max_concurrent_requests",
    *(
        f"{a}_{m}_ms"
        for m in ("ttft", "tpot", "itl", "e2el")
        for a in ("mean", "median", "std", "p50", "p90", "p95", "p99")
    ),
}
VLLM_DETAILS = {"input_lens", "output_lens", "ttfts", "itls", "generated_texts", "errors", "start_times", "latencies"}


def with_models(answer: Answer) -> Answer:
    return lambda request: models() if request.method == "GET" else answer(request)


def gsm_load(*args: str) -> Result:
    result = CliRunner().invoke(command, args, catch_exceptions=False, standalone_mode=False)
    return result


def measure(answer: Answer, tmp_path: Path, *args: str) -> tuple[dict[str, Any], Result, list[Request]]:
    path = tmp_path / "result.json"
    with ScriptedServer(with_models(answer)) as server:
        result = gsm_load(server.url, "--json", str(path), *args)
    return json.loads(path.read_text()), result, server.requests


def test_one_run_from_end_to_end(tmp_path: Path) -> None:
    answer = steady(num_tokens=8, ttft_s=0.1, itl_s=0.02)
    args = ("-c", "4", "-n", "12", "--details", "--goodput", "ttft:5000", "tpot:1000")
    data, result, requests = measure(lambda _: answer, tmp_path, *args)
    assert result.return_value == 0
    assert data.keys() >= VLLM_KEYS | VLLM_DETAILS
    assert (data["completed"], data["failed"], data["total_output_tokens"]) == (12, 0, 96)
    # The scripted times are lower bounds; how close we come on a quiet machine is benchmarks/load's business.
    assert 99 <= data["median_ttft_ms"] < 400
    assert 19 <= data["median_tpot_ms"] < 100
    assert data["num_itl_samples"] == 12 * 7
    assert data["request_goodput"] == data["request_throughput"]
    assert data["max_concurrent_requests"] == 4
    assert data["generated_texts"] == [" word" * 8] * 12
    assert data["num_warmup_dropped"] == 4
    assert len(requests) == 1 + 1 + 4 + 12, "models, check, warm-up, measured"
    prompts = [request.body["messages"][0]["content"] for request in requests[2:]]
    assert len(set(prompts)) == 16, "no prompt was sent twice"
    assert {len(prompt.split()) for prompt in prompts} == {512}
    for words in ("12 completed", "TTFT", "1 check and 4 warm-up", "fewer than 100 samples"):
        assert words in result.output
    assert read_result(tmp_path / "result.json", LoadResult).kind == "load"


def test_failures_stand_beside_the_percentiles_of_successes(tmp_path: Path) -> None:  # CASES.md E5
    seen: list[int] = []

    def answer(request: Request) -> Script:
        seen.append(1)
        if len(seen) > 1 and len(seen) % 5 == 0:
            return Script([Step(0.0, b'{"error": {"message": "too busy"}}')], 503, {"Content-Type": "application/json"})
        return steady(num_tokens=2, ttft_s=0.1, itl_s=0.0)

    data, result, _ = measure(answer, tmp_path, "-n", "20", "--warmup", "0")
    assert (data["completed"], data["failed"]) == (16, 4)
    assert data["failures"]["http_503"]["count"] == 4
    assert min(data["median_e2el_ms"], data["p50_e2el_ms"]) >= 99
    assert "4 x" in result.output
    assert "too busy" in result.output
    assert result.return_value == 0


def test_nothing_seen_is_na(tmp_path: Path) -> None:  # CASES.md E7
    answer = Script([Step(0.0, event("", finish="stop") + usage_event(1) + DONE)])
    data, result, _ = measure(lambda _: answer, tmp_path, "-n", "3")
    assert data["completed"] == 3
    assert data["mean_ttft_ms"] is None
    assert "n/a" in result.output
    assert "3 responses held no text" in result.output


def test_reasoning_has_rows_of_its_own(tmp_path: Path) -> None:
    steps = [Step(0.0, event(reasoning="Hm")), Step(0.05, event("42")), Step(0.05, event("", finish="stop") + DONE)]
    data, result, _ = measure(lambda _: Script(steps), tmp_path, "-n", "2")
    assert data["median_ttft_ms"] == data["median_ttft_reasoning_ms"]
    assert data["median_ttft_answer_ms"] >= data["median_ttft_reasoning_ms"] + 40
    assert "first of reasoning" in result.output
    assert "2 responses came without usage" in result.output


def test_whole_responses_have_no_first_token(tmp_path: Path) -> None:
    body = json.dumps({"choices": [{"message": {"content": "Hi"}, "finish_reason": "stop"}]}).encode()
    answer = Script([Step(0.0, body)], headers={"Content-Type": "application/json"})
    data, result, _ = measure(lambda _: answer, tmp_path, "-n", "2", "--no-stream")
    assert data["mean_ttft_ms"] is None
    assert data["mean_e2el_ms"] is not None
    assert "were not streamed" in result.output


def test_a_server_that_breaks_ends_with_exit_code_1(tmp_path: Path) -> None:
    seen: list[int] = []

    def answer(request: Request) -> Script:
        seen.append(1)
        return steady(1, 0.0, 0.0) if len(seen) == 1 else Script(status=500)

    data, result, _ = measure(answer, tmp_path, "-n", "500", "-c", "4")
    assert result.return_value == 1
    assert data["completed"] == 0
    assert data["stopped_by"] == "failures"
    assert 100 <= data["failed"] <= 104


def test_a_header_with_a_credential_is_in_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", "topsecret")
    monkeypatch.setattr(sys, "argv", ["gsm", "load", "--header", "X-Api-Key=alsosecret"])
    _, _, requests = measure(
        lambda _: steady(1, 0.0, 0.0),
        tmp_path,
        "-n",
        "1",
        "--api-key-env",
        "MY_KEY",
        "--header",
        "X-Api-Key=alsosecret",
    )
    assert requests[-1].headers["authorization"] == "Bearer topsecret"
    text = (tmp_path / "result.json").read_text()
    assert "topsecret" not in text
    assert "alsosecret" not in text


def test_two_servers_are_compared_in_interleaved_rounds_with_equal_prompts(tmp_path: Path) -> None:
    path, order = tmp_path / "ab.json", []

    def arm(name: str, ttft_s: float) -> Answer:
        def answer(request: Request) -> Script:
            order.append((name, request.body["messages"][0]["content"]))
            return steady(2, ttft_s, 0.01)

        return with_models(answer)

    with ScriptedServer(arm("A", 0.02)) as a, ScriptedServer(arm("B", 0.2)) as b:
        args = ("-n", "6", "--rounds", "3", "--warmup", "0", "--prompt-tokens", "8")
        result = gsm_load("--ab", a.url, b.url, *args, "--json", str(path))
    data = json.loads(path.read_text())
    measured = order[2:]
    assert [name for name, _ in measured] == list("AABBBBAAAABB"), "A B, B A, A B"
    assert [p for name, p in measured if name == "A"] == [p for name, p in measured if name == "B"]
    assert result.return_value == 0
    assert data["num_rounds"] == 3
    row = data["paired"]["ttft_ms"]
    assert row["low"] <= row["difference"] <= row["high"]
    assert row["mean_b"] - row["mean_a"] == pytest.approx(row["difference"])
    assert row["low"] > 50
    assert row["num_rounds"] == 3
    assert data["A"]["completed"] == data["B"]["completed"] == 6
    assert "differs" in result.output


def test_two_values_on_one_server_get_different_prompts_of_one_size(tmp_path: Path) -> None:
    seen: list[tuple[str, int, str]] = []

    def answer(request: Request) -> Script:
        content = request.body["messages"][0]["content"]
        seen.append((request.headers.get("x-mode", ""), request.body.get("top_k", 0), content))
        return steady(2, 0.0, 0.0)

    with ScriptedServer(with_models(answer)) as server:
        args = ("-n", "4", "--warmup", "0", "--prompt-tokens", "9")
        gsm_load(server.url, "--ab", "header:X-Mode=a", "body:top_k=5", *args)
    measured = [entry for entry in seen if entry[2] != "Hello"]
    assert {(mode, top_k) for mode, top_k, _ in measured} == {("a", 0), ("", 5)}
    assert len({content for *_, content in measured}) == 8
    assert {len(content.split()) for *_, content in measured} == {9}


@pytest.mark.parametrize(
    ("args", "error", "words"),
    [
        ([], ConfigError, "no server was named"),
        (["localhost:8000"], ConfigError, "http://localhost:8000"),
        (["http://h", "-c", "0"], ConfigError, "between 1 and 10000"),
        (["http://h", "-n", "0"], ConfigError, "number of requests"),
        (["http://h", "--duration", "-1"], ConfigError, "duration"),
        (["http://h", "--rate", "0"], ConfigError, "rate"),
        (["http://h", "--warmup", "-1"], ConfigError, "warm-up"),
        (["http://h", "--timeout", "0"], ConfigError, "timeout"),
        (["http://h", "--prefix-share", "2"], ConfigError, "prefix"),
        (["http://h", "--goodput", "speed:3"], ConfigError, "ttft, tpot, e2el"),
        (["http://h", "--goodput", "ttft:3", "--no-stream"], ConfigError, "streamed"),
        (["http://h", "--body", "n=2"], ConfigError, "several choices"),
        (["http://h", "--api-key-env", "GSM_TEST_UNSET_VARIABLE"], ConfigError, "not set"),
        (["http://h", "--prompts", "/nowhere/p.jsonl"], InputError, "cannot be read"),
        (["http://h", "--json", "/nowhere/r.json"], InputError, "does not exist"),
        (["http://h", "--ab", "http://a", "http://b"], ConfigError, "would not be used"),
        (["--ab", "http://a", "body:x=1"], ConfigError, "no server was named"),
        (["http://h", "--ab", "body:x=1", "body:x=2", "-n", "1"], ConfigError, "2 requests per arm"),
        (["http://127.0.0.1:9", "--model", "m"], MeasurementError, "cannot connect"),
        (["http://127.0.0.1:9"], MeasurementError, "is the server running"),
    ],
)
def test_wrong_input_is_one_clear_sentence(args: list[str], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words) as caught:
        gsm_load(*args)
    assert "\n" not in str(caught.value)


@pytest.mark.skipif(os.name != "posix", reason="sends signals")
@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM], ids=["Ctrl-C", "SIGTERM"])
def test_being_stopped_keeps_the_results(tmp_path: Path, stop: signal.Signals) -> None:
    path, path_ab = tmp_path / "result.json", tmp_path / "ab.json"
    num_measured = 0

    def interrupt_after(count: int, process: list[subprocess.Popen[str]]) -> Answer:
        def answer(request: Request) -> Script:
            nonlocal num_measured
            num_measured += 1
            if num_measured == count:
                process[0].send_signal(stop)
            return Script([Step(60.0, DONE)]) if num_measured >= count else steady(2, 0.0, 0.0)

        return answer

    for args, file in ((["-n", "1000"], path), (["--ab", "body:a=1", "body:a=2", "-n", "1000"], path_ab)):
        num_measured, process = 0, []
        with ScriptedServer(with_models(interrupt_after(12, process))) as server:
            line = [sys.executable, "-c", "from gsm.cli import main; main()", "load", server.url]
            line += [*args, "--warmup", "0", "--json", str(file)]
            process.append(subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
            output, errors = process[0].communicate(timeout=60)
        assert process[0].returncode == 130, errors
        assert "interrupted" in output
    data = json.loads(path.read_text())
    assert (data["completed"], data["cancelled"], data["stopped_by"]) == (10, 1, "interrupt")
    assert json.loads(path_ab.read_text())["A"]["stopped_by"] == "interrupt"
