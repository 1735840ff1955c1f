"""Running tiny and real models with and without GSM, and comparing what comes out."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

import gsm
from gsm.integrations.transformers import cache_kwarg

FULL: dict[str, Any] = {"cache": {"warm": {"codec": "none"}}}
# the budget covers any test's context, so selection must change nothing
SPARSE_ALL: dict[str, Any] = {
    "cache": {"warm": {"codec": "none"}, "sparse": {"enabled": True, "budget_tokens": 100_000}}
}
# everything small, so that a few dozen tokens cross every border: page 4, hot zone of 8, chunks of 16
SMALL: dict[str, Any] = {"page_size": 4, "hot_size": 8, "recent_tokens": 4, "prefill_chunk_tokens": 16}


def small(**settings: Any) -> dict[str, Any]:
    return {"cache": {**SMALL, **settings}}


def prompt(length: int, seed: int = 0, rows: int = 1, vocab: int = 128) -> Tensor:
    return torch.randint(3, vocab, (rows, length), generator=torch.Generator().manual_seed(seed))


def run(model: PreTrainedModel, ids: Tensor, new_tokens: int, **settings: Any) -> tuple[Tensor, Tensor]:
    """Greedy unless told otherwise: sequences, and the logits of every new token `[rows, new_tokens, vocab]`."""
    result = model.generate(
        ids,
        max_new_tokens=new_tokens,
        min_new_tokens=new_tokens,
        return_dict_in_generate=True,
        output_logits=True,
        **{"do_sample": False, **settings},
    )
    return result.sequences, torch.stack(result.logits, dim=1)


def run_gsm(
    model: PreTrainedModel, config: Any, ids: Tensor, new_tokens: int, **settings: Any
) -> tuple[Tensor, Tensor]:
    """The same inside `gsm.attach`; integrity is checked and every page given back at the end."""
    with gsm.attach(model, config) as handle:
        result = run(model, ids, new_tokens, **settings)
        assert handle.cache is not None
        handle.cache.manager.check_integrity()
        handle.cache.free()
        assert used(handle.cache) == 0
    return result


def given(model: PreTrainedModel, cache: Any) -> dict[str, Any]:
    """The keyword argument that hands a cache to a model, whatever this transformers version calls it."""
    return {cache_kwarg(model): cache}


def used(cache: gsm.Cache) -> int:
    """Pages in use."""
    return sum(group.pages.num_used for group in cache.manager.groups)


def assert_equal_run(ours: tuple[Tensor, Tensor], plain: tuple[Tensor, Tensor], tolerance: float = 1e-4) -> None:
    """Equal tokens, or a first difference where the plain run's two best logits are closer than the tolerance."""
    for row in range(len(plain[0])):
        same = ours[0][row] == plain[0][row]
        num_prompt = plain[0].shape[1] - plain[1].shape[1]
        first = plain[1].shape[1] if bool(same.all()) else int((~same).nonzero()[0]) - num_prompt
        if first < plain[1].shape[1]:
            best = plain[1][row, first].topk(2).values
            assert best[0] - best[1] < tolerance, f"row {row} differs at new token {first}"
        difference = (ours[1][row, : first + 1] - plain[1][row, : first + 1]).abs()
        assert difference[torch.isfinite(difference)].max() <= tolerance
