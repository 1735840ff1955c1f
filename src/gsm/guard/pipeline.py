"""The whole of `gsm smooth`: observe, select, apply, guard, measure, say what it was worth, and export.

The order is "quantise, then smooth": what is judged and timed is the model in the arithmetic it will run in. Folds are
the one exception by nature: a weight must be folded before it is rounded.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from gsm.config.smoothing import SmoothingConfig
from gsm.errors import ConfigError
from gsm.guard.guard import search
from gsm.guard.records import Outcome, SiteChoice, SmoothResult, Speed, Step, Tails
from gsm.guard.speed import compare_speed
from gsm.models import LoadedModel
from gsm.models.weights import weight_bytes
from gsm.quality.texts import TextThirds, encode
from gsm.results import Environment
from gsm.smoothing import Applied, Calibration, apply, calibrate, cut_samples
from gsm.smoothing.context import check_ids
from gsm.smoothing.export import check_target, export_checkpoint
from gsm.smoothing.int8 import Int8Linear
from gsm.smoothing.select import CANDIDATES

Progress = Callable[[str, int, int], None]

_TAIL_SAMPLES = 32
_SHORT_OF_WORTH = 1.05  # a gain below this is within the noise of a shared machine


@dataclass(frozen=True)
class SmoothPlan:
    """What `smooth_model` is asked for."""

    config: SmoothingConfig
    calibration: Calibration | None = None
    export_to: Path | None = None
    dry_run: bool = False
    gradients: bool = False
    prompt_tokens: int = 2048


def smooth_model(
    loaded: LoadedModel,
    thirds: TextThirds,
    plan: SmoothPlan,
    environment: Environment,
    progress: Progress = lambda label, done, total: None,
) -> SmoothResult:
    """Run the pipeline on ``loaded``; the model is the original again afterwards. Raises GsmError.

    Calibration, tuning and evaluation read disjoint thirds of the text.
    """
    config, notes = _settle(plan)
    if plan.export_to is not None:
        check_target(plan.export_to)
    model = loaded.model
    samples = cut_samples(
        encode(loaded.tokenizer, thirds.calibration), config.calibration_samples, config.sample_tokens
    )
    calibration = plan.calibration
    if calibration is None and (config.enable or plan.gradients):
        calibration = calibrate(
            model, samples, gradients=plan.gradients, name=loaded.name, progress=_prefixed("calibration", progress)
        )

    def state(current: SmoothingConfig, outcome: Outcome | None = None) -> AbstractContextManager[Applied]:
        excluded = outcome.rolled_back if outcome else ()
        return apply(model, current, samples=samples, calibration=calibration, exclude=excluded)

    bytes_before = weight_bytes(model)
    with state(config) as applied:
        described = _describe(applied, model, environment, thirds, notes, bytes_before)
    if plan.dry_run:
        return described.model_copy(update={"conclusion": "dry run: nothing was measured or written"})
    text = encode(loaded.tokenizer, thirds.evaluation)
    outcome = search(
        model, config, text, samples=samples, calibration=calibration, tell=_step_progress(progress, config)
    )
    if not outcome.accepted:
        reason = outcome.verdict.failures[0] if outcome.verdict.failures else _first_miss(outcome)
        return described.model_copy(
            update={"outcome": outcome, "worth_it": False, "conclusion": f"not accepted: {reason}"}
        )
    speed = compare_speed(
        model,
        lambda: state(outcome.config, outcome),
        encode(loaded.tokenizer, thirds.tuning)[: _prompt_length(loaded, plan)],
        tell=lambda done, total: progress("speed", done, total),
    )
    exported = _export(loaded, plan, outcome, state, notes)
    return described.model_copy(
        update={
            "outcome": outcome,
            "tails_before": _tails(calibration, config) if config.enable else None,
            "tails_after": _tails_after(model, samples, outcome, state) if config.enable else None,
            "speed": speed,
            **_conclusion(outcome, speed),
            "exported_to": exported,
            "notes": notes,
        }
    )


def _settle(plan: SmoothPlan) -> tuple[SmoothingConfig, list[str]]:
    """The settings that will really run, and what was changed for it."""
    config = plan.config
    notes: list[str] = []
    if not config.active:
        raise ConfigError("smoothing is off: set smoothing.enable: true, or smoothing.int8, in the config")
    if plan.export_to is None:
        return config, notes
    if not config.is_folded:
        raise ConfigError(
            "there is nothing to export: only method channel or rotate changes weights; int8 and window act at run time"
        )
    if config.method == "rotate" and config.online_rotation:
        config = config.model_copy(update={"online_rotation": False})
        notes.append("the run-time rotation is off, because a checkpoint that any engine loads cannot hold it")
    return config, notes


def _describe(
    applied: Applied,
    model: Any,
    environment: Environment,
    thirds: TextThirds,
    notes: list[str],
    bytes_before: int,
) -> SmoothResult:
    int8 = [module for module in model.modules() if isinstance(module, Int8Linear)]
    return SmoothResult(
        environment=environment,
        text_hashes=thirds.hashes(),
        choices=[SiteChoice(name=c.name, chosen=c.chosen, reason=c.reason) for c in applied.choices],
        left_out=applied.left_out,
        int8_modules=applied.int8,
        max_logit_change=applied.max_logit_change,
        weight_bytes_before=bytes_before,
        weight_bytes_after=weight_bytes(model) + sum(module.int8.nbytes for module in int8) if int8 else None,
        conclusion="",
        notes=notes,
    )


def _prompt_length(loaded: LoadedModel, plan: SmoothPlan) -> int:
    longest = loaded.arch.max_position_embeddings or plan.prompt_tokens
    return min(plan.prompt_tokens, longest // 2)


def _export(
    loaded: LoadedModel, plan: SmoothPlan, outcome: Outcome, state: Callable[..., Any], notes: list[str]
) -> str | None:
    if plan.export_to is None:
        return None
    config = outcome.config
    with state(config.model_copy(update={"int8": "off"}), outcome):
        about = {"smoothing": config.model_dump(mode="json"), "rolled_back": outcome.rolled_back}
        ids = check_ids(loaded.model)
        difference = export_checkpoint(loaded.model, loaded.tokenizer, plan.export_to, about, ids)
    notes.append(
        f"the exported checkpoint, loaded by plain transformers, gives the same logits within {difference:.1e}"
    )
    return str(plan.export_to)


def _tails(calibration: Calibration | None, config: SmoothingConfig) -> Tails | None:
    if calibration is None:
        return None
    sites = calibration.of_kind(*CANDIDATES[config.method])
    worst = max(sites, key=lambda site: site.kurtosis_body)
    return Tails(
        median=statistics.median(site.kurtosis_body for site in sites),
        largest=worst.kurtosis_body,
        largest_at=worst.name,
    )


def _tails_after(model: Any, samples: Tensor, outcome: Outcome, state: Callable[..., Any]) -> Tails | None:
    """The same statistics on the smoothed model in full precision, where every site can still be seen."""
    config = outcome.config.model_copy(update={"int8": "off"})
    with state(config, outcome):
        return _tails(calibrate(model, samples[:_TAIL_SAMPLES]), config)


def _conclusion(outcome: Outcome, speed: Speed) -> dict[str, Any]:
    prefill, decode = speed.gains_over_linear
    gain = max(prefill, decode)
    change = outcome.verdict.perplexity_change
    assert change is not None
    figures = (
        f"prefill {speed.prefill_gain:.2f}x, decode {speed.decode_gain:.2f}x, perplexity {change.mean:+.2%} "
        f"({change.low:+.2%} to {change.high:+.2%}); against GSM's linear layers, which lose nothing: prefill "
        f"{prefill:.2f}x, decode {decode:.2f}x"
    )
    worth = gain >= _SHORT_OF_WORTH
    word = "worth it here" if worth else "no benefit measured here"
    if worth and outcome.config.is_windowed:
        worth, word = False, "no benefit of window: it changes no product's time, the gain is int8's"
    return {"worth_it": worth, "conclusion": f"{word}: {figures}"}


def _prefixed(prefix: str, progress: Progress) -> Progress:
    return lambda label, done, total: progress(f"{prefix}: {label}", done, total)


def _step_progress(progress: Progress, config: SmoothingConfig) -> Callable[[Step], None]:
    count = 0

    def tell(step: Step) -> None:
        nonlocal count
        count += 1
        progress(
            f"guard: {step.what} ({step.num_active} active): {'passed' if step.passed else 'failed'}", count, count
        )

    return tell


def _first_miss(outcome: Outcome) -> str:
    """What the first change that missed the tolerance did, where every module had to be rolled back."""
    missed = next((step for step in outcome.steps if not step.passed), None)
    if missed is None:
        return "the settings change no module; name others in target_layers, or fewer in keep_precision"
    kl = "not finite" if missed.kl is None else f"{missed.kl:.2g} nats"
    return f"KL is {kl} after '{missed.what}', and rolling back left no module to change"
