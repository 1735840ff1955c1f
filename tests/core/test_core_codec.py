"""Codecs: round trips within the stated bound at every bit width, and codes that do not drift."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from gsm.core.codec import CODECS, Int4Codec, quantise_symmetric, v_group

HALF = 2.0**-11  # relative rounding of a float16
TINY = 2.0**-24  # smallest positive float16
PAGE = 16


def _pages(kind: str, k_dim: int, v_dim: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    k = torch.randn(5, PAGE, k_dim, generator=generator)
    v = torch.randn(5, PAGE, v_dim, generator=generator)
    if kind == "zero":
        k, v = torch.zeros_like(k), torch.zeros_like(v)
    elif kind == "constant":
        k, v = torch.full_like(k, 3.7), torch.full_like(v, -0.013)
    elif kind == "outlier":  # one channel a thousand times the others, as keys of real models have
        k[..., 0] *= 1000.0
        v[..., -1] += 500.0
    elif kind == "tiny":
        k, v = k * 1e-7, v * 1e-7
    elif kind == "mixed":  # zero and constant groups beside ordinary ones
        k[0], v[1] = 0.0, 1.25
        k[2, :, 3], v[3, 2] = -8.0, 0.0
    return k.to(dtype), v.to(dtype)


def _int8_bound(x: torch.Tensor) -> torch.Tensor:
    top = x.float().abs().amax(-1, keepdim=True)
    return top / 254 + top * HALF + 128 * TINY


def _int4_bound(x: torch.Tensor, dim: int) -> torch.Tensor:
    x = x.float()
    low, high = x.amin(dim, keepdim=True), x.amax(dim, keepdim=True)
    return (high - low) / 30 + (high - low) * HALF + low.abs() * HALF + 16 * TINY


KINDS = ("normal", "zero", "constant", "outlier", "tiny", "mixed")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("k_dim", "v_dim"), [(64, 64), (48, 32), (16, 24)])
@pytest.mark.parametrize("name", list(CODECS))
def test_round_trip_within_the_stated_bound(name: str, k_dim: int, v_dim: int, kind: str, dtype: torch.dtype) -> None:
    k, v = _pages(kind, k_dim, v_dim, dtype)
    codec = CODECS[name]
    fields = codec.encode(k, v)
    decoded_k, decoded_v = codec.decode(fields, torch.float32)
    assert torch.isfinite(decoded_k).all()
    assert torch.isfinite(decoded_v).all()
    if name == "none":
        assert torch.equal(decoded_k, k.float())
        assert torch.equal(decoded_v, v.float())
        return
    if name == "int8":
        k_bound, v_bound = _int8_bound(k), _int8_bound(v)
    else:
        group = v_group(v_dim)
        k_bound = _int4_bound(k, 1)
        v_bound = _int4_bound(v.unflatten(-1, (-1, group)), -1).expand(-1, -1, -1, group).flatten(-2)
    assert ((decoded_k - k.float()).abs() <= k_bound).all()
    assert ((decoded_v - v.float()).abs() <= v_bound).all()


@pytest.mark.parametrize("name", list(CODECS))
def test_zero_pages_come_back_as_zero(name: str) -> None:
    k, v = _pages("zero", 64, 64, torch.float32)
    decoded_k, decoded_v = CODECS[name].decode(CODECS[name].encode(k, v), torch.float32)
    assert not decoded_k.any()
    assert not decoded_v.any()


@pytest.mark.parametrize("name", list(CODECS))
def test_fields_have_the_declared_shapes_and_dtypes(name: str) -> None:
    k, v = _pages("normal", 64, 96, torch.float32)
    codec = CODECS[name]
    encoded = codec.encode(k, v)
    declared = codec.fields(PAGE, 64, 96, torch.float32)
    assert {n: (tuple(f.shape[1:]), f.dtype) for n, f in encoded.items()} == declared


@pytest.mark.parametrize("name", list(CODECS))
def test_encoding_is_deterministic_and_independent_of_the_batch(name: str) -> None:
    k, v = _pages("normal", 64, 64, torch.float32)
    codec = CODECS[name]
    together = codec.encode(k, v)
    alone = codec.encode(k[2:3], v[2:3])
    for field, values in alone.items():
        assert torch.equal(together[field][2:3], values), field


# not "tiny": float16 scales below 6e-5 are subnormal, their rounding is coarser than a code
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "tiny"])
def test_int8_of_a_decoded_result_is_the_same_codes(kind: str) -> None:
    k, v = _pages(kind, 64, 64, torch.float32)
    codec = CODECS["int8"]
    once = codec.encode(k, v)
    twice = codec.encode(*codec.decode(once, torch.float32))
    for field, values in once.items():
        assert torch.equal(twice[field], values), field


def test_bytes_per_element_are_what_the_codec_promises() -> None:
    def per_element(name: str, dtype: torch.dtype) -> float:
        fields = CODECS[name].fields(PAGE, 64, 64, dtype)
        nbytes = sum(torch.empty(shape, dtype=kind).nbytes for shape, kind in fields.values())
        return nbytes / (PAGE * 128)

    assert per_element("none", torch.float32) == 4.0
    assert per_element("int8", torch.float32) <= 1.04
    assert per_element("int4", torch.float32) <= 0.70


def test_int4_packs_the_even_channel_low() -> None:
    k = torch.zeros(1, PAGE, 2)
    k[0, 0, 0], k[0, 0, 1] = 15.0, 3.0
    k[0, 1, 1] = 15.0
    fields = Int4Codec().encode(k, torch.zeros(1, PAGE, 2))
    assert int(fields["k"][0, 0, 0]) == 15 | (3 << 4)


@pytest.mark.parametrize("shape", [(3, 8), (2, 5, 16), (4, 1)])
def test_symmetric_codes_never_leave_their_range(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape) * 1e4
    codes, scale = quantise_symmetric(x)
    assert codes.abs().max() <= 127
    assert torch.isfinite(scale.float()).all()
    assert scale.shape == x.shape[:-1]


@pytest.mark.parametrize("name", list(CODECS))
def test_codes_survive_host_disk_and_back_bit_for_bit(name: str, tmp_path: Path) -> None:  # CASES D5
    k, v = _pages("outlier", 64, 64, torch.float32)
    codec = CODECS[name]
    fields = codec.encode(k, v)
    save_file({field: values.contiguous() for field, values in fields.items()}, tmp_path / "pages.safetensors")
    back = load_file(tmp_path / "pages.safetensors")
    assert back.keys() == fields.keys()
    for field, values in fields.items():
        assert back[field].dtype == values.dtype
        assert torch.equal(back[field].view(torch.uint8), values.contiguous().view(torch.uint8)), field
    for ours, theirs in zip(codec.decode(back, torch.float32), codec.decode(fields, torch.float32), strict=True):
        assert torch.equal(ours, theirs)
