"""`gsm diagnose`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from gsm.cli.common import DTYPE_CHOICES, check_json_path, json_option, progress_bar, save

if TYPE_CHECKING:
    from gsm.measure.diagnose.record import DiagnoseResult


@click.command()
@click.argument("targets", nargs=-1, required=True, metavar="RESULT... | MODEL")
@click.option("--config", metavar="FILE", help="Run MODEL with this config file or arm and watch it.")
@click.option("--prompt-tokens", type=click.IntRange(min=64), default=1024, show_default=True)
@click.option("--new-tokens", type=click.IntRange(min=16), default=32, show_default=True)
@click.option("--text", metavar="FILE", help="UTF-8 text; Python's help topics by default.")
@click.option("--max-kl", type=click.FloatRange(min=0), default=0.02, show_default=True, help="Above this, look why.")
@click.option("--dtype", type=click.Choice(DTYPE_CHOICES), default="float32", show_default=True)
@click.option("--threads", type=click.IntRange(min=1), help="CPU threads; torch's own choice by default.")
@click.option("--device", default="cpu", show_default=True, help="cpu, cuda or cuda:N.")
@json_option
def command(targets: tuple[str, ...], config: str | None, json_path: str | None, **settings: Any) -> int:
    """Name the cause of a trouble: from RESULT files, or from a run of MODEL with --config; exit code 1 if any.

    A run is compared with the full cache; where something is wrong, one setting at a time is turned until the cause is
    known.
    """
    from gsm.errors import InputError
    from gsm.measure.diagnose import DiagnoseSpec, diagnose_files, diagnose_run

    check_json_path(json_path)
    if config is None:
        result = diagnose_files(targets)
    elif len(targets) != 1:
        raise InputError(f"--config runs one model, but {len(targets)} were named; name one")
    else:
        with progress_bar() as progress:
            result = diagnose_run(DiagnoseSpec(model=targets[0], config=config, **settings), progress)
    print_diagnosis(result)
    save(json_path, result)
    return 1 if any(not item.advice for item in result.findings) else 0


def print_diagnosis(result: DiagnoseResult) -> None:
    """What was checked, then every finding with its remedy."""
    for item in result.checked:
        click.echo(f"  {item.what}: {item.found}")
    for found in result.findings:
        mark = "advice" if found.advice else "cause"
        click.echo(f"{mark}: {found.cause} ({found.symptom})\n    {found.evidence}\n    remedy: {found.remedy}")
    for note in result.notes:
        click.echo(f"Note: {note}.")
    if not result.findings:
        click.echo("Nothing wrong was found.")
