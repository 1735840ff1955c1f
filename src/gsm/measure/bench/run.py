"""`bench`: several arms, one machine, one prompt. Speed and memory in a process per arm, then quality.

The screen to read first is `_measure_speed`: start the arms, throw one run of each away, then take turns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from gsm.errors import InputError
from gsm.measure.bench.arms import LINEAR, PLAIN, ArmSpec, make_arm, resolve_arms
from gsm.measure.bench.machine import NOISY_SHARE, CpuMeter, benchmark_lock, wait_for_quiet
from gsm.measure.bench.process import WorkerProcess
from gsm.measure.bench.record import ArmRecord
from gsm.measure.bench.spec import BenchSpec
from gsm.measure.profile import MAX_STEPS
from gsm.models import load_model
from gsm.quality import Assessment, PlainArm, Progress, QualityPlan, encode, load_thirds, no_progress
from gsm.results import BenchResult, Environment, Profile, Quality, Workload, collect_environment, load_average

_LOCK_WAIT_S = 3600.0
_MEMORY_MARGIN = 1.3  # a loaded model takes more than its parameters


def bench(spec: BenchSpec, progress: Progress = no_progress) -> BenchResult:
    """Measure ``spec`` and return the result; Ctrl-C returns what was complete by then, marked ``interrupted``.

    Raises InputError, ConfigError, ModelError or MeasurementError before or while measuring.
    """
    run = _Bench(spec, resolve_arms(spec.arms), progress)
    try:
        with benchmark_lock(_LOCK_WAIT_S, progress):
            run.measure_speed()
        if spec.measures_quality:
            run.measure_quality()
    except KeyboardInterrupt:
        if not run.has_samples:
            raise
        run.interrupted = True
    return run.result()


class _Bench:
    """A benchmark under way: what is complete so far."""

    def __init__(self, spec: BenchSpec, arms: tuple[ArmSpec, ...], progress: Progress):
        self.spec, self.arms, self.progress = spec, arms, progress
        self.records = {arm.name: ArmRecord(arm) for arm in arms}
        self.environment: Environment | None = None
        self.ready: dict[str, Any] = {}
        self.other_shares: list[float] = []
        self.bandwidth: float | None = None
        self.quality: dict[str, Quality] = {}
        self.interrupted = False
        self.notes: list[str] = []
        self._steps_done = 0

    @property
    def has_samples(self) -> bool:
        return any(record.ttft_ms for record in self.records.values())

    # -- speed and memory ----------------------------------------------------------------------------------------

    def measure_speed(self) -> None:
        with self._start(self.arms[0]) as first:
            self._describe(first)
            if self._all_fit(first):
                with ExitStack() as stack:
                    others = [stack.enter_context(self._start(arm)) for arm in self.arms[1:]]
                    self._take_turns([first, *others])
                return
            self.notes.append("too little memory to hold every arm's model at once: arms ran one after the other")
            self._take_turns([first])
        for arm in self.arms[1:]:
            with self._start(arm) as worker:
                self._take_turns([worker])

    def _take_turns(self, workers: list[WorkerProcess]) -> None:
        """Warm up (thrown away), then one run of each arm in turn, so that a slow minute hits all of them."""
        if not wait_for_quiet(self.spec.wait_s, self.progress):
            self.notes.append(f"the machine stayed busy for {self.spec.wait_s:.0f} s before measuring began")
        if self.bandwidth is None:
            self.bandwidth = self._advance("memory bandwidth", workers[0].ask, "bandwidth")["bytes_per_s"]
        meter = CpuMeter([worker.pid for worker in workers])
        try:
            if self.spec.warmup:
                for worker in workers:
                    self._advance(f"warm-up: {worker.arm}", worker.ask, "run")
            for run in range(self.spec.runs):
                for worker in workers:
                    label = f"run {run + 1}: {worker.arm}"
                    self.records[worker.arm].add_run(self._advance(label, worker.ask, "run"))
        finally:
            self.other_shares.append(meter.other_share())
        for worker in workers:
            self.records[worker.arm].add_memory(worker.ask("memory"))
        self._measure_unchunked(workers)
        self._measure_profiles(workers)

    def _measure_unchunked(self, workers: list[WorkerProcess]) -> None:
        """After the peak memory was read: one large chunk needs more."""
        if not self.spec.unchunked or self.spec.prompt_tokens <= self.spec.chunk_tokens:
            return
        for worker in workers:
            if worker.arm == PLAIN:
                for _ in range(self.spec.runs):
                    answer = self._advance("unchunked prefill", worker.ask, "unchunked")
                    self.records[PLAIN].unchunked_ms.append(answer["ttft_ms"])

    def _measure_profiles(self, workers: list[WorkerProcess]) -> None:
        for worker in workers if self.spec.profile else ():
            answer = self._advance(f"profile: {worker.arm}", worker.ask, "profile")
            self.records[worker.arm].profile = Profile.model_validate(answer)

    @contextmanager
    def _start(self, arm: ArmSpec) -> Iterator[WorkerProcess]:
        worker = self._advance(f"loading: {arm.name}", WorkerProcess, self.spec.job(arm.name))
        try:
            yield worker
        finally:
            worker.close()

    def _describe(self, worker: WorkerProcess) -> None:
        self.ready = worker.ready
        known = {name: worker.ready[name] for name in ("model", "dtype", "device", "threads")}
        self.environment = collect_environment(**known)
        window = worker.ready["max_positions"]
        quality_plan(self.spec, window)  # what cannot work is refused before anything is timed
        if self.spec.profile and 0 < window < self.spec.prompt_tokens + MAX_STEPS:
            raise InputError(
                f"a profile decodes {MAX_STEPS} tokens after the prompt, but the model was trained for {window} "
                f"positions; use a prompt of at most {max(0, window - MAX_STEPS)} tokens"
            )

    def _all_fit(self, first: WorkerProcess) -> bool:
        needed = (len(self.arms) - 1) * first.ready["model_bytes"] * _MEMORY_MARGIN
        return bool(needed < first.ready["free_bytes"])

    def _advance(self, label: str, action: Callable[..., Any], *args: Any) -> Any:
        self.progress(label, self._steps_done, self._num_steps)
        answer = action(*args)
        self._steps_done += 1
        self.progress(label, self._steps_done, self._num_steps)
        return answer

    @property
    def _num_steps(self) -> int:
        spec, num_arms = self.spec, len(self.arms)
        runs = num_arms * (1 + int(spec.warmup) + spec.runs + int(spec.profile))
        unchunked = spec.unchunked and spec.prompt_tokens > spec.chunk_tokens and PLAIN in self.records
        return runs + 1 + (spec.runs if unchunked else 0)

    # -- quality -------------------------------------------------------------------------------------------------

    def measure_quality(self) -> None:
        """In this process, after the arms' processes have ended; windows and needles are paired with the full cache."""
        spec = self.spec
        self.progress("loading the model for quality", 0, 1)
        loaded = load_model(spec.model, dtype=spec.dtype, threads=spec.threads, device=spec.device)
        plan = quality_plan(spec, loaded.arch.max_position_embeddings)
        text_ids = encode(loaded.tokenizer, load_thirds(spec.text).evaluation)
        reference = PlainArm(loaded.model, chunk_tokens=spec.chunk_tokens)
        compared = [make_arm(arm, loaded, spec.chunk_tokens, spec.text) for arm in self.arms if arm.config is not None]
        assessment = Assessment(reference, compared, loaded.tokenizer, text_ids, plan, self.progress)
        try:
            assessment.run()
        finally:
            self.quality = assessment.results()

    # -- the result ----------------------------------------------------------------------------------------------

    def result(self) -> BenchResult:
        spec = self.spec
        if not spec.measures_quality:
            self.notes.append("quality was not measured: these numbers alone are not a result")
        if _shares_hidden(self.arms, spec.device):
            self.notes.append("GSM's arms also multiply weights by faster code; the arm 'linear' shows its share")
        return BenchResult(
            environment=self._final_environment(),
            workload=Workload(
                prompt_tokens=spec.prompt_tokens,
                new_tokens=spec.new_tokens,
                runs=spec.runs,
                batch_size=spec.batch_size,
                warmup_runs=int(spec.warmup),
                prefill_chunk_tokens=spec.chunk_tokens,
                text_sha256=self.ready.get("text_sha256"),
            ),
            arms=tuple(self.records[arm.name].result(self._floor(), self.quality.get(arm.name)) for arm in self.arms),
            interrupted=self.interrupted,
            notes=tuple(self.notes),
        )

    def _floor(self) -> dict[str, Any]:
        return {
            "weight_bytes": self.ready.get("weight_bytes"),
            "bandwidth": self.bandwidth,
            "context_tokens": self.spec.prompt_tokens + self.spec.new_tokens - 1,
        }

    def _final_environment(self) -> Environment:
        share = max(self.other_shares, default=None)
        environment = self.environment or collect_environment()
        return environment.model_copy(
            update={
                "load_average_after": load_average(),
                "other_cpu_share": share,
                "noisy": None if share is None else share > NOISY_SHARE,
                "memory_bandwidth_bytes_per_s": self.bandwidth,
            }
        )


def _shares_hidden(arms: Sequence[ArmSpec], device: str) -> bool:
    """Whether plain transformers stands beside faster linear layers and nothing tells what those alone give."""
    linear = {arm.linear for arm in arms}
    return device == "cpu" and linear == {"auto", "torch"} and LINEAR not in {arm.name for arm in arms}


def quality_plan(spec: BenchSpec, max_positions: int) -> QualityPlan:
    """The quality part of ``spec`` for a model trained for ``max_positions`` (0: unknown)."""
    return QualityPlan.make(
        spec.prompt_tokens,
        num_windows=spec.num_windows,
        window_tokens=spec.window_tokens,
        windows_per_prefill=spec.windows_per_prefill,
        needles_per_depth=spec.needles_per_depth,
        max_positions=max_positions,
    )
