"""Arms and sessions: the only thing quality needs to know of a cache.

An *arm* is one way to run a model (plain transformers, or a GSM config). ``arm.open()`` gives a *session*: tokens go
in, logits come out. Quality measurements and benchmarks drive all arms through this one path, with equal chunks.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

import gsm.integrations.transformers as hf
from gsm.config import GsmConfig
from gsm.config.linear import LinearBackend
from gsm.errors import InputError
from gsm.linear import fast_linears

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# (what is being done, steps done, steps in all)
Progress = Callable[[str, int, int], None]


def no_progress(label: str, done: int, total: int) -> None:
    """A `Progress` that shows nothing."""


@dataclass(frozen=True)
class SessionStats:
    """What a session's cache holds now, in bytes, and how many tokens one kv head attended per decode step."""

    kv_bytes: int
    kv_pool_bytes: int
    attended_tokens_mean: float | None
    bytes_by_tier: dict[str, int] | None = None


class Session(Protocol):
    """One batch of sequences of equal length, fed to a model through one cache."""

    @property
    def num_tokens(self) -> int:
        """Tokens fed so far, per sequence."""

    def prefill(self, ids: torch.Tensor) -> torch.Tensor:
        """Feed ``ids`` [batch, n] in chunks; the last position's logits, [batch, vocab]."""

    def score(self, ids: torch.Tensor) -> torch.Tensor:
        """Feed ``ids`` [batch, n] in one pass; the logits of every position, [batch, n, vocab]."""

    def step(self, ids: torch.Tensor) -> torch.Tensor:
        """Feed one token per sequence, ``ids`` [batch, 1], on the decode path; logits [batch, vocab]."""

    def fork(self) -> Session:
        """An independent session that continues from here; close it when done."""

    def close(self) -> None:
        """Give the cache's memory back."""

    def stats(self) -> SessionStats: ...


def score_by_steps(session: Session, ids: torch.Tensor) -> torch.Tensor:
    """`Session.score` of one sequence for runtimes that give the logits of the last position only."""
    return torch.stack([session.step(token[None])[0] for token in ids[0].split(1)])[None]


class Arm(Protocol):
    """One way to run a model."""

    @property
    def name(self) -> str: ...

    def open(self) -> AbstractContextManager[Session]:
        """A fresh session; leaving the context frees its cache and restores the model."""


class _ModelArm(ABC):
    """An arm on a transformers model that is changed only while sessions run, so that arms can take turns."""

    @contextmanager
    def open(self) -> Iterator[Session]:
        with self.running():
            session = self.start()
            try:
                yield session
            finally:
                session.close()

    @abstractmethod
    def start(self) -> ModelSession:
        """An empty session; the caller closes it."""

    @abstractmethod
    def running(self) -> AbstractContextManager[Any]:
        """Sessions from `start` may be fed inside of it."""


class PlainArm(_ModelArm):
    """Plain transformers with its DynamicCache: the reference of every quality measurement.

    ``linear`` "auto" gives it GSM's linear layers and nothing else, to see what they alone are worth.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        name: str = "transformers",
        chunk_tokens: int = 1024,
        linear: LinearBackend = "torch",
    ):
        self.model, self.name, self.chunk_tokens, self.linear = model, name, chunk_tokens, linear

    def start(self) -> ModelSession:
        from transformers import DynamicCache

        return _Plain(self.model, DynamicCache(config=self.model.config), self.chunk_tokens)

    def running(self) -> AbstractContextManager[Any]:
        return fast_linears(self.model, self.linear)


class GsmArm(_ModelArm):
    """A GSM config on the same model, attached only while a session is open."""

    def __init__(self, model: PreTrainedModel, config: GsmConfig, *, name: str, chunk_tokens: int = 1024):
        self.model, self.config, self.name, self.chunk_tokens = model, config, name, chunk_tokens

    def start(self) -> ModelSession:
        return _Managed(self.model, hf.Cache(self.model, self.config), self.chunk_tokens)

    def running(self) -> AbstractContextManager[Any]:
        return hf.attach(self.model, self.config)


class ModelSession(ABC):
    """A session on a transformers model: the way tokens reach it is the same for every cache."""

    def __init__(self, model: PreTrainedModel, cache: Any, chunk_tokens: int):
        self.model, self.cache, self.chunk_tokens = model, cache, chunk_tokens
        self._keyword = hf.cache_kwarg(model)
        self.num_decode_steps = 0

    @property
    def num_tokens(self) -> int:
        return int(self.cache.get_seq_length())

    @torch.inference_mode()
    def prefill(self, ids: torch.Tensor) -> torch.Tensor:
        if ids.ndim != 2 or ids.shape[1] < 1:
            raise InputError(f"a prefill needs ids of shape [batch, tokens >= 1], got {tuple(ids.shape)}")
        logits: torch.Tensor = hf.prefill(self.model, ids.to(self.model.device), self.cache, self.chunk_tokens)
        return logits

    @torch.inference_mode()
    def score(self, ids: torch.Tensor) -> torch.Tensor:
        kwargs: dict[str, Any] = {self._keyword: self.cache}
        logits: torch.Tensor = self.model(input_ids=ids.to(self.model.device), use_cache=True, **kwargs).logits
        return logits

    def step(self, ids: torch.Tensor) -> torch.Tensor:
        self.num_decode_steps += 1
        return self.score(ids)[:, -1]

    @abstractmethod
    def fork(self) -> Session: ...

    @abstractmethod
    def close(self) -> None: ...

    @abstractmethod
    def stats(self) -> SessionStats: ...


class _Plain(ModelSession):
    @torch.inference_mode()
    def fork(self) -> Session:
        return _Plain(self.model, _fork_dynamic(self.cache), self.chunk_tokens)

    def close(self) -> None:
        self.cache.layers = []

    def stats(self) -> SessionStats:
        held = sum(_layer_bytes(layer) for layer in self.cache.layers)
        return SessionStats(held, held, self._attended_tokens_mean())

    def _attended_tokens_mean(self) -> float | None:
        """Mean over layers and decode steps; a growing layer was shorter by half the steps on average."""
        layers = [layer for layer in self.cache.layers if torch.is_tensor(getattr(layer, "keys", None))]
        if not layers or not self.num_decode_steps:
            return None
        grown = (self.num_decode_steps - 1) / 2
        lengths = [layer.keys.shape[-2] - (0 if getattr(layer, "is_sliding", False) else grown) for layer in layers]
        return float(sum(lengths) / len(lengths))


class _Managed(ModelSession):
    @torch.inference_mode()  # pages born in inference mode may only be changed in it
    def fork(self) -> Session:
        return _Managed(self.model, self.cache.fork(), self.chunk_tokens)

    @torch.inference_mode()
    def close(self) -> None:
        self.cache.free()

    def stats(self) -> SessionStats:
        stats = self.cache.stats()
        return SessionStats(
            stats.kv_bytes, stats.kv_pool_bytes, stats.attended_tokens_mean, dict(stats.bytes_by_tier) or None
        )


def _fork_dynamic(cache: Any) -> Any:
    """A copy that shares tensors: growing layers replace their tensors instead of writing into them."""
    from transformers.cache_utils import DynamicLayer

    fork = copy.copy(cache)
    fork.layers = [
        copy.copy(layer) if isinstance(layer, DynamicLayer) else copy.deepcopy(layer) for layer in cache.layers
    ]
    return fork


def _layer_bytes(layer: Any) -> int:
    return sum(value.nbytes for value in vars(layer).values() if torch.is_tensor(value))
