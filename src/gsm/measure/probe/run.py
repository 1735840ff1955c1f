"""`probe`: one request under plain transformers, timed token by token and part by part; a verdict; what would help.

The screen to read first is `_Probe.decode`: plain blocks give time against length, timed blocks say where it goes.
"""

from __future__ import annotations

import time

import torch

from gsm.errors import InputError
from gsm.measure.bench.machine import NOISY_SHARE, CpuMeter, benchmark_lock, wait_for_quiet
from gsm.measure.bench.prompt import check_window, make_prompt
from gsm.measure.probe.advice import cheaper_first
from gsm.measure.probe.levers import Levers
from gsm.measure.probe.record import Growth, Lever, ProbeResult
from gsm.measure.probe.spec import ProbeSpec
from gsm.measure.probe.turns import LEVER_STEPS
from gsm.measure.probe.verdict import Evidence, judge, request_shares
from gsm.measure.profile import BLOCK_STEPS, Blocks, Stepper, summarise, synchroniser
from gsm.models import LoadedModel, load_model
from gsm.quality import ModelSession, PlainArm, Progress, load_thirds, no_progress
from gsm.results import Environment, Profile, Workload, collect_environment, load_average
from gsm.stats import theil_sen

_LOCK_WAIT_S = 3600.0


def probe(spec: ProbeSpec, progress: Progress = no_progress) -> ProbeResult:
    """Probe ``spec``; Ctrl-C returns what is complete by then, marked ``interrupted``.

    Raises InputError, ConfigError, ModelError or MeasurementError.
    """
    progress("loading the model", 0, 1)
    loaded = load_model(spec.model, dtype=spec.dtype, threads=spec.threads, device=spec.device)
    run = _Probe(spec, loaded, progress)
    try:
        with benchmark_lock(_LOCK_WAIT_S, progress):
            run.decode()
            run.ask_levers()
    except KeyboardInterrupt:
        if not run.token_ms:
            raise
        run.interrupted = True
    return run.result()


class _Probe:
    """A probe under way: what is complete so far."""

    def __init__(self, spec: ProbeSpec, loaded: LoadedModel, progress: Progress):
        self.spec, self.loaded, self.progress = spec, loaded, progress
        self.new_tokens = _new_tokens(spec, loaded)
        self.lengths = spec.lengths or (spec.prompt_tokens + self.new_tokens,)
        thirds = load_thirds(spec.text)
        longest = max(spec.prompt_tokens, *self.lengths)
        self.prompt = make_prompt(loaded, thirds, longest, 0, spec.batch_size)
        self.text_sha256 = thirds.sha256("evaluation")
        self.environment = _environment(loaded)
        self.ttft_ms = 0.0
        self.context_tokens: list[int] = []
        self.token_ms: list[float] = []
        self.profile: Profile | None = None
        self.levers: list[Lever] = []
        self.empty_ms: float | None = None
        self.full_ms: float | None = None
        self.other_cpu_share: float | None = None
        self.interrupted = False
        self.notes: list[str] = []

    # -- measuring -----------------------------------------------------------------------------------------------

    def decode(self) -> None:
        """Prefill, then blocks of 16 tokens: plain and timed ones in turn."""
        if not wait_for_quiet(self.spec.wait_s, self.progress):
            self.notes.append(f"the machine was busy when measuring began, after {self.spec.wait_s:.0f} s of waiting")
        meter = CpuMeter([])
        arm = PlainArm(self.loaded.model, chunk_tokens=self.spec.chunk_tokens)
        with torch.inference_mode():  # weights are mapped from their file: reading them first is loading
            self.loaded.model(input_ids=self.prompt[:1, :8])
        with arm.open() as session:
            assert isinstance(session, ModelSession)
            self.progress("prefill", 0, self.new_tokens)
            self.ttft_ms, token = _timed_prefill(session, self.prompt[:, : self.spec.prompt_tokens])
            self._decode_blocks(session, token)
        self.other_cpu_share = meter.other_share()

    def _decode_blocks(self, session: ModelSession, token: torch.Tensor) -> None:
        stepper, blocks = Stepper(session, token), Blocks()
        num_blocks = max(1, (self.new_tokens - 1) // BLOCK_STEPS)
        for index in range(num_blocks):
            self.progress("decoding", index * BLOCK_STEPS, self.new_tokens)
            length = session.num_tokens
            if index % 2:
                blocks.timed.append(stepper.timed_block())
            else:
                seconds = stepper.plain_block(min(BLOCK_STEPS, self.new_tokens - 1))
                blocks.plain_s.append(sum(seconds) / len(seconds))
                self.context_tokens += range(length, length + len(seconds))
                self.token_ms += [1e3 * s for s in seconds]
            if blocks.timed:
                middle = self.spec.prompt_tokens + (index + 1) * BLOCK_STEPS // 2
                self.profile = summarise(blocks, middle)

    def ask_levers(self) -> None:
        levers = Levers(self.spec, self.loaded, self.prompt, self.progress)
        for lever in levers.predict(self.lengths):
            self.levers.append(lever)
            if self._is_nearest(lever.context_tokens):
                self.empty_ms, self.full_ms = levers.empty_ms, levers.full_ms
        for measured in levers.verify(tuple(self.levers)) if self.spec.verify else ():
            self.levers = [measured if _same(measured, lever) else lever for lever in self.levers]

    def _is_nearest(self, length: int) -> bool:
        """Whether no other length asked for is nearer to the one that was probed."""
        return length == min(self.lengths, key=lambda other: abs(other - self.spec.prompt_tokens - self.new_tokens))

    # -- the result ----------------------------------------------------------------------------------------------

    def growth(self) -> Growth | None:
        """Theil-Sen over blocks: neighbouring tokens wait for the same disturbances, blocks hardly do."""
        starts = range(0, len(self.token_ms) - BLOCK_STEPS + 1, BLOCK_STEPS)
        if len(starts) < 3:
            return None
        lengths = [self.context_tokens[s] + (BLOCK_STEPS - 1) / 2 for s in starts]
        block_ms = [sorted(self.token_ms[s : s + BLOCK_STEPS])[BLOCK_STEPS // 2] for s in starts]
        line = theil_sen(lengths, block_ms)
        return Growth(
            us_per_token=1e3 * line.slope, low=1e3 * line.low, high=1e3 * line.high, intercept_ms=line.intercept
        )

    def _length_share(self) -> float | None:
        if self.empty_ms is None or self.full_ms is None:
            return None
        return 1 - self.empty_ms / self.full_ms

    def result(self) -> ProbeResult:
        spec, growth = self.spec, self.growth()
        evidence = Evidence(
            self.ttft_ms, self.new_tokens, len(self.token_ms), self.profile, growth, self.other_cpu_share,
            self._length_share(),
        )  # fmt: skip
        shares = request_shares(self.ttft_ms, self.new_tokens, self.profile) if self.profile else None
        return ProbeResult(
            environment=self.environment.model_copy(
                update={
                    "load_average_after": load_average(),
                    "other_cpu_share": self.other_cpu_share,
                    "noisy": None if self.other_cpu_share is None else self.other_cpu_share > NOISY_SHARE,
                }
            ),
            workload=Workload(
                prompt_tokens=spec.prompt_tokens,
                new_tokens=self.new_tokens,
                runs=1,
                batch_size=spec.batch_size,
                prefill_chunk_tokens=spec.chunk_tokens,
                text_sha256=self.text_sha256,
            ),
            ttft_ms=self.ttft_ms,
            context_tokens=tuple(self.context_tokens),
            token_ms=tuple(self.token_ms),
            growth=growth,
            profile=self.profile,
            shares=shares,
            empty_ms=self.empty_ms,
            full_ms=self.full_ms,
            verdict=judge(evidence, NOISY_SHARE),
            cheaper_first=tuple(cheaper_first(self.loaded, spec.batch_size, self.profile, self.levers)),
            levers=tuple(self.levers),
            interrupted=self.interrupted,
            notes=tuple(self.notes),
        )


def _same(a: Lever, b: Lever) -> bool:
    return (a.name, a.context_tokens) == (b.name, b.context_tokens)


def _new_tokens(spec: ProbeSpec, loaded: LoadedModel) -> int:
    """As many new tokens as the model's window has room for. Raises InputError when it has none."""
    window = loaded.arch.max_position_embeddings
    for length in spec.lengths:
        check_window(loaded, length, LEVER_STEPS)  # what a lever's measurement decodes
    if not window:
        return spec.new_tokens
    room = window - spec.prompt_tokens - (0 if spec.lengths else LEVER_STEPS)
    if room < 2:
        raise InputError(
            f"a prompt of {spec.prompt_tokens} tokens leaves no room for new ones in {loaded.name}, which was trained "
            f"for {window} positions; shorten the prompt"
        )
    return min(spec.new_tokens, room)


def _timed_prefill(session: ModelSession, prompt: torch.Tensor) -> tuple[float, torch.Tensor]:
    wait = synchroniser(prompt.device)
    start = time.perf_counter()
    token = session.prefill(prompt).argmax(-1, keepdim=True)
    wait()
    return 1e3 * (time.perf_counter() - start), token


def _environment(loaded: LoadedModel) -> Environment:
    model = loaded.model
    on_gpu = model.device.type == "cuda"
    return collect_environment(
        model=loaded.name,
        dtype=str(model.dtype).removeprefix("torch."),
        device=torch.cuda.get_device_name(model.device) if on_gpu else "cpu",
        threads=torch.get_num_threads(),
    )
