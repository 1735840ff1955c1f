"""`gsm lint-prompt`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from gsm.cli.common import check_json_path, json_option, progress_bar, save

if TYPE_CHECKING:
    from gsm.prompt.lint import LintReport


@click.command()
@click.argument("file", metavar="FILE|LOG")
@click.option("--model", default="demo", show_default=True, help="Whose tokenizer and chat template; no weights load.")
@click.option("--page-size", type=click.IntRange(min=1), default=16, show_default=True, help="Of the prefix index.")
@json_option
def command(file: str, model: str, page_size: int, json_path: str | None) -> int:
    """Why prompts share no prefix, where it breaks, and the remedy; exit code 1 when something was found.

    FILE is a request with messages (or the messages alone): it is looked at turn by turn. LOG has one request per line
    and also gives the hit rate, now and after the remedies.
    """
    check_json_path(json_path)
    from gsm.config.reasoning import MARKERS
    from gsm.models import load_tokenizer
    from gsm.prompt.lint import Linter
    from gsm.prompt.lint_files import read_conversations

    conversations = read_conversations(file)
    linter = Linter(load_tokenizer(model), MARKERS, page_size)
    with progress_bar() as progress:
        report = linter.lint(conversations, lambda done, total: progress("reading prompts", done, total))
    print_report(report)
    save(json_path, report)
    return 1 if report.findings else 0


def print_report(report: LintReport) -> None:
    """Findings, the costliest first, then the hit rates."""
    for number, finding in enumerate(report.findings, 1):
        times = f", {finding.count} times" if finding.count > 1 else ""
        click.echo(f"{number}. {finding.cause}{times}: {finding.lost_tokens} tokens computed anew")
        click.echo(f"   at token {finding.at_token}: {finding.where}")
        click.echo(f"   remedy: {finding.remedy}")
    if not report.findings:
        click.echo("every prompt begins with the one before it")
    click.echo(
        f"{report.num_requests} prompts, {report.num_tokens} tokens; found in a prefix index: {report.hit_rate:.1%} "
        f"now, {report.hit_rate_after:.1%} with the remedies"
    )
