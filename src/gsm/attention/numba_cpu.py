"""Decode attention on CPU: one compiled call per layer that reads pages in place (`numba_kernels`)."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gsm.attention import numba_kernels as kernels
from gsm.attention.base import DecodeAttention, DecodeResult, check_query
from gsm.attention.torch_ops import TorchAttention
from gsm.core.view import AttentionSpec, KVView, Selection

_MODES = {"anchor": kernels.ANCHOR, "mean_sigma": kernels.MEAN_SIGMA, "minmax": kernels.MINMAX}
_CODECS = {"none": kernels.NONE, "int8": kernels.INT8, "int4": kernels.INT4}


class NumbaAttention(DecodeAttention):
    """Fused selection and attention. What the kernel does not know (see `serves`) goes to `TorchAttention`."""

    name = "numba"

    def __init__(self) -> None:
        self._general = TorchAttention()

    @staticmethod
    def serves(view: KVView, spec: AttentionSpec) -> bool:
        """float32 and bfloat16 pages without windows, soft-caps, sink logits or gaps."""
        plain = spec.window is None and spec.softcap is None and spec.sink_logits is None and not view.has_skips
        plain = plain and view.cold is None
        return plain and view.hot["k"].dtype in (torch.float32, torch.bfloat16) and view.scorer.name in _MODES

    def decode(self, query: Tensor, view: KVView, spec: AttentionSpec, selection: Selection | None) -> DecodeResult:
        if not self.serves(view, spec):
            return self._general.decode(query, view, spec, selection)
        check_query(query, view)
        batch, num_kv_heads = query.shape[0], view.table.shape[1]
        budgets, mode, num_sinks, recent = self._plan(view, selection, batch)
        width = min(int(budgets.max()), view.max_pages)
        out = torch.empty(batch, query.shape[1], view.hot["v"].shape[-1])
        pages = torch.empty(batch, num_kv_heads, width, dtype=torch.long)
        mass = torch.empty(batch, num_kv_heads, width)
        scaled = (query.float() * spec.scale).contiguous()
        kernels.decode(  # type: ignore[call-arg]
            scaled.numpy(),
            view.table.numpy(),
            view.slots.numpy(),
            view.seq_lens.numpy(),
            *self._arrays(view),
            mode,
            np.float32(view.scorer.sigma),
            num_sinks,
            recent,
            budgets,
            self._num_chunks(batch * num_kv_heads, width),
            out.numpy(),
            pages.numpy(),
            mass.numpy(),
        )
        return DecodeResult(out.to(query.dtype), pages, mass)

    @staticmethod
    def _plan(view: KVView, selection: Selection | None, batch: int) -> tuple[NDArray[np.int64], int, int, int]:
        if selection is None:
            return np.full(batch, view.max_pages, np.int64), kernels.ALL, 0, 0
        budgets = np.array(selection.budget_pages, np.int64)
        return budgets, _MODES[view.scorer.name], selection.num_sink_pages, selection.recent_tokens

    @staticmethod
    def _num_chunks(num_streams: int, width: int) -> int:
        threads = torch.get_num_threads()
        if num_streams % threads == 0:
            return 1
        return threads if num_streams < 4 * threads else 1

    @staticmethod
    def _arrays(view: KVView) -> tuple[Any, ...]:
        """The pools as numpy arrays; converting twenty tensors on every call would cost as much as the kernel."""
        warm_k = view.warm["k"].data_ptr() if view.warm is not None else 0
        key = (view.records["hot"].data_ptr(), view.hot["k"].data_ptr(), warm_k)
        if view.scratch.get("numba_key") != key:
            view.scratch.update(numba_key=key, numba_arrays=_as_arrays(view))
        arrays: tuple[Any, ...] = view.scratch["numba_arrays"]
        return arrays


def _as_arrays(view: KVView) -> tuple[Any, ...]:
    records = view.records
    summaries = [records["center"].numpy(), _bits(records["center_scale"]), records["detail"].numpy()]
    summaries += [_bits(records["detail_scale"]), _bits(records["radius"])]
    hot = view.hot["k"], view.hot["v"]
    is_bfloat16 = hot[0].dtype == torch.bfloat16
    hot_arrays = [_bits(x) if is_bfloat16 else x.numpy() for x in hot]
    warm = _warm_arrays(view)
    return (records["hot"].numpy(), records["warm"].numpy(), *summaries, *hot_arrays, is_bfloat16, *warm)


def _warm_arrays(view: KVView) -> tuple[Any, ...]:
    """Codec number, codes, scales and offsets in one layout for every codec, so that the kernel compiles once."""
    codes, flat, per_token = np.zeros((1, 1, 1), np.int8), np.zeros((1, 1), np.uint16), np.zeros((1, 1, 1), np.uint16)
    codec = _CODECS[view.codec.name]
    warm = view.warm
    if warm is None:
        return codec, codes, codes, flat, flat, per_token, per_token
    k, v = (warm[name].view(torch.int8).numpy() for name in ("k", "v"))
    if codec == kernels.INT8:
        return (
            codec,
            k,
            v,
            _bits(warm["k_scale"]),
            flat,
            _bits(warm["v_scale"]).reshape(*warm["v_scale"].shape, 1),
            per_token,
        )
    return codec, k, v, *(_bits(warm[name]) for name in ("k_scale", "k_offset", "v_scale", "v_offset"))


def _bits(x: Tensor) -> NDArray[np.uint16]:
    return x.view(torch.int16).numpy().view(np.uint16)
