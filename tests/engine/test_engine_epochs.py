"""Several configs in one engine: each request as if its own were the only one; and answers read again exactly."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from running import CACHE, ENGINE, PLAIN, SPARSE, config, drain, solo, used_pages

from gsm.config import load_config
from gsm.engine import Engine, SamplingParams
from gsm.engine.shadow import Score
from gsm.errors import ConfigError
from gsm.models import LoadedModel
from support_engine import load_tiny, prompt_ids

GREEDY = SamplingParams(max_tokens=24)
WINDOW: dict[str, Any] = {
    "enable": True,
    "method": "window",
    "window_size": 8,
    "smooth_strength": 0.3,
    "target_layers": ["*.down_proj"],
    "precision": "fp32",
    "short_request": {"max_tokens": 0},
}


@pytest.fixture(scope="module")
def tiny(tiny_model: Any) -> LoadedModel:
    return load_tiny(tiny_model("llama"))


# each changes something else: what a step reads, what a whole call has in common, the hot zone, the limits, the grid
LIVE: dict[str, dict[str, Any]] = {
    "sparse": config(SPARSE),
    "recent": config({"sparse": {"enabled": True, "budget_tokens": 20}, "recent_tokens": 8}),
    "hot": config({"hot_size": 24}),
    "drop": config({"policy": "recent", "warm_size": 8, "cold": "drop"}),
    "chunks": config(chunk_tokens=8),
    "no prefix": config(prefix_cache=False),
    "window": {**config(), "smoothing": WINDOW},
}


def window_of(loaded: LoadedModel, settings: dict[str, Any], ids: list[int]) -> list[int]:
    """What an engine that was started with window smoothing answers."""
    from gsm.smoothing.window import window_hooks

    names = [name for name, _ in loaded.model.named_modules() if name.endswith("down_proj")]
    with (
        window_hooks(loaded.model, names, load_config(settings).smoothing) as window,
        Engine(loaded, settings, window=window) as engine,
    ):
        engine.add("solo", list(ids), GREEDY)
        return drain(engine)["solo", 0].token_ids


def test_every_request_is_served_as_if_its_config_were_the_only_one(tiny: LoadedModel) -> None:
    ids = [prompt_ids(45, seed) for seed in range(3)]
    found: dict[str, list[list[int]]] = {}
    with Engine(tiny, config()) as engine:
        for number, settings in enumerate(LIVE.values(), 1):
            engine.epochs.publish(number, load_config(settings))
        names = ["start", *LIVE]
        for epoch, name in enumerate(names):
            for i, one in enumerate(ids):
                engine.add(f"{name}/{i}", list(one), GREEDY, epoch=epoch, salt=name)  # no reuse: `solo` has none
        outcomes = drain(engine)
        for name in names:
            found[name] = [outcomes[f"{name}/{i}", 0].token_ids for i in range(3)]
        engine.prefix.clear()  # type: ignore[union-attr]
        assert used_pages(engine) == 0
    assert not any(module._forward_pre_hooks for module in tiny.model.modules())
    for name, settings in {"start": config(), **LIVE}.items():
        for i, one in enumerate(ids):
            alone = window_of(tiny, settings, one) if name == "window" else solo(tiny, settings, one, GREEDY).token_ids
            assert found[name][i] == alone, (name, i)
    assert len({str(answers) for answers in found.values()}) >= 4, "the configs make no difference here"


@pytest.mark.parametrize(
    "settings",
    [
        config({"page_size": 8, "hot_size": 8}),
        config(PLAIN),
        config({"sparse": {"scorer": "minmax"}}),
        config({"policy": "threshold", "threshold": 0.01}),
        config({"sink_tokens": 8}),
        config(kv_pages=50),
        {**config(), "smoothing": {"int8": "dynamic"}},
        {**config(), "smoothing": {"enable": True, "method": "channel"}},
        {**config(), "smoothing": {"enable": True, "method": "window"}},
        {**config(), "smoothing": {**WINDOW, "target_layers": ["nothing_like_it"]}},
    ],
    ids=str,
)
def test_what_needs_a_restart_is_refused_and_changes_nothing(tiny: LoadedModel, settings: dict[str, Any]) -> None:
    with Engine(tiny, config()) as engine:
        with pytest.raises(ConfigError, match=r"restart|target_layers"):
            engine.epochs.publish(1, load_config(settings))
        assert engine.epochs.numbers == [0]
        assert not engine.epochs.current.window


def test_a_change_of_decode_settings_keeps_the_prefix_and_any_other_does_not(tiny: LoadedModel) -> None:
    ids = prompt_ids(45)  # CASES C2
    with Engine(tiny, config()) as engine:
        for number, name in enumerate(LIVE, 1):
            engine.epochs.publish(number, load_config(LIVE[name]))
        engine.add("cold", ids, GREEDY)
        drain(engine)
        cached = {}
        for number, name in enumerate(LIVE, 1):
            cached[name] = engine.add(name, list(ids), GREEDY, epoch=number)
            drain(engine)
        hits = {name: request.num_cached_tokens for name, request in cached.items()}
        assert hits["sparse"] == hits["recent"] == 44
        assert hits["hot"] == hits["chunks"] == hits["no prefix"] == hits["drop"] == hits["window"] == 0


def test_limits_follow_the_current_epoch(tiny: LoadedModel) -> None:
    with Engine(tiny, config()) as engine:
        engine.epochs.publish(7, load_config(config(max_waiting=0, kv_memory_mib=1.5)))
        assert engine.scheduler.limits.max_waiting == 256
        engine.epochs.use(7)
        assert engine.scheduler.limits.max_waiting == 0
        assert engine.room.max_bytes == 1.5 * 2**20
        engine.epochs.retire(0)
        assert engine.epochs.numbers == [7]
        with pytest.raises(ConfigError, match="epoch 0"):
            engine.add("late", prompt_ids(5), GREEDY, epoch=0)


def scores(tiny: LoadedModel, settings: dict[str, Any], **sampling: Any) -> tuple[list[Score], Engine]:
    found: list[Score] = []
    with Engine(tiny, settings) as engine:
        engine.shadow.on_score = found.append
        for seed in range(4):
            engine.add(
                str(seed), prompt_ids(90, seed), SamplingParams(max_tokens=40, seed=seed, **sampling), is_scored=True
            )
        drain(engine)
        while engine.shadow.has_work:
            engine.use_spare_time()
        assert engine.shadow.num_scored == 4
        return found, engine


def test_an_exact_config_scores_nought_and_a_bad_one_does_not(tiny: LoadedModel) -> None:
    exact, _ = scores(tiny, config({**PLAIN, "hot_size": 200}))
    assert all(score.kl < 1e-5 and score.top1 == 0 and abs(score.gap) < 1e-4 for score in exact)
    assert all(score.num_tokens == 40 for score in exact)
    bad, _ = scores(tiny, config(SPARSE), temperature=1.0)
    assert sum(score.kl for score in bad) / 4 > 0.01


def test_the_score_is_what_transformers_says(tiny: LoadedModel) -> None:
    ids = prompt_ids(90)
    with Engine(tiny, config(SPARSE)) as engine:
        found: list[Score] = []
        engine.shadow.on_score = found.append
        engine.add("a", list(ids), SamplingParams(max_tokens=30, logprobs=20), is_scored=True)
        events = []
        while engine.has_work:
            events += engine.step()
        while engine.shadow.has_work:
            engine.use_spare_time()
    judged = [one for event in events for one in event.logprobs]
    answer = [one.token_id for one in judged]
    with torch.inference_mode():
        logits = tiny.model(torch.tensor([[*ids, *answer]])).logits[0, len(ids) - 1 : -1]
    exact = logits.log_softmax(-1)
    gap = sum(one.logprob - float(exact[i, one.token_id]) for i, one in enumerate(judged)) / len(judged)
    assert found[0].gap == pytest.approx(gap, abs=1e-4)
    best = [one.top[0][0] for one in judged]
    assert found[0].top1 == pytest.approx(sum(int(exact[i].argmax()) != b for i, b in enumerate(best)) / len(best))
    assert found[0].kl > 0


def test_scoring_leaves_the_prefix_cache_and_other_answers_alone(tiny: LoadedModel) -> None:
    ids = prompt_ids(60, 5)
    alone = solo(tiny, config(SPARSE), ids, GREEDY).token_ids
    with Engine(tiny, config(SPARSE)) as engine:
        engine.add("scored", prompt_ids(60, 6), GREEDY, is_scored=True)
        drain(engine)
        counters, pages = dict(engine.prefix.counters), engine.prefix.num_pages  # type: ignore[union-attr]
        while engine.shadow.has_work:
            engine.use_spare_time()
        assert (engine.prefix.counters, engine.prefix.num_pages) == (counters, pages)  # type: ignore[union-attr]
        engine.add("next", list(ids), GREEDY)
        assert drain(engine)["next", 0].token_ids == alone


def test_scoring_keeps_to_its_share_while_somebody_waits(tiny: LoadedModel) -> None:
    with Engine(tiny, {"cache": CACHE, "engine": ENGINE}) as engine:
        engine.shadow.share = 0.0
        for seed in range(3):
            engine.add(str(seed), prompt_ids(20, seed), SamplingParams(max_tokens=4), is_scored=True)
        engine.add("long", prompt_ids(20, 9), SamplingParams(max_tokens=30))
        while engine.has_work:
            engine.step()
            if engine.has_work:
                engine.use_spare_time()
        assert engine.shadow.spent_s == 0.0
        engine.shadow.share = 1.0
        engine.add("more", prompt_ids(20, 10), SamplingParams(max_tokens=30))
        while engine.has_work:
            engine.step()
            if engine.has_work:
                engine.use_spare_time()
        assert engine.shadow.spent_s > 0.0
