"""Scoring and generating through the tiered cache, as the harness's `hf` model does without it.

A continuation is scored as it would be generated: the context is a prefill in chunks, every further token a decode step
over the cache as the config keeps it. Scoring both in one forward pass would never read what was compressed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM

from gsm.config import load_config
from gsm.config.presets import PRESETS
from gsm.errors import InputError
from gsm.integrations.transformers import Cache, cache_kwarg, prefill
from gsm.integrations.transformers.levers import attach
from gsm.models import load_model

Request = tuple[tuple[str, str], list[int], list[int]]  # texts, context ids, continuation ids


@register_model("gsm")
class GsmLM(HFLM):
    """``pretrained`` is what `gsm.load_model` takes; ``config`` a preset's name or a config file."""

    def __init__(
        self,
        pretrained: str,
        config: str = "tiers",
        dtype: str = "float32",
        device: str = "cpu",
        threads: int | None = None,
        quantization: str | None = None,
        **kwargs: Any,
    ) -> None:
        loaded = load_model(pretrained, dtype=dtype, device=device, threads=threads, quantization=quantization)
        self.gsm_config = load_config({"cache": {"preset": config}} if config in PRESETS else config)
        super().__init__(pretrained=loaded.model, tokenizer=loaded.tokenizer, **kwargs)

    def _loglikelihood_tokens(
        self, requests: list[Request], disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[tuple[float, bool]]:
        """(log-probability of the continuation, is it what greedy decoding gives) per request, in their order."""
        results: dict[int, tuple[float, bool]] = {}
        order = sorted(range(len(requests)), key=lambda i: requests[i][1])  # equal contexts share one prefill
        with attach(self.model, self.gsm_config, tokenizer=self.tokenizer), torch.inference_mode():
            held: _Context | None = None
            for index in order:
                _, context, continuation = requests[index]
                context = self._fitting(context, continuation)
                if held is None or held.ids != context:
                    held = _Context(self, context)
                with held.continued() as score:
                    results[index] = score(continuation)
        return [results[index] for index in range(len(requests))]

    def _fitting(self, context: list[int], continuation: list[int]) -> list[int]:
        """The end of the context that fits the window beside the continuation, as `hf` cuts it."""
        room = self.max_length + 1 - len(continuation)
        if room < 1:
            raise InputError(
                f"a continuation of {len(continuation)} tokens does not fit the window of {self.max_length}; shorten it"
            )
        return context[-room:]

    def _model_generate(self, context: Any, max_length: int, stop: list[str], **kwargs: Any) -> Any:
        with attach(self.model, self.gsm_config, tokenizer=self.tokenizer):
            return super()._model_generate(context, max_length, stop, **kwargs)


class _Context:
    """A context that was read once, and continued as often as there are answers."""

    def __init__(self, lm: GsmLM, ids: list[int]) -> None:
        self.ids = ids
        self._lm = lm
        self._cache = Cache(lm.model, lm.gsm_config, lm.tokenizer)
        inputs = torch.tensor([ids], device=lm.device)
        self._logits = prefill(lm.model, inputs, self._cache, lm.gsm_config.cache.prefill_chunk_tokens)

    @contextmanager
    def continued(self) -> Iterator[Any]:
        """A function from continuation ids to (log-probability, is greedy) that leaves the context as it was."""
        fork = self._cache.fork()
        keyword = {cache_kwarg(self._lm.model): fork}

        def score(continuation: list[int]) -> tuple[float, bool]:
            logits, total, is_greedy = self._logits, 0.0, True
            for position, token in enumerate(continuation):
                if position:
                    step = torch.tensor([[continuation[position - 1]]], device=self._lm.device)
                    logits = self._lm.model(step, use_cache=True, **keyword).logits[:, -1]
                total += float(torch.log_softmax(logits[0].float(), dim=-1)[token])
                is_greedy &= int(logits[0].argmax()) == token
            return total, is_greedy

        try:
            yield score
        finally:
            fork.free()
