"""What smoothing and int8 are worth on the demo model.

    python benchmarks/smooth.py {quality,speed,window,cost,tails,memory}

Each part writes one JSON file with the command that made it. Calibration, tuning and evaluation read disjoint thirds of
the text. `speed` and `cost` need a quiet machine; the other parts do not.
`smooth_verdict.py` puts the files together.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from gsm import load_model
from gsm.config.smoothing import GuardConfig, SmoothingConfig
from gsm.guard import PairedTest
from gsm.guard.speed import compare_speed
from gsm.quality.texts import encode, load_thirds
from gsm.results import collect_environment, load_average
from gsm.smoothing import apply, calibrate, cut_samples
from gsm.smoothing.picture import draw_calibration
from gsm.smoothing.select import CANDIDATES
from gsm.smoothing.sites import find_sites

RESULTS = Path(__file__).parent / "results"
NUM_SAMPLES = 32  # of 256 tokens
ROTATE: dict[str, Any] = {"enable": True, "method": "rotate"}
CHANNEL: dict[str, Any] = {"enable": True, "method": "channel"}

# arm -> (settings, the bar on the mean change of perplexity)
QUALITY_ARMS: dict[str, tuple[dict[str, Any], float | None]] = {
    "dynamic": ({"int8": "dynamic"}, None),
    "dynamic + rotate": ({**ROTATE, "int8": "dynamic"}, 0.01),
    "dynamic + channel": ({**CHANNEL, "int8": "dynamic"}, 0.01),
    "static + rotate": ({**ROTATE, "int8": "static"}, 0.015),
    "weight_only": ({"int8": "weight_only"}, 0.002),
    "weight_only, head in fp32": ({"int8": "weight_only", "int8_lm_head": False}, 0.002),
    "static": ({"int8": "static"}, None),
    "static + rotate, sinks not exempt": ({**ROTATE, "int8": "static", "skip_sink": False}, None),
}
SPEED_ARMS: dict[str, dict[str, Any]] = {
    "dynamic + rotate": {**ROTATE, "int8": "dynamic"},
    "dynamic": {"int8": "dynamic"},  # `channel` runs the same code: a fold leaves no trace at run time
    "weight_only": {"int8": "weight_only"},
    "weight_only, head in fp32": {"int8": "weight_only", "int8_lm_head": False},
    "static + rotate": {**ROTATE, "int8": "static"},
}
# the document's ranges: strength 0.05 to 0.3, window 4 to 16; "{}" is the configuration it recommends
WINDOW_ARMS: dict[str, dict[str, Any]] = {
    "0.05, W 4, o_proj of a quarter of the layers": {
        "smooth_strength": 0.05, "window_size": 4, "target_layers": "high_kurtosis_o_proj",
    },
    "0.1, W 8, high_kurtosis": {},
    "0.05, W 4, all": {"smooth_strength": 0.05, "window_size": 4, "target_layers": "all"},
    "0.05, W 4, all, from the first token on": {
        "smooth_strength": 0.05, "window_size": 4, "target_layers": "all", "skip_sink": False, "warmup": "partial",
    },
    "0.1, W 8, all": {"target_layers": "all"},
    "0.3, W 16, all": {"smooth_strength": 0.3, "window_size": 16, "target_layers": "all"},
}  # fmt: skip
TAIL_ARMS: dict[str, dict[str, Any]] = {"channel": CHANNEL, "rotate": ROTATE}


class Bench:
    """The demo model with its text, loaded once."""

    def __init__(self, threads: int) -> None:
        self.loaded = load_model("demo", threads=threads)
        self.model = self.loaded.model
        self.thirds = load_thirds()
        self.samples = cut_samples(encode(self.loaded.tokenizer, self.thirds.calibration), NUM_SAMPLES, 256)
        self.text = encode(self.loaded.tokenizer, self.thirds.evaluation)
        self.environment = collect_environment(
            model=self.loaded.name, dtype="float32", device="cpu", threads=torch.get_num_threads()
        )

    def write(self, name: str, content: dict[str, Any]) -> None:
        environment = self.environment.model_copy(update={"load_average_after": load_average()})
        head = {
            "command": "python " + " ".join(sys.argv),
            "environment": environment.model_dump(mode="json"),
            "text": self.thirds.name,
            "text_hashes": self.thirds.hashes(),
            "num_calibration_samples": len(self.samples),
        }
        (RESULTS / name).write_text(json.dumps({**head, **content}, indent=2) + "\n", encoding="utf-8")
        print(f"written: benchmarks/results/{name}")


def select_arms(arms: dict[str, Any], only: list[str], file: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The arms to measure, and the file's results of those that stay as they are. `only` empty: all, and none."""
    if unknown := set(only) - set(arms):
        raise SystemExit(f"--only names {', '.join(sorted(unknown))}, but the arms are {'; '.join(arms)}")
    found = json.loads((RESULTS / file).read_text(encoding="utf-8"))["arms"] if only else {}
    kept = {name: result for name, result in found.items() if name not in only}
    return {name: arm for name, arm in arms.items() if not only or name in only}, kept


def quality(bench: Bench, num_tokens: int, only: list[str]) -> None:
    """Perplexity change, KL and top-1 of every arm against fp32 on the same evaluation tokens."""
    calibration = calibrate(bench.model, bench.samples)
    test = PairedTest(bench.model, bench.text, num_tokens, GuardConfig())
    arms, results = select_arms(QUALITY_ARMS, only, "smooth_quality.json")
    for name, (settings, bar) in arms.items():
        with apply(bench.model, SmoothingConfig(**settings), samples=bench.samples, calibration=calibration) as applied:
            verdict = test.measure()
        change = verdict.perplexity_change
        assert change is not None
        results[name] = {
            "settings": settings,
            "command": "python " + " ".join(sys.argv),
            "bar": bar,
            "within_bar": None if bar is None else change.mean <= bar,
            "max_logit_change_of_the_fold": applied.max_logit_change,
            **verdict.model_dump(mode="json", exclude={"failures", "finite"}),
        }
        print(f"{name:36s} {change.mean:+.3%} ({change.low:+.3%} to {change.high:+.3%})", flush=True)
        _compare_with_plain(results)
        bench.write("smooth_quality.json", {"num_tokens": test.num_tokens, "arms": results})


def _compare_with_plain(results: dict[str, Any]) -> None:
    """How much of plain int8's loss a smoothed arm still has."""
    for name, result in results.items():
        plain = results.get(name.partition(" + ")[0].partition(", ")[0])
        if plain is not None and plain is not result:
            result["share_of_plain_loss"] = result["perplexity_change"]["mean"] / plain["perplexity_change"]["mean"]


def speed(bench: Bench, prompt_tokens: int, rounds: int, only: list[str]) -> None:
    """Prefill, decode and products of every arm, each in turn with fp32."""
    prompt = encode(bench.loaded.tokenizer, bench.thirds.tuning)[:prompt_tokens]
    arms, results = select_arms(SPEED_ARMS, only, "smooth_speed.json")
    for name, settings in arms.items():
        config = SmoothingConfig(**settings)
        found = compare_speed(
            bench.model,
            lambda config=config: apply(bench.model, config, samples=bench.samples[:4]),
            prompt,
            rounds=rounds,
        )
        results[name] = {
            "settings": settings,
            "command": "python " + " ".join(sys.argv),
            "prefill_gain": found.prefill_gain,
            "decode_gain": found.decode_gain,
            "gains_over_linear": found.gains_over_linear,
            **found.model_dump(mode="json"),
        }
        print(f"{name:20s} prefill {found.prefill_gain:.2f}x, decode {found.decode_gain:.2f}x", found, flush=True)
    weights = sum(parameter.nbytes for parameter in bench.model.parameters())
    bandwidth = _bandwidth_bytes_per_s()
    bound = {
        "memory_bandwidth_bytes_per_s": bandwidth,
        "weight_bytes_fp32": weights,
        "weight_bytes_int8": weights // 4,
        "decode_floor_ms_fp32": 1e3 * weights / bandwidth,
        "decode_floor_ms_int8": 1e3 * weights / 4 / bandwidth,
    }
    bench.write(
        "smooth_speed.json", {"prompt_tokens": prompt_tokens, "rounds": rounds, "arms": results, "bound": bound}
    )


def window(bench: Bench, num_tokens: int) -> None:
    """The source document's own method over its parameter range: quality in fp32, and what it costs."""
    calibration = calibrate(bench.model, bench.samples)
    test = PairedTest(bench.model, bench.text, num_tokens, GuardConfig())
    quarter = _best_attention_outputs(calibration)
    results: dict[str, Any] = {}
    for name, settings in WINDOW_ARMS.items():
        named = {**settings}
        if named.get("target_layers") == "high_kurtosis_o_proj":
            named["target_layers"] = quarter
        config = SmoothingConfig(enable=True, method="window", short_request={"max_tokens": 0}, **named)
        with apply(bench.model, config, samples=bench.samples, calibration=calibration) as applied:
            verdict = test.measure()
        change = verdict.perplexity_change
        assert change is not None
        results[name] = {
            "settings": settings,
            "num_modules": len(applied.smoothed),
            **verdict.model_dump(mode="json", exclude={"failures", "finite"}),
        }
        print(f"{name:45s} {change.mean:+.3%} ({change.low:+.3%} to {change.high:+.3%})", flush=True)
        bench.write("smooth_window.json", {"num_tokens": test.num_tokens, "arms": results})


def cost(bench: Bench, prompt_tokens: int) -> None:
    """What `window` adds to prefill and decode on every module it can act on, beside the products it precedes."""
    ids = encode(bench.loaded.tokenizer, bench.thirds.tuning)[None, :prompt_tokens]
    results: dict[str, Any] = {}
    for size, precision in ((4, "fp32"), (8, "fp32"), (16, "fp32"), (8, "bf16")):
        config = SmoothingConfig(
            enable=True, method="window", window_size=size, precision=precision, target_layers="all",
            short_request={"max_tokens": 0},
        )  # fmt: skip
        with apply(bench.model, config, samples=bench.samples[:2]) as applied:
            results[f"W {size}, {precision}"] = _own_cost(bench.model, applied, ids)
        print(f"W {size}, {precision}", results[f"W {size}, {precision}"], flush=True)
    block = find_sites(bench.model).blocks[0]
    down = block.part(block.layout.mlp_out[0])
    products = {
        f"down_proj_{rows}_tokens_ms": 1e3 * min(_timed(lambda: down(x)) for _ in range(9))  # noqa: B023
        for rows in (1, prompt_tokens)
        for x in [torch.randn(1, rows, down.in_features)]
    }
    bench.write("smooth_cost.json", {"prompt_tokens": prompt_tokens, "products": products, "arms": results})


def tails(bench: Bench) -> None:
    """Excess kurtosis of every site before and after folding (first token of each sample left out), and the picture."""
    before = calibrate(bench.model, bench.samples, name=bench.loaded.name)
    draw_calibration(before, RESULTS / "smooth_tails.png")
    found = {"before": _kurtosis(before)}
    for name, settings in TAIL_ARMS.items():
        with apply(bench.model, SmoothingConfig(**settings), samples=bench.samples, calibration=before):
            found[name] = _kurtosis(calibrate(bench.model, bench.samples[:16]))
        print(name, found[name]["median"], found[name]["largest"], flush=True)
    bench.write("smooth_tails.json", {"arms": found})


def _kurtosis(calibration: Any) -> dict[str, Any]:
    sites = calibration.of_kind(*CANDIDATES["channel"])
    worst = max(sites, key=lambda site: site.kurtosis_body)
    return {
        "median": statistics.median(site.kurtosis_body for site in sites),
        "largest": worst.kurtosis_body,
        "largest_at": worst.name,
        "sites": {site.name: site.kurtosis_body for site in sites},
        "sink_driven": [site.name for site in sites if site.sink_driven],
    }


def memory(bench: Bench, num_samples: int) -> None:
    """Growth of resident memory over the loaded model while calibrating."""
    rows = cut_samples(encode(bench.loaded.tokenizer, bench.thirds.calibration), num_samples, 256)
    results = {}
    with torch.inference_mode():
        bench.model(input_ids=rows[:1, :8])  # weights are mapped, and become resident when first read
    for gradients in (False, True):
        before = _resident_bytes("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
        began = time.perf_counter()
        calibrate(bench.model, rows, gradients=gradients)
        growth = _resident_bytes("VmHWM") - before
        results["with gradients" if gradients else "activations"] = {
            "num_samples": len(rows),
            "growth_bytes": growth,
            "seconds": time.perf_counter() - began,
            "within_250_MB": growth <= 250e6,
        }
        print(results)
    bench.write("smooth_memory.json", {"arms": results})


def _best_attention_outputs(calibration: Any) -> tuple[str, ...]:
    sites = sorted(calibration.of_kind("attn_out_input"), key=lambda site: site.kurtosis_body, reverse=True)
    return tuple(site.name for site in sites[: len(sites) // 4])


@torch.inference_mode()
def _own_cost(model: Any, applied: Any, ids: torch.Tensor, num_tokens: int = 32) -> dict[str, float]:
    """Smoothing's own time per module: in a prefill, and per decoded token after it."""
    own = applied.window.cost
    model(input_ids=ids[:, :64], use_cache=True, logits_to_keep=1)
    own.calls, own.seconds = 0, 0.0
    out = model(input_ids=ids, use_cache=True, logits_to_keep=1)
    prefill = {"prefill_ms_per_module": 1e3 * own.seconds / own.calls, "prefill_s": own.seconds}
    own.calls, own.seconds = 0, 0.0
    for _ in range(num_tokens):
        out = model(input_ids=ids[:, :1], past_key_values=out.past_key_values, use_cache=True, logits_to_keep=1)
    return {
        **prefill,
        "num_modules": len(applied.smoothed),
        "decode_us_per_module_and_token": 1e6 * own.seconds / own.calls,
        "decode_ms_per_token": 1e3 * own.seconds / num_tokens,
    }


def _timed(run: Any) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def _bandwidth_bytes_per_s() -> float:
    """What a float32 matrix-vector product reads per second from weights larger than any cache."""
    w, x = torch.randn(49152, 576), torch.randn(1, 576)
    return w.nbytes / min(_timed(lambda: torch.mm(x, w.t())) for _ in range(20))


def _resident_bytes(field: str) -> int:
    lines: Iterator[str] = iter(Path("/proc/self/status").read_text().splitlines())
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["quality", "speed", "window", "cost", "tails", "memory"])
    parser.add_argument("--tokens", type=int, default=16384, help="evaluation tokens (quality, window)")
    parser.add_argument("--prompt-tokens", type=int, default=2048, help="of the prefill (speed, cost)")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--samples", type=int, default=64, help="calibration samples (memory)")
    parser.add_argument("--only", nargs="+", default=[], help="measure these arms, keep the file's others")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    bench = Bench(options.threads)
    parts = {
        "quality": lambda: quality(bench, options.tokens, options.only),
        "speed": lambda: speed(bench, options.prompt_tokens, options.rounds, options.only),
        "window": lambda: window(bench, options.tokens),
        "cost": lambda: cost(bench, options.prompt_tokens),
        "tails": lambda: tails(bench),
        "memory": lambda: memory(bench, options.samples),
    }
    parts[options.part]()


if __name__ == "__main__":
    main()
