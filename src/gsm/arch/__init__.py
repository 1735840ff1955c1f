"""What we know of a model family before any weight is read: KV geometry per layer, RoPE, what GSM can do with it."""

from gsm.arch.describe import describe
from gsm.arch.geometry import LayerGeometry, LayerKind, ModelArch, Rope, Support

__all__ = ["LayerGeometry", "LayerKind", "ModelArch", "Rope", "Support", "describe"]
