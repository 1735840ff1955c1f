"""`gsm convert`: change a model's attention; so far, fewer kv heads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from gsm.cli.common import DTYPE_CHOICES, check_json_path, json_option, progress_bar, save

if TYPE_CHECKING:
    from gsm.convert import ConvertResult, PerplexityChange


@click.group()
def command() -> None:
    """Change a model's attention and say what it cost."""


@command.command()
@click.argument("model")
@click.option("--kv-heads", "num_kv_heads", type=click.IntRange(min=1), required=True, help="Kv heads afterwards.")
@click.option("-o", "--output", required=True, metavar="DIR", help="The new checkpoint, a Hugging Face directory.")
@click.option("--uptrain", metavar="TEXT", help="UTF-8 file to train on, or 'topics'; its last third evaluates.")
@click.option("--steps", type=click.IntRange(min=2), default=100, show_default=True, help="Training steps.")
@click.option("--batch", type=click.IntRange(min=1), default=2, show_default=True, help="Sequences of 256 per step.")
@click.option("--windows", "num_windows", type=click.IntRange(min=2), default=16, show_default=True)
@click.option("--dtype", type=click.Choice(DTYPE_CHOICES), default="float32", show_default=True)
@click.option("--threads", type=click.IntRange(min=1), help="CPU threads; torch's own choice by default.")
@click.option("--overwrite", is_flag=True, help="Replace DIR if it exists.")
@json_option
def gqa(json_path: str | None, **settings: Any) -> None:
    """Mean-pool the K/V heads of MODEL into fewer groups (GQA, MQA).

    The cache shrinks in proportion. Without further training the loss of quality is large; --uptrain wins part of it
    back.
    """
    check_json_path(json_path)
    from gsm.convert import ConvertSpec, convert_gqa

    with progress_bar() as progress:
        result = convert_gqa(ConvertSpec(**settings), progress)
    for line in report(result):
        click.echo(line)
    save(json_path, result)


def report(result: ConvertResult) -> list[str]:
    """What was saved and what it cost, in words."""
    saved = 1 - result.kv_bytes_per_token_after / result.kv_bytes_per_token_before
    lines = [
        f"kv heads {result.kv_heads_before} -> {result.kv_heads_after}: {result.kv_bytes_per_token_before:,.0f} -> "
        f"{result.kv_bytes_per_token_after:,.0f} KV bytes per token, {saved:.0%} saved",
        f"perplexity {result.perplexity_before:.2f} before, on {result.evaluation_tokens} tokens of "
        f"{result.evaluation_text} that were not trained on",
        "pooled:    " + _change(result.pooled),
    ]
    if result.uptrained is not None and result.uptrain is not None:
        done = result.uptrain
        lines.append("uptrained: " + _change(result.uptrained))
        back = f"{done.recovered:.0%} of the lost log-perplexity came back" if done.recovered is not None else "no loss"
        lines.append(f"{back} in {done.steps} steps ({done.tokens} tokens, {done.cpu_s:.0f} s of CPU)")
    elif result.pooled.ratio > 1.05:
        lines.append("a loss of that size needs further training; --uptrain TEXT starts it")
    return [*lines, f"written: {result.output}"]


def _change(change: PerplexityChange) -> str:
    interval = change.ratio_ci95
    spread = f" ({interval[0]:.3g} to {interval[1]:.3g})" if interval else ""
    return (
        f"perplexity {change.perplexity:.2f}, {change.ratio:.3g} x{spread}; KL {change.kl:.3g}; "
        f"{change.top1_agreement:.1%} same best token"
    )
