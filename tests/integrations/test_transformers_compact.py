"""`positions: compact` in transformers: positions reach the model, results equal attention over what is kept."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

import gsm
from gsm.integrations.transformers import cache_kwarg

LIMIT = 128
CACHE: dict[str, Any] = {
    "page_size": 4, "hot_size": 64, "recent_tokens": 16, "sink_tokens": 4, "policy": "recent", "cold": "drop",
    "warm": {"codec": "none"}, "positions": "compact", "prefill_chunk_tokens": 24, "backend": "torch",
}  # fmt: skip
CONFIG = {"cache": CACHE}


def random_ids(rows: int, num_tokens: int, seed: int = 0) -> Tensor:
    return torch.randint(2, 128, (rows, num_tokens), generator=torch.Generator().manual_seed(seed))


def kept(cache: gsm.Cache, layer: int) -> tuple[Tensor, Tensor]:
    """K and V of one layer as the store holds them, `[1, H, positions, d]`, holes left out (all heads agree)."""
    slot = cache.slots[0]
    length = cache.manager.num_tokens(slot)
    group = cache.manager._group_of[layer]
    view = group.layer_view(layer, torch.tensor([slot]), torch.tensor([length]), -(-length // group.page_size))
    ids = view.page_ids()
    k, v = view.read(ids)
    there = (ids[0, 0] >= 0).repeat_interleave(group.page_size)[:length]
    return k[:, :, :length][:, :, there], v[:, :, :length][:, :, there]


@pytest.mark.parametrize("family", ["llama", "gpt_neox", "glm"])
def test_logits_are_those_of_plain_attention_over_the_kept_tokens(family: str, tiny_model: Any) -> None:
    model = tiny_model(family, max_position_embeddings=LIMIT)
    ids = random_ids(1, 500)
    keyword = cache_kwarg(model)
    with gsm.attach(model, CONFIG), torch.no_grad():
        cache = gsm.Cache(model, CONFIG)
        for chunk in ids[:, :480].split(24, dim=1):
            model(chunk, **{keyword: cache}, use_cache=True)
        assert cache.manager.compactor is not None
        assert cache.manager.compactor.num_cuts >= 4
        assert cache.get_seq_length() == 480
        plain = DynamicCache()
        for layer in range(model.config.num_hidden_layers):
            plain.update(*kept(cache, layer), layer)
        place = cache.manager.num_tokens(cache.slots[0])
        assert place <= LIMIT
        got = torch.cat([model(ids[:, i : i + 1], **{keyword: cache}).logits for i in range(480, 488)], dim=1)
    new = torch.arange(place, place + 8)[None]
    with torch.no_grad():
        expected = model(ids[:, 480:488], **{keyword: plain}, position_ids=new).logits
    # the first new tokens see what is in `plain`; later ones lose what leaves the hot zone meanwhile
    torch.testing.assert_close(got[:, :1], expected[:, :1], atol=1e-4, rtol=1e-4)
