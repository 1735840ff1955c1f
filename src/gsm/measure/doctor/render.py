"""Findings as a table for the terminal."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from gsm.measure.doctor.record import DoctorResult

_MARKS = {"ok": "[green]ok[/green]", "warning": "[yellow]warning[/yellow]", "problem": "[bold red]problem[/bold red]"}


def render_doctor(result: DoctorResult, console: Console) -> None:
    """Print every finding with its remedy, then the sum."""
    table = Table(show_header=False, box=None, pad_edge=False)
    for column in ("status", "what", "found"):
        table.add_column(column, no_wrap=column != "found")
    section = ""
    for check in result.checks:
        if check.section != section:
            section = check.section
            table.add_row("", f"[bold]{section}[/bold]", "")
        found = check.found.replace("[", r"\[")
        remedy = f"\n[dim]-> {check.remedy}[/dim]".replace("gsm-infer[", r"gsm-infer\[") if check.remedy else ""
        table.add_row(_MARKS[check.status], check.name, found + remedy)
    console.print(table)
    counts = {status: sum(check.status == status for check in result.checks) for status in _MARKS}
    console.print(f"ok: {counts['ok']}, warnings: {counts['warning']}, problems: {counts['problem']}")
