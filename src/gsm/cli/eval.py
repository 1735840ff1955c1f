"""`gsm eval`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from gsm.cli.common import (
    check_json_path,
    engine_option,
    json_option,
    model_options,
    progress_bar,
    quality_options,
    save,
)
from gsm.cli.tables import print_table, quality_rows

if TYPE_CHECKING:
    from gsm.measure.evaluate import EvalSpec
    from gsm.quality import Progress
    from gsm.results import EvalResult


@click.command()
@model_options
@click.option("--config", required=True, metavar="FILE", help="Config file, or the name of an arm such as sparse.")
@click.option("--prompt-tokens", type=click.IntRange(min=1), default=1024, show_default=True)
@click.option(
    "--tolerance-kl",
    type=click.FloatRange(min=0),
    default=0.01,  # as in gsm.results.Tolerance, which --help should not have to load
    show_default=True,
    help="Highest KL to the full cache, nats per token; judged on the upper end of its 95 % interval.",
)
@click.option(
    "--tolerance-needles",
    type=click.IntRange(min=0),
    default=1,
    show_default=True,
    help="Needles per case that the full cache finds and the config may lose.",
)
@click.option("--chunk-tokens", type=click.IntRange(min=1), default=1024, show_default=True, help="Prefill chunk.")
@quality_options
@engine_option
@json_option
def command(tolerance_kl: float, tolerance_needles: int, engine: str, json_path: str | None, **settings: Any) -> int:
    """Quality of a config against MODEL's full cache; exit code 1 when it misses the tolerance.

    Ctrl-C keeps what is complete.
    """
    from gsm.measure.evaluate import EvalSpec
    from gsm.results import Tolerance

    check_json_path(json_path)
    tolerance = Tolerance(kl=tolerance_kl, needles_lost=tolerance_needles)
    with progress_bar() as progress:
        spec = EvalSpec(tolerance=tolerance, **settings)
        result = _measure(engine, spec, progress)
    print_eval(result, settings["config"])
    save(json_path, result)
    if result.interrupted:
        return 130
    return 0 if result.passed else 1


def _measure(engine: str, spec: EvalSpec, progress: Progress) -> EvalResult:
    if engine == "vllm":
        from gsm.measure.vllm import evaluate_vllm

        return evaluate_vllm(spec, progress)
    from gsm.measure.evaluate import evaluate

    return evaluate(spec, progress)


def print_eval(result: EvalResult, name: str) -> None:
    """The quality table and the verdict."""
    quality = result.quality
    title = f"{result.environment.model} after {result.workload.prompt_tokens} tokens, {quality.n_windows} windows"
    print_table(title, ["", name], quality_rows([quality]))
    for note in quality.notes:
        click.echo(f"Note: {note}.")
    click.echo("Passed." if result.passed else "Missed: " + "; ".join(result.failures) + ".")
