"""The guard: accept a smoothed model only when a paired test says so; otherwise lower, then roll back, then give up.

1. The settings as they are. 2. The strength lowered, step by step. 3. Modules rolled back by bisection, most sensitive
first, and the culprits named. Every change is evaluated, and the accepted state is confirmed on a larger set of tokens.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import Tensor

from gsm import smoothing
from gsm.config.smoothing import SmoothingConfig
from gsm.guard.paired import PairedTest
from gsm.guard.records import Outcome, Step, Verdict
from gsm.guard.rollback import find_culprits, smallest_retreat
from gsm.smoothing import Applied, Calibration
from gsm.smoothing.select import rollback_order

Tell = Callable[[Step], None]


class Apply(Protocol):
    """`gsm.smoothing.apply`, or something that does more than it."""

    def __call__(
        self,
        model: Any,
        config: Any,
        *,
        samples: Tensor | None = None,
        calibration: Calibration | None = None,
        exclude: Any = (),
    ) -> AbstractContextManager[Applied]: ...


@contextlib.contextmanager
def guarded(
    model: Any,
    config: SmoothingConfig,
    text: Tensor,
    *,
    samples: Tensor | None = None,
    calibration: Calibration | None = None,
    tell: Tell | None = None,
    apply: Apply = smoothing.apply,
) -> Iterator[Outcome]:
    """Run the guard on ``model``, then hold it in the accepted state until the `with` ends.

    ``text`` [num_tokens] int64 is evaluation text, disjoint from the calibration ``samples``. When nothing passes, the
    model inside the `with` is the original.
    """
    outcome = search(model, config, text, samples=samples, calibration=calibration, tell=tell, apply=apply)
    if not outcome.accepted:
        yield outcome
        return
    with apply(model, outcome.config, samples=samples, calibration=calibration, exclude=outcome.rolled_back):
        yield outcome


def search(
    model: Any,
    config: SmoothingConfig,
    text: Tensor,
    *,
    samples: Tensor | None = None,
    calibration: Calibration | None = None,
    tell: Tell | None = None,
    apply: Apply = smoothing.apply,
) -> Outcome:
    """Find settings that pass and the modules to roll back; ``model`` is the original again afterwards."""
    limits = config.guard
    if calibration is None and config.enable and config.method != "rotate" and samples is not None:
        calibration = smoothing.calibrate(model, samples)
    run = _Run(model, samples, calibration, apply, tell)
    quick = PairedTest(model, text, limits.search_tokens, limits)
    verdict = run.measure(quick, config, "as configured")
    for lowered in _lowered(config):
        if verdict.passed:
            break
        config = lowered
        verdict = run.measure(quick, config, f"strength lowered to {config.smooth_strength:g}")
    culprits: list[str] = []
    excluded: list[str] = []
    if not verdict.passed:
        culprits, excluded = run.roll_back(quick, config)
    thorough = PairedTest(model, text, limits.final_tokens, limits)
    verdict = run.measure(thorough, config, "confirmation on more tokens", excluded)
    if not verdict.passed:
        more = smallest_retreat(run.ordered(excluded), run.passes(thorough, config, excluded, "confirmation"))
        excluded = excluded + (more or [])
        verdict = run.measure(thorough, config, "confirmation after roll-back", excluded)
    whole = config.enable and config.method == "rotate"  # of the residual stream: no module's roll-back ends it
    accepted = verdict.passed and (whole or bool(set(run.units) - set(excluded)))
    return Outcome(
        accepted=accepted, config=config, culprits=culprits, rolled_back=excluded, verdict=verdict, steps=run.steps
    )


class _Run:
    """One guarded run: applies a state, measures it, and keeps the trail."""

    def __init__(
        self, model: Any, samples: Tensor | None, calibration: Calibration | None, apply: Apply, tell: Tell | None
    ) -> None:
        self._model, self._samples, self._calibration = model, samples, calibration
        self._apply, self._tell = apply, tell
        self.units: list[str] = []
        self.steps: list[Step] = []

    def measure(self, test: PairedTest, config: SmoothingConfig, what: str, exclude: Sequence[str] = ()) -> Verdict:
        """The verdict on ``config`` without the modules in ``exclude``; the model is restored before it returns."""
        with self._apply(
            self._model, config, samples=self._samples, calibration=self._calibration, exclude=tuple(exclude)
        ) as applied:
            if not self.units:
                self.units = rollback_order(self._calibration, applied.units)
            verdict = test.measure()
        step = Step(
            what=what,
            num_active=len(set(self.units) - set(exclude)),
            passed=verdict.passed,
            perplexity_change=verdict.perplexity_change.mean if verdict.perplexity_change else None,
            kl=verdict.kl.mean if verdict.kl else None,
        )
        self.steps.append(step)
        if self._tell is not None:
            self._tell(step)
        return verdict

    def ordered(self, excluded: Sequence[str]) -> list[str]:
        """Units still active, the most sensitive first."""
        return [unit for unit in self.units if unit not in set(excluded)]

    def passes(
        self, test: PairedTest, config: SmoothingConfig, excluded: Sequence[str], what: str
    ) -> Callable[[frozenset[str]], bool]:
        """Whether a set of active units passes while ``excluded`` stay rolled back."""

        def check(active: frozenset[str]) -> bool:
            others = [unit for unit in self.units if unit not in active]
            return self.measure(test, config, what, [*dict.fromkeys([*excluded, *others])]).passed

        return check

    def roll_back(self, test: PairedTest, config: SmoothingConfig) -> tuple[list[str], list[str]]:
        """(culprits, everything to roll back). Culprits fail alone; the rest is rolled back for the sum of damage."""
        culprits = find_culprits(self.units, self.passes(test, config, (), "bisection"))
        if culprits and self.measure(test, config, "without the culprits", culprits).passed:
            return culprits, culprits
        rest = self.ordered(culprits)
        more = smallest_retreat(rest, self.passes(test, config, culprits, "retreat"))
        return culprits, [*culprits, *(rest if more is None else more)]


def _lowered(config: SmoothingConfig) -> Iterator[SmoothingConfig]:
    """The same settings with less strength: only `window` has a strength to lower."""
    if not config.is_windowed:
        return
    for step in range(1, config.guard.strength_steps + 1):
        yield config.model_copy(update={"smooth_strength": config.smooth_strength / 2**step})
