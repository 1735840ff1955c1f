"""What works on which architecture: one function per column, run on tiny random models of each family.

`python tests/integrations/architectures.py` runs all and writes docs/architectures.md; the same checks are tests.
A cell is "yes", or why not; a check that fails raises.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

sys.path.insert(0, str(Path(__file__).parent.parent))

from generation import assert_equal_run, given, prompt, run, run_gsm, small

import gsm
from gsm.arch import describe
from gsm.errors import KVError, UnsupportedModel
from support_models import build_tiny_model

ROOT = Path(__file__).parent.parent.parent
FILE = ROOT / "docs" / "architectures.md"

_YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0, "original_max_position_embeddings": 128}
_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "rope_theta": 10000.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_MAMBA2 = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16}
_KIMI = {
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "num_key_value_heads": 4,
    "linear_head_dim": 16,
    "linear_num_heads": 4,
    "num_experts": 4,
    "num_experts_per_token": 2,
    "moe_intermediate_size": 32,
}
_ZAMBA = {"n_mamba_heads": 8, "mamba_d_state": 16, "num_mem_blocks": 1, "num_key_value_heads": 4}
# row of the table -> (transformers' model_type, config overrides, what is special about it)
ROWS: dict[str, tuple[str, dict[str, Any], str]] = {
    "Llama": ("llama", {}, "grouped queries"),
    "Llama, llama3 RoPE": ("llama", {"rope_parameters": _LLAMA3}, "scaled RoPE"),
    "Llama, YaRN": ("llama", {"rope_parameters": _YARN}, "scaled RoPE"),
    "Llama, multi-head": ("llama", {"num_key_value_heads": 4}, "one kv head per query head"),
    "Llama, multi-query": ("llama", {"num_key_value_heads": 1}, "one kv head"),
    "Qwen2": ("qwen2", {}, "biases"),
    "Qwen3": ("qwen3", {}, "normed queries and keys"),
    "Qwen2-MoE": ("qwen2_moe", {}, "experts"),
    "Qwen3-MoE": ("qwen3_moe", {}, "experts"),
    "Mixtral": ("mixtral", {}, "experts"),
    "Mistral": ("mistral", {"sliding_window": 24}, "every layer slides"),
    "Phi-3": ("phi3", {}, "fused projections"),
    "GPT-NeoX": ("gpt_neox", {}, "partial RoPE"),
    "GPT-2": ("gpt2", {}, "learned positions"),
    "GPT-BigCode": ("gpt_bigcode", {}, "multi-query"),
    "StarCoder2": ("starcoder2", {"sliding_window": None}, "biases"),
    "OLMo-2": ("olmo2", {}, "post-norms"),
    "Cohere2": (
        "cohere2",
        {"sliding_window": 24, "num_hidden_layers": 4},
        "sliding and full layers, no RoPE in full ones",
    ),
    "Gemma 2": ("gemma2", {"sliding_window": 24}, "sliding and full layers, soft-caps"),
    "Gemma 3": ("gemma3_text", {"sliding_window": 24}, "five sliding layers to one full"),
    "Gemma 3n": (
        "gemma3n_text",
        {
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "num_kv_shared_layers": 2,
            "sliding_window": 24,
            "vocab_size_per_layer_input": 128,
            "activation_sparsity_pattern": None,
        },
        "layers that read another layer's cache",
    ),
    "Gemma 4": (
        "gemma4_text",
        {
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "num_global_key_value_heads": 1,
            "global_head_dim": 32,
            "vocab_size_per_layer_input": 128,
            "sliding_window": 24,
        },
        "two geometries in one model",
    ),
    "gpt-oss": ("gpt_oss", {"sliding_window": 24}, "sink logits, sliding and full layers"),
    "Llama 4": (
        "llama4_text",
        {
            "attention_chunk_size": 24,
            "num_hidden_layers": 4,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
            "intermediate_size_mlp": 96,
        },
        "chunked attention",
    ),
    "DeepSeek-V2": ("deepseek_v2", {}, "latent attention"),
    "DeepSeek-V3": ("deepseek_v3", {}, "latent attention"),
    "GLM-4-MoE-Lite": ("glm4_moe_lite", {}, "latent attention"),
    "MiniCPM3": ("minicpm3", {}, "latent attention"),
    "Qwen3-Next": ("qwen3_next", {}, "linear attention beside full"),
    "Jamba": ("jamba", {}, "Mamba beside full"),
    "Bamba": ("bamba", {"num_hidden_layers": 4, "attn_layer_indices": [1, 3], **_MAMBA2}, "Mamba-2 beside full"),
    "Granite 4 hybrid": (
        "granitemoehybrid",
        {"layer_types": ["linear_attention", "full_attention", "linear_attention"], **_MAMBA2},
        "Mamba-2 beside full",
    ),
    "Falcon-H1": ("falcon_h1", {}, "Mamba-2 and attention in one layer"),
    "Nemotron-H": ("nemotron_h", {}, "Mamba-2, attention and MLP layers"),
    "Zamba2": (
        "zamba2",
        {"num_hidden_layers": 4, "layers_block_type": ["linear_attention", "hybrid"] * 2, **_ZAMBA},
        "Mamba-2, one attention block used by several layers",
    ),
    "Kimi-Linear": (
        "kimi_linear",
        {"layer_types": ["linear_attention", "full_attention", "linear_attention"], **_KIMI},
        "linear attention beside latent attention",
    ),
    "LFM2": ("lfm2", {}, "short convolutions beside full"),
    "RecurrentGemma": ("recurrent_gemma", {}, "its recurrent state is kept inside the model"),
    "BLOOM": ("bloom", {}, "ALiBi"),
    "MPT": ("mpt", {}, "ALiBi"),
    "Falcon": ("falcon", {}, "its own attention code"),
    "GPT-Neo": ("gpt_neo", {}, "its own attention code"),
    "Mamba": ("mamba", {}, "no KV cache"),
    "DeepSeek-V3.2": ("deepseek_v32", {}, "compressed KV and an indexer"),
    "DeepSeek-V4": ("deepseek_v4", {}, "compressed KV"),
}

IDS_LENGTH = 61
NEW_TOKENS = 24
PLAIN = {"warm": {"codec": "none"}}


def model_of(row: str) -> PreTrainedModel:
    model_type, overrides, _ = ROWS[row]
    return build_tiny_model(model_type, **overrides)


def check_exact(model: PreTrainedModel) -> str:
    """Full cache, no codec: greedy tokens and logits of plain transformers, over every border of pages and windows."""
    ids = prompt(IDS_LENGTH)
    plain = run(model, ids, NEW_TOKENS)
    for config in (small(**PLAIN), small(**PLAIN, page_size=1), {"cache": PLAIN}):
        assert_equal_run(run_gsm(model, config, ids, NEW_TOKENS), plain)
    return "yes"


def check_tiers(model: PreTrainedModel) -> str:
    """Warm int8 pages: really demoted, and close to the full cache on the same tokens."""
    ids = prompt(IDS_LENGTH + NEW_TOKENS)
    plain = forced(model, ids, DynamicCache(config=model.config))
    config = small(hot_size=16)
    with gsm.attach(model, config), torch.inference_mode():
        cache = gsm.Cache(model, config)
        ours = forced(model, ids, cache)
        cache.manager.check_integrity()
        assert cache.stats().num_demoted > 0
    divergence = (plain.exp() * (plain - ours)).sum(-1)
    assert float(divergence.mean()) < 0.05, f"KL {float(divergence.mean()):.4f}"
    return "yes"


@torch.inference_mode()
def forced(model: PreTrainedModel, ids: Tensor, cache: Any) -> Tensor:
    """Log-probabilities after each token of `ids` behind the prompt, one step per token: some recurrent layers compute
    something else in one pass."""
    model(ids[:, :IDS_LENGTH], **given(model, cache))
    steps = [model(token.view(1, 1), **given(model, cache)).logits[0, -1] for token in ids[0, IDS_LENGTH:]]
    return torch.stack(steps).log_softmax(-1)


def check_sparse(model: PreTrainedModel) -> str:
    """A budget that covers everything changes nothing; a small one reads no more than it says."""
    ids = prompt(IDS_LENGTH)
    everything = small(**PLAIN, sparse={"enabled": True, "budget_tokens": 10_000})
    assert_equal_run(run_gsm(model, everything, ids, NEW_TOKENS), run(model, ids, NEW_TOKENS))
    with gsm.attach(model, small(sparse={"enabled": True, "budget_tokens": 20})) as handle:
        _, logits = run(model, ids, NEW_TOKENS)
        assert handle.cache is not None
        assert handle.cache.stats().attended_tokens_mean <= 28  # whole pages around a window
    assert bool(torch.isfinite(logits).all())
    return "yes"


def check_beams(model: PreTrainedModel) -> str:
    ids = prompt(30, rows=2)
    settings: dict[str, Any] = {"max_new_tokens": 12, "num_beams": 3, "num_return_sequences": 2, "do_sample": False}
    plain = model.generate(ids, **settings)
    with gsm.attach(model, small(**PLAIN)) as handle:
        assert torch.equal(model.generate(ids, **settings), plain)
        assert handle.cache is not None
        handle.cache.manager.check_integrity()
    return "yes"


def check_crop(model: PreTrainedModel) -> str:
    """Drafts that are half wrong, across page borders, leave nothing (CASES D7); or the crop is refused."""
    ids, right = prompt(IDS_LENGTH), prompt(24, seed=8)[0]
    config = small(**PLAIN)
    with torch.inference_mode():
        expected = model(torch.cat((ids, right[None]), dim=1)).logits[0, IDS_LENGTH:]
    got = []
    with gsm.attach(model, config), torch.inference_mode():
        cache = gsm.Cache(model, config)
        model(ids, **given(model, cache))
        cache.activate_past_recording()
        for position in range(0, 24, 3):
            draft = right[position : position + 6].clone()
            draft[3:] = (draft[3:] + 1) % 128
            got.append(model(draft[None], **given(model, cache)).logits[0, :3])
            try:
                cache.crop(-(len(draft) - 3))
            except KVError:
                return "no: a recurrent state cannot be undone"
            cache.manager.check_integrity()
    torch.testing.assert_close(torch.cat(got), expected, atol=2e-4, rtol=0)
    return "yes"


def check_padding(model: PreTrainedModel) -> str:
    """A left-padded batch equals each row alone, where that holds without GSM (CASES A9)."""
    ids, mask = prompt(48, rows=2), torch.ones(2, 48, dtype=torch.long)
    ids[1, :29], mask[1, :29] = 0, 0
    plain = run(model, ids, 12, attention_mask=mask)
    sequences, logits = run_gsm(model, small(**PLAIN), ids, 12, attention_mask=mask)
    note = "yes"
    for row, padding in ((0, 0), (1, 29)):
        alone = run(model, ids[row : row + 1, padding:], 12)
        try:
            assert_equal_run((plain[0][row : row + 1, padding:], plain[1][row : row + 1]), alone, tolerance=1e-3)
        except AssertionError:
            note = "as without GSM"
            assert_equal_run((sequences[row : row + 1], logits[row : row + 1]), tuple(x[row : row + 1] for x in plain))
            continue
        assert_equal_run((sequences[row : row + 1, padding:], logits[row : row + 1]), alone, tolerance=1e-3)
    return note


COLUMNS: dict[str, Callable[[PreTrainedModel], str]] = {
    "exact": check_exact,
    "tiers": check_tiers,
    "sparse": check_sparse,
    "beams": check_beams,
    "crop": check_crop,
    "padding": check_padding,
}


def refusal(model: PreTrainedModel) -> str | None:
    """Why the model is not attached, or None where it is."""
    arch = describe(model.config)
    if arch.support in ("managed", "partly"):
        return None
    with pytest.raises(UnsupportedModel) as refused, gsm.attach(model):
        pass
    assert arch.support_reason in str(refused.value)
    return arch.support_reason


def cells(row: str) -> list[str]:
    """One row of the table; raises where something that should work does not."""
    model = model_of(row)
    if refusal(model) is not None:
        word = "not worth it" if describe(model.config).support == "not_worth_it" else "refused"
        return [word] * len(COLUMNS)
    return [check(model) for check in COLUMNS.values()]


HEAD = """# Architectures

Made by `python tests/integrations/architectures.py` from tiny random models of each family; the slow tests run the same
checks. "yes" means that the check passed:

* **exact**: with the full cache the greedy tokens and logits are those of plain transformers (pages of 16, 4 and 1);
* **tiers**: pages really go down to int8, and the mean KL to the full cache over 24 forced tokens is below 0.05 nats
  (tiny random models react more than trained ones);
* **sparse**: a budget that covers everything changes nothing, a small one reads no more than it says;
* **beams**: beam search gives the sequences of plain transformers;
* **crop**: half-wrong drafts across page borders leave nothing behind;
* **padding**: a left-padded batch equals each row alone ("as without GSM": transformers itself gives other tokens
  there, and GSM gives the same ones).

"""


def table_rows() -> dict[str, list[str]]:
    """Cells by row of the written table."""
    lines = FILE.read_text(encoding="utf-8").splitlines() if FILE.exists() else []
    split = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")]
    return {cells[0]: cells[2:] for cells in split if cells[0] in ROWS}


def write(rows: dict[str, list[str]]) -> None:
    """The page, with the reason of every row that is not attached."""
    lines = ["| | what is special | " + " | ".join(COLUMNS) + " |", "|---|---|" + "---|" * len(COLUMNS)]
    lines += [f"| {name} | {ROWS[name][2]} | " + " | ".join(rows[name]) + " |" for name in ROWS if name in rows]
    reasons = [
        f"* **{name}**: {why}"
        for name in ROWS
        if rows.get(name, [""])[0] in ("refused", "not worth it") and (why := refusal(model_of(name)))
    ]
    FILE.write_text(HEAD + "\n".join(lines) + "\n\n## Why not\n\n" + "\n".join(reasons) + "\n" + TAIL, encoding="utf-8")


TAIL = """
DeepSeek-V4.1 has no model in transformers yet; `gsm plan` knows its geometry from the config, and says the same of it
as of V4. Which families are read how is a table too: `gsm/arch/families.py`.

What the notes mean in memory: sliding and chunked layers keep the pages of their window only; latent attention stores
one latent with its rotary part per token and nothing else, and attends it without expanding it; a recurrent state stays
in transformers' own cache layers beside the pages, so a hybrid model can be forked and reordered, but not cropped.

transformers 5.16 takes `sdpa` for models with soft-caps such as Gemma 2 and leaves the caps out without a word. GSM
applies them: its logits are those of `attn_implementation="eager"`.
"""


def main(names: list[str]) -> int:
    """Check rows (all by default), write the table; returns the number of rows with a failure."""
    rows, num_failed = table_rows(), 0
    for name in names or list(ROWS):
        try:
            rows[name] = cells(name)
        except Exception as error:
            num_failed += 1
            print(f"{name}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        else:
            print(name, *rows[name], sep=" | ", flush=True)
    write(rows)
    return num_failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
