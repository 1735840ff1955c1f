"""What the page shows: now and the last 15 minutes, in steps of five seconds. Aggregates only, no text, no keys."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from gsm.engine import Engine
from gsm.serve.facts import Facts
from gsm.stats import percentile

STEP_S = 5.0
NUM_STEPS = 180
_MOST_SAMPLES = 500  # of one step
_NOW_STEPS = 12  # what counts as now: a minute


@dataclass(slots=True)
class _Step:
    """Five seconds: times of the answers that ended, and counters of the engine at their end."""

    number: int
    ttft_s: list[float] = field(default_factory=list)
    itl_s: list[float] = field(default_factory=list)
    num_tokens: int = 0
    num_queried: int = 0
    num_hit: int = 0
    bytes_by_tier: dict[str, int] = field(default_factory=dict)


class Live:
    """Filled in the engine's thread (`note_step`, `note`), read by the event loop."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._began_s = time.monotonic()
        self._steps: deque[_Step] = deque([_Step(0)], maxlen=NUM_STEPS + 1)
        self._counted = (0, 0, 0)
        self._looked_s = 0.0

    def note(self, facts: Facts) -> None:
        step = self._step()
        if facts.ttft_s is not None and len(step.ttft_s) < _MOST_SAMPLES:
            step.ttft_s.append(facts.ttft_s)
        if facts.itl_s is not None and len(step.itl_s) < _MOST_SAMPLES:
            step.itl_s.append(facts.itl_s)

    def note_step(self, engine: Engine) -> None:
        """Look at the engine's counters, at most once a second."""
        now = time.monotonic()
        if now - self._looked_s >= 1.0:
            self._looked_s = now
            self.look()

    def look(self) -> None:
        """Look at them now."""
        engine, step = self._engine, self._step()
        prefix = engine.prefix.counters if engine.prefix is not None else {"queries": 0, "hits": 0}
        counted = (engine.stats.num_generated_tokens, prefix["queries"], prefix["hits"])
        new = [after - before for before, after in zip(self._counted, counted, strict=True)]
        self._counted = counted
        step.num_tokens += new[0]
        step.num_queried += new[1]
        step.num_hit += new[2]
        step.bytes_by_tier = engine.manager.stats().bytes_by_tier

    def describe(self) -> dict[str, Any]:
        """Now (the last minute), and series with None where nothing was seen."""
        engine, present = self._engine, self._number()
        steps = {step.number: step for step in list(self._steps)}
        numbers = range(max(0, present - NUM_STEPS + 1), present + 1)
        rows = [steps.get(number) for number in numbers]
        recent = [row for row in rows[-_NOW_STEPS:] if row is not None]
        ttft, itl = ([x for row in recent for x in getattr(row, name)] for name in ("ttft_s", "itl_s"))
        seconds = max(1.0, min(_NOW_STEPS * STEP_S, time.monotonic() - self._began_s))
        stats = engine.stats
        return {
            "uptime_s": time.monotonic() - self._began_s,
            "now": {
                "num_running": len(engine.scheduler.running),
                "num_waiting": len(engine.scheduler.waiting),
                "tokens_per_s": sum(row.num_tokens for row in recent) / seconds,
                "ttft_s": _spread(ttft),
                "itl_s": _spread(itl),
                "kv_bytes": next((row.bytes_by_tier for row in reversed(rows) if row and row.bytes_by_tier), {}),
                "kv_limit_bytes": engine.room.max_bytes,
                "num_prefix_tokens": self._counted[1],
                "num_prefix_hits": self._counted[2],
                "num_generated_tokens": stats.num_generated_tokens,
                "engine_s": stats.step_s,
                "shadow_s": engine.shadow.spent_s,
                "num_scored": engine.shadow.num_scored,
            },
            "series": {
                "step_s": STEP_S,
                "ago_s": [(present - number) * STEP_S for number in numbers],
                "tokens_per_s": [row.num_tokens / STEP_S if row else 0.0 for row in rows],
                "ttft_p50": [_at(row.ttft_s if row else [], 50) for row in rows],
                "ttft_p95": [_at(row.ttft_s if row else [], 95) for row in rows],
                "itl_p50": [_at(row.itl_s if row else [], 50) for row in rows],
                "itl_p95": [_at(row.itl_s if row else [], 95) for row in rows],
                "kv_hot": [row.bytes_by_tier.get("hot") if row else None for row in rows],
                "kv_warm": [row.bytes_by_tier.get("warm") if row else None for row in rows],
                "hit_rate": [row.num_hit / row.num_queried if row and row.num_queried else None for row in rows],
            },
        }

    def _number(self) -> int:
        return int((time.monotonic() - self._began_s) / STEP_S)

    def _step(self) -> _Step:
        number = self._number()
        if self._steps[-1].number != number:
            self._steps.append(_Step(number))
        return self._steps[-1]


def _spread(samples: list[float]) -> dict[str, float | int | None]:
    return {"p50": _at(samples, 50), "p95": _at(samples, 95), "num": len(samples)}


def _at(samples: list[float], percent: float) -> float | None:
    return percentile(samples, percent) if samples else None
