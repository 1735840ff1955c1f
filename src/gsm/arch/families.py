"""The table of model families. Data only: a new family that looks like Llama needs no line here at all."""

from __future__ import annotations

from dataclasses import dataclass

from gsm.arch.geometry import LayerKind, Support


@dataclass(frozen=True)
class Family:
    """How to read a family's config. ``layout`` names a reader in `gsm.arch.readers`."""

    layout: str = "standard"
    support: Support = "managed"
    reason: str = ""
    packable_reason: str = ""
    gated_mlp: bool = True


# transformers' name of a layer type -> what it keeps
LAYER_KINDS: dict[str, LayerKind] = {
    "full_attention": "full",
    "hybrid": "full",  # attention and a linear state side by side
    "sliding_attention": "sliding",
    "hybrid_sliding": "sliding",
    "chunked_attention": "sliding",
    "linear_attention": "linear",
    "mamba": "linear",
    "recurrent": "linear",
    "conv": "linear",
    "indexed_attention": "compressed",
    "deepseek_sparse_attention": "compressed",
    "compressed_sparse_attention": "compressed",
    "heavily_compressed_attention": "compressed",
    "moe": "none",
    "mlp": "none",
}

HELPS_COMPRESSED = (
    "keeping prefixes across requests (prefix reuse), because prefill is the larger cost",
    "a shorter prompt (de-duplication, history compression)",
    "more concurrent requests: its KV is small, so memory allows large batches",
    "planning the reasoning effort: fewer generated tokens beat a faster token",
)
HELPS_UNSERVED = (
    "a shorter prompt (de-duplication, history compression)",
    "quantised weights",
    "keeping prefixes across requests in the engine that serves it",
)
HELPS_STATE = (
    "a shorter prompt, because the state is computed over all of it",
    "quantised weights, because a decode step reads little else",
)

_ALIBI = Family(
    support="refused",
    reason="ALiBi biases attention by key distance inside the model's own mask, which would not follow selected keys",
    packable_reason="ALiBi biases by distance within the row",
    gated_mlp=False,
)
_OWN_ATTENTION = Family(
    support="refused",
    reason="transformers computes its attention inside the layer, where no other attention can be registered",
    packable_reason="its attention cannot be replaced, and packed rows need that",
    gated_mlp=False,
)
_STATE_IN_MODEL = Family(
    support="refused",
    reason="it keeps its recurrent state inside the model's layers, where no cache can hold, fork or restore it",
    packable_reason="a recurrent state would run from one sequence into the next",
)
_SHARED_BLOCK = Family(
    support="refused",
    reason="one attention block serves several of its layers, a layout that GSM has not been checked with",
    packable_reason="a recurrent state would run from one sequence into the next",
)
_STATE_ONLY = Family(
    layout="state_only",
    support="not_worth_it",
    reason="it has no KV cache: every layer keeps a recurrent state of fixed size",
    packable_reason="a recurrent state would run from one sequence into the next",
)
_UNGATED = Family(gated_mlp=False)

FAMILIES: dict[str, Family] = {
    "bloom": _ALIBI,
    "mpt": _ALIBI,
    "falcon": _OWN_ATTENTION,
    "gpt_neo": _OWN_ATTENTION,
    "gpt_neox_japanese": _OWN_ATTENTION,
    "xglm": _OWN_ATTENTION,
    "recurrent_gemma": _STATE_IN_MODEL,
    "zamba": _SHARED_BLOCK,
    "zamba2": _SHARED_BLOCK,
    "mamba": _STATE_ONLY,
    "mamba2": _STATE_ONLY,
    "falcon_mamba": _STATE_ONLY,
    "rwkv": _STATE_ONLY,
    "xlstm": _STATE_ONLY,
    "deepseek_v4": Family(layout="deepseek_v4"),
    "deepseek_v41": Family(layout="deepseek_v41"),
    "deepseek_v41_text": Family(layout="deepseek_v41"),
    "gpt2": _UNGATED,
    "gpt_bigcode": _UNGATED,
    "gpt_neox": _UNGATED,
    "gptj": _UNGATED,
    "codegen": _UNGATED,
    "apertus": _UNGATED,
    "arcee": _UNGATED,
    "nanochat": _UNGATED,
    "opt": _UNGATED,
    "phi": _UNGATED,
    "starcoder2": _UNGATED,
    "nemotron": _UNGATED,
    "persimmon": _UNGATED,
}
