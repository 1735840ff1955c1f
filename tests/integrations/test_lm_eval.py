"""The harness model `gsm` on a local task: with nothing compressed it agrees with the harness's own `hf`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lm_eval", reason="lm-eval is not installed")

from lm_eval.evaluator import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from gsm.integrations.lm_eval import GsmLM
from gsm.models import LoadedModel

TASKS = Path(__file__).parent / "tasks"


@pytest.fixture
def tasks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> TaskManager:
    """The task names its data file relative to where it runs; downloads nothing."""
    monkeypatch.chdir(TASKS)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path))
    return TaskManager(include_path=str(TASKS), include_defaults=False)


def _run(model: Any, tasks: TaskManager) -> dict[str, Any]:
    result = simple_evaluate(model=model, tasks=["gsm_capitals"], task_manager=tasks, bootstrap_iters=0)
    assert result is not None
    return result


def _scores(result: dict[str, Any]) -> list[list[float]]:
    samples = sorted(result["samples"]["gsm_capitals"], key=lambda sample: sample["doc_id"])
    return [[float(answer[0][0]) for answer in sample["resps"]] for sample in samples]


def test_full_agrees_with_hf(demo: LoadedModel, tasks: TaskManager) -> None:
    plain = _run(HFLM(pretrained=demo.model, tokenizer=demo.tokenizer), tasks)
    ours = _run(GsmLM("demo", config="full"), tasks)
    assert ours["results"]["gsm_capitals"]["acc,none"] == plain["results"]["gsm_capitals"]["acc,none"]
    for got, expected in zip(_scores(ours), _scores(plain), strict=True):
        assert got == pytest.approx(expected, abs=1e-3)


def test_generation_goes_through_the_cache(demo: LoadedModel) -> None:
    from lm_eval.api.instance import Instance

    arguments = ("The capital of France is", {"until": ["\n"], "max_gen_toks": 8})
    request = Instance(request_type="generate_until", doc={}, arguments=arguments, idx=0)
    plain = HFLM(pretrained=demo.model, tokenizer=demo.tokenizer).generate_until([request], disable_tqdm=True)
    ours = GsmLM("demo", config="full").generate_until([request], disable_tqdm=True)
    assert ours == plain


def test_a_tight_budget_changes_scores(demo: LoadedModel, tmp_path: Path) -> None:
    """What is scored is what the cache kept: with nearly nothing of a long context left, the answer's odds move."""
    from pydoc_data.topics import topics

    from lm_eval.api.instance import Instance

    config = tmp_path / "tight.json"
    tight = {"sink_tokens": 1, "hot_size": 16, "recent_tokens": 16, "policy": "recent", "cold": "drop"}
    config.write_text(json.dumps({"cache": tight}))
    filler = topics["assert"]  # the first page stays as a sink, so the fact comes behind it
    context = filler[:300] + "\nEmma's phone number is 49755.\n" + filler[300:1500] + "\nEmma's phone number is"
    request = Instance(request_type="loglikelihood", doc={}, arguments=(context, " 49755"), idx=0)
    full, dropped = (
        GsmLM("demo", config=name).loglikelihood([request], disable_tqdm=True)[0][0] for name in ("full", str(config))
    )
    assert dropped < full - 1.0
