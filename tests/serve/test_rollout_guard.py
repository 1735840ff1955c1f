"""Fluent, wrong answers are noticed: whole servers whose canaries are bad in ways that no error shows."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from rollout_server import BASE, SPARSE, Served, serve_tiny, with_cache
from torch import Tensor

from gsm.engine import Engine
from gsm.engine.request import Work
from gsm.engine.runner import Runner
from gsm.models import LoadedModel
from support_engine import load_tiny, prompt_ids

# times are not under test here: they are those of whatever machine runs the tests
RULES: dict[str, Any] = {"tolerance": {"ttft": None, "itl": None}, "canary_share": 1.0, "promote_after": None}
STABLE = with_cache(RULES)
WINDOW = {
    "enable": True,
    "method": "window",
    "window_size": 16,
    "smooth_strength": 0.3,
    "target_layers": "all",
    "precision": "fp32",
    "short_request": {"max_tokens": 0},
}


@pytest.fixture(scope="module")
def tiny(tiny_model: Any) -> LoadedModel:
    return load_tiny(tiny_model("llama"))


def load(served: Served, most: int, until: Any, **body: Any) -> int:
    """Ask until something is so, at most `most` times; how often it took."""
    for number in range(most):
        if until():
            return number
        response = served.ask(
            prompt_ids(60, number), 16, user=f"u{number}", temperature=0.7, **{"seed": number, **body}
        )
        assert response.status_code == 200, response.text
    return most


def canary(served: Served, config: dict[str, Any], weight: float = 50.0) -> httpx.Response:
    response = served.admin.post("/admin/canary", json={"config": config, "weight": weight})
    assert response.status_code == 200, response.text
    return response


def is_back(served: Served) -> bool:
    return served.rollout.live.canary is None


class WrongPositions(Runner):
    """The mistake of many caches: after something went, new tokens are counted from what is left."""

    def _positions(self, work: Work, num_tokens: int) -> range:
        right = super()._positions(work, num_tokens)
        if work.sequence.request.epoch < 2 or not work.sequence.num_generated:
            return right
        return range(right.start - 32, right.stop - 32)


class Overflowing(Runner):
    """Now and then a number is no number, and the answer is as fluent as ever."""

    def run(self, works: Sequence[Work]) -> list[Tensor]:
        logits = [block.clone() for block in super().run(works)]
        sampling = [work for work in works if work.samples]
        for block, work in zip(logits, sampling, strict=True):
            if work.sequence.request.epoch >= 2 and work.sequence.num_generated == 3:
                block[0, 5] = torch.inf
        return logits


def with_runner(kind: type[Runner]) -> Any:
    def change(engine: Engine) -> None:
        engine.runner.__class__ = kind

    return change


@pytest.mark.parametrize(
    ("config", "runner"),
    [
        ({**SPARSE, "rollout": RULES}, Runner),
        ({**STABLE, "smoothing": WINDOW}, Runner),
        ({**STABLE, "engine": {**BASE["engine"], "max_waiting": 99}}, WrongPositions),
        ({**STABLE, "engine": {**BASE["engine"], "max_waiting": 99}}, Overflowing),
    ],
    ids=["budget", "window", "positions", "infinity"],
)
def test_a_bad_canary_is_taken_back_with_its_evidence(
    tiny: LoadedModel, tmp_path: Path, config: dict[str, Any], runner: type[Runner]
) -> None:
    state = tmp_path / "state.json"
    with serve_tiny(tiny, STABLE, state=state, change=with_runner(runner)) as served:
        assert canary(served, config).json()["epoch"] == 2
        load(served, 200, lambda: is_back(served))
        served.wait_for(lambda: is_back(served) or not served.engine.shadow.has_work)
        found = served.epochs()
        record = next(e for e in found["epochs"] if e["epoch"] == 2)
        assert record["status"] == "rolled back", record
        assert record["reason"].startswith("guard: ")
        evidence = {row["name"]: row for row in record["evidence"]}
        if runner is not Overflowing:
            assert 0 < evidence["kl"]["num_answers"] <= 60
            assert any(row["evidence"] is not None and row["evidence"] >= row["needed"] for row in record["evidence"])
        assert {served.ask([5], 1, user=str(i)).headers["x-gsm-epoch"] for i in range(8)} == {"1"}
        kept = json.loads(state.read_text())
        assert kept["stable"]["number"] == 1
        assert kept["history"][-1]["status"] == "rolled back"
        assert kept["history"][-1]["evidence"], "evidence is kept"
        assert "gsm:config_rollbacks_total" in served.client.get("/metrics").text


@pytest.mark.parametrize("config", [with_cache(RULES, recent_tokens=8), with_cache({**RULES, "steady_sample": 0.1})])
def test_a_harmless_canary_stays(tiny: LoadedModel, config: dict[str, Any]) -> None:
    with serve_tiny(tiny, STABLE) as served:
        canary(served, config)
        load(served, 60, lambda: is_back(served))
        served.wait_for(lambda: not served.engine.shadow.has_work)
        assert not is_back(served), served.epochs()["epochs"][0]["reason"]
        rows = {row["name"]: row for row in served.epochs()["epochs"][0]["evidence"]}
        assert rows["kl"]["num_answers"] > 5
        assert rows["kl"]["stable_mean"] is not None, "the stable epoch is scored beside it"


def test_a_reload_is_watched_and_counts_as_good_after_enough_answers(tiny: LoadedModel, tmp_path: Path) -> None:
    rules = {**RULES, "promote_after": 6}
    with serve_tiny(tiny, with_cache(rules), state=tmp_path / "s") as served:
        served.admin.put("/admin/config", json={"config": with_cache(rules, recent_tokens=8)})
        found = served.epochs()
        assert (found["stable"], found["canary"], found["weight"]) == (1, 2, 100.0)
        load(served, 40, lambda: served.rollout.live.canary is None)
        served.wait_for(lambda: served.rollout.live.canary is None)
        record = next(e for e in served.epochs()["epochs"] if e["epoch"] == 2)
        assert record["status"] == "stable"
        assert "scored" in record["reason"]
        bad = {**SPARSE, "rollout": rules}
        served.admin.put("/admin/config", json={"config": {**bad, "rollout": {**rules, "promote_after": None}}})
        served.admin.post("/admin/canary", json={"weight": 99.9})  # not promoted by number, judged all the same
        load(served, 100, lambda: is_back(served))
        served.wait_for(lambda: is_back(served))
        assert served.rollout.live.stable.number == 2


def test_steady_state_scores_a_few_answers_and_a_canary_more(tiny: LoadedModel) -> None:
    with serve_tiny(tiny, with_cache({**RULES, "steady_sample": 0.25})) as served:
        shares = [served.rollout.admit(str(i))[1] for i in range(400)]
        assert 60 <= sum(shares) <= 140
        assert served.engine.shadow.share == 0.05
        canary(served, with_cache(RULES, recent_tokens=8), 20.0)
        assert served.engine.shadow.share == 1.0
        admitted = [served.rollout.admit(str(i)) for i in range(600)]
        new = [scored for epoch, scored in admitted if epoch.number == 2]
        old = [scored for epoch, scored in admitted if epoch.number == 1]
        assert all(new)
        assert 0.15 < sum(old) / len(old) < 0.36, "about as many as of the canary"
    with serve_tiny(tiny, with_cache({"guard": False})) as served:
        assert not any(served.rollout.admit(str(i))[1] for i in range(200))


def test_what_a_client_sees_does_not_depend_on_being_scored(tiny: LoadedModel) -> None:
    with serve_tiny(tiny, with_cache({**RULES, "steady_sample": 1.0})) as served:
        scored = served.ask(prompt_ids(30, 1), 10, logprobs=2).json()["choices"][0]
    with serve_tiny(tiny, with_cache({"guard": False})) as served:
        plain = served.ask(prompt_ids(30, 1), 10, logprobs=2).json()["choices"][0]
    assert scored["text"] == plain["text"]
    assert len(scored["logprobs"]["top_logprobs"][0]) == 2
    assert scored["logprobs"]["token_logprobs"] == pytest.approx(plain["logprobs"]["token_logprobs"], abs=1e-4)
