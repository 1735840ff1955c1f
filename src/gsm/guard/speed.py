"""What smoothing and int8 do to speed: prefill and decode end to end, the products alone, and smoothing's own cost."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from gsm.guard.records import Speed
from gsm.linear import fast_linears
from gsm.results import Spread
from gsm.smoothing import Applied, int8_ops
from gsm.smoothing.int8 import Int8Linear, RotatedLinear

_PREFIX_TOKENS = 16
_PRODUCT_ROWS = 512


@torch.inference_mode()
def compare_speed(
    model: Any,
    state: Callable[[], AbstractContextManager[Applied]],
    ids: Tensor,
    *,
    rounds: int = 3,
    new_tokens: int = 16,
    tell: Callable[[int, int], None] | None = None,
) -> Speed:
    """Time the original, the original with GSM's linear layers and the changed model in turn, ``rounds`` times each,
    after one warm-up of all.

    ``ids`` [n] int64 is the prompt of the prefill; decode follows a prompt of 16 tokens. ``state`` puts the model into
    the changed state.
    """
    samples: dict[str, list[float]] = {}
    for turn in range(rounds + 1):
        _time_once(model, ids, new_tokens, "before", samples, keep=turn > 0)
        with fast_linears(model):
            _time_once(model, ids, new_tokens, "linear", samples, keep=turn > 0)
        with state() as applied:
            _time_once(model, ids, new_tokens, "after", samples, keep=turn > 0)
            if turn == rounds:
                own = own_cost_ms(model, applied)
        if tell is not None:
            tell(turn + 1, rounds + 1)
    spreads = {name: _spread(values) for name, values in samples.items()}
    return Speed(
        prompt_tokens=len(ids),
        prefill_s_before=spreads["prefill before"],
        prefill_s_after=spreads["prefill after"],
        decode_ms_before=spreads["decode before"],
        decode_ms_after=spreads["decode after"],
        products_ms_before=spreads["products before"],
        products_ms_after=spreads["products after"],
        own_cost_ms_per_token=own,
        prefill_s_linear=spreads["prefill linear"],
        decode_ms_linear=spreads["decode linear"],
    )


def own_cost_ms(model: Any, applied: Applied) -> float:
    """What smoothing itself adds to a decode step, in milliseconds per token. Folded smoothing adds nothing."""
    if applied.window is not None:
        cost = applied.window.cost
        return 1e3 * cost.seconds / max(1, cost.calls) * len(applied.smoothed)
    total = 0.0
    for module in model.modules():
        block = module.rotation_block if isinstance(module, (Int8Linear, RotatedLinear)) else 1
        if block > 1:
            width = module.int8.codes.shape[1] if isinstance(module, Int8Linear) else module.weight.shape[1]
            total += _rotation_ms(int(width), block)
    return total


def _rotation_ms(width: int, block: int) -> float:
    x = torch.randn(1, width)
    times = []
    for size in (block, 1):
        int8_ops.quantise_rows(x, block=size)
        times.append(_seconds(lambda size=size: int8_ops.quantise_rows(x, block=size), 30))  # type: ignore[misc]
    return max(0.0, 1e3 * (times[0] - times[1]))


def _time_once(model: Any, ids: Tensor, new_tokens: int, arm: str, samples: dict[str, list[float]], keep: bool) -> None:
    prompt = ids[None].to(next(model.parameters()).device)
    found = {
        f"prefill {arm}": [_seconds(lambda: model(input_ids=prompt, use_cache=True, logits_to_keep=1))],
        f"decode {arm}": [1e3 * seconds for seconds in _decode(model, prompt[:, :_PREFIX_TOKENS], new_tokens)],
        f"products {arm}": [1e3 * _products(model)],
    }
    if keep:
        for name, values in found.items():
            samples.setdefault(name, []).extend(values)


def _decode(model: Any, prompt: Tensor, new_tokens: int) -> list[float]:
    out = model(input_ids=prompt, use_cache=True, logits_to_keep=1)
    times = []
    for _ in range(new_tokens):
        token = out.logits[:, -1:].argmax(-1)
        began = time.perf_counter()
        out = model(input_ids=token, past_key_values=out.past_key_values, use_cache=True, logits_to_keep=1)
        _wait(token)
        times.append(time.perf_counter() - began)
    return times


def _products(model: Any) -> float:
    """Seconds of the first block's products on 512 random rows, rounding included."""
    block = find_products(model)
    width = model.get_input_embeddings().weight.shape[1]
    like = next(model.parameters())
    x = torch.randn(1, _PRODUCT_ROWS, width, dtype=like.dtype, device=like.device)
    return _seconds(lambda: [module(x) for module in block])


def find_products(model: Any) -> list[Any]:
    """The first block's modules that multiply the residual width: q, k, v (or one of them) and the MLP.

    Of a block with other names, every linear layer of that width.
    """
    layer = (model.get_decoder() if hasattr(model, "get_decoder") else model).layers[0]
    attention, mlp = getattr(layer, "self_attn", None), getattr(layer, "mlp", None)
    known = [getattr(attention, name, None) for name in ("q_proj", "k_proj", "v_proj", "qkv_proj")]
    if attention is not None and mlp is not None and any(known):
        return [module for module in (*known, mlp) if module is not None]
    width = model.get_input_embeddings().weight.shape[1]
    return [module for module in layer.modules() if getattr(module, "in_features", None) == width]


def _seconds(run: Callable[[], Any], times: int = 1) -> float:
    began = time.perf_counter()
    for _ in range(times):
        run()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return (time.perf_counter() - began) / times


def _wait(tensor: Tensor) -> None:
    if tensor.device.type == "cuda":
        torch.cuda.synchronize()


def _spread(values: Sequence[float]) -> Spread:
    return Spread(median=statistics.median(values), min=min(values), max=max(values))
