"""`make_plan`: what fits, how fast it can get at best, and which sizes to start with."""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby

from gsm.arch import LayerGeometry, ModelArch
from gsm.config import CacheConfig, GsmConfig, load_config
from gsm.measure.plan.advice import advise
from gsm.measure.plan.footprint import attended_bytes, tier_parts
from gsm.measure.plan.record import Capacity, LayerKindRow, Parts, PlanResult, StepBytes
from gsm.measure.plan.weights import PlannedModel
from gsm.models.sizes import DTYPE_BYTES

_CONTEXTS = (2048, 8192, 32768, 131072)
_FAR = 1 << 40  # tokens: more than any memory holds
_HEAD_ROOM = 0.2  # share of the weights kept free by default, the documents' "model + 20 %"


def make_plan(
    model: PlannedModel,
    *,
    memory_bytes: int,
    memory_from: str = "as given",
    reserve_bytes: int | None = None,
    context_tokens: int | None = None,
    config: GsmConfig | None = None,
) -> PlanResult:
    """Plan ``model`` into ``memory_bytes``. ``reserve_bytes`` is kept free for everything else (default: 20 % of the
    weights, at least the activations); ``config`` is compared beside the plain cache (default: the `sparse` preset).
    """
    arch, element_bytes = model.arch, DTYPE_BYTES[model.dtype]
    context = context_tokens or _default_context(arch)
    activations = _activation_bytes(arch, element_bytes, (config or GsmConfig()).cache)
    weights = model.weight_bytes or 0
    reserve = reserve_bytes if reserve_bytes is not None else max(int(_HEAD_ROOM * weights), activations or 0)
    budget = memory_bytes - weights - reserve
    capacities = tuple(_capacities(arch, element_bytes, context, budget, config))
    steps = tuple(_steps(model, element_bytes, context, capacities, config))
    advice = advise(model, context, budget, capacities, steps)
    return PlanResult(
        model=model.name,
        model_type=arch.model_type,
        dtype=model.dtype,
        context_tokens=context,
        max_position_embeddings=arch.max_position_embeddings,
        support=arch.support,
        support_reason=arch.support_reason,
        helps_instead=arch.helps_instead,
        num_parameters=model.num_parameters,
        weight_bytes=model.weight_bytes,
        weights_from=model.weights_from,
        activation_bytes=activations,
        memory_bytes=memory_bytes,
        memory_from=memory_from,
        reserve_bytes=reserve,
        reserve_from="as given" if reserve_bytes is not None else "20 % of the weights, at least the activations",
        kv_budget_bytes=budget,
        kv_bytes_per_token=arch.kv_bytes_per_token(element_bytes),
        kinds=tuple(_kinds(arch, context, element_bytes)),
        capacities=capacities,
        steps=steps,
        recommended=advice.config,
        verdict=advice.verdict,
        notes=advice.notes,
    )


def _default_context(arch: ModelArch) -> int:
    return min(arch.max_position_embeddings or 8192, 32768)


def _kinds(arch: ModelArch, context: int, element_bytes: int) -> list[LayerKindRow]:
    """Alike layers in one row each."""
    ordered = sorted(arch.layers, key=repr)
    return [_kind_row(layer, len(list(same)), context, element_bytes) for layer, same in groupby(ordered)]


def _kind_row(layer: LayerGeometry, count: int, context: int, element_bytes: int) -> LayerKindRow:
    return LayerKindRow(
        kind="shared" if layer.kv_source is not None else layer.kind,
        num_layers=count,
        formula=_formula(layer, element_bytes),
        elements_per_token=layer.elements_per_token,
        bytes_per_token=count * layer.kv_bytes_per_token(element_bytes),
        bytes_at_context=count * layer.kv_bytes(context, element_bytes),
    )


def _formula(layer: LayerGeometry, element_bytes: int) -> str:
    """How the bytes of one layer come about, in words that can be checked by hand."""
    if layer.kv_source is not None:
        return f"reads layer {layer.kv_source}"
    if layer.kind == "none":
        return "keeps nothing"
    if layer.kind == "linear":
        return f"state of {layer.state_elements} elements" if layer.state_elements else "a state of fixed size"
    heads, k, v = layer.num_kv_heads, layer.k_dim, layer.v_dim
    if layer.kind == "compressed":
        entry = (
            f"{layer.native_entry_bytes:.0f} B per entry"
            if layer.native_entry_bytes is not None
            else f"({heads * (k + v)} + {layer.index_dim}) x {element_bytes} B"
        )
        window = f", raw window {layer.window}" if layer.window else ""
        return f"{entry} / {layer.compress_rate}{window}"
    size = f"2 x {heads} x {k}" if k == v else f"{heads} x ({k} + {v})"
    tokens = f"min(context, {layer.window}) x " if layer.window is not None else ""
    return f"{tokens}{size} x {element_bytes} B"


def _capacities(
    arch: ModelArch, element_bytes: int, context: int, budget: int, config: GsmConfig | None
) -> list[Capacity]:
    def plain(num_tokens: int) -> Parts:
        return Parts(hot_copies=arch.kv_bytes(num_tokens, element_bytes))

    if arch.support in ("refused", "not_worth_it"):
        return [_capacity("its own cache", None, plain, context, budget)]
    rows = [_capacity("transformers", None, plain, context, budget)]
    if config is not None:
        caches: dict[str, CacheConfig] = {"the given config": config.cache}
    else:
        caches = {name: load_config({"cache": {"warm": {"codec": name}}}).cache for name in ("int8", "int4")}
    for name, cache in caches.items():
        title = name if config is not None else f"{name} tiers"
        rows.append(_capacity(title, cache, _in_tiers(arch, cache, element_bytes), context, budget))
    return rows


def _in_tiers(arch: ModelArch, cache: CacheConfig, element_bytes: int) -> Callable[[int], Parts]:
    return lambda num_tokens: tier_parts(arch, num_tokens, cache, element_bytes)


def _capacity(
    name: str, cache: CacheConfig | None, parts: Callable[[int], Parts], context: int, budget: int
) -> Capacity:
    at_context = parts(context)
    far = 1 << 20  # far past every window and hot zone, where only what grows is left
    per_token = (parts(2 * far).total - parts(far).total) / far
    sequences = int(budget // at_context.total) if at_context.total and budget > 0 else 0
    return Capacity(
        name=name,
        config=cache.model_dump(mode="json", exclude_defaults=True) if cache is not None else None,
        bytes_per_token=per_token,
        bytes_at_context=at_context.total,
        parts=at_context,
        max_tokens=_max_tokens(lambda n: parts(n).total, budget),
        max_sequences=sequences if at_context.total else None,
    )


def _max_tokens(total: Callable[[int], float], budget: int) -> int | None:
    """The longest single sequence whose cache fits; None if it does not grow or the budget is endless for it."""
    if budget <= 0:
        return 0
    if total(_FAR) <= budget:
        return None
    low, high = 0, _FAR
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if total(middle) <= budget else (low, middle)
    return low


def _steps(
    model: PlannedModel, element_bytes: int, context: int, capacities: tuple[Capacity, ...], config: GsmConfig | None
) -> list[StepBytes]:
    arch = model.arch
    if model.weight_bytes is None or arch.support in ("refused", "not_worth_it"):
        return []
    cache = config.cache if config is not None else load_config({"cache": {"preset": "sparse"}}).cache
    limit = arch.max_position_embeddings or max(context, _CONTEXTS[-1])
    contexts = sorted({*(c for c in _CONTEXTS if c < limit), context})
    batch = capacities[0].max_sequences or 1
    return [_step(model, element_bytes, n, cache, batch if n == context else 1) for n in contexts]


def _step(model: PlannedModel, element_bytes: int, num_tokens: int, cache: CacheConfig, batch: int) -> StepBytes:
    assert model.weight_bytes is not None
    weights = int(model.weight_bytes * model.active_share)
    full = model.arch.kv_bytes(num_tokens, element_bytes)
    attended, sparse = attended_bytes(model.arch, num_tokens, cache, element_bytes)
    # With many sequences a mixture of experts reads (nearly) all of its experts in every step.
    shared = weights if batch == 1 else model.weight_bytes
    return StepBytes(
        context_tokens=num_tokens,
        weight_bytes=weights,
        kv_bytes=full,
        kv_share=full / (weights + full) if weights + full else 0.0,
        attended_tokens=attended,
        sparse_kv_bytes=sparse,
        max_gain=_gain(weights, full, sparse),
        max_gain_batched=_gain(shared, batch * full, batch * sparse) if batch > 1 else None,
    )


def _gain(weights: float, full: float, sparse: float) -> float:
    return (weights + full) / (weights + sparse) if weights + sparse else 1.0


def _activation_bytes(arch: ModelArch, element_bytes: int, cache: CacheConfig) -> int | None:
    """Live tensors of one prefill chunk: a few hidden states, the FFN intermediates, queries and outputs, and one row
    of logits. An estimate; `gsm bench` measures the peak."""
    if not arch.hidden_size or not arch.intermediate_size:
        return None
    chunk = cache.prefill_chunk_tokens or min(arch.max_position_embeddings or 8192, 8192)
    heads = max((layer.num_query_heads * max(layer.k_dim, layer.v_dim) for layer in arch.layers), default=0)
    per_token = 4 * arch.hidden_size + 3 * arch.intermediate_size + 3 * heads
    return int(chunk * per_token * element_bytes + arch.vocab_size * 4)
