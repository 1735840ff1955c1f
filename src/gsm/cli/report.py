"""`gsm report`."""

from __future__ import annotations

import click


@click.command()
@click.argument("files", nargs=-1, required=True)
@click.option("-o", "--output", default="report.html", show_default=True, metavar="FILE", help=".html or .md")
@click.option("--title", help="Heading; the models' names by default.")
@click.option("--json", "json_path", metavar="FILE", help="Also write the page's verdicts as JSON.")
def command(files: tuple[str, ...], output: str, title: str | None, json_path: str | None) -> None:
    """One self-contained page with pictures from result FILES of any gsm command."""
    import json
    import shlex

    from gsm.cli.common import check_json_path
    from gsm.report import compose, write_report

    for path in (output, json_path):
        check_json_path(path)
    made_by = shlex.join(["gsm", "report", *files, "-o", output])
    page = compose(files, title, made_by)
    write_report(output, page)
    click.echo(f"written: {output}", err=True)
    for verdict in page.verdicts:
        click.echo(verdict.text)
    if json_path is not None:
        from gsm.report.write import write_text

        verdicts = [{"level": v.level, "text": v.text, "source": v.source} for v in page.verdicts]
        write_text(json_path, json.dumps({"title": page.title, "verdicts": verdicts}, indent=2) + "\n")
