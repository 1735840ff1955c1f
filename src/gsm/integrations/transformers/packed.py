"""Tokens of many sequences in one row of an unmodified model."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from transformers import PreTrainedModel

from gsm.config import CacheConfig, GsmConfig, SparseConfig
from gsm.core.batch import Span
from gsm.core.scorers import make_scorer
from gsm.errors import UnsupportedModel
from gsm.integrations.transformers.cache import Cache
from gsm.integrations.transformers.step import AttentionStep
from gsm.kv.manager import KVManager


class PackedCache(Cache):
    """Says which sequences the next call's tokens belong to; the sequences are the caller's, not the cache's.

    Call `plan`, then the model with `position_ids` and this cache inside `gsm.attach`. A call without a plan has no
    sequences to work on and is refused by the attention step. Under `positions: compact` the hook of `attach` puts the
    store's own positions in the place of the given ones: they are known only once a sequence was cut.
    """

    _grades_rows = False  # the engine follows its sequences itself

    def __init__(self, model: PreTrainedModel, config: GsmConfig) -> None:
        super().__init__(model, config)
        if self.layers:
            raise UnsupportedModel(
                f"{self.arch.model_type}: some layers keep a recurrent state, which one row of several sequences "
                "cannot carry; use gsm.attach and model.generate for this model"
            )
        self._spans: tuple[Span, ...] = ()
        self._sparse: tuple[SparseConfig, ...] = ()
        self._settings = config.cache

    def limit(self, max_pages: int | None) -> KVManager:
        """Never use more than that many pages of each layer and head; returns the manager."""
        self.manager.max_pages = max_pages
        return self.manager

    def plan(self, spans: Sequence[Span], sparse: Sequence[SparseConfig], settings: CacheConfig | None = None) -> None:
        """The next call holds `spans`, each with its own sparse settings; what a whole call has in common (recent
        tokens, back end, weight of the spread) is taken from `settings` and the first of `sparse`."""
        self._spans, self._sparse = tuple(spans), tuple(sparse)
        self._settings = settings if settings is not None else self.gsm_config.cache
        # what a model without position_ids derives its positions from: right for one span, unused for several
        self.num_columns = self.manager.num_tokens(spans[0].slot) if len(spans) == 1 else 0

    def begin(self, rows: int, columns: int, mask: Tensor | None) -> AttentionStep:
        kv = self.manager.begin(self._spans)
        sigma = self._sparse[0].sigma if self._sparse else self.gsm_config.cache.sparse.sigma
        if sigma != self.gsm_config.cache.sparse.sigma:
            kv.scorer = make_scorer(self.gsm_config.cache.sparse.scorer, sigma)
        self.step = AttentionStep(kv, self._settings, self._sparse)
        return self.step
