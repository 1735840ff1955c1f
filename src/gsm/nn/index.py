"""The valid-token index: attention over some keys, named by their numbers.

An index is int64 `[B, H, S]` (per kv head) or `[B, S]` (all heads alike) on the keys' device. Entry j names the key at
place j of the keys `[B, H, N, d]`; -1 pads rows that name fewer. A key named twice would count twice, so callers keep
entries distinct. docs/nn.md lists what goes wrong when these rules are broken.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from gsm.core.scorers import make_scorer
from gsm.errors import InputError


def check_index(index: Tensor, keys: Tensor) -> Tensor:
    """Validate an index against `keys [B, H, N, d]` once, at the boundary; returns it as `[B, H, S]`.

    Entries are looked at on the CPU only: on a GPU that would stop the stream, and inside torch.compile it would break
    the graph. Raises InputError with what is wrong and the remedy.
    """
    batch, heads, num_keys, _ = keys.shape
    if index.dtype != torch.int64:
        raise InputError(f"the index is {index.dtype} but gather needs int64; convert it with index.long()")
    if index.device != keys.device:
        raise InputError(f"the index is on {index.device} but the keys are on {keys.device}; move the index there")
    if index.dim() == 2:
        index = index.unsqueeze(1).expand(-1, heads, -1)
    if index.dim() != 3 or index.shape[:2] != (batch, heads):
        raise InputError(
            f"an index of shape {list(index.shape)} does not fit keys [{batch}, {heads}, {num_keys}, d]; give "
            f"[{batch}, {heads}, S] per kv head, or [{batch}, S] for all"
        )
    if not torch.compiler.is_compiling() and index.device.type == "cpu" and index.numel():
        low, high = int(index.min()), int(index.max())
        if low < -1 or high >= num_keys:
            raise InputError(
                f"the index names key {low if low < -1 else high} but there are {num_keys}; use 0 to {num_keys - 1}, "
                "and -1 for padding"
            )
    return index


def attend_index(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    index: Tensor,
    query_positions: Tensor | None = None,
    scale: float | None = None,
    key_padding_mask: Tensor | None = None,
) -> Tensor:
    """Attention of `query [B, Hq, T, d]` over the keys an index names; returns `[B, Hq, T, v_dim]`.

    `query_positions [T]` hides keys at later places (causal); None hides nothing. `key_padding_mask [B, N]` is true
    where a key may *not* be seen, as in torch.nn.MultiheadAttention. A query that may see no key gets zeros.
    """
    index = check_index(index, keys)
    places = index.clamp_min(0)
    chosen = places.unsqueeze(-1)
    k = keys.gather(2, chosen.expand(-1, -1, -1, keys.shape[-1]))
    v = values.gather(2, chosen.expand(-1, -1, -1, values.shape[-1]))
    seen = index >= 0
    if key_padding_mask is not None:
        seen = seen & ~key_padding_mask.unsqueeze(1).expand(-1, keys.shape[1], -1).gather(2, places)
    mask = seen.unsqueeze(2)  # [B, H, 1, S]
    if query_positions is not None:
        mask = mask & (places.unsqueeze(2) <= query_positions.view(1, 1, -1, 1))
    mask = mask.repeat_interleave(query.shape[1] // keys.shape[1], dim=1)
    return masked_sdpa(query, k, v, mask, scale=scale)


def masked_sdpa(
    query: Tensor, k: Tensor, v: Tensor, mask: Tensor, dropout: float = 0.0, scale: float | None = None
) -> Tensor:
    """torch's attention with grouped heads under a boolean mask; zeros, not NaN, for a query that sees nothing."""
    sees_any = mask.any(dim=-1, keepdim=True)
    out = F.scaled_dot_product_attention(
        query, k, v, attn_mask=mask | ~sees_any, dropout_p=dropout, scale=scale, enable_gqa=query.shape[1] != k.shape[1]
    )
    return out.masked_fill(~sees_any, 0.0)


@torch.no_grad()
def best_tokens(
    query: Tensor, keys: Tensor, num_tokens: int, page_size: int = 16, scorer: str = "anchor", sigma: float = 2.5
) -> Tensor:
    """An index `[B, H, S]` of the pages that look best to the newest query: at most `num_tokens` tokens, page-wise.

    `query [B, Hq, T, d]`, `keys [B, H, N, d]`. Pages are scored by summaries, exactly as the cache selects
    (`gsm.core.scorers`); nothing but summaries is compared with the query, but making them reads every key, so keep an
    index for several steps or use the cache where that matters. Raises InputError when no page fits.
    """
    if num_tokens < page_size:
        raise InputError(f"num_tokens is {num_tokens} but a page has {page_size}; give at least one page")
    batch, heads, num_keys, dim = keys.shape
    if num_keys <= num_tokens:
        return torch.arange(num_keys, device=keys.device).expand(batch, heads, -1)
    num_full = num_keys // page_size
    judge = make_scorer(scorer, sigma)
    pages = judge.summarise(keys[:, :, : num_full * page_size].reshape(-1, page_size, dim))
    summary = type(pages)(*(x.unflatten(0, (batch, heads, num_full)) for x in pages))
    scaled = query[:, :, -1].unflatten(1, (heads, -1)) * dim**-0.5
    known = torch.ones(batch, heads, num_full, dtype=torch.bool, device=keys.device)
    score = judge.score(scaled, summary, known, page_size)
    num_rest = num_keys - num_full * page_size  # the page that is not full has no summary and is always read
    num_pages = max(1, (num_tokens - num_rest) // page_size)
    best = score.topk(min(num_pages, num_full), dim=-1).indices.sort(dim=-1).values
    index = (best.unsqueeze(-1) * page_size + torch.arange(page_size, device=keys.device)).flatten(-2)
    rest = torch.arange(num_full * page_size, num_keys, device=keys.device).expand(batch, heads, -1)
    return torch.cat((index, rest), dim=-1)
