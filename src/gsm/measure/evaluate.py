"""`evaluate`: one config's quality against the full cache, held against a tolerance."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gsm.errors import InputError
from gsm.measure.bench.arms import make_arm, resolve_arm
from gsm.models import load_model
from gsm.quality import MIN_WINDOWS, Assessment, PlainArm, Progress, QualityPlan, encode, load_thirds, no_progress
from gsm.results import (
    Environment,
    EvalResult,
    NeedlePair,
    Quality,
    Tolerance,
    Workload,
    collect_environment,
    load_average,
)


@dataclass(frozen=True)
class EvalSpec:
    """What to evaluate: ``config`` is a config file or the name of an arm. Sizes in tokens."""

    model: str
    config: str
    prompt_tokens: int
    tolerance: Tolerance
    dtype: str = "float32"
    threads: int | None = None
    device: str = "cpu"
    text: str | None = None
    chunk_tokens: int = 1024
    num_windows: int = MIN_WINDOWS
    windows_per_prefill: int = 2
    needles_per_depth: int = 10


def evaluate(spec: EvalSpec, progress: Progress = no_progress) -> EvalResult:
    """Measure and judge; Ctrl-C returns what was complete by then, marked ``interrupted`` and not passed.

    Raises InputError, ConfigError or ModelError before anything is measured.
    """
    arm = resolve_arm(spec.config)
    if arm.config is None:
        raise InputError(f"'{spec.config}' is the full cache itself; evaluate a config file, tiers or sparse")
    if not spec.num_windows and not spec.needles_per_depth:
        raise InputError("neither windows nor needles are to be measured; raise one of them above 0")
    progress("loading the model", 0, 1)
    loaded = load_model(spec.model, dtype=spec.dtype, threads=spec.threads, device=spec.device)
    environment = collect_environment(model=loaded.name, dtype=spec.dtype, device=spec.device, threads=spec.threads)
    thirds = load_thirds(spec.text)
    plan = QualityPlan.make(
        spec.prompt_tokens,
        num_windows=spec.num_windows,
        windows_per_prefill=spec.windows_per_prefill,
        needles_per_depth=spec.needles_per_depth,
        max_positions=loaded.arch.max_position_embeddings,
    )
    assessment = Assessment(
        PlainArm(loaded.model, chunk_tokens=spec.chunk_tokens),
        [make_arm(arm, loaded, spec.chunk_tokens, spec.text)],
        loaded.tokenizer,
        encode(loaded.tokenizer, thirds.evaluation),
        plan,
        progress,
    )
    return assess(assessment, spec, environment, arm.name, arm.config_dict(), thirds.sha256("evaluation"))


def assess(
    assessment: Assessment,
    spec: EvalSpec,
    environment: Environment,
    arm: str,
    config: dict[str, Any] | None,
    text_sha256: str,
) -> EvalResult:
    """Run an assessment and judge the arm of that name, wherever it runs."""
    interrupted = False
    try:
        assessment.run()
    except KeyboardInterrupt:
        if not assessment.has_results:
            raise
        interrupted = True
    quality = assessment.results()[arm]
    failures = judge(quality, spec.tolerance)
    if interrupted:
        failures.append(f"interrupted after {quality.n_windows} windows and {quality.n_needles} needles per case")
    return EvalResult(
        environment=environment.model_copy(update={"load_average_after": load_average()}),
        workload=Workload(
            prompt_tokens=spec.prompt_tokens,
            new_tokens=0,
            runs=1,
            batch_size=1,
            prefill_chunk_tokens=spec.chunk_tokens,
            text_sha256=text_sha256,
        ),
        config=config,
        tolerance=spec.tolerance,
        quality=quality,
        passed=not failures,
        failures=tuple(failures),
        interrupted=interrupted,
    )


def judge(quality: Quality, tolerance: Tolerance) -> list[str]:
    """Why ``quality`` misses ``tolerance``; empty when it passes. KL is judged on the upper end of its interval."""
    failures = []
    if quality.n_windows:
        upper = quality.kl_ci95[1] if quality.kl_ci95 else None
        if upper is None:
            failures.append("KL has no interval: at least 2 windows are needed")
        elif upper > tolerance.kl:
            failures.append(f"KL may be {upper:.3g} nats per token (upper end of the interval), above {tolerance.kl:g}")
    for name, pair in (("question in the prefill", quality.prefill_pair), ("late question", quality.late_pair)):
        failures += _judge_needles(name, pair, tolerance.needles_lost)
    return failures


def _judge_needles(name: str, pair: NeedlePair | None, allowed: int) -> list[str]:
    if pair is None or pair.lost <= allowed:
        return []
    return [
        f"{pair.lost} of {pair.reference_found} needles that the full cache finds are lost ({name}), {allowed} allowed"
    ]
