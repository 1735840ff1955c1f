"""How the keys of a layer turn with their position, from the config alone.

Only rotations whose angle grows linearly with the position can be moved afterwards by one more rotation: the default,
linear, llama3 and YaRN kinds, whole or partial. `dynamic` and `longrope` change with the length, and families that are
not listed may lay their channels out differently: those are refused rather than turned wrongly.

Sources: RoPE (arXiv:2104.09864), YaRN (arXiv:2309.00071), Llama 3.1's scaling as in transformers. Tests compare every
kind and every family listed here with the model's own rotation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from gsm.arch.geometry import ModelArch, Rope
from gsm.errors import UnsupportedModel

# Channel i turns together with channel i + d/2, in every layer.
HALVES = frozenset({
    "arcee", "gemma", "gemma2", "gemma3_text", "gpt_neox", "gpt_oss", "granite", "llama", "mistral", "mixtral",
    "nemotron", "olmo", "olmo2", "persimmon", "phi", "phi3", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "seed_oss",
    "stablelm", "starcoder2",
})  # fmt: skip
# Channel 2 i turns together with channel 2 i + 1.
PAIRS = frozenset({"cohere", "ernie4_5", "glm", "glm4", "helium"})


@dataclass(frozen=True)
class RotaryLayout:
    """`frequencies`: radians per position of every pair of channels; channels beyond 2 x len(frequencies) rest."""

    frequencies: tuple[float, ...]
    pairs: bool  # channels 2 i and 2 i + 1 form a pair, instead of i and i + half


def rotary_layouts(arch: ModelArch) -> tuple[RotaryLayout, ...]:
    """One layout per layer. Raises UnsupportedModel with the reason where keys cannot be moved to other positions."""
    if arch.model_type not in HALVES | PAIRS:
        raise UnsupportedModel(
            f"positions: compact does not know how {arch.model_type} lays out rotated keys; use positions: logical"
        )
    layouts = []
    for layer in arch.layers:
        own = arch.sliding_rope if layer.kind == "sliding" and arch.sliding_rope is not None else arch.rope
        if own is None:
            raise UnsupportedModel(f"{arch.model_type} has no rotary positions to compact; use positions: logical")
        layouts.append(RotaryLayout(_frequencies(own, layer.k_dim, arch), arch.model_type in PAIRS))
    return tuple(layouts)


def _frequencies(rope: Rope, head_dim: int, arch: ModelArch) -> tuple[float, ...]:
    kind = _KINDS.get(rope.type)
    if kind is None:
        raise UnsupportedModel(
            f"positions: compact cannot move keys under RoPE of type {rope.type}, whose angles depend on the length; "
            f"known are {', '.join(sorted(_KINDS))}; use positions: logical"
        )
    dim = int(head_dim * rope.partial_rotary_factor)
    plain = [rope.theta ** (-2 * i / dim) for i in range(dim // 2)]
    try:
        return tuple(kind(plain, dim, rope, dict(rope.scaling), arch.max_position_embeddings))
    except KeyError as error:
        raise UnsupportedModel(
            f"RoPE of type {rope.type} lacks {error} in the config; use positions: logical"
        ) from None


def _default(plain: list[float], dim: int, rope: Rope, scaling: Mapping[str, Any], longest: int) -> list[float]:
    return plain


def _linear(plain: list[float], dim: int, rope: Rope, scaling: Mapping[str, Any], longest: int) -> list[float]:
    return [f / scaling["factor"] for f in plain]


def _llama3(plain: list[float], dim: int, rope: Rope, scaling: Mapping[str, Any], longest: int) -> list[float]:
    factor, low, high = scaling["factor"], scaling["low_freq_factor"], scaling["high_freq_factor"]
    original = scaling.get("original_max_position_embeddings") or longest

    def scaled(f: float) -> float:
        turns = original * f / (2 * math.pi)
        share = min(1.0, max(0.0, (turns - low) / (high - low)))
        return (1 - share) * f / factor + share * f

    return [scaled(f) for f in plain]


def _yarn(plain: list[float], dim: int, rope: Rope, scaling: Mapping[str, Any], longest: int) -> list[float]:
    original = scaling.get("original_max_position_embeddings") or longest
    factor = scaling.get("factor") or longest / original

    def channel_of(turns: float) -> float:
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = channel_of(scaling.get("beta_fast") or 32), channel_of(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    width = (high - low) or 0.001
    ramps = [min(1.0, max(0.0, (i - low) / width)) for i in range(dim // 2)]
    return [f * (1 - ramp) + f / factor * ramp for f, ramp in zip(plain, ramps, strict=True)]


_Kind = Callable[[list[float], int, Rope, Mapping[str, Any], int], list[float]]
_KINDS: dict[str, _Kind] = {"default": _default, "linear": _linear, "llama3": _llama3, "yarn": _yarn}
