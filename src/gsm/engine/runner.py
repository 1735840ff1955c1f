"""One step through the model: all tokens of all requests in one row, where the architecture allows it."""

from __future__ import annotations

import inspect
from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from gsm.config import GsmConfig
from gsm.core.batch import Span
from gsm.engine.request import Work
from gsm.engine.windows import Windows
from gsm.integrations.transformers.forward import cache_kwarg
from gsm.integrations.transformers.packed import PackedCache
from gsm.models import LoadedModel


class Runner:
    """Calls the model. The model must be attached (`gsm.attach`) with the same config."""

    def __init__(self, loaded: LoadedModel, config: GsmConfig, windows: Windows) -> None:
        self.model = loaded.model
        self.packable = loaded.arch.packable
        self.cache = PackedCache(loaded.model, config)
        self._windows = windows
        self._keyword = cache_kwarg(loaded.model)
        parameters = inspect.signature(type(loaded.model).forward).parameters
        self._takes = {name for name in ("position_ids", "logits_to_keep") if name in parameters}

    def rows(self, works: Seq[Work]) -> list[list[Work]]:
        """Which works share one row: all of them, but for settings that a whole attention call has in common, and for
        architectures whose rows cannot be shared."""
        if not self.packable:
            return [[work] for work in works]
        shared: dict[tuple[object, ...], list[Work]] = {}
        # windowed requests first: window smoothing takes single tokens at the beginning of a row in one product
        for work in sorted(works, key=lambda work: work.sequence.request.terms.window is None):
            request = work.sequence.request
            cache = request.config.cache
            shared.setdefault((cache.recent_tokens, cache.backend, request.sparse.sigma), []).append(work)
        return list(shared.values())

    @torch.inference_mode()
    def run(self, works: Seq[Work]) -> list[Tensor]:
        """Compute the tokens of one row; returns logits `[1 + len(draft), vocab]` of each that samples, in order.

        Raises OutOfPages or what the model raises; then nothing was stored of it.
        """
        ids: list[int] = []
        positions: list[int] = []
        spans: list[Span] = []
        kept: list[int] = []  # columns whose logits are wanted
        widths: list[int] = []
        for work in works:
            sequence, new, start = work.sequence, work.ids, len(ids)
            assert sequence.slot is not None
            spans.append(Span(sequence.slot, 0, start, len(new), is_draft=bool(work.draft)))
            ids += new
            positions += self._positions(work, len(new))
            if work.samples:
                widths.append(1 + len(work.draft))
                kept += range(len(ids) - widths[-1], len(ids))
        requests = [work.sequence.request for work in works]
        self.cache.plan(spans, [request.sparse for request in requests], requests[0].config.cache)
        self._windows.begin_step(works)
        logits = self._call(ids, positions, kept)
        return list(logits.split(widths)) if widths else []

    def _positions(self, work: Work, num_tokens: int) -> range:
        return range(work.sequence.num_computed, work.sequence.num_computed + num_tokens)

    def _call(self, ids: list[int], positions: list[int], kept: list[int]) -> Tensor:
        """Logits of columns `kept` of one row, `[len(kept), vocab]`."""
        device = self.model.device
        kwargs = {self._keyword: self.cache, "use_cache": True}
        if "position_ids" in self._takes:
            kwargs["position_ids"] = torch.tensor([positions], device=device)
        where = torch.tensor(kept or [len(ids) - 1], device=device)
        if "logits_to_keep" in self._takes:
            kwargs["logits_to_keep"] = where
        logits: Tensor = self.model(torch.tensor([ids], device=device), **kwargs).logits[0]
        return logits if "logits_to_keep" in self._takes else logits[where]
