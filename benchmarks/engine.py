"""The engine beside what else serves many requests from the same model. One part per call, so that each fits into a few
quiet minutes; every part writes one JSON file with the command that made it.

    python benchmarks/engine.py batch|long|prefix|short|capacity|concurrency|overload [--threads N]
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from gsm.config import GsmConfig, SparseConfig, load_config
from gsm.engine import Engine, SamplingParams
from gsm.models import LoadedModel, load_model
from gsm.quality import load_thirds
from gsm.quality.texts import encode
from gsm.results import collect_environment, load_average
from gsm.serve.run import open_engine
from gsm.stats import percentile

RESULTS = Path(__file__).parent / "results"
GSM = [sys.executable, "-c", "from gsm.cli import main; main()"]
PLENTY = {"max_running": 32, "kv_memory_mib": 8192.0}

# rotated first where activations are rounded too: +0.5 % perplexity instead of +3.4 % (`smooth_quality.json`)
INT8: dict[str, dict[str, Any]] = {
    "off": {},
    "weight_only": {"int8": "weight_only"},
    "dynamic": {"enable": True, "method": "rotate", "int8": "dynamic"},
}


def settings(preset: str, smoothing: dict[str, Any] | None = None, **engine: Any) -> GsmConfig:
    return load_config({"cache": {"preset": preset}, "engine": {**PLENTY, **engine}, "smoothing": smoothing or {}})


def write(name: str, args: argparse.Namespace, before: Any, content: dict[str, Any]) -> None:
    environment = collect_environment(model=args.model, dtype=args.dtype, threads=torch.get_num_threads())
    head = {"environment": environment.model_dump(mode="json"), "load_average_at_start": before}
    text = json.dumps({**head, **content}, indent=2) + "\n"
    temporary = RESULTS / f".{name}.tmp"
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, RESULTS / name)
    print(json.dumps(content, indent=2))


def text_prompts(loaded: LoadedModel, num: int, length: int) -> list[list[int]]:
    """Different stretches of the evaluation third."""
    ids = encode(loaded.tokenizer, load_thirds().part("evaluation"))
    step = max(1, (len(ids) - length) // num)
    return [ids[i * step : i * step + length].tolist() for i in range(num)]


@functools.cache
def _load(model: str, dtype: str, threads: int) -> LoadedModel:
    return load_model(model, dtype=dtype, threads=threads)


def loaded_once(args: argparse.Namespace) -> LoadedModel:
    return _load(args.model, args.dtype, args.threads)


def run_all(
    engine: Engine, prompts: list[list[int]], new_tokens: int, sparse: SparseConfig | None = None
) -> dict[str, Any]:
    """Submit everything at once and step to the end: total time, and when every token came."""
    sampling = SamplingParams(max_tokens=new_tokens, ignore_eos=True)
    began = time.perf_counter()
    for number, ids in enumerate(prompts):
        engine.add(str(number), list(ids), sampling, sparse=sparse)
    times: dict[str, list[float]] = {}
    texts: dict[str, list[int]] = {}
    while engine.has_work:
        for event in engine.step():
            times.setdefault(event.request_id, []).append(time.perf_counter() - began)
            texts.setdefault(event.request_id, []).extend(event.token_ids)
    return {"total_s": time.perf_counter() - began, "times": times, "token_ids": texts}


def decode_phase(times: dict[str, list[float]]) -> dict[str, float]:
    """Rate and gaps from when everybody has a token until the first is done."""
    start, end = max(t[0] for t in times.values()), min(t[-1] for t in times.values())
    if end <= start:
        sys.exit("the first request was done before the last one began to decode; raise --new-tokens")
    gaps = [b - a for t in times.values() for a, b in itertools.pairwise(t) if a >= start and b <= end]
    num = sum(start < moment <= end for t in times.values() for moment in t)
    return {
        "tokens_per_s": num / (end - start),
        "itl_p50_ms": 1000 * percentile(gaps, 50),
        "itl_p99_ms": 1000 * percentile(gaps, 99),
        "num_gaps": len(gaps),
    }


def batch(args: argparse.Namespace) -> None:
    """8 x (64 + 32) tokens: the engine, a static batch, transformers' own continuous batching; interleaved rounds."""
    before, loaded = load_average(), loaded_once(args)
    prompts = text_prompts(loaded, 8, 64)

    def static() -> float:
        ids = torch.tensor(prompts)
        began = time.perf_counter()
        loaded.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=32,
            min_new_tokens=32,
            do_sample=False,
            pad_token_id=0,
        )
        return time.perf_counter() - began

    def ours(preset: str) -> float:
        with Engine(loaded, settings(preset, prefix_cache=False)) as engine:
            found = run_all(engine, prompts, 32)
            assert all(len(ids) == 32 for ids in found["token_ids"].values())
            return float(found["total_s"])

    def continuous() -> float:
        from transformers import GenerationConfig

        generation = GenerationConfig(max_new_tokens=32, eos_token_id=-1, pad_token_id=0, do_sample=False)
        attention = loaded.model.config._attn_implementation
        began = time.perf_counter()
        out = loaded.model.generate_batch(prompts, generation_config=generation, progress_bar=False)
        spent = time.perf_counter() - began
        loaded.model.set_attn_implementation(attention)
        assert len(out) == 8
        return spent

    arms: dict[str, Callable[[], float]] = {
        "static batch of transformers": static,
        "gsm engine, full": lambda: ours("full"),
        "continuous batching of transformers": continuous,
    }
    times: dict[str, list[float]] = {name: [] for name in arms}
    errors = {}
    for round_number in range(3):
        for name, run in arms.items():
            if name in errors:
                continue
            try:
                spent = run()
            except Exception as error:  # a peer that does not run here is reported, not hidden
                errors[name] = f"{type(error).__name__}: {error}"
                continue
            if round_number:  # the first round warms up and is thrown away
                times[name].append(spent)
    medians = {name: statistics.median(found) for name, found in times.items() if found}
    ours_s = medians["gsm engine, full"]
    content = {
        "work": "8 requests x (64 prompt + 32 new tokens), all submitted at once",
        "median_s": medians,
        "samples_s": times,
        "errors": errors,
        "ratio_to_static": ours_s / medians["static batch of transformers"],
        "ratio_to_continuous": ours_s / medians.get("continuous batching of transformers", float("nan")),
        "vllm_cpu_s_seen_before": 1.6,
    }
    write("engine-batch.json", args, before, content)


def long(args: argparse.Namespace) -> None:
    """8 requests with 4000 tokens of context, all decoding: every page in full precision, then selected pages of which
    the older ones are int8. Each arm has an engine of its own and computes its own prompts."""
    before, loaded = load_average(), loaded_once(args)
    prompts = text_prompts(loaded, 8, args.context)
    smoothing = INT8[args.int8]
    content: dict[str, Any] = {
        "work": f"8 requests x ({args.context} + {args.new_tokens}) tokens, all submitted at once",
        "smoothing": smoothing,
        "vllm_cpu_decode_tokens_per_s_seen_before": {"bfloat16": 87, "float32": 60},
    }
    for preset in ("full", "sparse"):
        with ExitStack() as kept:
            engine = kept.enter_context(open_engine(loaded, settings(preset, smoothing), None, kept))
            run_all(engine, [ids[:40] for ids in prompts], 8)  # warms up
            found = run_all(engine, prompts, args.new_tokens)
            first_s = max(times[0] for times in found["times"].values())
            content[preset] = {"ttft_max_s": first_s, **decode_phase(found["times"])}
    content["speedup"] = content["sparse"]["tokens_per_s"] / content["full"]["tokens_per_s"]
    write(f"engine-long{'' if args.int8 == 'off' else '-' + args.int8}.json", args, before, content)


def capacity(args: argparse.Namespace) -> None:
    """KV bytes of one request of 4000 tokens in every cache and dtype, after a real prefill."""
    before, rows = load_average(), {}
    for dtype in ("float32", "bfloat16"):
        loaded = load_model(args.model, dtype=dtype, threads=args.threads)
        for preset in ("full", "tiers", "sparse-int4"):
            with Engine(loaded, settings(preset, prefix_cache=False)) as engine:
                engine.add("r", text_prompts(loaded, 1, args.context)[0], SamplingParams(max_tokens=args.new_tokens))
                most = used = 0
                while engine.has_work:
                    engine.step()
                    most, used = max(most, engine.room.used_bytes), engine.room.used_bytes or used
                rows[f"{dtype} {preset}"] = {"bytes_at_end": used, "bytes_at_most": most}
                rows[f"{dtype} {preset}"]["bytes_admitted"] = engine.room.bytes_of(args.context + args.new_tokens)
    for dtype in ("float32", "bfloat16"):
        memory = 8 * rows[f"{dtype} full"]["bytes_admitted"]
        for preset in ("tiers", "sparse-int4"):
            row = rows[f"{dtype} {preset}"]
            row["running_in_the_memory_of_8_full"] = running_in(memory, row)
            row["requests_that_fit_against_full"] = running_in(memory, row) / 8
    write("engine-capacity.json", args, before, {"work": f"{args.context} + {args.new_tokens} tokens", "rows": rows})


def running_in(memory: float, row: dict[str, int]) -> int:
    """Requests that run at once: the one that enters must fit at its most, with the chunk that is being computed."""
    return 1 + int((memory - row["bytes_admitted"]) / row["bytes_at_most"])


def short(args: argparse.Namespace) -> None:
    """The parts that a few quiet minutes hold, in one process."""
    batch(args)
    long(args)
    prefix(args)
    args.int8 = "dynamic"
    long(args)


def prefix(args: argparse.Namespace) -> None:
    """The same 6000-token prompt twice, and once more after a restart, from disk."""
    before, loaded = load_average(), loaded_once(args)
    (ids,) = text_prompts(loaded, 1, 6000)

    def ttft_s(engine: Engine) -> tuple[float, int]:
        began = time.perf_counter()
        request = engine.add("r", list(ids), SamplingParams(max_tokens=2))
        first = None
        while engine.has_work:
            if engine.step() and first is None:
                first = time.perf_counter() - began
        assert first is not None
        return first, request.num_cached_tokens

    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as directory:
        with Engine(loaded, settings(args.preset), prefix_dir=directory) as engine:
            found["first"], found["again"] = ttft_s(engine), ttft_s(engine)
        size = sum(file.stat().st_size for file in Path(directory).rglob("*.page"))
        with Engine(loaded, settings(args.preset), prefix_dir=directory) as engine:
            found["after a restart, from disk"] = ttft_s(engine)
    first = found["first"][0]
    content = {
        "work": "6000 prompt tokens",
        "preset": args.preset,
        "ttft_s": {name: value[0] for name, value in found.items()},
        "cached_tokens": {name: value[1] for name, value in found.items()},
        "share_of_first": {name: value[0] / first for name, value in found.items()},
        "bytes_on_disk": size,
    }
    write("engine-prefix.json", args, before, content)


def concurrency(args: argparse.Namespace) -> None:
    """S10: int8 on and off, window smoothing on and off, at 1, 8 and 32 requests at a time; sparse cache."""
    before = load_average()
    window = {"enable": True, "method": "window", "window_size": 8, "smooth_strength": 0.1}
    window["target_layers"] = args.window_layers.split(",")
    arms = [(i, w) for i in ("off", "dynamic") for w in (False, True) if args.int8_arm in (i, "both")]
    rows = []
    for int8, windowed in arms:
        loaded = load_model(args.model, dtype=args.dtype, threads=args.threads)
        smoothing = {"int8": int8, **(window if windowed else {})}
        with ExitStack() as kept:
            config = settings("sparse", smoothing, prefix_cache=False)
            engine = kept.enter_context(open_engine(loaded, config, None, kept))
            for level in (1, 8, 32):
                prompts = text_prompts(loaded, level, 192)
                run_all(engine, prompts[:2], 4)
                found = run_all(engine, prompts, args.new_tokens)
                ends = [t[-1] for t in found["times"].values()]
                firsts = [t[0] for t in found["times"].values()]
                gaps = [b - a for t in found["times"].values() for a, b in itertools.pairwise(t)]
                row: dict[str, Any] = {"int8": int8, "window": windowed, "concurrency": level}
                row["tokens_per_s"] = level * args.new_tokens / found["total_s"]
                for name, values in (("ttft", firsts), ("itl", gaps), ("e2e", ends)):
                    row |= {f"{name}_p{p}_ms": round(1000 * percentile(values, p), 1) for p in (50, 95, 99)}
                rows.append(row)
    work = f"192 prompt + {args.new_tokens} new tokens, sparse cache; all of a level submitted at once"
    write(f"engine-concurrency-{args.int8_arm}.json", args, before, {"work": work, "rows": rows})


def overload(args: argparse.Namespace) -> None:
    """Capacity first, then that rate and three times as much for a minute each, over HTTP."""
    before, port = load_average(), 18431
    limits = ["--max-running", "8", "--max-waiting", "8"]
    command = [*GSM, "serve", args.model, "--port", str(port), "--config", "tiers", *limits]
    url, found = f"http://127.0.0.1:{port}", {}
    with subprocess.Popen(command) as server:
        try:
            wait_for(url)
            found["capacity"] = load_test(url, "-c", "8", "-n", "48")
            rate = found["capacity"]["requests_per_s"]
            for times in (1, 3):
                found[f"{times}x"] = load_test(url, "-r", f"{times * rate:.3f}", "--duration", "60", "-c", "200")
        finally:
            server.terminate()
    content: dict[str, Any] = {"work": "64 + 32 tokens, Poisson arrivals", "limits": limits, "levels": found}
    one, three = found["1x"], found["3x"]
    content["goodput_3x_over_1x"] = three["requests_per_s"] / one["requests_per_s"]
    for name in ("ttft", "e2el"):
        content[f"{name}_p95_3x_over_1x"] = three[name]["p95"] / one[name]["p95"]
    write("engine-overload.json", args, before, content)


def wait_for(url: str) -> None:
    for _ in range(600):
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health") as response:
            if response.status == 200:
                return
        time.sleep(0.1)
    raise SystemExit("the server did not start")


def load_test(url: str, *options: str) -> dict[str, Any]:
    """`gsm load` on short work: requests per second, percentiles in ms, failures by kind."""
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "load.json"
        command = [*GSM, "load", url, "--prompt-tokens", "64", "--output-tokens", "32"]
        subprocess.run([*command, "--ignore-eos", *options, "--json", str(file)], check=True)
        result = json.loads(file.read_text(encoding="utf-8"))
    return {"raw": {k: v for k, v in result.items() if k not in ("details",)}, **summary(result)}


def summary(result: dict[str, Any]) -> dict[str, Any]:
    return {
        "requests_per_s": result["request_throughput"],
        "completed": result["completed"],
        "failures": result["failures"],
        **{name: {"p50": result[f"p50_{name}_ms"], "p95": result[f"p95_{name}_ms"]} for name in ("ttft", "e2el")},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=["batch", "long", "prefix", "short", "capacity", "concurrency", "overload"])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--preset", default="full")
    parser.add_argument("--int8", default="off", choices=["off", "dynamic", "weight_only"])
    parser.add_argument("--int8-arm", default="both", choices=["off", "dynamic", "both"])
    parser.add_argument("--window-layers", default="*.o_proj")
    parser.add_argument("--context", type=int, default=4000)
    parser.add_argument("--new-tokens", type=int, default=128)
    args = parser.parse_args()
    globals()[args.part](args)


if __name__ == "__main__":
    main()
