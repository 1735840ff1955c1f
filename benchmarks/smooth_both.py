"""Both levers in one run: does the gain of int8 add to the gain of sparse attention?

    python benchmarks/smooth_both.py speed --prompt-tokens 7680      -> results/smooth_both_speed.json (quiet machine)
    python benchmarks/smooth_both.py quality --prompt-tokens 7680    -> results/smooth_both_quality.json

Four arms on the same prompt: plain transformers; sparse attention over the tiered cache; int8 with transformers' own
cache; and both. Each arm has a model of its own in this process. After a short warm-up every arm prefills the prompt
once (TTFT); then the arms decode in turn, a few tokens at a time, so that a slow minute hits all of them. Quality is
judged against plain transformers on the evaluation third of the text; rotation needs no calibration.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from gsm import load_model
from gsm.config import load_config
from gsm.quality import Arm, Assessment, GsmArm, PlainArm, QualityPlan, Session, encode, load_thirds
from gsm.quality.smoothed import SmoothedArm
from gsm.results import collect_environment, load_average

RESULTS = Path(__file__).parent / "results"
SPARSE = {"cache": {"sparse": {"enabled": True}}}
INT8 = {"smoothing": {"enable": True, "method": "rotate", "int8": "dynamic"}}
PLAIN = "transformers"
ARMS: dict[str, dict[str, Any]] = {PLAIN: {}, "sparse": SPARSE, "int8": INT8, "int8 + sparse": {**SPARSE, **INT8}}


class Bench:
    """The arms, the prompt and what is known of the machine."""

    def __init__(self, prompt_tokens: int, threads: int) -> None:
        self.thirds, self.prompt_tokens, self.threads = load_thirds(), prompt_tokens, threads
        self.loaded = load_model("demo", threads=threads)
        self.text = encode(self.loaded.tokenizer, self.thirds.evaluation)
        self.environment = collect_environment(
            model=self.loaded.name, dtype="float32", device="cpu", threads=torch.get_num_threads()
        )

    def arm(self, name: str, own_model: bool) -> Arm:
        loaded = load_model("demo", threads=self.threads) if own_model else self.loaded
        settings = ARMS[name]
        config = load_config(settings)
        inner: Arm = PlainArm(loaded.model, name=name)
        if "cache" in settings:
            inner = GsmArm(loaded.model, config, name=name)
        if not config.smoothing.active:
            return inner
        return SmoothedArm(inner, loaded, config.smoothing, self.thirds)

    def write(self, name: str, content: dict[str, Any]) -> None:
        environment = self.environment.model_copy(update={"load_average_after": load_average()})
        head = {
            "command": "python " + " ".join(sys.argv),
            "environment": environment.model_dump(mode="json"),
            "prompt_tokens": self.prompt_tokens,
            "text_sha256": self.thirds.sha256("evaluation"),
            "settings": ARMS,
        }
        (RESULTS / name).write_text(json.dumps({**head, **content}, indent=2) + "\n", encoding="utf-8")
        print(f"written: benchmarks/results/{name}")


def speed(bench: Bench, turns: int, tokens_per_turn: int) -> None:
    prompt = bench.text[None, : bench.prompt_tokens]
    with ExitStack() as stack:
        sessions: dict[str, Session] = {}
        tokens: dict[str, torch.Tensor] = {}
        ttft_s: dict[str, float] = {}
        for name in ARMS:
            arm = bench.arm(name, own_model=True)
            if isinstance(arm, SmoothedArm):
                stack.enter_context(arm.hold())
            _warm_up(arm, prompt)
            sessions[name] = stack.enter_context(arm.open())
            began = time.perf_counter()
            tokens[name] = sessions[name].prefill(prompt).argmax(-1, keepdim=True)
            ttft_s[name] = time.perf_counter() - began
            print(f"{name:15s} TTFT {ttft_s[name]:.1f} s", flush=True)
        step_ms: dict[str, list[float]] = {name: [] for name in ARMS}
        for _ in range(turns):
            for name, session in sessions.items():
                for _ in range(tokens_per_turn):
                    began = time.perf_counter()
                    tokens[name] = session.step(tokens[name]).argmax(-1, keepdim=True)
                    step_ms[name].append(1e3 * (time.perf_counter() - began))
        arms = {
            name: {
                "ttft_s": ttft_s[name],
                "tpot_ms": statistics.mean(step_ms[name]),
                "tpot_ms_median": statistics.median(step_ms[name]),
                "tpot_ms_min": min(step_ms[name]),
                "share_of_transformers_tpot": statistics.mean(step_ms[name]) / statistics.mean(step_ms[PLAIN]),
                "share_of_transformers_ttft": ttft_s[name] / ttft_s[PLAIN],
                "kv_bytes": sessions[name].stats().kv_bytes,
                "attended_tokens_mean": sessions[name].stats().attended_tokens_mean,
            }
            for name in ARMS
        }
    for name, found in arms.items():
        print(f"{name:15s}", {key: round(value or 0, 3) for key, value in found.items()})
    bench.write("smooth_both_speed.json", {"new_tokens": turns * tokens_per_turn, "arms": arms, **_sum(arms)})


def _warm_up(arm: Arm, prompt: torch.Tensor) -> None:
    """Compiled kernels are loaded and weights become resident."""
    with arm.open() as session:
        token = session.prefill(prompt[:, :1280]).argmax(-1, keepdim=True)
        for _ in range(3):
            session.step(token)


def _sum(arms: dict[str, Any]) -> dict[str, Any]:
    """Do the gains add? The time that both together save, beside the sum of what each saves alone."""
    saved = {name: arms[PLAIN]["tpot_ms"] - found["tpot_ms"] for name, found in arms.items()}
    return {
        "saved_ms_per_token": saved,
        "share_of_the_sum_that_both_save": saved["int8 + sparse"] / (saved["int8"] + saved["sparse"]),
    }


def quality(bench: Bench, num_windows: int, needles_per_depth: int) -> None:
    reference = bench.arm(PLAIN, own_model=False)
    arms = [bench.arm(name, own_model=False) for name in ARMS if name != PLAIN]
    plan = QualityPlan.make(
        bench.prompt_tokens,
        num_windows=num_windows,
        windows_per_prefill=4,
        needles_per_depth=needles_per_depth,
        max_positions=bench.loaded.arch.max_position_embeddings or 0,
    )
    assessment = Assessment(reference, arms, bench.loaded.tokenizer, bench.text, plan, _say)
    try:
        assessment.run()
    finally:
        found = {name: record.model_dump(mode="json") for name, record in assessment.results().items()}
        bench.write("smooth_both_quality.json", {"arms": found})


def _say(label: str, done: int, total: int) -> None:
    print(f"{time.strftime('%H:%M:%S')} {label} {done}/{total}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["speed", "quality"])
    parser.add_argument("--prompt-tokens", type=int, default=7680)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--tokens-per-turn", type=int, default=12)
    parser.add_argument("--windows", type=int, default=16)
    parser.add_argument("--needles", type=int, default=4, help="per depth and case")
    options = parser.parse_args()
    bench = Bench(options.prompt_tokens, options.threads)
    if options.part == "speed":
        speed(bench, options.turns, options.tokens_per_turn)
    else:
        quality(bench, options.windows, options.needles)


if __name__ == "__main__":
    main()
