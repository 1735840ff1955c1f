"""`explain`: run a prompt and some new tokens through a config, then say where every token is or why it went."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from gsm.errors import InputError
from gsm.integrations.transformers import Cache, attach, cache_kwarg, prefill
from gsm.kv.positions import PositionMap, place_dict
from gsm.measure.bench.arms import resolve_arm
from gsm.measure.bench.prompt import check_window
from gsm.models import LoadedModel, load_model
from gsm.quality import Progress, encode, load_thirds, no_progress
from gsm.results import Environment, Record, collect_environment


@dataclass(frozen=True)
class ExplainSpec:
    """What to run: ``config`` is a config file or the name of an arm; the prompt is a file's text, or real text of
    ``prompt_tokens`` tokens. ``token`` asks for one logical position, prompt and answer counted together."""

    model: str
    config: str
    prompt_tokens: int = 2048
    prompt_file: str | None = None
    new_tokens: int = 64
    token: int | None = None
    dtype: str = "float32"
    threads: int | None = None
    device: str = "cpu"


class ExplainResult(Record):
    """A run's position map in numbers."""

    environment: Environment
    config: dict[str, Any]
    positions: dict[str, Any]
    token: list[dict[str, Any]] | None = None
    stats: dict[str, Any]


def explain(spec: ExplainSpec, progress: Progress = no_progress) -> tuple[ExplainResult, PositionMap]:
    """Run and explain. Raises InputError, ConfigError or ModelError before anything runs."""
    arm = resolve_arm(spec.config)
    if arm.config is None:
        raise InputError(f"'{spec.config}' is plain transformers; give a config file or another arm")
    progress("loading the model", 0, 1)
    loaded = load_model(spec.model, dtype=spec.dtype, threads=spec.threads, device=spec.device)
    ids = _prompt(loaded, spec)
    total = ids.shape[1] + spec.new_tokens
    if spec.token is not None and not 0 <= spec.token < total:
        raise InputError(f"there is no token {spec.token}: prompt and answer have {total}; ask for 0 to {total - 1}")
    with attach(loaded.model, arm.config, tokenizer=loaded.tokenizer), torch.inference_mode():
        cache = Cache(loaded.model, arm.config, loaded.tokenizer)
        progress("prefill", 0, spec.new_tokens)
        logits = prefill(loaded.model, ids, cache, arm.config.cache.prefill_chunk_tokens)
        for index in range(spec.new_tokens):
            progress("decoding", index + 1, spec.new_tokens)
            next_token = logits.argmax(-1, keepdim=True)
            keyword: dict[str, Any] = {cache_kwarg(loaded.model): cache}
            logits = loaded.model(next_token, use_cache=True, **keyword).logits[:, -1]
        positions = cache.manager.explain(cache.slots[0])
        stats = asdict(cache.stats())
    result = ExplainResult(
        environment=collect_environment(
            model=loaded.name, dtype=spec.dtype, device=spec.device, threads=torch.get_num_threads()
        ),
        config=arm.config_dict() or {},
        positions=positions.to_dict(),
        token=None if spec.token is None else [place_dict(place) for place in positions.token(spec.token)],
        stats={**stats, "nonfinite_pages": {str(layer): n for layer, n in stats["nonfinite_pages"].items()}},
    )
    return result, positions


def _prompt(loaded: LoadedModel, spec: ExplainSpec) -> torch.Tensor:
    """Ids `[1, n]` on the model's device."""
    if spec.prompt_file is None:
        ids = encode(loaded.tokenizer, load_thirds(None).evaluation)[: spec.prompt_tokens]
    else:
        try:
            ids = encode(loaded.tokenizer, Path(spec.prompt_file).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"the prompt file {spec.prompt_file} cannot be read: {error}") from None
    if len(ids) == 0:
        raise InputError("the prompt is empty; give at least one token")
    check_window(loaded, len(ids), spec.new_tokens)
    return ids[None].to(loaded.model.device)
