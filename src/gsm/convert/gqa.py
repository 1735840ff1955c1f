"""`convert_gqa`: a model with fewer kv heads, written as a checkpoint that plain transformers loads."""

from __future__ import annotations

import math
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gsm.arch import describe
from gsm.convert.compare import compare, evaluation_windows
from gsm.convert.pool import pooled_config, pooled_state
from gsm.convert.record import ConvertResult, PerplexityChange, UptrainRecord
from gsm.convert.uptrain import uptrain
from gsm.errors import InputError
from gsm.models import LoadedModel, load_model
from gsm.quality import Progress, TextThirds, encode, load_thirds, no_progress
from gsm.results import collect_environment, load_average

TOPICS = "topics"  # the word for the standard library's help topics


@dataclass(frozen=True)
class ConvertSpec:
    """What to convert. `uptrain`: a UTF-8 file or the word "topics"; its first two thirds train, its last evaluates."""

    model: str
    num_kv_heads: int
    output: str
    uptrain: str | None = None
    steps: int = 100
    batch: int = 2
    num_windows: int = 16
    dtype: str = "float32"
    threads: int | None = None
    overwrite: bool = False


def convert_gqa(spec: ConvertSpec, progress: Progress = no_progress) -> ConvertResult:
    """Pool, measure, train if asked to, measure again, write. The directory appears complete or not at all.

    Raises InputError, ConfigError, ModelError or UnsupportedModel before anything is written.
    """
    target = _check_target(Path(spec.output), spec.overwrite)
    progress("loading the model", 0, 1)
    loaded = load_model(spec.model, dtype=spec.dtype, threads=spec.threads)
    environment = collect_environment(model=loaded.name, dtype=spec.dtype, threads=torch.get_num_threads())
    thirds = load_thirds(None if spec.uptrain in (None, TOPICS) else spec.uptrain)
    windows = evaluation_windows(encode(loaded.tokenizer, thirds.evaluation), spec.num_windows)
    student = pooled_model(loaded.model, spec.num_kv_heads)
    measured = compare(loaded.model, {"pooled": student}, windows, progress)
    trained = again = None
    if spec.uptrain is not None and spec.steps:
        trained = _uptrain(loaded, student, thirds, spec, progress)
        again = compare(loaded.model, {"pooled": student}, windows, progress)["pooled"]
        trained = trained.model_copy(update={"recovered": _recovered(measured["pooled"], again)})
    _write(student, loaded, target, spec.overwrite)
    before, after = (_kv_bytes_per_token(model) for model in (loaded.model, student))
    return ConvertResult(
        environment=environment.model_copy(update={"load_average_after": load_average()}),
        output=str(target),
        kv_heads_before=loaded.model.config.get_text_config(decoder=True).num_key_value_heads,
        kv_heads_after=spec.num_kv_heads,
        kv_bytes_per_token_before=before,
        kv_bytes_per_token_after=after,
        parameters_before=loaded.model.num_parameters(),
        parameters_after=student.num_parameters(),
        evaluation_text=thirds.name,
        evaluation_sha256=thirds.sha256("evaluation"),
        evaluation_tokens=windows.shape[0] * (windows.shape[1] // 2),
        perplexity_before=measured["perplexity"],
        pooled=measured["pooled"],
        uptrain=trained,
        uptrained=again,
    )


def pooled_model(model: Any, num_kv_heads: int) -> Any:
    """A new model of the same class with pooled kv heads, in eval mode; `model` is unchanged."""
    config = pooled_config(model.config, num_kv_heads)
    state = pooled_state(model.state_dict(), model.config.get_text_config(decoder=True), num_kv_heads)
    attention = model.config._attn_implementation
    student = type(model)._from_config(config, dtype=model.dtype, attn_implementation=attention)
    student.load_state_dict(state, strict=True)
    student.tie_weights()
    student.generation_config = model.generation_config
    return student.to(model.device).eval()


def _uptrain(
    loaded: LoadedModel, student: Any, thirds: TextThirds, spec: ConvertSpec, progress: Progress
) -> UptrainRecord:
    text = thirds.calibration + thirds.tuning
    done = uptrain(loaded.model, student, encode(loaded.tokenizer, text), spec.steps, spec.batch, progress)
    return UptrainRecord(
        steps=spec.steps,
        tokens=done.tokens,
        trained_parameters=done.trained_parameters,
        cpu_s=done.cpu_s,
        text=f"{thirds.name}, first two thirds",
        text_sha256=thirds.sha256("calibration"),
        first_loss=done.first_loss,
        last_loss=done.last_loss,
        recovered=None,
    )


def _recovered(pooled: PerplexityChange, trained: PerplexityChange) -> float | None:
    lost = math.log(pooled.ratio)
    return 1.0 - math.log(trained.ratio) / lost if lost > 0 else None


def _kv_bytes_per_token(model: Any) -> float:
    return describe(model.config).kv_bytes_per_token(model.dtype.itemsize)


def _check_target(target: Path, overwrite: bool) -> Path:
    if target.exists() and not (overwrite and target.is_dir()):
        raise InputError(f"{target} exists already; name a new directory or add --overwrite")
    if not target.absolute().parent.is_dir():
        raise InputError(f"{target.absolute().parent} does not exist; create it first")
    return target


def _write(model: Any, loaded: LoadedModel, target: Path, overwrite: bool) -> None:
    """Into a temporary directory beside the target, then moved into place."""
    partial = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.absolute().parent))
    try:
        model.save_pretrained(partial)
        loaded.tokenizer.save_pretrained(partial)
        partial.chmod(0o755)
        if overwrite and target.is_dir():
            shutil.rmtree(target)
        os.replace(partial, target)
    except OSError as error:
        raise InputError(f"{target} cannot be written ({error.strerror}); choose another directory") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
