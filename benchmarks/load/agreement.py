"""`gsm load` and `vllm bench serve`, alternately against the same running server with the same prompts.

    python benchmarks/load/agreement.py --url http://127.0.0.1:8000 --tokenizer MODEL_DIRECTORY --out benchmarks/load

Writes the result files of both and `agreement_<api>.json` with their medians side by side. README.md has the server.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from gsm.measure.load.workload import SyntheticWorkload
from gsm.stats import summary

METRICS = ("median_ttft_ms", "median_tpot_ms", "median_itl_ms", "median_e2el_ms", "output_throughput")
JUDGED = ("median_ttft_ms", "median_tpot_ms")
ALLOWED = 0.10


def write_prompts(path: Path, count: int, num_tokens: int) -> None:
    workload = SyntheticWorkload(num_tokens, seed=11)
    lines = [json.dumps({"prompt": workload.prompt("agreement", index).content}) for index in range(count)]
    path.write_text("\n".join(lines) + "\n")


def gsm_command(args: argparse.Namespace, api: str, prompts: Path, result: Path) -> list[str]:
    command = [sys.executable, "-c", "from gsm.cli import main; main()", "load", args.url, "--api", api]
    command += ["-c", str(args.concurrency), "-n", str(args.requests), "--warmup", str(args.concurrency)]
    command += ["--prompts", str(prompts), "--output-tokens", str(args.output_tokens), "--ignore-eos"]
    return [*command, "--model", args.model, "--body", "temperature=0", "--json", str(result)]


def vllm_command(args: argparse.Namespace, api: str, prompts: Path, result: Path) -> list[str]:
    chat = api == "chat"
    command = [*shlex.split(args.bench), "--backend", "openai-chat" if chat else "openai", "--base-url", args.url]
    command += ["--endpoint", "/v1/chat/completions" if chat else "/v1/completions", "--model", args.model]
    command += ["--tokenizer", args.tokenizer, "--dataset-name", "custom", "--dataset-path", str(prompts)]
    command += ["--skip-chat-template", "--disable-shuffle", "--custom-output-len", str(args.output_tokens)]
    command += ["--num-prompts", str(args.requests), "--max-concurrency", str(args.concurrency), "--ignore-eos"]
    command += [
        "--num-warmups",
        str(args.concurrency),
        "--temperature",
        "0",
        "--percentile-metrics",
        "ttft,tpot,itl,e2el",
    ]
    command += ["--metric-percentiles", "50,90,95,99", "--save-result", "--disable-tqdm"]
    return [*command, "--result-dir", str(result.parent), "--result-filename", result.name]


def run(command: list[str], result: Path) -> dict[str, Any]:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode or not result.exists():
        sys.exit(f"{shlex.join(command)}\nended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    data: dict[str, Any] = json.loads(result.read_text())
    for key in ("tokenizer_id", "model_id", "environment", "target"):
        data.pop(key, None)  # paths of this machine
    return data


def compare(args: argparse.Namespace, api: str) -> bool:
    runs: dict[str, list[dict[str, Any]]] = {"gsm": [], "vllm": []}
    with tempfile.TemporaryDirectory() as folder:
        prompts = Path(folder) / "prompts.jsonl"
        write_prompts(prompts, args.requests, args.prompt_tokens)
        for repeat in range(args.repeats):
            for tool, command in (("gsm", gsm_command), ("vllm", vllm_command)):
                result = Path(folder) / f"{tool}-{repeat}.json"
                runs[tool].append(run(command(args, api, prompts, result), result))
                print(api, tool, {name: round(runs[tool][-1][name], 2) for name in METRICS}, flush=True)
    figures = {tool: {name: summary(r[name] for r in results) for name in METRICS} for tool, results in runs.items()}
    ratios = {name: (figures["gsm"][name]["median"] or 0) / (figures["vllm"][name]["median"] or 1) for name in METRICS}
    agrees = all(abs(ratios[name] - 1) <= ALLOWED for name in JUDGED)
    settings = {k: getattr(args, k) for k in ("concurrency", "requests", "prompt_tokens", "output_tokens", "repeats")}
    report = {"api": api, "settings": settings, "load_average": os.getloadavg(), "within_10_percent": agrees}
    report |= {"gsm_over_vllm": ratios, "median_of_runs": figures}
    for tool, results in runs.items():
        (args.out / f"agreement_{api}_{tool}.json").write_text(json.dumps(results, indent=1) + "\n")
    (args.out / f"agreement_{api}.json").write_text(json.dumps(report, indent=2) + "\n")
    print(api, "gsm / vllm:", {name: round(ratio, 3) for name, ratio in ratios.items()}, "agrees:", agrees, flush=True)
    return agrees


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", required=True)
    parser.add_argument("--tokenizer", required=True, help="directory of the served model")
    parser.add_argument("--model", default="demo", help="name under which it is served")
    parser.add_argument("--bench", default="vllm bench serve", help="how the other tool is called")
    parser.add_argument("--api", nargs="+", default=["completions", "chat"])
    parser.add_argument("--concurrency", type=int, default=4)
    parser.add_argument("--requests", type=int, default=24)
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    return 0 if all([compare(args, api) for api in args.api]) else 1


if __name__ == "__main__":
    sys.exit(main())
