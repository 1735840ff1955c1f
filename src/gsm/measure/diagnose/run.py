"""`diagnose_run`: load a model, watch a config on real text, name the causes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from gsm.config import load_config
from gsm.errors import InputError
from gsm.measure.bench.arms import resolve_arm
from gsm.measure.bench.prompt import check_window
from gsm.measure.diagnose.live import Diagnosis
from gsm.measure.diagnose.observe import Subject
from gsm.measure.diagnose.record import DiagnoseResult
from gsm.models import load_model
from gsm.quality import Progress, encode, load_thirds, no_progress
from gsm.results import collect_environment
from gsm.smoothing import calibrate, cut_samples


@dataclass(frozen=True)
class DiagnoseSpec:
    """What to run: ``config`` is a config file or the name of an arm. Sizes in tokens."""

    model: str
    config: str
    prompt_tokens: int = 1024
    new_tokens: int = 32
    text: str | None = None
    max_kl: float = 0.02
    dtype: str = "float32"
    threads: int | None = None
    device: str = "cpu"


def diagnose_run(spec: DiagnoseSpec, progress: Progress = no_progress) -> DiagnoseResult:
    """Run and judge. Raises InputError, ConfigError or ModelError before anything runs."""
    arm = resolve_arm(spec.config)
    if arm.config is None:
        raise InputError(f"'{spec.config}' is plain transformers; give a config file or another arm")
    thirds = load_thirds(spec.text)
    progress("loading the model", 0, 1)
    loaded = load_model(spec.model, dtype=spec.dtype, threads=spec.threads, device=spec.device)
    check_window(loaded, spec.prompt_tokens, 2 * spec.new_tokens + 8)
    ids = encode(loaded.tokenizer, thirds.evaluation)
    if len(ids) < spec.prompt_tokens + spec.new_tokens:
        raise InputError(
            f"the evaluation third of the text has {len(ids)} tokens, but {spec.prompt_tokens + spec.new_tokens} are "
            "needed; give a longer text with --text, or a smaller --prompt-tokens"
        )
    samples, calibration = None, None
    if arm.config.smoothing.active:
        samples = cut_samples(encode(loaded.tokenizer, thirds.calibration), 32, 128)
        if arm.config.smoothing.enable:
            progress("calibration", 0, 1)
            calibration = calibrate(loaded.model, samples)
    subject = Subject(
        model=loaded.model,
        prompt=ids[: spec.prompt_tokens],
        forced=ids[spec.prompt_tokens : spec.prompt_tokens + spec.new_tokens],
        samples=samples,
        calibration=calibration,
        num_generated=spec.new_tokens,
    )
    count = 0

    def tell(what: str) -> None:
        nonlocal count
        count += 1
        progress(f"run {count}: {what}", count, count + 1)

    diagnosis = Diagnosis(subject, load_config(arm.config), _decoder(loaded.tokenizer), spec.max_kl, tell)
    diagnosis.run()
    return DiagnoseResult(
        environment=collect_environment(
            model=loaded.name, dtype=spec.dtype, device=spec.device, threads=torch.get_num_threads()
        ),
        config=arm.config_dict(),
        findings=tuple(sorted(diagnosis.findings, key=lambda item: item.advice)),
        checked=tuple(diagnosis.checked),
        notes=(
            f"one prompt of {spec.prompt_tokens} tokens and {spec.new_tokens} forced ones: an impression, not a bar",
        ),
    )


def _decoder(tokenizer: Any) -> Any:
    return lambda ids: str(tokenizer.decode(ids))
