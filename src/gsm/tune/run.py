"""`tune`: one variable at a time from a start, each at three lengths, then everything that helped at once.

The screen to read first is `_Tuner.run`. What it decides is a pure function of bouts; a run that is taken up again
finds them in its notebook.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gsm.config import GsmConfig, load_config
from gsm.errors import ConfigError, InputError
from gsm.models import load_model
from gsm.quality import Progress, load_thirds, no_progress
from gsm.results import Environment, Tolerance, collect_environment, load_average
from gsm.tune.bout import PLAIN, BoutPlan, Contestant, Ring
from gsm.tune.judge import best, compare, gain, noise_of, why, why_not
from gsm.tune.ladder import (
    CACHE_VARIABLES,
    Variable,
    cache_variables,
    changed,
    start_config,
    strength_variable,
    window_variable,
)
from gsm.tune.notebook import Notebook, bout_key
from gsm.tune.records import Bout, Candidate, Comparison, Measured, Step, TuneResult

START, TWIN, COMBINED = "start", "start again", "combined"
_PAGE, _SHORTEST = 16, 768


@dataclass(frozen=True)
class TuneSpec:
    """What to tune for. ``length`` is the full prompt length in tokens (None: the model's window, at most 8192)."""

    model: str
    task: str
    text: str | None = None
    length: int | None = None
    config: str | None = None
    variables: tuple[str, ...] = CACHE_VARIABLES
    smoothing: bool = False
    allow_drop: bool = False
    most_values: int = 3
    tolerance: Tolerance = dataclasses.field(default_factory=lambda: Tolerance(kl=0.02, needles_lost=0))
    plan: BoutPlan = dataclasses.field(default_factory=BoutPlan)
    dtype: str = "float32"
    threads: int | None = None
    device: str = "cpu"
    max_minutes: float | None = None

    def __post_init__(self) -> None:
        unknown = [name for name in self.variables if name not in CACHE_VARIABLES]
        if unknown:
            raise InputError(f"variable '{unknown[0]}' is unknown; use some of {', '.join(CACHE_VARIABLES)}")


class _TimeIsUp(Exception):
    """The allowed minutes are over; what is measured stays."""


def tune(spec: TuneSpec, state: Path | None = None, progress: Progress = no_progress) -> TuneResult:
    """Tune, writing ``state`` after every bout and taking it up where it exists already.

    Ctrl-C and the end of ``max_minutes`` return what is complete, marked ``interrupted``. Raises InputError,
    ConfigError or ModelError before anything is measured.
    """
    thirds = load_thirds(spec.text)
    progress("loading the model", 0, 1)
    loaded = load_model(spec.model, dtype=spec.dtype, threads=spec.threads, device=spec.device)
    lengths = _lengths(spec.length, loaded.arch.max_position_embeddings, spec.plan)
    start = load_config(spec.config) if spec.config else start_config(spec.task, lengths[-1])
    ring = Ring(loaded, thirds, spec.plan, progress)
    ring.check(lengths[-1])
    environment = collect_environment(
        model=loaded.name, dtype=spec.dtype, device=spec.device, threads=torch.get_num_threads()
    )
    head = TuneResult(
        environment=environment,
        task=spec.task,
        fingerprint=_fingerprint(spec, environment, lengths, thirds.hashes(), start),
        lengths=lengths,
        tolerance=spec.tolerance,
        text=thirds.name,
        text_sha256=thirds.hashes(),
        start=start.model_dump(mode="json"),
    )
    tuner = _Tuner(spec, head, start, ring.hold, Notebook(state, head.fingerprint))
    interrupted = False
    try:
        tuner.run()
    except (KeyboardInterrupt, _TimeIsUp):
        interrupted = True
    result = tuner.result(interrupted)
    tuner.notebook.write(result)
    return result


Hold = Callable[[str, str, int, Sequence[Contestant], set[str]], Bout]


class _Tuner:
    """A tuning run under way: what is decided so far."""

    def __init__(self, spec: TuneSpec, head: TuneResult, start: GsmConfig, hold: Hold, notebook: Notebook) -> None:
        self.spec, self.head, self.start, self.hold, self.notebook = spec, head, start, hold, notebook
        self.noise: dict[int, float] = {}
        self.baseline: Candidate | None = None
        self.steps: list[Step] = []
        self.combined: list[Candidate] = []
        self.against_plain: list[Comparison] = []
        self._began = time.monotonic()

    def run(self) -> None:
        self._baseline()
        most = self.spec.most_values
        for variable in cache_variables(self.spec.task, self._longest, self.start, most, self.spec.allow_drop):
            if variable.name in self.spec.variables:
                self._step(variable)
        if self.spec.smoothing:
            strength = self._step(strength_variable(most))
            chosen = None if strength is None else float(strength)
            self._step(window_variable(chosen, most))
        self._combine()

    @property
    def _longest(self) -> int:
        return self.head.lengths[-1]

    # -- the parts -----------------------------------------------------------------------------------------------

    def _baseline(self) -> None:
        """The start against plain transformers, and against itself: the second is the noise of every later step."""
        seats = [Contestant(PLAIN, None), Contestant(START, self.start), Contestant(TWIN, self.start)]
        comparisons = []
        for length in self.head.lengths:
            bout = self._bout("tuning", length, seats, judged={START})
            plain, own, twin = (_named(bout, seat.name) for seat in seats)
            self.noise[length] = noise_of(own, twin)
            comparisons.append(compare(plain, own, length, self.noise[length], self.spec.tolerance))
        self.baseline = _candidate("start", self.start, comparisons)

    def _step(self, variable: Variable) -> str | None:
        """Measure one variable's values; the label of the best accepted one."""
        trials = [_Trial.of(value.label, self.start, value.changes) for value in variable.values]
        for length in () if variable.skipped else self.head.lengths:
            alive = [trial for trial in trials if trial.alive]
            if not alive:
                break
            seats = [Contestant(START, self.start), *(trial.contestant for trial in alive)]
            bout = self._bout("tuning", length, seats, judged={trial.label for trial in alive})
            for trial in alive:
                before, after = _named(bout, START), _named(bout, trial.label)
                trial.comparisons.append(compare(before, after, length, self.noise[length], self.spec.tolerance))
        candidates = tuple(trial.candidate() for trial in trials)
        step = Step(
            variable=variable.name,
            question=variable.question,
            start_value=variable.start(self.start),
            candidates=candidates,
            chosen=best((candidate.value, candidate.gain) for candidate in candidates if candidate.accepted),
            skipped=variable.skipped,
        )
        self.steps.append(step)
        return step.chosen

    def _combine(self) -> None:
        """Everything that helped at once, on text no step has seen; the least useful is left out until it holds."""
        winners = sorted(self._winners(), key=lambda item: -item[1].gain)
        while True:
            names = [f"{name} {candidate.value}" for name, candidate in winners]
            try:
                config = self._merged([candidate for _, candidate in winners])
            except ConfigError:
                winners.pop()
                continue
            if self._measure_combined(config, " + ".join(names) or "start") or not winners:
                return
            winners.pop()

    def _measure_combined(self, config: GsmConfig, label: str) -> bool:
        seats = [Contestant(PLAIN, None), Contestant(START, self.start)]
        is_start = config == self.start
        if not is_start:
            seats.append(Contestant(COMBINED, config))
        name = START if is_start else COMBINED
        against_start, self.against_plain = [], []
        for length in self.head.lengths:
            bout = self._bout("evaluation", length, seats, judged={name})
            after, noise = _named(bout, name), self.noise[length]
            against_start.append(compare(_named(bout, START), after, length, noise, self.spec.tolerance))
            self.against_plain.append(compare(_named(bout, PLAIN), after, length, noise, self.spec.tolerance))
            if not against_start[-1].holds:
                break
        candidate = _candidate(label, config, self.against_plain if is_start else against_start)
        held = all(comparison.holds for comparison in against_start)
        helps = held and gain(self.against_plain[-1]) > 0 and not self.against_plain[-1].slower
        accepted = helps and (is_start or gain(against_start[-1]) > 0)
        reason = candidate.reason if accepted or not held else f"{candidate.reason}; {self._plain_words()}"
        self.combined.append(candidate.model_copy(update={"accepted": accepted, "reason": reason}))
        return accepted

    def _plain_words(self) -> str:
        return f"against plain transformers: {why(self.against_plain[-1])}"

    def _winners(self) -> list[tuple[str, Candidate]]:
        chosen = {step.variable: (step, step.chosen) for step in self.steps if step.chosen is not None}
        if "window_size" in chosen:  # its candidates carry the chosen strength with them
            chosen.pop("smooth_strength", None)
        return [(name, next(c for c in step.candidates if c.value == value)) for name, (step, value) in chosen.items()]

    def _merged(self, winners: Sequence[Candidate]) -> GsmConfig:
        """The start with every winner's difference from it. Raises ConfigError where two exclude each other."""
        before = self.start.model_dump(mode="json")
        merged = before
        for winner in winners:
            merged = _apply_difference(merged, before, winner.config)
        return load_config(merged)

    # -- bouts and the result ------------------------------------------------------------------------------------

    def _bout(self, third: str, length: int, seats: Sequence[Contestant], judged: set[str]) -> Bout:
        key = bout_key(third, length, seats)
        known = self.notebook.get(key)
        if known is not None:
            return known
        limit = self.spec.max_minutes
        if limit is not None and time.monotonic() - self._began > 60 * limit:
            raise _TimeIsUp
        bout = self.hold(key, third, length, seats, judged)
        self.notebook.add(bout, lambda: self.result(interrupted=True))
        return bout

    def result(self, interrupted: bool) -> TuneResult:
        last = self.combined[-1] if self.combined else None
        proposed = last.config if last is not None and last.accepted and not interrupted else None
        environment = self.head.environment.model_copy(update={"load_average_after": load_average()})
        shares = [bout.other_cpu_share for bout in self.notebook.bouts.values() if bout.other_cpu_share is not None]
        if shares:
            environment = environment.model_copy(update={"other_cpu_share": max(shares), "noisy": max(shares) > 0.1})
        return self.head.model_copy(
            update={
                "environment": environment,
                "bouts": tuple(self.notebook.bouts.values()),
                "noise": dict(self.noise),
                "baseline": self.baseline,
                "steps": tuple(self.steps),
                "combined": tuple(self.combined),
                "against_plain": tuple(self.against_plain),
                "proposed": proposed,
                "conclusion": self._conclusion(proposed, interrupted),
                "interrupted": interrupted,
                "notes": tuple(self._notes()),
            }
        )

    def _conclusion(self, proposed: dict[str, Any] | None, interrupted: bool) -> str:
        if interrupted:
            return f"interrupted after {len(self.notebook.bouts)} bouts; the same command goes on from here"
        if proposed is None:
            reason = self.combined[-1].reason if self.combined else "nothing was measured"
            return f"nothing is proposed: {reason}"
        last = self.against_plain[-1]
        slower = "" if last.faster else ", but no less time per token"
        return f"proposed for {self._longest} tokens; against plain transformers: {why(last)}{slower}"

    def _notes(self) -> list[str]:
        plan = self.spec.plan
        windows = plan.num_prefills * plan.windows_per_prefill
        notes = []
        if windows < 16:
            notes.append(
                f"{windows} windows of {plan.window_tokens} tokens per length are an impression, not a bar; confirm "
                "the proposal with `gsm eval`"
            )
        if self.against_plain and not self.against_plain[-1].faster:
            notes.append(
                "this saves KV memory only; `gsm bench` shows whether the peak of the whole process falls as well"
            )
        for comparison in self.against_plain:
            if comparison.slower and comparison.prompt_tokens < self._longest:
                notes.append(
                    f"at {comparison.prompt_tokens} tokens plain transformers is faster by {comparison.time.mean:.1%}"
                )
        return notes


@dataclass
class _Trial:
    """A candidate while it is measured."""

    label: str
    config: GsmConfig | None
    comparisons: list[Comparison]
    error: str = ""

    @classmethod
    def of(cls, label: str, start: GsmConfig, changes: dict[str, Any]) -> _Trial:
        try:
            return cls(label, changed(start, changes), [])
        except ConfigError as error:
            return cls(label, None, [], str(error))

    @property
    def alive(self) -> bool:
        return self.config is not None and all(comparison.holds for comparison in self.comparisons)

    @property
    def contestant(self) -> Contestant:
        return Contestant(self.label, self.config)

    def candidate(self) -> Candidate:
        if self.config is None:
            return Candidate(value=self.label, config={}, reason=f"impossible: {self.error}")
        return _candidate(self.label, self.config, self.comparisons)


def _candidate(label: str, config: GsmConfig, comparisons: Sequence[Comparison]) -> Candidate:
    """The decision about a config from its comparisons, shortest length first."""
    objection = next(filter(None, map(why_not, comparisons)), "")
    value = gain(comparisons[-1]) if comparisons and not objection else 0.0
    reason = objection or (why(comparisons[-1]) if comparisons else "not measured")
    return Candidate(
        value=label,
        config=config.model_dump(mode="json"),
        comparisons=tuple(comparisons),
        accepted=value > 0,
        gain=value,
        reason=reason,
    )


def _named(bout: Bout, name: str) -> Measured:
    return next(measured for measured in bout.contestants if measured.name == name)


def _apply_difference(target: dict[str, Any], before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """``target`` with every setting in which ``after`` differs from ``before``."""
    result = dict(target)
    for key, value in after.items():
        if isinstance(value, dict) and isinstance(before.get(key), dict):
            result[key] = _apply_difference(target[key], before[key], value)
        elif value != before.get(key):
            result[key] = value
    return result


def _lengths(length: int | None, window: int, plan: BoutPlan) -> tuple[int, int, int]:
    """A quarter, a half and the whole, in whole pages."""
    room = (window or 8192) - max(plan.num_steps, 48) - 1
    full = (length or min(8192, room)) // _PAGE * _PAGE
    if full < _SHORTEST:
        raise InputError(
            f"a length of {length or full} tokens is too short to tune for: a quarter of it has no room for needles; "
            f"give --length {_SHORTEST} or more"
        )
    return tuple(full // part // _PAGE * _PAGE for part in (4, 2, 1))  # type: ignore[return-value]


def _fingerprint(
    spec: TuneSpec, environment: Environment, lengths: tuple[int, ...], text: dict[str, str], start: GsmConfig
) -> str:
    what = {
        "model": environment.model,
        "dtype": spec.dtype,
        "device": spec.device,
        "threads": environment.threads,
        "cpu": environment.cpu,
        "gsm": environment.gsm,
        "task": spec.task,
        "lengths": lengths,
        "text": text,
        "plan": dataclasses.asdict(spec.plan),
        "start": start.model_dump(mode="json"),
    }
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:16]
