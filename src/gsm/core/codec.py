"""How the tokens of one page are stored: plain, int8 or int4.

A codec turns pages `k [N, page_size, k_dim]` and `v [N, page_size, v_dim]` into named fields and back. Encoding is
deterministic and happens once in the life of a page. The field layout is shared vocabulary: the KV store writes it,
attention kernels read it in place.

Error bounds (checked in tests): int8 stores each token's K and V with one scale, so the error is at most half a step,
max|x| / 254. int4 stores K per channel over one page and V per token in groups of 32 (asymmetric, 16 levels): at most
half a step, (max - min) / 30. Scales and offsets are float16, whose rounding (2^-11 of the span and of the offset)
comes on top.

Sources: KIVI (arXiv:2402.02750) for the int4 directions; SPEC K1.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

Fields = dict[str, Tensor]
FieldSpec = dict[str, tuple[tuple[int, ...], torch.dtype]]

V_GROUP = 32  # values that share one int4 scale
_SMALLEST_SCALE = 2.0**-24  # the smallest positive float16: an all-zero group gets codes 0, never a division by zero


class Codec(ABC):
    """Layout of one stored page. Stateless; `name` is the configuration's word for it."""

    name: str

    @abstractmethod
    def fields(self, page_size: int, k_dim: int, v_dim: int, dtype: torch.dtype) -> FieldSpec:
        """Shape (without the leading page axis) and dtype of every field."""

    @abstractmethod
    def encode(self, k: Tensor, v: Tensor) -> Fields:
        """Fields of pages `k [N, page_size, k_dim]`, `v [N, page_size, v_dim]`."""

    @abstractmethod
    def decode(self, fields: Fields, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Pages of `dtype` from fields with a leading axis N."""


class PlainCodec(Codec):
    """Full precision: the model's own dtype."""

    name = "none"

    def fields(self, page_size: int, k_dim: int, v_dim: int, dtype: torch.dtype) -> FieldSpec:
        return {"k": ((page_size, k_dim), dtype), "v": ((page_size, v_dim), dtype)}

    def encode(self, k: Tensor, v: Tensor) -> Fields:
        return {"k": k, "v": v}

    def decode(self, fields: Fields, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return fields["k"].to(dtype), fields["v"].to(dtype)


class Int8Codec(Codec):
    """Symmetric int8, one float16 scale per token for K and one for V."""

    name = "int8"

    def fields(self, page_size: int, k_dim: int, v_dim: int, dtype: torch.dtype) -> FieldSpec:
        return {
            "k": ((page_size, k_dim), torch.int8),
            "v": ((page_size, v_dim), torch.int8),
            "k_scale": ((page_size,), torch.float16),
            "v_scale": ((page_size,), torch.float16),
        }

    def encode(self, k: Tensor, v: Tensor) -> Fields:
        k_codes, k_scale = quantise_symmetric(k)
        v_codes, v_scale = quantise_symmetric(v)
        return {"k": k_codes, "v": v_codes, "k_scale": k_scale, "v_scale": v_scale}

    def decode(self, fields: Fields, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        k = fields["k"].to(torch.float32) * fields["k_scale"].to(torch.float32).unsqueeze(-1)
        v = fields["v"].to(torch.float32) * fields["v_scale"].to(torch.float32).unsqueeze(-1)
        return k.to(dtype), v.to(dtype)


class Int4Codec(Codec):
    """Asymmetric int4, two codes per byte (see `pack_nibbles`).

    K has one scale and offset per channel over the page; V one per token and group of `V_GROUP` channels.
    """

    name = "int4"

    def fields(self, page_size: int, k_dim: int, v_dim: int, dtype: torch.dtype) -> FieldSpec:
        groups = v_dim // v_group(v_dim)
        return {
            "k": ((page_size, k_dim // 2), torch.uint8),
            "v": ((page_size, v_dim // 2), torch.uint8),
            "k_scale": ((k_dim,), torch.float16),
            "k_offset": ((k_dim,), torch.float16),
            "v_scale": ((page_size, groups), torch.float16),
            "v_offset": ((page_size, groups), torch.float16),
        }

    def encode(self, k: Tensor, v: Tensor) -> Fields:
        k_codes, k_scale, k_offset = _quantise_asymmetric(k.float(), dim=1)
        group = v_group(v.shape[-1])
        grouped = v.float().unflatten(-1, (v.shape[-1] // group, group))
        v_codes, v_scale, v_offset = _quantise_asymmetric(grouped, dim=-1)
        return {
            "k": pack_nibbles(k_codes),
            "v": pack_nibbles(v_codes.flatten(-2)),
            "k_scale": k_scale.squeeze(1),
            "k_offset": k_offset.squeeze(1),
            "v_scale": v_scale.squeeze(-1),
            "v_offset": v_offset.squeeze(-1),
        }

    def decode(self, fields: Fields, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        k = unpack_nibbles(fields["k"]) * fields["k_scale"].float().unsqueeze(1) + fields["k_offset"].float().unsqueeze(
            1
        )
        num_groups = fields["v_scale"].shape[-1]
        v = unpack_nibbles(fields["v"])
        v = v.unflatten(-1, (num_groups, v.shape[-1] // max(1, num_groups)))
        v = v * fields["v_scale"].float().unsqueeze(-1) + fields["v_offset"].float().unsqueeze(-1)
        return k.to(dtype), v.flatten(-2).to(dtype)


def v_group(v_dim: int) -> int:
    """Channels that share an int4 scale: `V_GROUP`, or all of them where that does not divide."""
    return V_GROUP if v_dim % V_GROUP == 0 else v_dim


def quantise_symmetric(x: Tensor, levels: int = 127) -> tuple[Tensor, Tensor]:
    """Codes -levels..levels (int8) of `x [..., d]` and float16 scales `[...]`.

    Quantising a decoded result again changes nothing.
    """
    x = x.float()
    peak = x.abs().amax(dim=-1) if x.shape[-1] else x.new_zeros(x.shape[:-1])  # latent attention stores no V
    scale = (peak / levels).clamp(_SMALLEST_SCALE, 65504.0).to(torch.float16)
    codes = (x / scale.float().unsqueeze(-1)).round_().clamp_(-levels, levels).to(torch.int8)
    return codes, scale


def _quantise_asymmetric(x: Tensor, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    low = x.amin(dim=dim, keepdim=True).to(torch.float16)
    span = x.amax(dim=dim, keepdim=True) - low.float()
    scale = (span / 15.0).clamp(_SMALLEST_SCALE, 65504.0).to(torch.float16)
    codes = ((x - low.float()) / scale.float()).round_().clamp_(0, 15).to(torch.uint8)
    return codes, scale, low


def pack_nibbles(codes: Tensor) -> Tensor:
    """Channel i in the low half of byte i, channel i + d/2 in the high half: kernels unpack both as whole vectors."""
    half = codes.shape[-1] // 2
    return codes[..., :half] | (codes[..., half:] << 4)


def unpack_nibbles(packed: Tensor) -> Tensor:
    return torch.cat((packed & 15, packed >> 4), dim=-1).float()


CODECS: dict[str, Codec] = {codec.name: codec for codec in (PlainCodec(), Int8Codec(), Int4Codec())}
