"""`gsm doctor`: is everything ready, and if not, what to do."""

from __future__ import annotations

import click


@click.command(short_help="Check software, devices and a model; every problem comes with its remedy.")
@click.argument("model", required=False)
@click.option("--dtype", help="Precision the model will be loaded in (default: its own).")
@click.option("--json", "json_file", metavar="FILE", help="Write the findings to FILE.")
def command(model: str | None, dtype: str | None, json_file: str | None) -> int:
    """Check software, devices and a model; exit code 1 when something will not work.

    MODEL is a model directory, a .gguf file, a hub id or the word demo. No weights are loaded.
    """
    from rich.console import Console

    from gsm.measure.doctor import examine, render_doctor
    from gsm.models.sizes import parse_dtype
    from gsm.results import check_writable, write_result

    if json_file:
        check_writable(json_file)
    dtype = parse_dtype(dtype) if dtype else None
    with Console(stderr=True).status("looking around") as status:
        result = examine(model, dtype=dtype, progress=lambda what: status.update(f"looking at {what}"))
    render_doctor(result, Console())
    if json_file:
        write_result(json_file, result)
    return 0 if result.passed else 1
