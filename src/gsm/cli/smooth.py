"""`gsm smooth`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from gsm.cli.common import check_json_path, json_option, model_options, progress_bar, save
from gsm.cli.tables import format_bytes, format_number, print_table

if TYPE_CHECKING:
    from gsm.guard.records import Change, SmoothResult


@click.command()
@model_options
@click.option("--config", required=True, metavar="FILE", help="Config file with a smoothing section.")
@click.option("-o", "--output", metavar="DIR", help="Write the folded checkpoint here (methods channel and rotate).")
@click.option("--text", metavar="FILE", help="UTF-8 text; Python's help topics by default. Cut into disjoint thirds.")
@click.option("--calibration", metavar="FILE", help="A file made by `gsm calibrate`, instead of calibrating now.")
@click.option("--gradients", is_flag=True, help="Calibrate with gradients: roll-backs are ordered by sensitivity.")
@click.option("--prompt-tokens", type=click.IntRange(min=1), default=2048, show_default=True, help="Prefill to time.")
@click.option("--dry-run", is_flag=True, help="Say what would be smoothed and why; measure and write nothing.")
@json_option
def command(
    model: str,
    dtype: str,
    threads: int | None,
    device: str,
    config: str,
    output: str | None,
    text: str | None,
    calibration: str | None,
    gradients: bool,
    prompt_tokens: int,
    dry_run: bool,
    json_path: str | None,
) -> int:
    """Smooth MODEL, prove its quality, measure its speed, and export it; exit code 1 when the guard refuses it."""
    from pathlib import Path

    import torch

    from gsm.config import load_config
    from gsm.guard.pipeline import SmoothPlan, smooth_model
    from gsm.models import load_model
    from gsm.quality.texts import load_thirds
    from gsm.results import collect_environment
    from gsm.smoothing import Calibration
    from gsm.smoothing.export import check_target

    check_json_path(json_path)
    plan = SmoothPlan(
        config=load_config(config).smoothing,
        calibration=Calibration.load(calibration) if calibration else None,
        export_to=check_target(Path(output)) if output else None,
        dry_run=dry_run,
        gradients=gradients,
        prompt_tokens=prompt_tokens,
    )
    thirds = load_thirds(text)
    loaded = load_model(model, dtype=dtype, threads=threads, device=device)
    environment = collect_environment(
        model=loaded.name, dtype=dtype, device=device, threads=threads or torch.get_num_threads()
    )
    with progress_bar() as progress:
        result = smooth_model(loaded, thirds, plan, environment, progress)
    print_smooth(result)
    save(json_path, result)
    return 0 if dry_run or (result.outcome is not None and result.outcome.accepted) else 1


def print_smooth(result: SmoothResult) -> None:
    """What was chosen, what the guard said, and the verdict table."""
    _print_choices(result)
    if result.outcome is not None:
        rows = _verdict_rows(result)
        tokens = result.outcome.verdict.num_tokens
        print_table(f"{result.environment.model}: verdict on {tokens} evaluation tokens", ["", "before", "after"], rows)
        if result.outcome.culprits:
            click.echo("Culprits, rolled back: " + ", ".join(result.outcome.culprits))
        others = [name for name in result.outcome.rolled_back if name not in result.outcome.culprits]
        if others:
            click.echo("Also rolled back, for the sum of small damage: " + ", ".join(others))
    for note in result.notes:
        click.echo(f"Note: {note}.")
    if result.exported_to:
        click.echo(f"written: {result.exported_to}", err=True)
    click.echo(result.conclusion[0].upper() + result.conclusion[1:] + ".")


def _print_choices(result: SmoothResult) -> None:
    chosen = [choice for choice in result.choices if choice.chosen]
    if result.choices:
        click.echo(f"Smoothed: {len(chosen)} of {len(result.choices)} sites.")
        for choice in chosen[:8]:
            click.echo(f"  {choice.name}: {choice.reason}")
        if len(chosen) > 8:
            click.echo(f"  ... and {len(chosen) - 8} more (all reasons are in --json)")
    for name, reason in list(result.left_out.items())[:4]:
        click.echo(f"  left out {name}: {reason}")
    if result.int8_modules:
        before, after = format_bytes(result.weight_bytes_before), format_bytes(result.weight_bytes_after)
        click.echo(f"int8: {len(result.int8_modules)} linear layers; weights {before} -> {after} MiB.")


def _verdict_rows(result: SmoothResult) -> list[list[str]]:
    assert result.outcome is not None
    verdict, config = result.outcome.verdict, result.outcome.config
    method = config.method if config.enable else "none"
    rows = [
        ["method", "-", f"{method}, int8 {config.int8}"],
        ["perplexity", format_number(verdict.perplexity_before, 4), format_number(verdict.perplexity_after, 4)],
        ["  change (95 % interval)", "", _percent(verdict.perplexity_change)],
        ["  on sequences of 32 tokens", "", _percent(verdict.short_change)],
        ["KL, nats", "", "n/a" if verdict.kl is None else f"{verdict.kl.mean:.3g}"],
        ["same best token, %", "", "n/a" if verdict.top1 is None else f"{100 * verdict.top1:.1f}"],
    ]
    if result.tails_before and result.tails_after:
        rows.append(["kurtosis, median site", f"{result.tails_before.median:.3g}", f"{result.tails_after.median:.3g}"])
        rows.append(["  heaviest site", f"{result.tails_before.largest:.3g}", f"{result.tails_after.largest:.3g}"])
    if speed := result.speed:
        for label, before, after in (
            (f"prefill of {speed.prompt_tokens} tokens, s", speed.prefill_s_before, speed.prefill_s_after),
            ("decode at short context, ms", speed.decode_ms_before, speed.decode_ms_after),
            ("one block's products, ms", speed.products_ms_before, speed.products_ms_after),
        ):
            rows.append([label, format_number(before.median), format_number(after.median)])
        if speed.prefill_s_linear and speed.decode_ms_linear:
            rows.append(["  prefill with GSM's linear layers, s", format_number(speed.prefill_s_linear.median), ""])
            rows.append(["  decode with GSM's linear layers, ms", format_number(speed.decode_ms_linear.median), ""])
        rows.append(["smoothing's own cost, ms/token", "0", format_number(speed.own_cost_ms_per_token)])
    return rows


def _percent(change: Change | None) -> str:
    if change is None:
        return "n/a"
    return f"{change.mean:+.2%} ({change.low:+.2%} to {change.high:+.2%})"
