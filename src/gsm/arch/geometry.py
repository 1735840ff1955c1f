"""The vocabulary: what one layer keeps of the past, and what a whole model is.

Sizes are counted in cached elements (numbers), so that any storage width can be applied later.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any, Literal

LayerKind = Literal["full", "sliding", "linear", "compressed", "none"]
Support = Literal["managed", "partly", "refused", "not_worth_it"]


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding. ``length_dependent``: its frequencies change with the sequence length."""

    type: str
    theta: float
    partial_rotary_factor: float = 1.0
    scaling: tuple[tuple[str, Any], ...] = ()

    @property
    def length_dependent(self) -> bool:
        return self.type in {"dynamic", "longrope"}


@dataclass(frozen=True)
class LayerGeometry:
    """What one decoder layer caches for one sequence.

    kind
        ``full``: every token; ``sliding``: the last ``window`` tokens; ``compressed``: the model's own compressed
        form of every token (and raw keys of the last ``window``); ``linear``: a state of fixed size; ``none``: nothing.
    k_dim, v_dim
        Elements per token and kv head. For multi-head latent attention they are the latent and its rotary part, with
        one kv head, because that is what transformers caches. ``v_dim`` is 0 where keys serve as values too.
    kv_source
        Index of the layer whose cache this layer reads instead of keeping its own.
    compress_rate
        Source tokens per compressed entry.
    index_dim
        Extra elements per entry for a learned indexer's keys.
    native_entry_bytes
        Bytes of one compressed entry where the model prescribes its storage format, whatever dtype is asked for.
    state_elements
        Size of a linear layer's state; 0 where it is not known.
    chunked
        The window is a chunk: a query sees the tokens since the last multiple of ``window``.
    latent
        Multi-head latent attention: ``k_dim`` is the latent, which serves as value too, ``v_dim`` its rotary part.
    """

    kind: LayerKind
    num_kv_heads: int = 0
    num_query_heads: int = 0
    k_dim: int = 0
    v_dim: int = 0
    window: int | None = None
    kv_source: int | None = None
    compress_rate: int = 1
    index_dim: int = 0
    native_entry_bytes: float | None = None
    state_elements: int = 0
    chunked: bool = False
    latent: bool = False

    @property
    def elements_per_token(self) -> float:
        """Elements that one more token costs while it is inside the window; 0 if the layer keeps none of its own."""
        if self.kv_source is not None:
            return 0
        elements = self.num_kv_heads * (self.k_dim + self.v_dim)
        if self.kind == "compressed":
            return (elements + self.index_dim) / self.compress_rate
        return elements

    @property
    def grows(self) -> bool:
        """Whether the cache of this layer grows with the context for ever."""
        return self.kind in {"full", "compressed"} and self.kv_source is None

    def kv_bytes_per_token(self, bytes_per_element: float) -> float:
        """Bytes that one more token adds once every window is full."""
        if not self.grows:
            return 0.0
        if self.native_entry_bytes is not None:
            return self.native_entry_bytes / self.compress_rate
        return self.elements_per_token * bytes_per_element

    def kv_bytes(self, num_tokens: int, bytes_per_element: float) -> float:
        """Bytes cached after ``num_tokens`` tokens of one sequence, a linear layer's state included."""
        recent = num_tokens if self.window is None else min(num_tokens, self.window)
        state = self.state_elements * bytes_per_element
        if self.kind == "compressed":
            raw = recent * self.num_kv_heads * self.k_dim if self.window is not None else 0
            return num_tokens * self.kv_bytes_per_token(bytes_per_element) + raw * bytes_per_element
        return recent * self.elements_per_token * bytes_per_element + state


@dataclass(frozen=True)
class ModelArch:
    """A decoder as seen from its cache. Sizes are tokens or elements; parameter counts are estimates from the config.

    ``packable``: several sequences may share one row of a forward pass; otherwise ``packable_reason`` says why not.
    ``support``: whether GSM can and should manage the cache; ``support_reason`` and ``helps_instead`` are sentences
    for people. ``rope`` belongs to the layers that see everything, ``sliding_rope`` to the others where it differs.
    """

    model_type: str
    layers: tuple[LayerGeometry, ...]
    max_position_embeddings: int
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    rope: Rope | None
    packable: bool
    packable_reason: str
    support: Support
    support_reason: str
    helps_instead: tuple[str, ...]
    num_parameters_estimate: int
    num_active_parameters_estimate: int
    sliding_rope: Rope | None = None

    def kv_bytes_per_token(self, bytes_per_element: float) -> float:
        """Bytes that one more token of context costs once every sliding window is full."""
        return sum(layer.kv_bytes_per_token(bytes_per_element) for layer in self.layers)

    def kv_bytes(self, num_tokens: int, bytes_per_element: float) -> float:
        """Bytes of the whole cache of one sequence of ``num_tokens`` tokens."""
        return sum(layer.kv_bytes(num_tokens, bytes_per_element) for layer in self.layers)

    @property
    def num_layers_by_kind(self) -> dict[str, int]:
        """Layers of each kind; a layer that reads another layer's cache counts as ``shared``."""
        return dict(Counter("shared" if layer.kv_source is not None else layer.kind for layer in self.layers))
