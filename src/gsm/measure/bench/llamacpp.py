"""`gsm bench FILE.gguf --backend llamacpp`: what a window of fixed size forgets, and what that costs.

Arms: ``whole`` (a context that holds everything: the reference), ``half`` (llama.cpp's own context shift), ``oldest``
and ``same`` (see `EndlessOptions`). All go through the library's own decode; only what is forgotten differs.
"""

from __future__ import annotations

import ctypes
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from gsm.errors import InputError
from gsm.integrations.llamacpp import Endless, EndlessOptions, load_gguf
from gsm.measure.bench.machine import CpuMeter, benchmark_lock, wait_for_quiet
from gsm.measure.bench.timing import timed_run
from gsm.quality import (
    Assessment,
    Progress,
    QualityPlan,
    Session,
    SessionStats,
    load_thirds,
    no_progress,
    score_by_steps,
)
from gsm.results import ArmResult, BenchResult, Quality, Samples, Spread, Workload, collect_environment, load_average

REFERENCE = "whole"
ARMS = ("half", "oldest", "same")


@dataclass(frozen=True)
class GgufBenchSpec:
    """What to measure. ``prompt_tokens`` should be a multiple of the window: then something must be forgotten."""

    path: str | Path
    window_tokens: int = 1024
    prompt_tokens: int = 2048
    new_tokens: int = 64
    runs: int = 3
    threads: int | None = None
    sink_tokens: int = 4
    text: str | None = None
    num_windows: int = 16
    needles_per_depth: int = 10
    wait_s: float = 60.0


class GgufTokenizer:
    """The part of a transformers tokenizer that quality measurements use, over a GGUF file's own vocabulary."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": self._llm.tokenize(text.encode(), add_bos=False)}

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self._llm.detokenize(list(ids)).decode(errors="ignore")
        return text


class GgufSession:
    """One sequence in a llama.cpp context. A fork goes on in the same context; closing it puts the state back."""

    def __init__(self, endless: Endless, saved: _Saved | None = None) -> None:
        self._endless, self._saved = endless, saved

    @property
    def num_tokens(self) -> int:
        return self._endless.num_seen

    def prefill(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(self._endless.feed(ids[0].tolist()))[None]

    def score(self, ids: torch.Tensor) -> torch.Tensor:
        return score_by_steps(self, ids)

    def step(self, ids: torch.Tensor) -> torch.Tensor:
        return self.prefill(ids)

    def fork(self) -> Session:
        return GgufSession(self._endless, _Saved.take(self._endless))

    def close(self) -> None:
        if self._saved is not None:
            self._saved.put_back(self._endless)

    def stats(self) -> SessionStats:
        held = self._endless.kv_bytes()
        return SessionStats(held, held, float(self._endless.num_held))


@dataclass(frozen=True)
class _Saved:
    """A sequence's state in llama.cpp's own format, and our counters."""

    state: Any
    input_ids: Any
    counters: dict[str, Any]

    @classmethod
    def take(cls, endless: Endless) -> _Saved:
        import llama_cpp

        context = endless.llm._ctx.ctx
        size = llama_cpp.llama_state_seq_get_size(context, 0)
        buffer = (ctypes.c_uint8 * size)()
        llama_cpp.llama_state_seq_get_data(context, buffer, size, 0)
        counters = {name: getattr(endless, name) for name in ("protected", "num_seen", "num_forgotten")}
        return cls(buffer, endless.llm.input_ids[: endless.num_held].copy(), counters)

    def put_back(self, endless: Endless) -> None:
        import llama_cpp

        endless.llm._ctx.kv_cache_clear()
        llama_cpp.llama_state_seq_set_data(endless.llm._ctx.ctx, self.state, len(self.state), 0)
        endless.llm.n_tokens = len(self.input_ids)
        endless.llm.input_ids[: len(self.input_ids)] = self.input_ids
        for name, value in self.counters.items():
            setattr(endless, name, value)


class GgufArm:
    """One way to keep a window."""

    def __init__(self, name: str, llm: Any, options: EndlessOptions) -> None:
        self.name, self.llm, self.options = name, llm, options

    @contextmanager
    def open(self) -> Iterator[Session]:
        endless = Endless(self.llm, self.options)
        endless.reset()
        yield GgufSession(endless)


def bench_gguf(spec: GgufBenchSpec, progress: Progress = no_progress) -> BenchResult:
    """Speed of every arm in turn, then quality against the context that holds everything.

    Raises InputError where the model's own window is too short for the reference.
    """
    plan = QualityPlan.make(
        spec.prompt_tokens,
        num_windows=spec.num_windows,
        windows_per_prefill=2,
        needles_per_depth=spec.needles_per_depth,
    )
    longest = max(plan.fed_tokens, spec.prompt_tokens + spec.new_tokens) + 8
    options = EndlessOptions(window_tokens=spec.window_tokens, sink_tokens=spec.sink_tokens)
    small, large = (load_gguf(spec.path, n, spec.threads) for n in (spec.window_tokens, longest))
    if longest > (trained := _trained_window(large)):
        raise InputError(
            f"the reference needs {longest} positions but the model was trained for {trained}; use a shorter prompt"
        )
    arms = [GgufArm(name, small, replace(options, forget=name)) for name in ARMS]  # type: ignore[arg-type]
    reference = GgufArm(REFERENCE, large, replace(options, window_tokens=longest))
    tokenizer, thirds = GgufTokenizer(large), load_thirds(spec.text)
    text_ids = torch.tensor(tokenizer(thirds.evaluation)["input_ids"])
    environment = collect_environment(model=Path(spec.path).name, dtype="gguf", threads=spec.threads)
    notes: list[str] = []
    with benchmark_lock(3600.0, progress):
        if not wait_for_quiet(spec.wait_s, progress):
            notes.append(f"the machine stayed busy for {spec.wait_s:.0f} s before measuring began")
        meter = CpuMeter([])
        speeds = _speeds([reference, *arms], text_ids[None, : spec.prompt_tokens], spec, progress)
        share = meter.other_share()
    assessment = Assessment(reference, arms, tokenizer, text_ids, plan, progress)  # type: ignore[arg-type]
    assessment.run()
    quality = assessment.results()
    environment = environment.model_copy(
        update={"load_average_after": load_average(), "other_cpu_share": share, "noisy": share > 0.1}
    )
    workload = Workload(
        prompt_tokens=spec.prompt_tokens, new_tokens=spec.new_tokens, runs=spec.runs, batch_size=1,
        text_sha256=thirds.sha256("evaluation"),
    )  # fmt: skip
    results = tuple(_arm_result(arm, speeds[arm.name], quality[arm.name]) for arm in [reference, *arms])
    return BenchResult(environment=environment, workload=workload, arms=results, notes=tuple(notes))


Speed = tuple[list[float], list[float], SessionStats]


def _speeds(arms: list[GgufArm], prompt: torch.Tensor, spec: GgufBenchSpec, progress: Progress) -> dict[str, Speed]:
    """Arms take turns; TTFT and TPOT of every run, and what the cache holds at the end."""
    speeds: dict[str, Speed] = {}
    for run in range(spec.runs):
        for index, arm in enumerate(arms):
            progress(f"run {run + 1}: {arm.name}", run * len(arms) + index, spec.runs * len(arms))
            ttft, tpot, stats = timed_run(arm, prompt, spec.new_tokens)
            ttfts, tpots, _ = speeds.get(arm.name, ([], [], stats))
            speeds[arm.name] = ([*ttfts, ttft], tpots if tpot is None else [*tpots, tpot], stats)
    return speeds


def _arm_result(arm: GgufArm, speed: Speed, quality: Quality) -> ArmResult:
    ttft, tpot, stats = speed
    return ArmResult(
        name=arm.name,
        config={"backend": "llamacpp", **vars(arm.options)},
        ttft_ms=_spread(ttft),
        tpot_ms=_spread(tpot),
        kv_bytes=stats.kv_bytes,
        attended_tokens_mean=stats.attended_tokens_mean,
        quality=quality,
        samples=Samples(ttft_ms=tuple(ttft), tpot_ms=tuple(tpot)),
    )


def _spread(samples: list[float]) -> Spread:
    return Spread(median=statistics.median(samples), min=min(samples), max=max(samples)) if samples else Spread()


def _trained_window(llm: Any) -> int:
    window: int = llm._model.n_ctx_train()
    return window
