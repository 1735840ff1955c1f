"""Attention over paged, tiered KV: exact reference, batched torch, fused kernels; and prefill."""

from gsm.attention.base import DecodeAttention, DecodeResult
from gsm.attention.factory import make_attention
from gsm.attention.prefill import prefill_attention, prefill_page_mass

__all__ = ["DecodeAttention", "DecodeResult", "make_attention", "prefill_attention", "prefill_page_mass"]
