"""The plugin under tensor, data and pipeline parallelism: the same answers, a config change that reaches every rank.

Each layout is a server of its own (`gsm serve --engine vllm -- ...`), asked over HTTP. With everything selected and
with an eighth selected, its answers must be those of one process, and the change must have reached every rank.
A server that drops blocks follows for tensor parallelism: all ranks must read the same blocks.

    .venv-vllm/bin/python benchmarks/vllm_parallel.py --json benchmarks/results/vllm-parallel.json

About 15 minutes on two cores with the demo model (3 kv heads: TP 3); PP runs compiled, as vLLM's CPU build asks.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from vllm_children import write

SELECT = {"cache": {"sparse": {"enabled": True, "budget_fraction": 0.125, "sigma": 2.5}}}
ALL = {"cache": {"sparse": {"enabled": True, "budget_fraction": 1.0}}, "vllm": {"always_select": True}}
DROP = {"cache": {"policy": "budget", "warm_size": 512, "hot_size": 512, "cold": "drop", "sparse": {"enabled": True}}}
LAYOUTS: dict[str, tuple[str, ...]] = {
    "single": (),
    "tp": ("--tensor-parallel-size", "{tp}"),
    "dp": ("--data-parallel-size", "2"),
    "pp": ("--pipeline-parallel-size", "2"),
}
TOLERANCE = 1e-3  # sums over ranks have another order
TOLERANCE_SELECTED = 2e-2  # which may tip the choice between two pages


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--layouts", default="tp,dp,pp")
    parser.add_argument("--tp", default="3")
    parser.add_argument("--prompt-tokens", type=int, default=2048)
    parser.add_argument("--new-tokens", type=int, default=24)
    parser.add_argument("--port", type=int, default=8765)
    parser.add_argument("--json", dest="json_path")
    told = parser.parse_args()
    prompts = make_prompts(told)
    results: dict[str, Any] = {"single": run("single", ALL, told, prompts)}
    results |= {f"{name}": run(name, ALL, told, prompts) for name in told.layouts.split(",")}
    drops = ["single"] + [name for name in told.layouts.split(",") if name == "tp"]
    dropped = {name: run(name, DROP, told, prompts) for name in drops}
    checks = {name: judge(results["single"], found) for name, found in results.items() if name != "single"}
    checks |= {f"{name}, dropping": judge(dropped["single"], dropped[name]) for name in drops if name != "single"}
    passed = all(all(check.values()) for check in checks.values())
    for name, check in checks.items():
        print(name, check)
    print("passed" if passed else "failed")
    if told.json_path:
        from gsm.results import collect_environment

        environment = collect_environment(model=told.model, dtype="float32").model_dump(mode="json")
        ranks = {name: found["ranks"] for name, found in {**results, **dropped}.items()}
        result = {
            "kind": "vllm-parallel",
            "environment": environment,
            "checks": checks,
            "ranks": ranks,
            "passed": passed,
        }
        write(told.json_path, result)
    return 0 if passed else 1


def make_prompts(told: argparse.Namespace) -> list[list[int]]:
    from transformers import AutoConfig, AutoTokenizer

    from gsm.models.sources import resolve_source
    from gsm.quality import encode, load_thirds

    source = resolve_source(told.model)
    ids = encode(AutoTokenizer.from_pretrained(source), load_thirds(None).evaluation)
    ids = (ids % AutoConfig.from_pretrained(source).vocab_size).tolist()
    return [ids[i * 977 : i * 977 + told.prompt_tokens] for i in range(2)]


def run(name: str, config: dict[str, Any], told: argparse.Namespace, prompts: list[list[int]]) -> dict[str, Any]:
    """Answers of one layout under two configs, what every rank says, and the metrics."""
    print(f"{name}: starting", file=sys.stderr, flush=True)
    url = f"http://127.0.0.1:{told.port}"
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "gsm.json"
        file.write_text(json.dumps(config))
        gsm = str(Path(sys.executable).with_name("gsm"))
        command = [gsm, "serve", told.model, "--engine", "vllm", "--config", str(file), "--port", str(told.port)]
        command += ["--dtype", "float32", "--kv-memory-mib", "512", "--max-running", "4", "--"]
        command += ["--max-model-len", str(told.prompt_tokens + told.new_tokens + 64)]
        command += [part.format(tp=told.tp) for part in LAYOUTS[name]]
        command += [] if name == "pp" else ["--enforce-eager"]
        environment = {**os.environ, "VLLM_LOGGING_LEVEL": "WARNING"}
        environment.setdefault("OMP_NUM_THREADS", "1")
        server = subprocess.Popen(command, env=environment, start_new_session=True)
        try:
            wait_until_ready(url, server)
            first = [answer(url, one, told) for one in prompts]
            second = SELECT if config is ALL else {**DROP, "cache": {**DROP["cache"], "warm_size": 256}}
            ranks = call(url + "/v1/gsm/config", second)["ranks"]
            changed = [answer(url, one, told) for one in prompts]
            refused = status_of(url + "/v1/gsm/config", {"engine": {"max_running": 1}})
            after = call(url + "/v1/gsm/config")["ranks"]
            metrics = get(url + "/metrics")
        finally:
            stop(server)
    return {
        "first": first,
        "changed": changed,
        "refused": refused,
        "ranks": [{k: r[k] for k in ("rank", "data_parallel_rank", "epoch", "fingerprint", "counters")} for r in after],
        "replaced": sorted((r["data_parallel_rank"], r["rank"]) for r in ranks),
        "metrics": all(text in metrics for text in ("gsm:read_tokens_total", "vllm:")),
        "series": sorted(line.split()[0] for line in metrics.splitlines() if line.startswith("gsm:config_epoch")),
    }


def stop(server: subprocess.Popen[bytes]) -> None:
    """End the server and what it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(server.pid, signal.SIGTERM)
    try:
        server.wait(60)
    except subprocess.TimeoutExpired:
        os.killpg(server.pid, signal.SIGKILL)


def judge(single: dict[str, Any], found: dict[str, Any]) -> dict[str, bool]:
    return {
        "same_answers": same(single["first"], found["first"], TOLERANCE),
        "same_answers_after_reload": same(single["changed"], found["changed"], TOLERANCE_SELECTED),
        "every_rank_has_the_config": len({r["fingerprint"] for r in found["ranks"]}) == 1
        and all(r["epoch"] == 2 for r in found["ranks"])
        and len(found["ranks"]) == len(found["replaced"]) > 1,
        "ranks_are_told_apart": len(set(found["series"])) == len(found["ranks"]),
        "refused_what_needs_a_restart": found["refused"] == 409,
        "metrics": found["metrics"],
    }


def same(one: list[Any], other: list[Any], within: float) -> bool:
    """Equal tokens up to a near tie, equal log-probabilities up to there."""
    for a, b in zip(one, other, strict=True):
        for (token, logprob), (token_b, logprob_b) in zip(a, b, strict=True):
            if abs(logprob - logprob_b) > within:
                return False
            if token != token_b:
                break
    return True


def answer(url: str, prompt: list[int], told: argparse.Namespace) -> list[Any]:
    body = {
        "model": Path(told.model).name, "prompt": prompt, "max_tokens": told.new_tokens, "temperature": 0,
        "logprobs": 1, "ignore_eos": True, "return_tokens_as_token_ids": True,
    }  # fmt: skip
    found = call(url + "/v1/completions", body)["choices"][0]["logprobs"]
    return list(zip(found["tokens"], found["token_logprobs"], strict=True))


def wait_until_ready(url: str, server: subprocess.Popen[bytes]) -> None:
    for _ in range(600):
        if server.poll() is not None:
            raise SystemExit(f"the server ended with exit code {server.returncode}; its messages are above")
        try:
            get(url + "/health")
        except (urllib.error.URLError, ConnectionError):
            time.sleep(1)
        else:
            return
    raise SystemExit("the server was not ready after 600 s")


def call(url: str, body: dict[str, Any] | None = None) -> Any:
    return json.loads(get(url, body))


def get(url: str, body: dict[str, Any] | None = None) -> str:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=600) as response:
        text: str = response.read().decode()
    return text


def status_of(url: str, body: dict[str, Any]) -> int:
    try:
        get(url, body)
    except urllib.error.HTTPError as error:
        return error.code
    return 200


if __name__ == "__main__":
    sys.exit(main())
