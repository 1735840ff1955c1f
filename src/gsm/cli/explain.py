"""`gsm explain`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from gsm.cli.common import check_json_path, json_option, model_options, progress_bar, save

if TYPE_CHECKING:
    from gsm.measure.explain import ExplainResult


@click.command()
@model_options
@click.option("--config", required=True, metavar="FILE", help="Config file, or the name of an arm such as evict.")
@click.option(
    "--prompt-file", metavar="FILE", help="UTF-8 text of the prompt; real text of --prompt-tokens by default."
)
@click.option("--prompt-tokens", type=click.IntRange(min=1), default=2048, show_default=True)
@click.option("--new-tokens", type=click.IntRange(min=0), default=64, show_default=True)
@click.option("--token", type=int, help="Also explain one logical position, in every layer and kv head.")
@click.option("--picture", metavar="FILE", help="Draw the tier map over the sequence (PNG).")
@json_option
def command(json_path: str | None, picture: str | None, **settings: Any) -> None:
    """Where every token of a sequence is after MODEL ran CONFIG, or why and when it went."""
    check_json_path(json_path)
    from gsm.kv.picture import draw_positions
    from gsm.measure.explain import ExplainSpec, explain

    with progress_bar() as progress:
        result, positions = explain(ExplainSpec(**settings), progress)
    print_explanation(result, settings["config"])
    if picture is not None:
        draw_positions(positions, picture, f"{result.environment.model}, {settings['config']}")
        click.echo(f"written: {picture}", err=True)
    save(json_path, result)


def print_explanation(result: ExplainResult, name: str) -> None:
    """Shares by tier, what went when, and the token that was asked for."""
    from gsm.cli.tables import print_table

    positions = result.positions
    shares = positions["share_by_tier"]
    title = f"{name}: {positions['num_tokens']} tokens in {positions['num_streams']} layers x kv heads"
    print_table(title, ["tier", "share of tokens"], [[tier, f"{share:.1%}"] for tier, share in shares.items()])
    if positions["removals"]:
        total = positions["num_tokens"] * positions["num_streams"]
        rows = [[r["reason"], str(r["at_num_tokens"]), f"{r['num_tokens'] / total:.2%}"] for r in positions["removals"]]
        print_table("Removed", ["by", "at length", "share of tokens"], rows)
    if result.token is not None:
        columns = ["layer", "head", "tier", "page", "page_id", "stored", "unit", "compact_position"]
        columns += ["removed_by", "removed_at"]
        rows = [["" if place[c] is None else str(place[c]) for c in columns] for place in result.token]
        print_table("The token", columns, rows)
