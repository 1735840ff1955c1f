"""`gsm probe`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from gsm.cli.common import check_json_path, json_option, model_options, progress_bar, save
from gsm.cli.tables import NA, format_number, print_table

if TYPE_CHECKING:
    from gsm.measure.probe import ProbeResult


@click.command()
@model_options
@click.option("--prompt-tokens", type=click.IntRange(min=1), default=1024, show_default=True)
@click.option("--new-tokens", type=click.IntRange(min=1), default=1024, show_default=True)
@click.option("--batch-size", type=click.IntRange(min=1), default=1, show_default=True)
@click.option("--text", metavar="FILE", help="UTF-8 text to read prompts from; Python's help topics by default.")
@click.option(
    "--lengths", default="", help="Comma-separated context lengths to predict levers at; the last by default."
)
@click.option(
    "--levers",
    default="tiers,sparse,sparse-int4,bfloat16,batch",
    show_default=True,
    help="What to predict: arms of gsm bench, config files, bfloat16, batch.",
)
@click.option("--verify", is_flag=True, help="Measure what is predicted.")
@click.option("--plot", "plot_path", metavar="FILE", help="Draw time per token against length (PNG or SVG).")
@click.option("--chunk-tokens", type=click.IntRange(min=1), default=1024, show_default=True, help="Prefill chunk.")
@click.option("--wait", "wait_s", type=click.FloatRange(min=0), default=60.0, help="Seconds to wait for quiet.")
@json_option
def command(lengths: str, levers: str, plot_path: str | None, json_path: str | None, **settings: Any) -> int:
    """Is it the cache? What bounds a request to MODEL on this machine, and what would help, by how much.

    MODEL is a directory, a hub id, a .gguf file, or the word demo. Ctrl-C keeps what is complete.
    """
    from gsm.measure.probe import ProbeSpec, draw, probe

    check_json_path(json_path)
    check_json_path(plot_path)
    spec = ProbeSpec(lengths=_lengths(lengths), levers=_words(levers), **settings)
    with progress_bar() as progress:
        result = probe(spec, progress)
    print_probe(result)
    save(json_path, result)
    if plot_path is not None:
        draw(result, plot_path)
        click.echo(f"written: {plot_path}", err=True)
    return 130 if result.interrupted else 0


def _words(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(",") if word.strip())


def _lengths(text: str) -> tuple[int, ...]:
    words = _words(text)
    wrong = next((word for word in words if not word.isdecimal()), None)
    if wrong is not None:
        raise click.BadParameter(
            f"'{wrong}' is not a number of tokens; write for example 2048,4096", param_hint="--lengths"
        )
    return tuple(int(word) for word in words)


def print_probe(result: ProbeResult) -> None:
    """The curve, the split, the verdict, then what to do about it."""
    from gsm.measure.probe import sparkline

    work, env, growth = result.workload, result.environment, result.growth
    click.echo(
        f"{env.model}, {env.dtype}, {env.device}, {env.threads} threads: {work.prompt_tokens} prompt + "
        f"{work.new_tokens} new tokens, batch {work.batch_size}, plain transformers"
    )
    click.echo(f"First token after {result.ttft_ms / 1e3:.1f} s. Time per token, from 0 up, as the context grows:")
    click.echo(f"  {sparkline(result.token_ms)}")
    if growth is not None:
        click.echo(
            f"  {growth.us_per_token:.2f} us more per token of context (95 %: {growth.low:.2f} to {growth.high:.2f}); "
            f"{growth.at(result.context_tokens[-1]):.0f} ms at the end"
        )
    _print_split(result)
    click.echo(result.verdict.sentence)
    for sentence in result.cheaper_first:
        click.echo(f"Cheaper first: {sentence}.")
    _print_levers(result)
    if result.interrupted:
        click.echo("INTERRUPTED: only what was complete is in here.")
    for note in result.notes:
        click.echo(f"Note: {note}.")


def _print_split(result: ProbeResult) -> None:
    from gsm.measure.probe import step_parts

    if result.profile is None or result.shares is None:
        return
    parts, shares = step_parts(result.profile), result.shares
    names = {"weights": "reading weights", "kv": "attention and cache", "overhead": "small operations, Python"}
    rows = [["before the first token", NA, f"{100 * shares.prefill:.0f}"]]
    rows += [[label, f"{parts[name]:.1f}", f"{100 * getattr(shares, name):.0f}"] for name, label in names.items()]
    title = f"Where the time goes (a step after {result.profile.context_tokens} tokens)"
    print_table(title, ["", "ms per step", "% of the request"], rows)


def _print_levers(result: ProbeResult) -> None:
    if not result.levers:
        return
    rows = [
        [
            str(lever.context_tokens),
            lever.name,
            f"{lever.plain_ms:.1f}",
            f"{lever.predicted_ms:.1f}",
            f"{lever.predicted_gain:.2f}",
            format_number(lever.measured_gain),
            NA if lever.error is None else f"{100 * lever.error:+.0f}",
        ]
        for lever in result.levers
    ]
    header = ["tokens", "lever", "plain, ms", "with it, ms", "gain", "measured", "error, %"]
    print_table("What each lever is predicted to give (per token)", header, rows)
