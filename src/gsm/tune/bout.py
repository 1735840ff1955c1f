"""One bout: several configs take turns, block by block, on the same real text in one process and one model.

Every decode step is timed *and* scored, so speed and quality come from the same run. Turns of a few tokens keep a busy
moment of the machine from hitting one contestant alone: block i of one and block i of another are a pair.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import gsm.integrations.transformers as hf
from gsm import smoothing
from gsm.config import GsmConfig
from gsm.errors import InputError
from gsm.measure.bench.machine import CpuMeter
from gsm.models import LoadedModel
from gsm.quality import Arm, GsmArm, NeedlePlan, PlainArm, Progress, Session, encode, needles
from gsm.quality.texts import TextThirds
from gsm.results import NeedlePair, Quality, Spread
from gsm.stats import bootstrap_mean_ci, mean, summary
from gsm.tune.records import Bout, Measured

BLOCK_TOKENS = 8
CASES = ("prefill", "late")
PLAIN = "transformers"


@dataclass(frozen=True)
class BoutPlan:
    """How much to measure per length. A *window* is what one quality sample averages over."""

    num_prefills: int = 2
    windows_per_prefill: int = 4
    window_tokens: int = 16
    needles_per_depth: int = 1
    chunk_tokens: int = 1024

    def __post_init__(self) -> None:
        if self.window_tokens % BLOCK_TOKENS:
            raise InputError(f"window_tokens is {self.window_tokens}; give a multiple of {BLOCK_TOKENS}")
        if self.num_prefills * self.windows_per_prefill < 2:
            raise InputError("one window has no interval; measure at least two")

    @property
    def num_steps(self) -> int:
        return self.windows_per_prefill * self.window_tokens


@dataclass(frozen=True)
class Contestant:
    """A name and its config; None is plain transformers."""

    name: str
    config: GsmConfig | None

    @property
    def smooths(self) -> bool:
        return self.config is not None and self.config.smoothing.active


@dataclass
class _Samples:
    """What came out of one contestant so far."""

    block_ms: list[float] = field(default_factory=list)
    prefill_ms: list[float] = field(default_factory=list)
    scores: list[Tensor] = field(default_factory=list)  # [steps, 3]: KL, NLL difference, top-1
    kv_bytes: int = 0
    attended: float | None = None


class Ring:
    """Where bouts are held: one loaded model, one text, and what the full cache said about it."""

    def __init__(self, loaded: LoadedModel, thirds: TextThirds, plan: BoutPlan, progress: Progress):
        self.loaded, self.plan, self.progress = loaded, plan, progress
        self._ids = {third: encode(loaded.tokenizer, thirds.part(third)) for third in ("tuning", "evaluation")}
        self._samples = smoothing.cut_samples(encode(loaded.tokenizer, thirds.calibration), 64, 128)
        self._calibration: smoothing.Calibration | None = None
        self._expected: dict[tuple[str, int, int], Tensor] = {}
        self._full_needles: dict[tuple[str, int], dict[str, tuple[bool, ...]]] = {}

    def check(self, longest: int) -> None:
        """Raise InputError when the longest bout fits neither the text nor the model's window."""
        needed = longest + max(self.plan.num_steps, 48) + 1
        window = self.loaded.arch.max_position_embeddings
        if 0 < window < needed:
            raise InputError(
                f"tuning at {longest} tokens needs {needed} positions, but the model was trained for {window}; "
                f"use --length {window - (needed - longest)}"
            )
        shortest = min(len(ids) for ids in self._ids.values())
        needed += (self.plan.num_prefills - 1) * self.plan.num_steps
        if shortest < needed:
            raise InputError(
                f"a third of the text has {shortest} tokens, but tuning at {longest} needs {needed}; give a longer "
                "text with --text, or a smaller --length"
            )

    @torch.inference_mode()
    def hold(self, key: str, third: str, length: int, contestants: Sequence[Contestant], judged: set[str]) -> Bout:
        """Measure all contestants after ``length`` tokens of a third of the text; ``judged`` ones also on needles."""
        began, meter = time.monotonic(), CpuMeter([])
        samples = {contestant.name: _Samples() for contestant in contestants}
        for index in range(self.plan.num_prefills):
            prompt, forced = self._text(third, length, index)
            expected = self._reference(third, length, index, prompt, forced)
            together = [c for c in contestants if not c.smooths]
            groups = [together, *([c] for c in contestants if c.smooths)]
            for group in filter(None, groups):
                label = f"{length} tokens, {index + 1} of {self.plan.num_prefills}: " + ", ".join(c.name for c in group)
                self.progress(label, index, self.plan.num_prefills)
                self._take_turns(group, prompt, forced, expected, samples)
        found = {c.name: self._needles(c, third, length) for c in contestants if c.name in judged}
        return Bout(
            key=key,
            third=third,
            prompt_tokens=length,
            contestants=tuple(self._record(c, samples[c.name], found.get(c.name), third, length) for c in contestants),
            seconds=round(time.monotonic() - began, 2),
            other_cpu_share=meter.other_share(),
        )

    # -- turns ---------------------------------------------------------------------------------------------------

    def _take_turns(
        self,
        group: Sequence[Contestant],
        prompt: Tensor,
        forced: Tensor,
        expected: Tensor,
        samples: dict[str, _Samples],
    ) -> None:
        with ExitStack() as stack:
            seats = [stack.enter_context(self._seat(contestant)) for contestant in group]
            for seat in seats:
                samples[seat.name].prefill_ms.append(seat.prefill(prompt, self.plan.chunk_tokens))
            for number, start in enumerate(range(0, len(forced) - 1, BLOCK_TOKENS)):
                block = slice(start, start + BLOCK_TOKENS)
                turn = number % len(seats)
                for seat in [*seats[turn:], *seats[:turn]]:
                    took_ms, logits = seat.block(forced[:-1][block])
                    if number:  # the first block warms up: kernels compile, caches fill
                        samples[seat.name].block_ms.append(took_ms / len(logits))
                    samples[seat.name].scores.append(_scores(expected[block], logits, forced[1:][block]))
            for seat in seats:
                samples[seat.name].kv_bytes, samples[seat.name].attended = seat.stats()

    @contextmanager
    def _seat(self, contestant: Contestant) -> Iterator[_Seat]:
        with self._smoothed(contestant):
            seat = _Seat(contestant, self.loaded.model)
            try:
                yield seat
            finally:
                seat.close()

    def _smoothed(self, contestant: Contestant) -> AbstractContextManager[Any]:
        if contestant.config is None or not contestant.smooths:
            return nullcontext()
        if self._calibration is None:
            self._calibration = smoothing.calibrate(self.loaded.model, self._samples)
        section = contestant.config.smoothing
        return smoothing.apply(self.loaded.model, section, samples=self._samples, calibration=self._calibration)

    def _text(self, third: str, length: int, index: int) -> tuple[Tensor, Tensor]:
        """Prompt [length] and the tokens that follow it, one more than there are steps."""
        ids = self._ids[third]
        needed = length + self.plan.num_steps + 1
        start = index * (len(ids) - needed) // max(1, self.plan.num_prefills - 1)
        piece = ids[start : start + needed]
        return piece[:length], piece[length:]

    def _reference(self, third: str, length: int, index: int, prompt: Tensor, forced: Tensor) -> Tensor:
        """Plain transformers' logits [steps, vocab] on the CPU, computed once per text."""
        key = (third, length, index)
        if key not in self._expected:
            self.progress(f"{length} tokens: the full cache's answers", 0, 1)
            with self._seat(Contestant(PLAIN, None)) as seat:
                seat.prefill(prompt, self.plan.chunk_tokens)
                self._expected[key] = seat.block(forced[:-1])[1]
        return self._expected[key]

    # -- needles and the record ----------------------------------------------------------------------------------

    def _needles(self, contestant: Contestant, third: str, length: int) -> dict[str, NeedlePair] | None:
        if not self.plan.needles_per_depth:
            return None
        key = (third, length)
        if key not in self._full_needles:
            self._full_needles[key] = self._find(PlainArm(self.loaded.model, chunk_tokens=self.plan.chunk_tokens), *key)
        full = self._full_needles[key]
        own = full if contestant.config is None else self._find(self._arm(contestant), *key)
        return {case: NeedlePair.of(full[case], own[case]) for case in CASES}

    def _find(self, arm: Arm, third: str, length: int) -> dict[str, tuple[bool, ...]]:
        per_haystack = 2 if length >= 1024 and self.plan.needles_per_depth > 1 else 1
        plan = NeedlePlan(length, self.plan.needles_per_depth, facts_per_depth=per_haystack)
        found: dict[str, list[bool]] = {case: [] for case in CASES}
        for outcome in needles([arm], self.loaded.tokenizer, self._ids[third], plan, self.progress):
            for case in CASES:
                found[case] += outcome[arm.name].found[case]
        return {case: tuple(hits) for case, hits in found.items()}

    def _arm(self, contestant: Contestant) -> Arm:
        assert contestant.config is not None
        arm = GsmArm(self.loaded.model, contestant.config, name=contestant.name, chunk_tokens=self.plan.chunk_tokens)
        return _SmoothedArm(arm, self, contestant) if contestant.smooths else arm

    def _record(
        self, contestant: Contestant, samples: _Samples, pairs: dict[str, NeedlePair] | None, third: str, length: int
    ) -> Measured:
        config = contestant.config
        return Measured(
            name=contestant.name,
            config=None if config is None else config.model_dump(mode="json"),
            tpot_ms=Spread(**summary(samples.block_ms)),
            block_ms=tuple(round(value, 4) for value in samples.block_ms),
            prefill_ms=float(mean(samples.prefill_ms) or 0.0),
            kv_bytes=samples.kv_bytes,
            attended_tokens_mean=samples.attended,
            quality=_quality(torch.cat(samples.scores), self.plan.window_tokens, pairs),
        )


class _Seat:
    """One contestant's cache on the shared model; the model is attached only while it is this one's turn."""

    def __init__(self, contestant: Contestant, model: Any) -> None:
        from transformers import DynamicCache

        self.name, self.config, self.model = contestant.name, contestant.config, model
        self._keyword = hf.cache_kwarg(model)
        self._lengths: list[int] = []
        if self.config is None:
            self.cache: Any = DynamicCache(config=model.config)
        else:
            self.cache = hf.Cache(model, self.config)

    def _turn(self) -> AbstractContextManager[Any]:
        return nullcontext() if self.config is None else hf.attach(self.model, self.config)

    def prefill(self, prompt: Tensor, chunk_tokens: int) -> float:
        """Feed ``prompt`` [n]; milliseconds."""
        with self._turn():
            began = time.perf_counter()
            hf.prefill(self.model, prompt[None].to(self.model.device), self.cache, chunk_tokens)
            self._wait()
            return 1e3 * (time.perf_counter() - began)

    def block(self, tokens: Tensor) -> tuple[float, Tensor]:
        """Feed tokens [n] one per step: milliseconds, and the logits [n, vocab] after each, on the CPU."""
        rows, arguments = [], {self._keyword: self.cache, "use_cache": True}
        with self._turn():
            began = time.perf_counter()
            for token in tokens.to(self.model.device):
                rows.append(self.model(input_ids=token.view(1, 1), **arguments).logits[0, -1])
            self._wait()
            took_ms = 1e3 * (time.perf_counter() - began)
        self._lengths.append(int(self.cache.get_seq_length()))
        return took_ms, torch.stack(rows).cpu()

    def stats(self) -> tuple[int, float | None]:
        """Bytes the cache holds, and the tokens a head attended per step."""
        if self.config is not None:
            stats = self.cache.stats()
            return stats.kv_bytes, stats.attended_tokens_mean
        tensors = [t for layer in self.cache.layers for t in vars(layer).values() if torch.is_tensor(t)]
        return sum(t.nbytes for t in tensors), mean(self._lengths)

    def close(self) -> None:
        if self.config is None:
            self.cache.layers = []
        else:
            self.cache.free()

    def _wait(self) -> None:
        if self.model.device.type == "cuda":
            torch.cuda.synchronize(self.model.device)


class _SmoothedArm:
    """A GsmArm on a model that is smoothed while a session is open."""

    def __init__(self, arm: GsmArm, ring: Ring, contestant: Contestant) -> None:
        self.arm, self.ring, self.contestant, self.name = arm, ring, contestant, arm.name

    @contextmanager
    def open(self) -> Iterator[Session]:
        with self.ring._smoothed(self.contestant), self.arm.open() as session:
            yield session


def _scores(expected: Tensor, got: Tensor, targets: Tensor) -> Tensor:
    """[steps, 3] float64: KL(expected || got), NLL difference, 1 where the best token is the same."""
    p, q = (torch.log_softmax(logits.double(), dim=-1) for logits in (expected, got))
    rows = torch.arange(len(targets))
    kl = (p.exp() * (p - q)).sum(-1)
    return torch.stack((kl, p[rows, targets] - q[rows, targets], (p.argmax(-1) == q.argmax(-1)).double()), dim=1)


def _quality(scores: Tensor, window_tokens: int, pairs: dict[str, NeedlePair] | None) -> Quality:
    """Quality of windows [n * window_tokens, 3]. Values that are not finite leave KL unmeasured and say so."""
    windows = scores.unflatten(0, (-1, window_tokens)).mean(1)
    finite = bool(torch.isfinite(windows).all())
    interval = bootstrap_mean_ci(windows[:, 0].tolist()) if finite else None
    pairs = pairs or {}
    needle_shares = {case: pair.found / pair.asked for case, pair in pairs.items()}
    return Quality(
        kl=interval.mean if interval else None,
        kl_ci95=(interval.low, interval.high) if interval else None,
        nll_delta=float(windows[:, 1].mean()) if finite else None,
        top1_agreement=float(windows[:, 2].mean()) if finite else None,
        needle_prefill=needle_shares.get("prefill"),
        needle_late=needle_shares.get("late"),
        n_windows=len(windows),
        n_needles=max((pair.asked for pair in pairs.values()), default=0),
        window_tokens=window_tokens,
        prefill_pair=pairs.get("prefill"),
        late_pair=pairs.get("late"),
        notes=() if finite else ("the output is not finite",),
    )
