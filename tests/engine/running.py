"""Engines on tiny random models, and what comes out of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from gsm.engine import Engine, SamplingParams, TokenEvent
from gsm.models import LoadedModel

# everything small, so that a few dozen tokens cross every border: pages of 4, hot zone of 8, chunks of 16
CACHE: dict[str, Any] = {"page_size": 4, "hot_size": 8, "recent_tokens": 4, "sink_tokens": 2}
ENGINE: dict[str, Any] = {"chunk_tokens": 16, "max_batch_tokens": 40, "max_running": 8}
PLAIN = {"warm": {"codec": "none"}}
SPARSE = {"sparse": {"enabled": True, "budget_tokens": 16}}


def config(cache: dict[str, Any] | None = None, **engine: Any) -> dict[str, Any]:
    return {"cache": {**CACHE, **(cache or {})}, "engine": {**ENGINE, **engine}}


@dataclass
class Outcome:
    """What the events of one choice add up to."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)  # between the two likeliest tokens
    finish_reason: str | None = None

    def take(self, event: TokenEvent) -> None:
        self.token_ids += event.token_ids
        self.text += event.text
        self.logprobs += [t.logprob for t in event.logprobs]
        self.gaps += [t.top[0][1] - t.top[1][1] for t in event.logprobs if len(t.top) > 1]
        assert self.finish_reason is None, "an event after the end"
        self.finish_reason = event.finish_reason


Outcomes = dict[tuple[str, int], Outcome]


def drain(engine: Engine, between: Callable[[int], None] | None = None, most: int = 5000) -> Outcomes:
    """Step until nothing is left; `between(step)` may add and cancel."""
    found: Outcomes = {}
    for step in range(most):
        if between is not None:
            between(step)
        if not engine.has_work and (between is None or step > 200):
            return found
        for event in engine.step():
            found.setdefault((event.request_id, event.index), Outcome()).take(event)
    raise AssertionError("the engine did not come to an end")


def solo(loaded: LoadedModel, settings: dict[str, Any], ids: list[int], sampling: SamplingParams) -> Outcome:
    """The request alone in an engine of its own, without prefix reuse and drafts; computed once per test run."""
    key = (id(loaded.model), json.dumps(settings, sort_keys=True), tuple(ids), repr(sampling))
    if key not in _SOLO:
        _SOLO[key] = _solo(loaded, settings, ids, sampling)
    return _SOLO[key]


_SOLO: dict[tuple[object, ...], Outcome] = {}


def _solo(loaded: LoadedModel, settings: dict[str, Any], ids: list[int], sampling: SamplingParams) -> Outcome:
    alone = {**settings, "engine": {**settings["engine"], "prefix_cache": False, "draft_tokens": 0, "kv_pages": None}}
    with Engine(loaded, alone) as engine:
        engine.add("solo", list(ids), sampling)
        return drain(engine)["solo", 0]


def used_pages(engine: Engine) -> int:
    """Pages in use that the prefix index does not hold; proves integrity on the way."""
    engine.manager.check_integrity()
    held = sum(len(node.ids[0]) for node in engine.prefix.nodes.values()) if engine.prefix is not None else 0
    return sum(group.pages.num_used for group in engine.manager.groups) - held
