"""`gsm tune`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from gsm.cli.common import check_json_path, model_options, progress_bar
from gsm.cli.tables import print_table

if TYPE_CHECKING:
    from gsm.tune.records import Comparison, TuneResult


@click.command()
@model_options
@click.option("--task", type=click.Choice(("dialog", "document", "reasoning", "code")), required=True)
@click.option("--text", metavar="FILE", help="UTF-8 text like your own; Python's help topics by default.")
@click.option("--length", type=click.IntRange(min=1), help="Full length in tokens (default: the window, at most 8192).")
@click.option("--config", metavar="FILE", help="Start from this config instead of the task's.")
@click.option(
    "--variables", default="hot_size,threshold,compression,budget", show_default=True, help="Which to tune, of these."
)
@click.option("--smoothing", is_flag=True, help="Also tune window smoothing: strength, then window.")
@click.option("--allow-drop", is_flag=True, help="Let the threshold forget pages for good instead of keeping int4.")
@click.option("--values", "most_values", type=click.IntRange(1, 4), default=3, show_default=True, help="Per variable.")
@click.option("--prefills", "num_prefills", type=click.IntRange(min=1), default=2, show_default=True)
@click.option("--windows-per-prefill", type=click.IntRange(min=1), default=4, show_default=True)
@click.option("--window-tokens", type=click.IntRange(min=8), default=16, show_default=True, help="A multiple of 8.")
@click.option("--needles", "needles_per_depth", type=click.IntRange(min=1), default=1, show_default=True)
@click.option("--tolerance-kl", type=click.FloatRange(min=0), default=0.02, show_default=True, help="Upper end, nats.")
@click.option("--tolerance-needles", type=click.IntRange(min=0), default=0, show_default=True, help="Lost per case.")
@click.option("--minutes", "max_minutes", type=click.FloatRange(min=0), help="Stop after this; run again to go on.")
@click.option("-o", "--output", default="gsm.yaml", show_default=True, metavar="FILE", help="The proposed config.")
@click.option(
    "--json",
    "json_path",
    metavar="FILE",
    help="Evidence, and the state to go on from (default: the output's name with .tune.json).",
)
def command(output: str, variables: str, json_path: str | None, **settings: Any) -> int:
    """Find a config for MODEL on your own text, one variable at a time; exit code 1 when nothing is worth proposing.

    Every value must hold at a quarter, a half and the full length, in speed and in quality with needles. Ctrl-C keeps
    what is measured; the same command goes on from there.
    """
    from pathlib import Path

    from gsm.results import Tolerance
    from gsm.tune import BoutPlan, TuneSpec, tune, write_proposal

    evidence = Path(json_path or Path(output).with_suffix(".tune.json"))
    for path in (output, str(evidence)):
        check_json_path(path)
    tolerance = Tolerance(kl=settings.pop("tolerance_kl"), needles_lost=settings.pop("tolerance_needles"))
    plan_keys = ("num_prefills", "windows_per_prefill", "window_tokens", "needles_per_depth")
    plan = BoutPlan(**{key: settings.pop(key) for key in plan_keys})
    names = tuple(name.strip() for name in variables.split(",") if name.strip())
    spec = TuneSpec(variables=names, tolerance=tolerance, plan=plan, **settings)
    with progress_bar() as progress:
        result = tune(spec, evidence, progress)
    print_tune(result)
    click.echo(f"written: {evidence}", err=True)
    if result.proposed is None:
        return 130 if result.interrupted else 1
    write_proposal(output, result, str(evidence))
    click.echo(f"written: {output}", err=True)
    return 0


def print_tune(result: TuneResult) -> None:
    """Every step with its candidates, then the verdict."""
    noise = ", ".join(f"{share:.1%} at {length}" for length, share in result.noise.items())
    if noise:
        click.echo(f"Noise of time per token between two identical runs: {noise}.")
    if result.baseline is not None:
        _print_candidates("the start against plain transformers", [result.baseline])
    for step in result.steps:
        title = f"{step.variable}: {step.question} (start: {step.start_value})"
        if step.skipped:
            click.echo(f"{title}\n  not tried: {step.skipped}")
            continue
        _print_candidates(title, step.candidates, step.chosen)
    if result.combined:
        _print_candidates("everything that helped, together", result.combined)
    for note in result.notes:
        click.echo(f"Note: {note}.")
    click.echo(result.conclusion[0].upper() + result.conclusion[1:] + ".")


def _print_candidates(title: str, candidates: Any, chosen: str | None = None) -> None:
    rows = []
    for candidate in candidates:
        last = candidate.comparisons[-1] if candidate.comparisons else None
        mark = "*" if candidate.value == chosen else ("ok" if candidate.accepted else "-")
        rows.append([candidate.value, mark, *_figures(last), candidate.reason])
    print_table(title, ["value", "", "at tokens", "time", "KV bytes", "why"], rows)


def _figures(comparison: Comparison | None) -> list[str]:
    if comparison is None:
        return ["n/a", "n/a", "n/a"]
    return [str(comparison.prompt_tokens), f"{comparison.time.mean:+.1%}", f"{comparison.kv_bytes:+.1%}"]
