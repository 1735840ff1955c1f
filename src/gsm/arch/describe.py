"""`describe`: a config (object, dict, config.json or directory) to a `ModelArch`. No weights, no network."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from gsm.arch.families import FAMILIES, HELPS_COMPRESSED, HELPS_STATE, HELPS_UNSERVED, Family
from gsm.arch.geometry import LayerGeometry, ModelArch, Rope, Support
from gsm.arch.parameters import estimate_parameters
from gsm.arch.readers import READERS, layer_types
from gsm.errors import ModelError, UnsupportedModel

_NEEDED = ("hidden_size", "num_hidden_layers", "vocab_size")


def describe(config: Any) -> ModelArch:
    """Return the `ModelArch` of a transformers config object, a config dict, or a path to config.json or its folder.

    A family without a line in the table is read as Llama-shaped if its config has that shape. Raises ModelError when
    the config cannot be read, UnsupportedModel when its cache cannot be known.
    """
    text = _text_config(config)
    model_type = getattr(text, "model_type", None) or "unknown"
    family = FAMILIES.get(model_type, Family())
    _check_shape(text, model_type, family)
    layers = _layer_configs(text)
    try:
        geometry = READERS[family.layout](text, layers)
        total, active = estimate_parameters(text, layers, family)
    except (AttributeError, TypeError, KeyError, ZeroDivisionError) as error:
        raise UnsupportedModel(f"the config of {model_type} lacks what GSM needs to size its cache: {error}") from None
    ropes = _ropes(text)
    chunked = family.layout == "standard" and "chunked_attention" in layer_types(text, layers)
    packable_reason = family.packable_reason or _not_packable(geometry, ropes, chunked)
    support, reason, helps = _support(text, family, geometry)
    return ModelArch(
        model_type=model_type,
        layers=geometry,
        max_position_embeddings=int(getattr(text, "max_position_embeddings", None) or 0),
        vocab_size=int(text.vocab_size),
        hidden_size=int(text.hidden_size),
        intermediate_size=_intermediate_size(text),
        rope=ropes[0],
        sliding_rope=ropes[1],
        packable=not packable_reason,
        packable_reason=packable_reason,
        support=support,
        support_reason=reason,
        helps_instead=helps,
        num_parameters_estimate=total,
        num_active_parameters_estimate=active,
    )


def _text_config(config: Any) -> Any:
    """The decoder's config: an object with attributes, defaults filled in where transformers knows the family."""
    if isinstance(config, (str, Path)):
        config = _read(Path(config))
    if not isinstance(config, Mapping):
        return _decoder_part(config)
    raw = dict(config)
    model_type = raw.get("model_type")
    if not model_type:
        return SimpleNamespace(**raw)
    from transformers import CONFIG_MAPPING

    if model_type not in CONFIG_MAPPING:
        nested = raw.get("text_config")
        if isinstance(nested, Mapping):
            return _text_config({"model_type": model_type, **nested})
        return SimpleNamespace(**raw)
    try:
        return _decoder_part(CONFIG_MAPPING[model_type].from_dict(raw))
    except Exception as error:  # strict dataclass validation and each family's own __post_init__
        raise ModelError(f"the config is no valid {model_type} config: {str(error).splitlines()[-1].strip()}") from None


def _decoder_part(config: Any) -> Any:
    find = getattr(config, "get_text_config", None)
    return find(decoder=True) if find else config


def _read(path: Path) -> Any:
    file = path / "config.json" if path.is_dir() else path
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{file} does not exist; give a model directory or a config.json") from None
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise ModelError(f"{file} cannot be read as a model config: {error}") from None


def _check_shape(text: Any, model_type: str, family: Family) -> None:
    if getattr(text, "is_encoder_decoder", False):
        raise UnsupportedModel(
            f"{model_type} is an encoder-decoder; GSM manages decoder-only models, so run it without GSM"
        )
    missing = [name for name in _NEEDED if not isinstance(getattr(text, name, None), int)]
    if missing:
        raise UnsupportedModel(f"the config of {model_type} has no {missing[0]}; GSM cannot know its cache from that")
    known = model_type in FAMILIES or _has(text, "num_key_value_heads") or _has(text, "kv_lora_rank")
    if not known:
        raise UnsupportedModel(
            f"{model_type} is not a known family and not Llama-shaped (no num_key_value_heads in its config); "
            "GSM manages decoder-only models with a KV cache"
        )
    if family.layout != "state_only" and not _has(text, "num_attention_heads"):
        raise UnsupportedModel(f"the config of {model_type} has no num_attention_heads")


def _has(config: Any, name: str) -> bool:
    """Whether any layer has ``name``; a per-layer attribute may not be read from the global config."""
    return any(getattr(layer, name, None) is not None for layer in _layer_configs(config)[:1])


def _layer_configs(text: Any) -> list[Any]:
    """One config per layer; the same object where all layers are alike."""
    per_layer = getattr(text, "per_layer_config", None)
    if per_layer is not None and not isinstance(per_layer, Mapping):
        return list(per_layer)
    return [text] * int(text.num_hidden_layers)


def _intermediate_size(text: Any) -> int:
    first = _layer_configs(text)[0]
    size = getattr(first, "intermediate_size", None) or getattr(first, "moe_intermediate_size", None)
    if isinstance(size, Sequence):
        size = size[0]
    return int(size or 4 * text.hidden_size)


def _ropes(text: Any) -> tuple[Rope | None, Rope | None]:
    """(RoPE of layers that see everything, RoPE of sliding layers where it differs)."""
    parameters = getattr(text, "rope_parameters", None)
    if parameters is None:
        theta = getattr(text, "rope_theta", None)
        parameters = {"rope_theta": theta, **(getattr(text, "rope_scaling", None) or {})} if theta else None
    if not parameters:
        return None, None
    nested = {name: value for name, value in parameters.items() if isinstance(value, Mapping)}
    if not nested:
        return _rope(parameters), None
    full = nested.get("full_attention") or nested.get("compress") or next(iter(nested.values()))
    sliding = nested.get("sliding_attention") or nested.get("main")
    one, other = _rope(full), _rope(sliding) if sliding else None
    return one, (other if other != one else None)


def _rope(parameters: Mapping[str, Any]) -> Rope:
    plain = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
    scaling = tuple(sorted((k, _frozen(v)) for k, v in parameters.items() if k not in plain))
    return Rope(
        type=str(parameters.get("rope_type") or parameters.get("type") or "default"),
        theta=float(parameters.get("rope_theta") or 10000.0),
        partial_rotary_factor=float(parameters.get("partial_rotary_factor") or 1.0),
        scaling=scaling,
    )


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _not_packable(geometry: Sequence[LayerGeometry], ropes: Sequence[Rope | None], chunked: bool) -> str:
    if any(layer.kind == "linear" or layer.state_elements for layer in geometry):
        return "a recurrent state would run from one sequence into the next"
    if any(layer.kind == "compressed" for layer in geometry):
        return "its own compression groups neighbouring tokens of the row"
    if any(rope is not None and rope.length_dependent for rope in ropes):
        return "its RoPE scaling depends on the length of the row"
    return "its chunked attention is aligned to the start of the row" if chunked else ""


def _support(text: Any, family: Family, geometry: Sequence[LayerGeometry]) -> tuple[Support, str, tuple[str, ...]]:
    if family.support != "managed":
        return family.support, family.reason, HELPS_STATE if family.layout == "state_only" else HELPS_UNSERVED
    if getattr(text, "alibi", False):
        return "refused", FAMILIES["bloom"].reason, HELPS_UNSERVED
    growing = [layer for layer in geometry if layer.grows]
    if any(layer.kind == "compressed" for layer in growing):
        return "not_worth_it", _compressed_reason(geometry), HELPS_COMPRESSED
    if not growing and all(layer.window is None for layer in geometry):
        return "not_worth_it", "it has no KV cache that grows with the context", HELPS_STATE
    notes = _notes(geometry)
    if notes:
        return "partly", "; ".join(notes), ()
    kept = "one latent per token" if any(layer.latent for layer in geometry) else "keys and values"
    return "managed", f"every layer keeps {kept}", ()


def _compressed_reason(geometry: Sequence[LayerGeometry]) -> str:
    native = any(layer.native_entry_bytes is not None for layer in geometry)
    per_token = sum(layer.kv_bytes_per_token(2) for layer in geometry)
    if not native and all(layer.compress_rate == 1 for layer in geometry):
        return (
            f"the model caches compressed latents ({per_token:.0f} bytes per token in 16 bit) and selects the tokens "
            "to read with its own trained indexer"
        )
    storage = "in its own FP4 format" if native else "in 16 bit"
    return f"the model already compresses its KV to {per_token:.0f} bytes of global KV per token {storage}"


def _notes(geometry: Sequence[LayerGeometry]) -> list[str]:
    """In which layers there is less to win, in words."""
    n, notes = len(geometry), []
    bounded = [layer for layer in geometry if layer.kind == "sliding"]
    if bounded:
        where = f"their chunk of {bounded[0].window}" if bounded[0].chunked else f"their last {bounded[0].window}"
        notes.append(f"{len(bounded)} of {n} layers see only {where} tokens")
    states = sum(layer.kind == "linear" or layer.state_elements > 0 for layer in geometry)
    if states:
        notes.append(f"{states} of {n} layers keep a state of fixed size, which stays the model's own")
    shared = sum(layer.kv_source is not None for layer in geometry)
    if shared:
        notes.append(f"{shared} of {n} layers read the cache of another layer")
    return notes
