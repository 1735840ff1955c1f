"""Arms that run inside vLLM: one engine, whose live config changes from arm to arm."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from gsm.config import GsmConfig, load_config
from gsm.integrations.vllm.drive import Turn, VllmEngine
from gsm.integrations.vllm.live import evicts
from gsm.quality.sessions import Session, SessionStats, score_by_steps

REFERENCE = "vllm"


class VllmArm:
    """One config on an engine. Prompts already seen by another arm are vLLM's own prefix hits: they are exact."""

    def __init__(self, engine: VllmEngine, config: GsmConfig, name: str) -> None:
        self.engine, self.config, self.name = engine, config, name

    @contextmanager
    def open(self) -> Iterator[Session]:
        self.engine.reload(self.config)
        session = VllmSession(self.engine)
        try:
            yield session
        finally:
            session.close()


def full_cache(config: GsmConfig) -> GsmConfig:
    """A config that reads and keeps everything, and that an engine started with `config` can go over to."""
    kept: dict[str, Any] = {
        "smoothing": config.smoothing.model_dump(exclude_unset=True),
        "vllm": {"block_tokens": config.vllm.block_tokens},
    }
    if evicts(config):
        kept["cache"] = {"policy": "recent", "cold": "drop", "hot_size": 1 << 30}
    return load_config(kept)


class VllmSession:
    """One sequence. A fork begins a request of its own, whose prompt vLLM's prefix cache knows."""

    def __init__(self, engine: VllmEngine, fed: list[int] | None = None) -> None:
        self._engine = engine
        self._fed = list(fed or ())
        self._turn: Turn | None = None
        self._kv_bytes = 0
        live = engine.live
        self._before = (live.counters.read_tokens, live.counters.sparse_steps) if live else (0, 0)

    @property
    def num_tokens(self) -> int:
        return len(self._fed)

    def prefill(self, ids: Tensor) -> Tensor:
        self._fed += ids[0].tolist()
        return self._begin()[None]

    def score(self, ids: Tensor) -> Tensor:
        return score_by_steps(self, ids)

    def step(self, ids: Tensor) -> Tensor:
        if self._turn is None or not self._turn.open:
            self._begin()
        assert self._turn is not None
        token = int(ids[0, 0])
        self._fed.append(token)
        logits = self._turn.next(token)
        self._kv_bytes = self._engine.used_blocks() * self._engine.block_bytes
        return logits[None]

    def fork(self) -> Session:
        return VllmSession(self._engine, self._fed)

    def close(self) -> None:
        self._engine.end_turn()

    def stats(self) -> SessionStats:
        live = self._engine.live
        read, steps = (live.counters.read_tokens, live.counters.sparse_steps) if live else (0, 0)
        read, steps = read - self._before[0], steps - self._before[1]
        return SessionStats(self._kv_bytes, self._kv_bytes, read / steps if steps else None)

    def _begin(self) -> Tensor:
        self._turn = self._engine.turn(self._fed)
        return self._turn.first()
