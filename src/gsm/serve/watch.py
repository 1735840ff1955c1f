"""The silent-quality guard: is a new config's answer worse than the stable one's?

Every kind of evidence is one sequential test (`gsm.guard.sequential`) with its share of the allowed risk of a false
alarm, so that all of them together stay below it, however long a canary runs.

* Levels (distance from the exact model, repetition, early stops, errors) are compared by amount: the canary's value
  minus that of a stable answer, capped at ten tolerances. Stable answers are used in their order, each once while they
  last; then one is drawn from those kept. Scores against the exact model need none: without a stable answer yet, the
  exact model itself (distance 0) is the partner.
* Times and memory are compared by order only, whatever their distribution: is the canary's more than a tolerance above
  that of a stable answer of the same stratum? Times are paired with answers of the same minute, because load changes.
* A NaN or an infinity in a canary's logits is no matter of statistics.

Owned by the engine's thread.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from gsm.config import RolloutConfig
from gsm.engine import Score
from gsm.guard.sequential import PairedBets, signed
from gsm.serve.facts import Facts

_KEPT = 256  # values of an epoch for each metric
_CAP = 10.0  # tolerances
_SAME_TIME_S = 60.0


@dataclass(frozen=True, slots=True)
class Metric:
    """One kind of evidence. `risk` is its share of the allowed false alarms; shares add up to 1."""

    name: str
    title: str
    unit: str
    risk: float
    is_order: bool = False
    from_exact: bool = False  # the exact model's own value is 0


METRICS = (
    Metric("kl", "distance from the exact model", "nats per token", 0.30, from_exact=True),
    Metric("top1", "other likeliest token", "share of tokens", 0.20, from_exact=True),
    Metric("gap", "log-probability gap", "nats per token", 0.10, from_exact=True),
    Metric("repetition", "repeated 4-grams", "share", 0.10),
    Metric("early_stop", "ends at once", "share of answers", 0.05),
    Metric("errors", "failed requests", "share of requests", 0.10),
    Metric("ttft", "time to first token", "s", 0.05, is_order=True),
    Metric("itl", "time between tokens", "s", 0.05, is_order=True),
    Metric("memory", "KV bytes per token", "bytes", 0.05, is_order=True),
)


@dataclass(frozen=True, slots=True)
class Breach:
    """Why an epoch is to be taken back."""

    epoch: int
    metric: str
    reason: str


@dataclass(slots=True)
class _Values:
    """The last values of one epoch and metric, and the sum of all."""

    kept: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT))
    num: int = 0
    total: float = 0.0

    def add(self, value: float) -> None:
        self.kept.append(value)
        self.num += 1
        self.total += value

    @property
    def mean(self) -> float | None:
        return self.total / self.num if self.num else None


class _Levels:
    """Compares amounts."""

    def __init__(self, metric: Metric, tolerance: float, stable: _Values, order: random.Random) -> None:
        self._cap = min(1.0, _CAP * tolerance) if metric.unit.startswith("share") else _CAP * tolerance
        self.bets = PairedBets(tolerance / self._cap)
        self._metric, self._stable, self._order = metric, stable, order
        self._fresh = deque(stable.kept)

    def note_stable(self, value: float, stratum: int, at_s: float) -> None:
        self._fresh.append(value)

    def note_canary(self, value: float, stratum: int, at_s: float) -> None:
        partner = self._partner()
        if partner is not None:
            self.bets.add(self._scaled(value) - self._scaled(partner))

    def _partner(self) -> float | None:
        if self._fresh:
            return self._fresh.popleft()
        if self._stable.kept:
            return self._order.choice(self._stable.kept)
        return 0.0 if self._metric.from_exact else None

    def _scaled(self, value: float) -> float:
        return min(max(value, 0.0), self._cap) / self._cap if math.isfinite(value) else 1.0


class _Order:
    """Compares which of two is larger, within strata and, for times, within a minute."""

    def __init__(self, metric: Metric, tolerance: float, stable: _Values, order: random.Random) -> None:
        self.bets = PairedBets(0.0)
        self._factor = 1.0 + tolerance
        self._within_s = math.inf if metric.name == "memory" else _SAME_TIME_S
        self._waiting: dict[tuple[str, int], deque[tuple[float, float]]] = {}

    def note_stable(self, value: float, stratum: int, at_s: float) -> None:
        self._pair("stable", "canary", value, stratum, at_s)

    def note_canary(self, value: float, stratum: int, at_s: float) -> None:
        self._pair("canary", "stable", value, stratum, at_s)

    def _pair(self, own: str, other: str, value: float, stratum: int, at_s: float) -> None:
        others = self._waiting.setdefault((other, stratum), deque(maxlen=_KEPT))
        while others and at_s - others[0][1] > self._within_s:
            others.popleft()
        if not others:
            self._waiting.setdefault((own, stratum), deque(maxlen=_KEPT)).append((value, at_s))
            return
        partner, _ = others.popleft()
        canary, stable = (value, partner) if own == "canary" else (partner, value)
        self.bets.add(signed(canary > stable * self._factor, canary < stable * self._factor))


class Watch:
    """Judges the canary, where there is one, and keeps what the stable epoch is like. `seed` draws partners."""

    def __init__(self, seed: int = 0) -> None:
        self.stable = self.canary = -1
        self.num_scored = 0  # of the canary's answers
        self.num_nonfinite = 0
        self._values: dict[int, dict[str, _Values]] = {}
        self._tests: dict[str, _Levels | _Order] = {}
        self._order = random.Random(seed)
        self._config = RolloutConfig()
        self._is_over = True

    def begin(self, stable: int, canary: int | None, config: RolloutConfig) -> None:
        """Judge `canary` anew against `stable` from now on; what is known of `stable` is kept."""
        self.stable, self.canary, self._config = stable, -1 if canary is None else canary, config
        self._values = {epoch: values for epoch, values in self._values.items() if epoch == stable}
        self.num_scored = self.num_nonfinite = 0
        self._is_over = canary is None
        self._tests = {}
        for metric in METRICS if canary is not None and config.guard else ():
            tolerance = getattr(config.tolerance, metric.name)
            if tolerance is not None:
                make: Callable[..., _Levels | _Order] = _Order if metric.is_order else _Levels
                self._tests[metric.name] = make(metric, tolerance, self._of(stable, metric.name), self._order)

    def note(self, facts: Facts) -> Breach | None:
        """A finished answer. Returns why its epoch is to be taken back, once."""
        if facts.epoch not in (self.stable, self.canary):
            return None
        values = {
            "repetition": facts.repetition,
            "early_stop": float(facts.is_early),
            "errors": float(facts.is_error),
            "ttft": facts.ttft_s,
            "itl": facts.itl_s,
            "memory": facts.bytes_per_token,
        }
        if facts.is_error:
            values = {"errors": 1.0}
        for name, value in values.items():
            if value is not None:
                self._add(name, facts, value)
        if facts.epoch == self.canary:
            self.num_nonfinite += facts.num_nonfinite
            if facts.num_nonfinite and self._config.guard:
                return self._breach(
                    "nonfinite", f"{facts.num_nonfinite} tokens came from logits with a NaN or infinity"
                )
        return self._judge()

    def note_score(self, score: Score, at_s: float = 0.0) -> Breach | None:
        """A scored answer. The same."""
        if score.epoch not in (self.stable, self.canary):
            return None
        self.num_scored += score.epoch == self.canary
        for name in ("kl", "top1", "gap"):
            self._put(name, score.epoch, getattr(score, name), 0, at_s)
        return self._judge()

    def evidence(self, epoch: int) -> list[dict[str, Any]]:
        """One entry per kind of evidence of an epoch. `evidence` at `needed` is an alarm; None: nothing is compared."""
        found = []
        for metric in METRICS:
            own, stable = self._of(epoch, metric.name), self._of(self.stable, metric.name)
            test = self._tests.get(metric.name) if epoch == self.canary else None
            found.append(
                {
                    "name": metric.name,
                    "title": metric.title,
                    "unit": metric.unit,
                    "num_answers": own.num,
                    "mean": own.mean,
                    "stable_mean": stable.mean if epoch == self.canary else None,
                    "tolerance": getattr(self._config.tolerance, metric.name),
                    "is_relative": metric.is_order,
                    "num_compared": test.bets.num_observed if test is not None else 0,
                    "evidence": test.bets.evidence if test is not None else None,
                    "needed": self._needed(metric),
                }
            )
        return found

    def _add(self, name: str, facts: Facts, value: float) -> None:
        stratum = {"ttft": facts.ttft_stratum, "itl": facts.length_stratum, "memory": facts.length_stratum}.get(name, 0)
        self._put(name, facts.epoch, value, stratum, facts.at_s)

    def _put(self, name: str, epoch: int, value: float, stratum: int, at_s: float) -> None:
        test = self._tests.get(name)
        if test is not None and epoch == self.canary:
            test.note_canary(value, stratum, at_s)
        elif test is not None:
            test.note_stable(value, stratum, at_s)
        self._of(epoch, name).add(value)

    def _judge(self) -> Breach | None:
        for metric in METRICS:
            test = self._tests.get(metric.name)
            if test is None or test.bets.evidence < self._needed(metric):
                continue
            own, stable = self._of(self.canary, metric.name).mean, self._of(self.stable, metric.name).mean
            beside = f"{stable:.4g}" if stable is not None else "unknown"
            reason = (
                f"{metric.title} is {own:.4g} {metric.unit} against the stable config's {beside}, after "
                f"{test.bets.num_observed} comparisons"
            )
            return self._breach(metric.name, reason)
        return None

    def _breach(self, name: str, reason: str) -> Breach | None:
        if self._is_over:
            return None
        self._is_over = True
        return Breach(self.canary, name, reason)

    def _needed(self, metric: Metric) -> float:
        return 1.0 / (self._config.false_alarm * metric.risk)

    def _of(self, epoch: int, name: str) -> _Values:
        return self._values.setdefault(epoch, {}).setdefault(name, _Values())
