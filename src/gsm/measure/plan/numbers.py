"""An architecture from a few numbers, for people who have no config at hand."""

from __future__ import annotations

from gsm.arch import LayerGeometry, ModelArch
from gsm.errors import InputError


def arch_from_numbers(
    *,
    layers: int,
    kv_heads: int,
    head_dim: int,
    query_heads: int | None = None,
    sliding_layers: int = 0,
    window: int | None = None,
) -> ModelArch:
    """A decoder with ``layers`` layers, of which ``sliding_layers`` see only ``window`` tokens. Raises InputError."""
    for name, value in (("layers", layers), ("kv-heads", kv_heads), ("head-dim", head_dim)):
        if value < 1:
            raise InputError(f"--{name} is {value}; it must be at least 1")
    if not 0 <= sliding_layers <= layers:
        raise InputError(f"--sliding-layers is {sliding_layers}; it must lie between 0 and --layers ({layers})")
    if bool(sliding_layers) != (window is not None):
        raise InputError("--sliding-layers and --window belong together; give both or neither")
    if window is not None and window < 1:
        raise InputError(f"--window is {window}; it must be at least 1")
    heads = query_heads or kv_heads
    if heads % kv_heads:
        raise InputError(f"--query-heads ({heads}) must be a multiple of --kv-heads ({kv_heads})")
    full = LayerGeometry("full", kv_heads, heads, head_dim, head_dim)
    sliding = LayerGeometry("sliding", kv_heads, heads, head_dim, head_dim, window=window)
    return ModelArch(
        model_type="numbers",
        layers=(sliding,) * sliding_layers + (full,) * (layers - sliding_layers),
        max_position_embeddings=0,
        vocab_size=0,
        hidden_size=heads * head_dim,
        intermediate_size=0,
        rope=None,
        packable=False,
        packable_reason="not known from numbers",
        support="partly" if sliding_layers else "managed",
        support_reason="taken from the numbers given",
        helps_instead=(),
        num_parameters_estimate=0,
        num_active_parameters_estimate=0,
    )
