"""Random stores for the contract of decode attention."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gsm.config import CacheConfig
from gsm.core.batch import Span
from gsm.core.view import AttentionSpec, KVView, Selection
from gsm.kv.manager import KVManager
from gsm.kv.removal import removal_code

LAYER = 1  # of two: the table's row must be respected


@dataclass
class Case:
    """A view before a decode step, the query, and the raw tokens per sequence."""

    view: KVView
    query: Tensor  # [B, Hq, k_dim]
    tokens: list[tuple[Tensor, Tensor]]  # k [H, n, k_dim], v [H, n, v_dim] as they were written
    manager: KVManager


def make_case(
    lengths: tuple[int, ...] = (100, 37, 1),
    *,
    num_kv_heads: int = 2,
    group_size: int = 3,
    k_dim: int = 16,
    v_dim: int = 16,
    page_size: int = 16,
    codec: str = "int8",
    hot_size: int = 40,
    scorer: str = "clusters",
    dropped: float = 0.0,
    chilled: float = 0.0,
    poison: bool = True,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Case:
    """Sequences of `lengths` tokens (the newest written, not committed), `dropped` of their older pages gone.

    `chilled` is the share of older pages that are int4 in the cold pool.
    """
    generator = torch.Generator().manual_seed(seed)
    config = CacheConfig.model_validate(
        {
            "page_size": page_size,
            "hot_size": hot_size,
            "recent_tokens": min(8, hot_size),
            "warm": {"codec": codec},
            **({"policy": "threshold", "threshold": 0.5, "cold": "int4"} if chilled else {}),
            "sparse": {"scorer": scorer},
        }
    )
    manager = KVManager(2, config)
    tokens = []
    for length in lengths:
        # a random direction per stretch of 8 tokens gives pages something to differ in
        k = torch.randn(num_kv_heads, length, k_dim, generator=generator)
        k += torch.randn(num_kv_heads, -(-length // 8), k_dim, generator=generator).repeat_interleave(8, 1)[:, :length]
        tokens.append((k.to(dtype), torch.randn(num_kv_heads, length, v_dim, generator=generator).to(dtype)))
    slots = [manager.add_sequence() for _ in lengths]
    for slot, (k, v) in zip(slots, tokens, strict=True):
        if k.shape[1] > 1:
            step = manager.begin([Span(slot, 0, 0, k.shape[1] - 1)])
            for layer in range(2):
                step.write(layer, k[None, :, :-1] + (layer - LAYER), v[None, :, :-1] + (layer - LAYER))
            step.commit()
    if dropped and manager.groups:
        _drop(manager, slots, dropped, generator)
    if chilled:
        _chill(manager, slots, chilled, generator)
    step = manager.begin([Span(slot, row, 0, 1) for row, slot in enumerate(slots)])
    for layer in range(2):
        step.write(layer, *(torch.stack([pair[i][:, -1:] for pair in tokens]) for i in (0, 1)))
    view = step.view(LAYER)
    if poison:
        _poison(manager, view)
    query = torch.randn(len(lengths), num_kv_heads * group_size, k_dim, generator=generator).to(dtype)
    return Case(view, query, tokens, manager)


def _drop(manager: KVManager, slots: list[int], share: float, generator: torch.Generator) -> None:
    group = manager.groups[0]
    for slot in slots:
        state = manager.sequences[slot]
        if len(state.demoted):
            shape = (len(group.rows), group.geometry.num_kv_heads, state.demoted.stop)
            gone = torch.rand(shape, generator=generator) < share
            gone[:, :, : state.demoted.start] = False
            group.drop(slot, gone, state.demoted, removal_code(state.num_tokens, "recent"))
    manager.check_integrity()


def _chill(manager: KVManager, slots: list[int], share: float, generator: torch.Generator) -> None:
    group = manager.groups[0]
    for slot in slots:
        stop = manager.sequences[slot].demoted.stop
        shape = (len(group.rows), group.geometry.num_kv_heads, stop)
        group.chill(slot, torch.rand(shape, generator=generator) < share)
    manager.check_integrity()


def _poison(manager: KVManager, view: KVView) -> None:
    """NaN in every slot that holds no token: free units, and the rest of each last page (CASES B1)."""
    group = manager.groups[0]
    free = group.hot.refs == 0
    for name in ("k", "v"):
        group.hot.fields[name][free] = torch.nan
    for pool in (group.warm, group.cold):
        for field in pool.fields.values() if pool is not None else ():
            field[pool.refs == 0] = torch.nan if field.dtype.is_floating_point else 127
    ids = view.page_ids()
    for b, length in enumerate(view.seq_lens.tolist()):
        if length % view.page_size:
            last = group.pages.fields["hot"][ids[b, :, length // view.page_size]].long()
            for name in ("k", "v"):
                group.hot.fields[name][last, length % view.page_size :] = torch.nan


def dense(case: Case, spec: AttentionSpec) -> Tensor:
    """The textbook formula over the raw tokens, in float64: no pages, no codes."""
    outs = []
    for row, (k, v) in enumerate(case.tokens):
        heads = case.query[row].double().unflatten(0, (k.shape[0], -1))
        logits = heads @ k.double().transpose(-1, -2) * spec.scale
        if spec.softcap is not None:
            logits = spec.softcap * torch.tanh(logits / spec.softcap)
        if spec.window is not None:
            logits[..., : max(0, k.shape[1] - spec.window)] = -torch.inf
        if spec.sink_logits is not None:
            sinks = spec.sink_logits.double().view(*logits.shape[:2], 1)
            weights = torch.cat((logits, sinks), -1).softmax(-1)[..., :-1]
        else:
            weights = logits.softmax(-1)
        outs.append((weights @ v.double()).flatten(0, 1))
    return torch.stack(outs)


def mass_by_page(pages: Tensor, mass: Tensor) -> list[list[dict[int, float]]]:
    """`{page: mass}` for every sequence and kv head."""
    return [
        [
            {int(page): float(m) for page, m in zip(row_pages, row_mass, strict=True) if page >= 0}
            for row_pages, row_mass in zip(pages[b], mass[b], strict=True)
        ]
        for b in range(len(pages))
    ]


def selection_for(case: Case, *budget_pages: int, recent_tokens: int = 8, num_sink_pages: int = 1) -> Selection:
    return Selection(num_sink_pages, recent_tokens, budget_pages)
