"""Attention of many new tokens over stored history, against the formula written out query by query."""

from __future__ import annotations

import pytest
import torch
from attention_cases import make_case
from torch import Tensor

from gsm.attention import prefill_attention, prefill_page_mass
from gsm.attention.reference import ReferenceAttention
from gsm.core.view import AttentionSpec, KVView

H, G, D = 2, 3, 16


def _history(length: int, **settings: object) -> tuple[KVView, Tensor, Tensor, Tensor]:
    """A view of `length` stored tokens, their k and v as stored `[H, n, dim]`, and bool `[H, n]`: still there."""
    case = make_case((length,), num_kv_heads=H, group_size=G, **settings)  # type: ignore[arg-type]
    view = case.view
    ids = view.page_ids()
    k, v = (x[0, :, :length] for x in view.read(ids))
    there = (ids[0] >= 0).repeat_interleave(view.page_size, -1)[:, :length]
    return view, k, v, there


def _expected(
    query: Tensor, k: Tensor, v: Tensor, past: tuple[Tensor, Tensor, Tensor] | None, spec: AttentionSpec
) -> Tensor:
    there = torch.ones(k.shape[:2], dtype=torch.bool)
    if past is not None:
        k, v, there = torch.cat((past[0], k), 1), torch.cat((past[1], v), 1), torch.cat((past[2], there), 1)
    num_past = k.shape[1] - query.shape[1]
    out = torch.zeros(*query.shape[:2], v.shape[-1], dtype=torch.float64)
    for head in range(query.shape[0]):
        h = head // G
        for t in range(query.shape[1]):
            position = num_past + t
            oldest = 0 if spec.window is None else max(0, position - spec.window + 1)
            keys = [j for j in range(oldest, position + 1) if there[h, j]]
            logits = k[h, keys].double() @ query[head, t].double() * spec.scale
            if spec.softcap is not None:
                logits = spec.softcap * torch.tanh(logits / spec.softcap)
            if spec.sink_logits is not None:
                weights = torch.cat((logits, spec.sink_logits[head : head + 1].double())).softmax(0)[:-1]
            else:
                weights = logits.softmax(0)
            out[head, t] = weights @ v[h, keys].double()
    return out


def _new(length: int, seed: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = ((H * G, length, D), (H, length, D), (H, length, D))
    query, k, v = (torch.randn(shape, generator=generator) for shape in shapes)
    return query, k, v


SPECS = {
    "plain": AttentionSpec(0.25),
    "window": AttentionSpec(0.25, window=6),
    "softcap": AttentionSpec(0.25, softcap=4.0),
    "sinks": AttentionSpec(0.25, sink_logits=torch.linspace(-1, 2, H * G)),
    "all": AttentionSpec(0.25, softcap=4.0, window=21, sink_logits=torch.linspace(-1, 2, H * G)),
}


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize("length", [1, 2, 19])
def test_without_history(spec: AttentionSpec, length: int) -> None:
    query, k, v = _new(length)
    out = prefill_attention(query, k, v, None, spec)
    torch.testing.assert_close(out.double(), _expected(query, k, v, None, spec), atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize("codec", ["none", "int8", "int4"])
@pytest.mark.parametrize("dropped", [0.0, 0.5])
@pytest.mark.parametrize("num_past", [5, 48, 75])
def test_over_history(spec: AttentionSpec, codec: str, dropped: float, num_past: int) -> None:
    view, past_k, past_v, there = _history(num_past, codec=codec, dropped=dropped, hot_size=20)
    query, k, v = _new(9)
    out = prefill_attention(query, k, v, view, spec)
    expected = _expected(query, k, v, (past_k, past_v, there), spec)
    torch.testing.assert_close(out.double(), expected, atol=2e-5, rtol=1e-4)


def test_the_last_query_equals_a_decode_step() -> None:
    """CASES A8: prefill and decode see the same keys."""
    for spec in SPECS.values():
        case = make_case((50,), num_kv_heads=H, group_size=G, codec="none")
        k, v = case.tokens[0]
        query = torch.randn(H * G, 50, D)
        query[:, -1] = case.query[0]
        prefill = prefill_attention(query, k, v, None, spec)[:, -1]
        decode = ReferenceAttention().decode(case.query, case.view, spec, None).out[0]
        torch.testing.assert_close(prefill, decode, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize("dropped", [0.0, 0.5])
@pytest.mark.parametrize("num_past", [0, 5, 48, 75])
def test_page_mass_is_its_definition(spec: AttentionSpec, dropped: float, num_past: int) -> None:
    """Against decode steps of the reference: one per new token, over a store that holds all tokens before it."""
    page_size, length = 16, 9
    query, k, _ = _new(length)
    view, past_k = None, torch.zeros(H, 0, D)
    there = torch.zeros(H, 0, dtype=torch.bool)
    if num_past:
        view, past_k, _, there = _history(num_past, dropped=dropped, hot_size=20)
    keys = torch.cat((past_k, k), dim=1)
    seen = torch.cat((there, torch.ones(H, length, dtype=torch.bool)), dim=1)
    expected = torch.zeros(length, H, -(-(num_past + length) // page_size))
    for t in range(length):
        position = num_past + t
        oldest = 0 if spec.window is None else max(0, position - spec.window + 1)
        for h in range(H):
            tokens = [j for j in range(oldest, position + 1) if seen[h, j]]
            logits = query[h * G : (h + 1) * G, t] @ keys[h, tokens].T * spec.scale
            if spec.softcap is not None:
                logits = spec.softcap * torch.tanh(logits / spec.softcap)
            if spec.sink_logits is not None:
                sinks = spec.sink_logits[h * G : (h + 1) * G, None]
                weights = torch.cat((logits, sinks), dim=-1).softmax(-1)[:, :-1]
            else:
                weights = logits.softmax(-1)
            for page in range(expected.shape[-1]):
                inside = torch.tensor([j // page_size == page for j in tokens])
                expected[t, h, page] = weights[:, inside].sum(-1).max()
    mass = prefill_page_mass(query, k, view, spec, slice(0, length), length, page_size)
    torch.testing.assert_close(mass, expected, atol=2e-5, rtol=1e-4)
    averaged = prefill_page_mass(query, k, view, spec, slice(3, length), 2, page_size)
    halves = torch.stack((expected[3:6].mean(0), expected[6:9].mean(0)))
    torch.testing.assert_close(averaged, halves, atol=2e-5, rtol=1e-4)
