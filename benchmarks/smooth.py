"""What smoothing and int8 are worth on the demo model.

    python benchmarks/smooth.py {quality,speed,window,memory,verdict}

Each part writes one JSON file with the command that made it. Calibration, tuning and evaluation read disjoint thirds of
the text. `speed` needs a quiet machine; the other parts do not.
"""

from __future__ import annotations

import argparse
import contextlib
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
from gsm.smoothing.sites import find_sites

RESULTS = Path(__file__).parent / "results"
ROTATE: dict[str, Any] = {"enable": True, "method": "rotate"}
CHANNEL: dict[str, Any] = {"enable": True, "method": "channel"}

# arm -> (settings, the bar on the mean change of perplexity)
QUALITY_ARMS: dict[str, tuple[dict[str, Any], float | None]] = {
    "weight_only": ({"int8": "weight_only"}, 0.002),
    "dynamic": ({"int8": "dynamic"}, None),
    "dynamic + channel": ({**CHANNEL, "int8": "dynamic"}, 0.01),
    "dynamic + channel, alpha 0.5": ({**CHANNEL, "int8": "dynamic", "alpha": 0.5}, None),
    "dynamic + rotate": ({**ROTATE, "int8": "dynamic"}, 0.01),
    "dynamic + rotate, folded only": ({**ROTATE, "int8": "dynamic", "online_rotation": False}, None),
    "static": ({"int8": "static"}, None),
    "static + channel": ({**CHANNEL, "int8": "static"}, None),
    "static + rotate": ({**ROTATE, "int8": "static"}, 0.015),
    "static + rotate, sinks not exempt": ({**ROTATE, "int8": "static", "skip_sink": False}, None),
}
SPEED_ARMS: dict[str, dict[str, Any]] = {
    "weight_only": {"int8": "weight_only"},
    "dynamic": {"int8": "dynamic"},
    "dynamic + rotate": {**ROTATE, "int8": "dynamic"},
    "static + rotate": {**ROTATE, "int8": "static"},
}
WINDOW_ARMS: dict[str, dict[str, Any]] = {
    "0.05, W 4, o_proj of a quarter of the layers": {
        "smooth_strength": 0.05, "window_size": 4, "target_layers": "high_kurtosis_o_proj",
    },
    "0.1, W 8, high_kurtosis (the document's config)": {},
    "0.05, W 4, all": {"smooth_strength": 0.05, "window_size": 4, "target_layers": "all"},
    "0.05, W 4, all, sink smoothed too": {
        "smooth_strength": 0.05, "window_size": 4, "target_layers": "all", "skip_sink": False, "warmup": "partial",
    },
    "0.1, W 4, all, from the first token": {
        "smooth_strength": 0.1, "window_size": 4, "target_layers": "all", "warmup": "partial",
    },
    "0.1, W 8, all": {"target_layers": "all"},
    "0.3, W 16, all": {"smooth_strength": 0.3, "window_size": 16, "target_layers": "all"},
    "0.1, W 8, high_kurtosis, int8 dynamic": {"int8": "dynamic"},
}  # fmt: skip


class Bench:
    """The demo model with its text, loaded once."""

    def __init__(self, threads: int) -> None:
        self.loaded = load_model("demo", threads=threads)
        self.model = self.loaded.model
        self.thirds = load_thirds()
        self.samples = cut_samples(encode(self.loaded.tokenizer, self.thirds.calibration), 128, 256)
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


def quality(bench: Bench, num_tokens: int) -> None:
    """Perplexity change, KL and top-1 of every arm against fp32 on the same evaluation tokens."""
    calibration = calibrate(bench.model, bench.samples)
    test = PairedTest(bench.model, bench.text, num_tokens, GuardConfig())
    results: dict[str, Any] = {}
    for name, (settings, bar) in QUALITY_ARMS.items():
        with apply(bench.model, SmoothingConfig(**settings), samples=bench.samples, calibration=calibration) as applied:
            verdict = test.measure()
        change = verdict.perplexity_change
        assert change is not None
        results[name] = {
            "settings": settings,
            "bar": bar,
            "within_bar": None if bar is None else change.mean <= bar,
            "max_logit_change_of_the_fold": applied.max_logit_change,
            **verdict.model_dump(mode="json", exclude={"failures", "finite"}),
        }
        print(f"{name:36s} {change.mean:+.3%} ({change.low:+.3%} to {change.high:+.3%})")
    for name, result in results.items():
        plain = results.get(name.partition(" + ")[0])
        if plain is not None and plain is not result:
            result["share_of_plain_loss"] = result["perplexity_change"]["mean"] / plain["perplexity_change"]["mean"]
    bench.write("smooth_quality.json", {"num_tokens": test.num_tokens, "arms": results})


def speed(bench: Bench, prompt_tokens: int, rounds: int) -> None:
    """Prefill, decode and products of every arm, each in turn with fp32."""
    prompt = encode(bench.loaded.tokenizer, bench.thirds.tuning)[:prompt_tokens]
    results: dict[str, Any] = {}
    for name, settings in SPEED_ARMS.items():
        config = SmoothingConfig(**settings)
        found = compare_speed(
            bench.model,
            lambda config=config: apply(bench.model, config, samples=bench.samples[:4]),
            prompt,
            rounds=rounds,
        )
        results[name] = {
            "settings": settings,
            "prefill_gain": found.prefill_gain,
            "decode_gain": found.decode_gain,
            **found.model_dump(mode="json"),
        }
        print(f"{name:20s} prefill {found.prefill_gain:.2f}x, decode {found.decode_gain:.2f}x", found)
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
            cost = _cost_per_decoded_token(bench.model, applied)
        assert verdict.perplexity_change is not None
        results[name] = {
            "settings": settings,
            "num_modules": len(applied.smoothed),
            **verdict.model_dump(mode="json", exclude={"failures", "finite"}),
            **cost,
        }
        print(f"{name:52s} {verdict.perplexity_change.mean:+.3%}  {cost}")
    bench.write("smooth_window.json", {"num_tokens": test.num_tokens, "arms": results})


def memory(bench: Bench, num_samples: int) -> None:
    """Growth of resident memory over the loaded model while calibrating."""
    rows = cut_samples(encode(bench.loaded.tokenizer, bench.thirds.calibration), num_samples, 256)
    results = {}
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
def _cost_per_decoded_token(model: Any, applied: Any, num_tokens: int = 32) -> dict[str, float]:
    """Smoothing's own time in decode steps, beside the time of the products it precedes."""
    ids = torch.arange(100, 164)[None]
    out = model(input_ids=ids, use_cache=True, logits_to_keep=1)
    cost = applied.window.cost
    cost.calls, cost.seconds = 0, 0.0
    for _ in range(num_tokens):
        out = model(input_ids=ids[:, :1], past_key_values=out.past_key_values, use_cache=True, logits_to_keep=1)
    block = find_sites(model).blocks[0]
    layer = block.part(block.layout.mlp_out[0])
    x = torch.randn(1, 1, layer.in_features)
    times = [_timed(lambda: layer(x)) for _ in range(50)]
    return {
        "own_us_per_module_and_token": 1e6 * cost.seconds / max(1, cost.calls),
        "own_ms_per_token": 1e3 * cost.seconds / num_tokens,
        "down_proj_product_us": 1e6 * statistics.median(times),
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
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=["quality", "speed", "window", "memory"])
    parser.add_argument("--tokens", type=int, default=16384, help="evaluation tokens (quality, window)")
    parser.add_argument("--prompt-tokens", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--samples", type=int, default=64, help="calibration samples (memory)")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    with contextlib.suppress(KeyboardInterrupt):
        bench = Bench(options.threads)
        if options.part == "quality":
            quality(bench, options.tokens)
        elif options.part == "speed":
            speed(bench, options.prompt_tokens, options.rounds)
        elif options.part == "window":
            window(bench, options.tokens)
        else:
            memory(bench, options.samples)


if __name__ == "__main__":
    main()
