"""The tuner's decisions on measurements that are made up, so that every rule can be broken on purpose."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from gsm.config import GsmConfig, load_config
from gsm.errors import InputError
from gsm.results import NeedlePair, Quality, Spread, Tolerance, collect_environment
from gsm.tune import BoutPlan, TuneSpec, write_proposal
from gsm.tune.bout import Contestant
from gsm.tune.judge import noise_of, relative_change
from gsm.tune.ladder import TASKS, cache_variables, changed, start_config
from gsm.tune.notebook import Notebook
from gsm.tune.records import Bout, Measured, TuneResult
from gsm.tune.run import _Tuner
from gsm.tune.write import differences

LENGTHS = (512, 1024, 2048)
Rule = Callable[[str, GsmConfig | None, int], tuple[float, int, float, int]]


def plain_rule(name: str, config: GsmConfig | None, length: int) -> tuple[float, int, float, int]:
    """(ms per token, KV bytes, KL, needles lost): tiers save memory, budgets save time, int4 costs quality."""
    if config is None:
        return 100.0, 1000 * length, 0.0, 0
    ms, size, kl = 99.0, 500 * length, 1e-5
    if config.cache.hot_size < 500:
        size -= 60 * length
    if config.cache.warm.codec == "int4":
        size, kl = size - 150 * length, 0.5
    if config.cache.sparse.enabled and config.cache.sparse.budget_fraction is not None:
        ms -= 40 * (1 - config.cache.sparse.budget_fraction)
    return ms, size, kl, 0


class Stage:
    """Stands in for a ring: answers by a rule, counts bouts, and may be interrupted."""

    def __init__(self, rule: Rule = plain_rule, stop_after: int | None = None):
        self.rule, self.stop_after = rule, stop_after
        self.seen: list[tuple[str, int, tuple[str, ...]]] = []

    def hold(self, key: str, third: str, length: int, contestants: Sequence[Contestant], judged: set[str]) -> Bout:
        if self.stop_after is not None and len(self.seen) >= self.stop_after:
            raise KeyboardInterrupt
        self.seen.append((third, length, tuple(c.name for c in contestants)))
        measured = tuple(self._measure(c, length, c.name in judged) for c in contestants)
        return Bout(key=key, third=third, prompt_tokens=length, contestants=measured, seconds=1.0)

    def _measure(self, contestant: Contestant, length: int, judged: bool) -> Measured:
        ms, size, kl, lost = self.rule(contestant.name, contestant.config, length)
        wobble = 0.3 if contestant.name == "start again" else 0.0
        blocks = tuple(ms + wobble + 0.2 * (index % 3) for index in range(8))
        pair = NeedlePair(asked=3, reference_found=3, found=3 - lost, lost=lost, gained=0)
        return Measured(
            name=contestant.name,
            config=None if contestant.config is None else contestant.config.model_dump(mode="json"),
            tpot_ms=Spread(median=ms, min=ms, max=ms),
            block_ms=blocks,
            prefill_ms=1.0,
            kv_bytes=size,
            quality=Quality(
                kl=kl, kl_ci95=(kl, kl), n_windows=8, n_needles=3 if judged else 0,
                prefill_pair=pair if judged else None, late_pair=pair if judged else None,
            ),
        )  # fmt: skip


def tuner(stage: Stage, state: Path | None = None, fingerprint: str = "x", **settings: Any) -> _Tuner:
    start = start_config("document", LENGTHS[-1])
    head = TuneResult(
        environment=collect_environment(model="tiny"),
        task="document",
        fingerprint=fingerprint,
        lengths=LENGTHS,
        tolerance=Tolerance(kl=0.02, needles_lost=0),
        text="x",
        text_sha256={},
        start=start.model_dump(mode="json"),
    )
    spec = TuneSpec("tiny", "document", **settings)
    return _Tuner(spec, head, start, stage.hold, Notebook(state, fingerprint))


def run(stage: Stage, state: Path | None = None, **settings: Any) -> TuneResult:
    one = tuner(stage, state, **settings)
    one.run()
    return one.result(False)


def step(result: TuneResult, variable: str) -> Any:
    return next(item for item in result.steps if item.variable == variable)


def test_what_helps_is_combined_and_proposed() -> None:
    result = run(Stage())
    assert [item.variable for item in result.steps] == ["hot_size", "threshold", "compression", "budget"]
    assert step(result, "hot_size").chosen == "256"
    assert step(result, "budget").chosen == "0.5 of the context"  # a quarter of 512 is too small, so it is not tried
    assert result.proposed is not None
    config = load_config(result.proposed)
    assert (config.cache.hot_size, config.cache.sparse.budget_fraction) == (256, 0.5)
    assert result.conclusion.startswith("proposed for 2048 tokens; against plain transformers: 2")
    assert "no less time" not in result.conclusion


def test_what_is_outside_the_tolerance_is_not_taken_and_not_measured_further() -> None:
    stage = Stage()
    result = run(stage)
    assert step(result, "compression").chosen is None
    assert "KL may be 0.5" in step(result, "compression").candidates[0].reason
    assert [length for _, length, names in stage.seen if "int4" in names] == [512]


def test_a_lost_needle_at_half_the_length_ends_a_candidate() -> None:
    def forgetful(name: str, config: GsmConfig | None, length: int) -> tuple[float, int, float, int]:
        ms, size, kl, _ = plain_rule(name, config, length)
        return ms, size, kl, int(config is not None and config.cache.sparse.enabled and length == 1024)

    budget = step(run(Stage(forgetful)), "budget")
    assert budget.chosen is None
    assert all("at 1024 tokens" in c.reason and "needles" in c.reason for c in budget.candidates)
    assert all(len(c.comparisons) == 2 for c in budget.candidates)


def test_a_gain_inside_the_noise_does_not_count() -> None:
    def slight(name: str, config: GsmConfig | None, length: int) -> tuple[float, int, float, int]:
        sparse = config is not None and config.cache.sparse.enabled
        return (99.8 if sparse else 100.0), 1000 * length, 1e-5, 0

    result = run(Stage(slight))
    assert step(result, "budget").chosen is None
    assert "no gain beyond the noise" in step(result, "budget").candidates[0].reason
    assert result.proposed is None
    assert result.conclusion.startswith("nothing is proposed")


def test_slower_at_a_quarter_of_the_length_is_enough_to_refuse() -> None:
    def slow_when_short(name: str, config: GsmConfig | None, length: int) -> tuple[float, int, float, int]:
        ms, size, kl, lost = plain_rule(name, config, length)
        sparse = config is not None and config.cache.sparse.enabled
        return (130.0 if sparse and length == 512 else ms), size, kl, lost

    budget = step(run(Stage(slow_when_short)), "budget")
    assert budget.chosen is None
    assert budget.candidates[0].reason.startswith("at 512 tokens: slower")


def test_together_is_measured_and_the_least_useful_left_out_when_it_fails() -> None:
    def quarrel(name: str, config: GsmConfig | None, length: int) -> tuple[float, int, float, int]:
        ms, size, kl, lost = plain_rule(name, config, length)
        both = config is not None and config.cache.sparse.enabled and config.cache.hot_size < 500
        return ms, size, (0.3 if both else kl), lost

    result = run(Stage(quarrel))
    assert [candidate.accepted for candidate in result.combined] == [False, True]
    assert result.proposed is not None
    assert load_config(result.proposed).cache.hot_size == 512


def test_only_what_was_measured_at_every_length_on_fresh_text_is_proposed() -> None:
    stage = Stage()
    result = run(stage)
    fresh = [bout for bout in result.bouts if bout.third == "evaluation"]
    assert [bout.prompt_tokens for bout in fresh] == list(LENGTHS)
    assert all(any(c.config == result.proposed for c in bout.contestants) for bout in fresh)


def test_settings_that_exclude_each_other_are_not_combined() -> None:
    def cheap(name: str, config: GsmConfig | None, length: int) -> tuple[float, int, float, int]:
        size = 1000 * length
        if config is not None:
            size -= 300 * length * (config.cache.cold == "int4") + 200 * length * (config.cache.warm.codec == "int4")
        return 100.0, size, 1e-5, 0

    result = run(Stage(cheap))
    assert (step(result, "threshold").chosen, step(result, "compression").chosen) != (None, None)
    assert result.proposed is not None
    assert load_config(result.proposed).cache.cold == "int4"  # the larger gain of the two


def test_an_interrupted_run_goes_on_where_it_stopped(tmp_path: Path) -> None:
    state = tmp_path / "tune.json"
    first = tuner(Stage(stop_after=7), state)
    with pytest.raises(KeyboardInterrupt):
        first.run()
    partial = TuneResult.model_validate_json(state.read_text())
    assert (len(partial.bouts), partial.interrupted) == (7, True)
    assert partial.proposed is None
    whole = Stage()
    result = run(whole, state)
    undisturbed = Stage()
    assert result.steps == run(undisturbed).steps
    assert len(whole.seen) == len(undisturbed.seen) - 7
    again = Stage()
    assert run(again, state).proposed == result.proposed
    assert again.seen == []


def test_a_state_of_another_run_is_refused(tmp_path: Path) -> None:
    state = tmp_path / "tune.json"
    run(Stage(), state)
    with pytest.raises(InputError, match="another model, text, length or plan"):
        tuner(Stage(), state, fingerprint="y")


def test_time_is_up_like_an_interrupt(tmp_path: Path) -> None:
    from gsm.tune.run import _TimeIsUp

    one = tuner(Stage(), tmp_path / "tune.json", max_minutes=0.0)
    with pytest.raises(_TimeIsUp):
        one.run()
    assert one.result(True).conclusion.startswith("interrupted")


def test_the_proposal_is_a_config_that_loads(tmp_path: Path) -> None:
    result = run(Stage())
    target = tmp_path / "gsm.yaml"
    write_proposal(target, result, "tune.json")
    assert load_config(target) == load_config(result.proposed)
    assert "# Evidence: tune.json" in target.read_text()
    assert differences(load_config(None)) == {}


def test_a_stall_of_the_machine_is_left_out_of_pairs() -> None:
    calm, stalled = [100.0, 101.0, 99.0, 100.0, 100.0], [90.0, 91.0, 900.0, 89.0, 90.0]
    assert relative_change(calm, stalled).high < -0.08


def test_noise_is_what_two_identical_runs_differ_by() -> None:
    twins = [Contestant(name, load_config(None)) for name in ("start", "start again")]
    bout = Stage().hold("k", "tuning", 512, twins, set())
    assert 0.002 < noise_of(*bout.contestants) < 0.01


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("length", [768, 2048, 8192])
def test_every_value_of_every_ladder_is_a_valid_config(task: str, length: int) -> None:
    start = start_config(task, length)
    highest = {"dialog": 0.005, "document": 0.02}.get(task, 1.0)
    for variable in cache_variables(task, length, start, 3, allow_drop=True):
        for value in variable.values:
            config = changed(start, value.changes)
            assert config != start
            assert config.cache.threshold is None or config.cache.threshold <= highest
    assert start.cache.hot_size <= length // 4


def test_nothing_is_dropped_unless_allowed() -> None:
    start = start_config("document", 2048)
    threshold = cache_variables("document", 2048, start, 3, allow_drop=False)[1]
    assert all(changed(start, value.changes).cache.cold == "int4" for value in threshold.values)


def test_a_plan_that_gives_no_interval_is_refused() -> None:
    with pytest.raises(InputError, match="multiple of 8"):
        BoutPlan(window_tokens=12)
    with pytest.raises(InputError, match="at least two"):
        BoutPlan(num_prefills=1, windows_per_prefill=1)


def test_the_evidence_survives_json(tmp_path: Path) -> None:
    result = run(Stage(), tmp_path / "tune.json")
    assert TuneResult.model_validate(json.loads(result.model_dump_json())) == result
