"""One model: is it whole, does it fit, and can GSM manage its cache? No weights are loaded."""

from __future__ import annotations

from pathlib import Path

from gsm.arch import ModelArch
from gsm.errors import ConfigError, InputError, ModelError
from gsm.measure.doctor.quantisation import check_quantisation
from gsm.measure.doctor.record import Check, Findings
from gsm.measure.plan.plan import make_plan
from gsm.measure.plan.weights import PlannedModel, plan_model
from gsm.models.checkpoint import Checkpoint, read_checkpoint
from gsm.models.memory import default_memory
from gsm.models.sizes import format_bytes
from gsm.models.sources import DEMO, demo_gguf_path, is_hub_id

_HEAD_ROOM = 1.2  # the documents: the whole model and 20 %
_BATCH_CONTEXT = 4096


def check_model(source: str | Path, dtype: str | None = None) -> list[Check]:
    """Findings about ``source``; the first thing that cannot be read ends the list."""
    findings = Findings("model")
    try:
        planned = _check_files(findings, source, dtype)
        if planned is not None:
            _check_support(findings, planned.arch)
            _check_window(findings, planned.arch)
            _check_memory(findings, planned)
    except (ModelError, InputError, ConfigError) as error:
        what, _, remedy = str(error).rpartition("; ")
        findings.problem("files", what or remedy, remedy if what else "correct it as the message says")
    return findings.checks


def _check_files(findings: Findings, source: str | Path, dtype: str | None) -> PlannedModel | None:
    planned = plan_model(source, dtype)
    path = demo_gguf_path() if str(source) == DEMO else Path(source).expanduser()
    if path.is_dir():
        checkpoint = read_checkpoint(path)
        shards = f"{len(checkpoint.weights)} weight files" if len(checkpoint.weights) > 1 else "one weight file"
        findings.ok("files", f"{path}: config.json and {shards}, {format_bytes(checkpoint.num_bytes)}, complete")
        _check_tokenizer(findings, checkpoint, planned.arch)
        findings.checks += check_quantisation(checkpoint)
    elif path.suffix == ".gguf":
        _check_gguf(findings, path)
    elif is_hub_id(str(source)):
        findings.warning("files", "only the config was looked at", f"download it once: hf download {source}")
    else:
        findings.problem("files", f"{path} is a config without weights", "give the model's directory")
    return planned


def _check_gguf(findings: Findings, path: Path) -> None:
    from gsm.models.gguf import converted_directory, num_parameters
    from gsm.models.sources import cache_directory

    count = num_parameters(path)  # reads the tensor table and so notices a file that is cut off
    converted = converted_directory(path, cache_directory())
    state = "converted already" if converted.is_dir() else "will be converted once"
    findings.ok("files", f"{path.name}, {format_bytes(path.stat().st_size)}, {count / 1e6:,.0f} M weights; {state}")


def _check_tokenizer(findings: Findings, checkpoint: Checkpoint, arch: ModelArch) -> None:
    from transformers import AutoTokenizer

    from gsm.models.quiet import quiet_transformers

    try:
        with quiet_transformers():
            tokenizer = AutoTokenizer.from_pretrained(checkpoint.path, local_files_only=True)
    except Exception as error:  # tokenizers, sentencepiece and transformers each have their own errors
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:160]
        findings.problem("tokenizer", f"cannot be loaded: {reason}", "add tokenizer.json and tokenizer_config.json")
        return
    if len(tokenizer) > arch.vocab_size:
        found = f"{len(tokenizer)} tokens, but the model's vocabulary has {arch.vocab_size}"
        findings.problem("tokenizer", found, "use the tokenizer that belongs to these weights")
    elif tokenizer.eos_token_id is None:
        findings.warning(
            "tokenizer", f"{len(tokenizer)} tokens, no end-of-text token", "set eos_token, or give max_new_tokens"
        )
    else:
        findings.ok("tokenizer", f"{len(tokenizer)} tokens")


def _check_support(findings: Findings, arch: ModelArch) -> None:
    if arch.support in ("managed", "partly"):
        findings.ok("cache", f"{arch.model_type}: {arch.support_reason}")
    else:
        word = "not worth managing" if arch.support == "not_worth_it" else "not managed by GSM"
        findings.warning(
            "cache", f"{word}: {arch.support_reason}", "; ".join(arch.helps_instead) or "use it without GSM"
        )


def _check_window(findings: Findings, arch: ModelArch) -> None:
    if not arch.max_position_embeddings:
        findings.warning("window", "the config names no trained window", "keep prompts as short as the model card says")
        return
    scaled = arch.rope is not None and arch.rope.type not in ("default", "none")
    how = f" (RoPE scaled: {arch.rope.type})" if scaled and arch.rope is not None else ""
    findings.ok("window", f"{arch.max_position_embeddings:,} tokens{how}")


def _check_memory(findings: Findings, planned: PlannedModel) -> None:
    """The model and 20 % head-room, and how many requests fit beside it."""
    assert planned.weight_bytes is not None
    free, where = default_memory()
    needed = int(planned.weight_bytes * _HEAD_ROOM)
    found = (
        f"{format_bytes(planned.weight_bytes)} of weights + 20 % = {format_bytes(needed)}, {format_bytes(free)} {where}"
    )
    smaller = "use --dtype bfloat16, quantised weights or a smaller model, or free memory"
    if planned.weight_bytes > free:
        findings.problem("memory", found, smaller)
        return
    if needed > free:
        findings.warning("memory", f"{found}: too little head-room", smaller)
        return
    findings.ok("memory", found)
    _check_batch(findings, planned, free)


def _check_batch(findings: Findings, planned: PlannedModel, free: int) -> None:
    context = min(planned.arch.max_position_embeddings or _BATCH_CONTEXT, _BATCH_CONTEXT)
    plan = make_plan(planned, memory_bytes=free, context_tokens=context)
    plain, *tiers = (row.max_sequences for row in plan.capacities)
    if plain is None:
        findings.ok("batch", "its cache does not grow, so memory sets no limit")
        return
    more = f" ({tiers[0]} in int8 tiers)" if tiers else ""
    found = f"1 to {plain} requests of {context} tokens fit{more}"
    if plain < 1:
        findings.warning(
            "batch", f"not even one request of {context} tokens fits{more}", "use tiers or a shorter context"
        )
    elif plain < 8:
        findings.ok("batch", f"{found}; batching pays from about 8 on")
    else:
        findings.ok("batch", f"{found}; 8 to {min(32, plain)} is a sensible range to start with")
