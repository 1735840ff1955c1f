"""The guard's judgement on answers made up here: what it must see, what it must let pass, and what it says."""

from __future__ import annotations

import random
from typing import Any

import pytest

from gsm.config import RolloutConfig, RolloutTolerance
from gsm.engine import Score
from gsm.serve.facts import Facts, repetition
from gsm.serve.watch import METRICS, Breach, Watch

STABLE, CANARY = 1, 2


def facts(epoch: int, at_s: float = 0.0, **changed: Any) -> Facts:
    values: dict[str, Any] = {
        "num_prompt_tokens": 100,
        "num_cached_tokens": 0,
        "num_tokens": 40,
        "is_error": False,
        "num_nonfinite": 0,
        "is_early": False,
        "repetition": 0.05,
        "ttft_s": 0.2,
        "itl_s": 0.03,
        "bytes_per_token": 5000.0,
    }
    return Facts(epoch, at_s, **{**values, **changed})


def score(epoch: int, kl: float, top1: float = 0.01, gap: float = 0.0) -> Score:
    return Score(epoch, 40, kl, top1, gap)


def watch(**rules: Any) -> Watch:
    found = Watch()
    found.begin(STABLE, CANARY, RolloutConfig(**rules))
    return found


def answers_until(found: Watch, make: Any, most: int = 300) -> tuple[int, Breach | None]:
    """Alternate stable and canary answers until a breach."""
    for number in range(1, most + 1):
        for epoch in (STABLE, CANARY):
            breach = make(found, epoch, number)
            if breach is not None:
                return number, breach
    return most, None


@pytest.mark.parametrize(
    ("metric", "bad"),
    [
        ("kl", lambda w, e, n: w.note_score(score(e, 0.08 if e == CANARY else 0.001))),
        ("top1", lambda w, e, n: w.note_score(score(e, 0.001, 0.3 if e == CANARY else 0.01))),
        ("gap", lambda w, e, n: w.note_score(score(e, 0.001, 0.01, 0.4 if e == CANARY else 0.0))),
        ("repetition", lambda w, e, n: w.note(facts(e, n, repetition=0.8 if e == CANARY else 0.1))),
        ("early_stop", lambda w, e, n: w.note(facts(e, n, is_early=e == CANARY and n % 3 > 0))),
        ("errors", lambda w, e, n: w.note(facts(e, n, is_error=e == CANARY and n % 3 > 0))),
        ("ttft", lambda w, e, n: w.note(facts(e, n, ttft_s=0.5 if e == CANARY else 0.2))),
        ("itl", lambda w, e, n: w.note(facts(e, n, itl_s=0.05 if e == CANARY else 0.02))),
        ("memory", lambda w, e, n: w.note(facts(e, n, bytes_per_token=9000.0 if e == CANARY else 4000.0))),
    ],
)
def test_each_kind_of_evidence_is_seen_alone(metric: str, bad: Any) -> None:
    number, breach = answers_until(watch(), bad)
    assert breach is not None
    assert (breach.metric, breach.epoch) == (metric, CANARY)
    assert number <= 60
    title = next(m.title for m in METRICS if m.name == metric)
    assert title in breach.reason
    off = watch(tolerance=RolloutTolerance(**{metric: None}))
    assert answers_until(off, bad, 80)[1] is None, "a tolerance of null is not watched"
    assert answers_until(watch(guard=False), bad, 80)[1] is None


def test_a_nan_is_enough_once() -> None:
    found = watch()
    breach = found.note(facts(CANARY, num_nonfinite=3))
    assert breach is not None
    assert breach.metric == "nonfinite"
    assert found.note(facts(CANARY, num_nonfinite=3)) is None, "one alarm for one canary"


def noise(order: random.Random, found: Watch, epoch: int, number: int) -> Breach | None:
    """Answers of two equal configs: heavy tails everywhere."""
    at_s = float(number)
    one = facts(
        epoch,
        at_s,
        num_prompt_tokens=order.choice([20, 200, 2000]),
        repetition=order.betavariate(1, 6),
        is_early=order.random() < 0.1,
        is_error=order.random() < 0.03,
        ttft_s=order.lognormvariate(-1.5, 1.2),
        itl_s=order.lognormvariate(-3.0, 0.6),
        bytes_per_token=order.lognormvariate(8.0, 0.7),
    )
    first = found.note(one)
    return first or found.note_score(
        score(epoch, order.expovariate(1 / 0.004), order.betavariate(1, 30), order.gauss(0.0, 0.03)), at_s
    )


def test_equal_configs_are_let_pass() -> None:
    order = random.Random(3)
    alarms = sum(answers_until(watch(), lambda w, e, n: noise(order, w, e, n), 150)[1] is not None for _ in range(150))
    assert alarms <= 4, "1 % of 150, and three sigma"


def test_a_slightly_worse_one_within_the_tolerance_is_let_pass() -> None:
    order = random.Random(4)

    def slight(found: Watch, epoch: int, number: int) -> Breach | None:
        return found.note_score(score(epoch, order.expovariate(1 / (0.009 if epoch == CANARY else 0.001))))

    assert sum(answers_until(watch(), slight)[1] is not None for _ in range(30)) <= 1


def test_without_stable_answers_the_exact_model_is_the_partner() -> None:
    found, number = watch(), 0
    while (breach := found.note_score(score(CANARY, 0.09))) is None:
        number += 1
        assert number < 60
    assert "unknown" in breach.reason
    harmless = watch()
    assert all(harmless.note_score(score(CANARY, 0.002)) is None for _ in range(300))


def test_what_is_known_of_the_stable_epoch_is_used_by_the_next_canary() -> None:
    found = Watch()
    found.begin(STABLE, None, RolloutConfig())
    for _ in range(20):
        assert found.note_score(score(STABLE, 0.05)) is None
    found.begin(STABLE, CANARY, RolloutConfig())
    assert all(found.note_score(score(CANARY, 0.05)) is None for _ in range(300)), "as far from exact as the stable one"
    assert found.num_scored == 300


def test_times_are_compared_within_strata_and_a_minute() -> None:
    found = watch()
    for number in range(200):  # the canary gets the long prompts
        assert found.note(facts(STABLE, number, num_prompt_tokens=20, ttft_s=0.05, itl_s=None)) is None
        assert found.note(facts(CANARY, number, num_prompt_tokens=4000, ttft_s=5.0, itl_s=None)) is None
    late = watch()
    for number in range(200):  # a quiet hour and then a busy one
        assert late.note(facts(STABLE, number, ttft_s=0.05, itl_s=0.01)) is None
    for number in range(200):
        assert late.note(facts(CANARY, 3600 + number, ttft_s=5.0, itl_s=0.5)) is None
    cached = watch()
    for number in range(100):  # what was cached needs no time
        assert cached.note(facts(STABLE, number, num_prompt_tokens=2000, num_cached_tokens=1900)) is None
        assert cached.note(facts(CANARY, number, num_prompt_tokens=2000, num_cached_tokens=0, ttft_s=9.0)) is None


def test_evidence_says_what_was_seen() -> None:
    found = watch()
    for number in range(5):
        found.note(facts(STABLE, number))
        found.note(facts(CANARY, number, ttft_s=None))
        found.note_score(score(CANARY, 0.02))
    rows = {row["name"]: row for row in found.evidence(CANARY)}
    assert rows["kl"]["num_answers"] == rows["kl"]["num_compared"] == 5
    assert rows["kl"]["mean"] == pytest.approx(0.02)
    assert rows["kl"]["stable_mean"] is None
    assert rows["ttft"]["num_answers"] == 0
    assert rows["ttft"]["mean"] is None, "nothing seen is nothing, not nought"
    assert rows["kl"]["evidence"] > 1 > rows["early_stop"]["evidence"]
    stable = {row["name"]: row for row in found.evidence(STABLE)}
    assert stable["ttft"]["num_answers"] == 5
    assert stable["ttft"]["evidence"] is None
    assert sum(metric.risk for metric in METRICS) == pytest.approx(1.0)


def test_repetition_counts_what_was_said_before() -> None:
    assert repetition(list(range(50))) == 0.0
    assert repetition([1, 2, 3]) == 0.0
    assert repetition([7] * 40) == pytest.approx(36 / 37)
    assert repetition([1, 2, 3, 4, 5] * 8) > 0.8


def test_resampling_bets_as_the_guard_does() -> None:
    """The vectorised bets of benchmarks/rollout.py stop where the guard does."""
    import importlib.util
    import sys
    from pathlib import Path

    import numpy as np

    spec = importlib.util.spec_from_file_location("rollout_bench", Path(__file__).parents[2] / "benchmarks/rollout.py")
    assert spec is not None
    assert spec.loader is not None
    bench = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = bench
    spec.loader.exec_module(bench)
    order = random.Random(5)

    def made_up(kl: float) -> dict[str, list[float]]:
        return {
            "kl": [order.expovariate(1 / kl) for _ in range(50)],
            "top1": [order.betavariate(1, 20) for _ in range(50)],
            "gap": [order.gauss(0.01, 0.05) for _ in range(50)],
            "repetition": [order.betavariate(1, 9) for _ in range(50)],
            "early_stop": [float(order.random() < 0.05) for _ in range(50)],
        }

    stable, canary = made_up(0.002), made_up(0.035)
    length = 80
    stops, causes = bench.first_alarms(stable, canary, RolloutConfig(), 25, length, np.random.default_rng(9))
    draws = np.random.default_rng(9).integers(50, size=(2, 25, length))
    names = bench._LEVELS
    for i in range(25):
        found, stop, cause = watch(tolerance=RolloutTolerance(ttft=None, itl=None, memory=None)), length + 1, None
        for j in range(length):
            for epoch, answers, which in ((STABLE, stable, draws[0, i, j]), (CANARY, canary, draws[1, i, j])):
                one = {name: answers[name][which] for name in names}
                first = found.note(facts(epoch, j, repetition=one["repetition"], is_early=one["early_stop"] > 0))
                breach = found.note_score(score(epoch, one["kl"], one["top1"], one["gap"])) or first
                if breach is not None and cause is None:
                    stop, cause = j + 1, breach.metric
            if cause is not None:
                break
        assert stops[i] == stop
        assert cause is None or names[causes[i]] == cause
    assert (stops <= length).any()
