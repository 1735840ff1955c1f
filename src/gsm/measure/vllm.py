"""`gsm eval --engine vllm` and `gsm bench --engine vllm`: the same measurements inside vLLM.

One engine in this process serves every arm of an evaluation, the live config changes between them; prompts are computed
once and found again by vLLM's own prefix cache. A benchmark gives every arm a process of its own, the first of them
without GSM.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Any

from gsm.arch import ModelArch, describe
from gsm.config import GsmConfig, load_config
from gsm.errors import InputError, MeasurementError
from gsm.integrations.vllm.launch import block_tokens, engine_options, require_vllm
from gsm.measure.bench.arms import resolve_arms
from gsm.measure.bench.machine import CpuMeter, benchmark_lock, wait_for_quiet
from gsm.measure.evaluate import EvalSpec, assess
from gsm.models.sources import resolve_source
from gsm.quality import Assessment, Progress, QualityPlan, encode, load_thirds, no_progress
from gsm.results import (
    ArmResult,
    BenchResult,
    EvalResult,
    Samples,
    Spread,
    Workload,
    collect_environment,
    load_average,
)

STOCK = "stock"


def evaluate_vllm(spec: EvalSpec, progress: Progress = no_progress) -> EvalResult:
    """A config's quality in vLLM against everything read and kept there. Raises InputError, ConfigError, ModelError."""
    require_vllm()
    (arm,) = resolve_arms([spec.config])
    if arm.config is None:
        raise InputError(f"'{spec.config}' has no GSM config to evaluate; use a config file, tiers or sparse")
    from transformers import AutoTokenizer

    from gsm.integrations.vllm.drive import VllmEngine
    from gsm.quality.vllm import REFERENCE, VllmArm, full_cache

    source = str(resolve_source(spec.model))
    longest = _arch(source).max_position_embeddings
    plan = QualityPlan.make(
        spec.prompt_tokens,
        num_windows=spec.num_windows,
        windows_per_prefill=spec.windows_per_prefill,
        needles_per_depth=spec.needles_per_depth,
        max_positions=longest,
    )
    progress("starting vLLM", 0, 1)
    environment = collect_environment(model=spec.model, dtype=spec.dtype, device=spec.device, threads=spec.threads)
    window = plan.fed_tokens + 1
    options = {"max_model_len": window, "max_num_batched_tokens": spec.chunk_tokens}
    options["kv_cache_memory_bytes"] = kv_pool_bytes(
        source, 3 * window, spec.dtype
    )  # a prompt, and what forks add to it
    engine = VllmEngine(
        source,
        None,
        dtype=spec.dtype,
        enforce_eager=True,
        max_num_seqs=4,
        **options,
        **_options(arm.config, spec.device),
    )
    tokenizer = AutoTokenizer.from_pretrained(source)
    thirds = load_thirds(spec.text)
    reference = VllmArm(engine, full_cache(arm.config), REFERENCE)
    candidate = VllmArm(engine, arm.config, arm.name)
    text_ids = encode(tokenizer, thirds.evaluation)
    assessment = Assessment(reference, [candidate], tokenizer, text_ids, plan, progress)
    config = {"engine": "vllm", **(arm.config_dict() or {})}
    return assess(assessment, spec, environment, arm.name, config, thirds.sha256("evaluation"))


def _arch(source: str) -> ModelArch:
    from transformers import AutoConfig

    return describe(AutoConfig.from_pretrained(source))


def kv_pool_bytes(source: str, num_tokens: int, dtype: str) -> int:
    """Pool for `num_tokens` and some blocks more. vLLM would take most of the memory otherwise."""
    element_bytes = 4 if dtype in ("float32", "auto") else 2
    return int(_arch(source).kv_bytes_per_token(element_bytes) * (num_tokens + 16 * 32))


def _options(config: GsmConfig, device: str) -> dict[str, Any]:
    options = engine_options(config, device)
    del options["worker_extension_cls"]  # everything is in this process
    return options


@dataclass(frozen=True)
class VllmBenchSpec:
    """What to time. ``arms`` are names or config files; plain vLLM is measured first in any case."""

    model: str
    arms: tuple[str, ...]
    prompt_tokens: int
    new_tokens: int
    runs: int
    batch_size: int = 1
    dtype: str = "float32"
    threads: int | None = None
    chunk_tokens: int = 1024
    text: str | None = None
    wait_s: float = 60.0
    eager: bool = False
    device: str = "cpu"


def bench_vllm(spec: VllmBenchSpec, progress: Progress = no_progress) -> BenchResult:
    """TTFT and TPOT of plain vLLM and of every arm, each in a process of its own, which takes turns with the others.

    Every process keeps its engine; between its turns it waits. Raises InputError, ConfigError, ModelError.
    """
    require_vllm()
    if spec.new_tokens < 2:
        raise InputError(f"a time per token needs at least 2 new tokens, not {spec.new_tokens}; raise --new-tokens")
    arms = [arm for arm in resolve_arms(spec.arms) if arm.config is not None]
    source = str(resolve_source(spec.model))
    thirds = load_thirds(spec.text)
    environment = collect_environment(model=spec.model, dtype=spec.dtype, threads=spec.threads)
    names = [STOCK, *(arm.name for arm in arms)]
    configs = [None, *(arm.config for arm in arms)]
    workers: list[_Worker] = []
    how = "eager" if spec.eager else "compiled"
    notes = [f"{STOCK} is vLLM without GSM in blocks of its default size; both run {how}"]
    try:
        for name, config in zip(names, configs, strict=True):
            progress(f"starting vLLM: {name}", len(workers), len(names))
            workers.append(_Worker(spec, source, config, thirds.evaluation))
        with benchmark_lock(3600.0, progress):
            if not wait_for_quiet(spec.wait_s, progress):
                notes.append(f"the machine stayed busy for {spec.wait_s:.0f} s before measuring began")
            meter = CpuMeter([worker.process.pid for worker in workers])
            samples: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
            for run in range(spec.runs + 1):  # the first one warms up
                for index, (name, worker) in enumerate(zip(names, workers, strict=True)):
                    progress(f"run {run}: {name}", run * len(names) + index, (spec.runs + 1) * len(names))
                    measured = worker.measure(run)
                    if run:
                        samples[name].append(measured)
            share = meter.other_share()
    finally:
        for worker in workers:
            worker.close()
    environment = environment.model_copy(
        update={"load_average_after": load_average(), "other_cpu_share": share, "noisy": share > 0.1}
    )
    if not all(sample["tpot_ms"] for measured in samples.values() for sample in measured):
        notes.append("in some runs no step decoded all requests at once; raise --new-tokens for a time per token")
    workload = Workload(
        prompt_tokens=spec.prompt_tokens, new_tokens=spec.new_tokens, runs=spec.runs, batch_size=spec.batch_size,
        warmup_runs=1, prefill_chunk_tokens=spec.chunk_tokens, text_sha256=thirds.sha256("evaluation"),
    )  # fmt: skip
    results = tuple(_arm_result(name, config, samples[name]) for name, config in zip(names, configs, strict=True))
    return BenchResult(environment=environment, workload=workload, arms=results, notes=tuple(notes))


def _arm_result(name: str, config: GsmConfig | None, samples: list[dict[str, Any]]) -> ArmResult:
    ttft, tpot = [s["ttft_ms"] for s in samples], [s["tpot_ms"] for s in samples if s["tpot_ms"] is not None]
    return ArmResult(
        name=name,
        config=None if config is None else {"engine": "vllm", **config.model_dump(mode="json")},
        ttft_ms=_spread(ttft),
        tpot_ms=_spread(tpot),
        attended_tokens_mean=samples[-1]["attended_tokens_mean"] if samples else None,
        samples=Samples(ttft_ms=tuple(ttft), tpot_ms=tuple(tpot)),
    )


def _spread(samples: list[float]) -> Spread:
    return Spread(median=statistics.median(samples), min=min(samples), max=max(samples)) if samples else Spread()


class _Worker:
    """An engine in a process of its own; one JSON line asks for a run, one answers."""

    def __init__(self, spec: VllmBenchSpec, source: str, config: GsmConfig | None, text: str) -> None:
        told = {
            "source": source,
            "config": None if config is None else config.model_dump(mode="json", exclude_unset=True),
            "text": text,
            "kv_bytes": kv_pool_bytes(source, spec.batch_size * (spec.prompt_tokens + spec.new_tokens), spec.dtype),
            **{name: getattr(spec, name) for name in _TOLD},
        }
        command = [sys.executable, "-c", "from gsm.measure.vllm import worker_main; worker_main()"]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=_environment(spec.threads)
        )
        self._ask(told)

    def measure(self, run: int) -> dict[str, Any]:
        return self._ask({"run": run})

    def _ask(self, message: dict[str, Any]) -> dict[str, Any]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(message) + "\n")
        self.process.stdin.flush()
        for line in self.process.stdout:
            if line.startswith(_MARK):
                answer: dict[str, Any] = json.loads(line[len(_MARK) :])
                return answer
        raise MeasurementError(f"an arm's vLLM ended with exit code {self.process.wait()}; its messages are above")

    def close(self) -> None:
        if self.process.stdin is not None:
            self.process.stdin.close()
        try:
            self.process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self.process.kill()


_MARK = "gsm-bench "  # before our lines: vLLM prints too
_TOLD = ("prompt_tokens", "new_tokens", "batch_size", "dtype", "chunk_tokens", "eager", "device")


def _environment(threads: int | None) -> dict[str, str]:
    new = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1"}
    new.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    new.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    if threads is not None:
        new["OMP_NUM_THREADS"] = str(threads)
    return new


def worker_main() -> None:
    """The child of `_Worker`: start an engine, then answer one run per line of standard input."""
    told = json.loads(sys.stdin.readline())
    from transformers import AutoTokenizer
    from vllm import LLM

    from gsm.integrations.vllm.drive import numba_hidden

    config = None if told["config"] is None else load_config(told["config"])
    device = told["device"]
    options = {"block_size": block_tokens(None, device)} if config is None else _options(config, device)
    with numba_hidden():
        llm = LLM(
            model=told["source"], dtype=told["dtype"], enforce_eager=told["eager"], max_num_seqs=told["batch_size"],
            max_model_len=told["prompt_tokens"] + told["new_tokens"] + 1, max_num_batched_tokens=told["chunk_tokens"],
            enable_prefix_caching=False, kv_cache_memory_bytes=told["kv_bytes"], **options,
        )  # fmt: skip
    ids = encode(AutoTokenizer.from_pretrained(told["source"]), told["text"]).tolist()
    print(_MARK + "{}", flush=True)
    for line in sys.stdin:
        print(_MARK + json.dumps(_timed(llm, ids, told, json.loads(line)["run"])), flush=True)


def _timed(llm: Any, ids: list[int], told: dict[str, Any], run: int) -> dict[str, Any]:
    """One run: TTFT until every request has its first token, then the mean step in which all decode."""
    from vllm import SamplingParams

    from gsm.integrations.vllm.live import live_of

    live = live_of(llm.llm_engine.vllm_config)
    before = (live.counters.read_tokens, live.counters.sparse_steps) if live else (0, 0)
    batch, size = told["batch_size"], told["prompt_tokens"]
    parameters = SamplingParams(temperature=0.0, max_tokens=told["new_tokens"], ignore_eos=True, detokenize=False)
    for i in range(batch):
        start = (run * batch + i) * 61 % max(1, len(ids) - size)
        llm.llm_engine.add_request(f"{run}-{i}", {"prompt_token_ids": ids[start : start + size]}, parameters)
    counts: dict[str, int] = {}
    steps: list[float] = []
    began, first = time.perf_counter(), 0.0
    while llm.llm_engine.has_unfinished_requests():
        start_s = time.perf_counter()
        outputs = llm.llm_engine.step()
        end_s = time.perf_counter()
        if len(counts) == batch and len(outputs) == batch:
            steps.append(end_s - start_s)
        counts |= {output.request_id: len(output.outputs[0].token_ids) for output in outputs if output.outputs}
        if len(counts) == batch and not first:
            first = end_s - began
    read = live.counters.read_tokens - before[0] if live else 0
    sparse = live.counters.sparse_steps - before[1] if live else 0
    return {
        "ttft_ms": 1e3 * first,
        "tpot_ms": 1e3 * statistics.mean(steps) if steps else None,
        "attended_tokens_mean": read / sparse / batch if sparse else None,
    }
