"""A load test on the terminal: progress while it runs, tables afterwards. Nothing measured is "n/a", never 0."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from gsm.measure.load.metrics import METRICS, MIN_SAMPLES_FOR_P99
from gsm.measure.load.runner import Phase, Schedule
from gsm.measure.load.session import OnProgress

_TITLES = {
    "ttft": "TTFT, first token",
    "ttft_reasoning": "  first of reasoning",
    "ttft_answer": "  first of answer",
    "tpot": "TPOT, per output token",
    "itl": "ITL, between tokens",
    "e2el": "E2E, whole response",
    "queue": "queue, before sending",
}
_PAIRED = {
    "ttft_ms": "TTFT, ms",
    "tpot_ms": "TPOT, ms",
    "itl_ms": "ITL, ms",
    "e2el_ms": "E2E, ms",
    "output_throughput": "tokens/s",
    "request_throughput": "requests/s",
}
_COUNTS = {
    "request_throughput": "requests/s",
    "output_throughput": "output tokens/s",
    "total_token_throughput": "input + output tokens/s",
    "request_goodput": "good requests/s",
    "mean_concurrency": "mean requests in flight",
    "client_cpu_percent_per_100_tokens_per_s": "client CPU, % of a core per 100 tokens/s",
}


@contextlib.contextmanager
def progress_on(console: Console) -> Iterator[OnProgress]:
    """A progress line; redrawn only when it is told something, so that drawing does not disturb the times."""
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[text]}"), TimeElapsedColumn())
    with Progress(*columns, console=console, auto_refresh=False, transient=True) as progress:
        task = progress.add_task("checking", total=None, text="")

        def show(name: str, schedule: Schedule, phase: Phase) -> None:
            done = len(phase.samples)
            bounded_by_time = schedule.duration_s < 3600 and schedule.num_requests > 100_000
            total = None if bounded_by_time else schedule.num_requests
            text = f"{done} done, {phase.num_failed} failed, {phase.num_started - done} in flight"
            progress.update(task, description=name, completed=done, total=total, text=text, refresh=True)

        yield show


def print_load(console: Console, result: Mapping[str, Any]) -> None:
    """One server's figures, failures and notes."""
    target = result["target"]
    console.print(f"[bold]{escape(target['url'])}[/]  model {escape(str(result['model_id']))}", highlight=False)
    console.print(_summary(result), highlight=False)
    console.print(_latency_table(result))
    for key, title in _COUNTS.items():
        if result.get(key) is not None:
            console.print(f"{title}: {_number(result[key])}", highlight=False)
    for kind, failure in result["failures"].items():
        console.print(
            f"[red]failed, {escape(kind)}: {failure['count']} x[/] {escape(failure['example'])}", highlight=False
        )
    _print_notes(console, result)


def print_comparison(console: Console, result: Mapping[str, Any]) -> None:
    """Both arms, then the paired differences."""
    for arm in "AB":
        console.rule(f"{arm}: {escape(result['labels'][arm])}")
        print_load(console, result[arm])
    console.rule("B - A")
    table = Table("mean of rounds")
    for title in ("A", "B", "B - A", "95 % interval", "relative"):
        table.add_column(title, justify="right")
    table.add_column("")
    for name, row in result["paired"].items():
        if row is None:
            table.add_row(_PAIRED[name], *["n/a"] * 5, "too few rounds")
            continue
        interval = f"{_number(row['low'])} .. {_number(row['high'])}"
        relative = "n/a" if row["relative"] is None else f"{100 * row['relative']:+.1f} %"
        verdict = "differs" if row["low"] > 0 or row["high"] < 0 else "no difference"
        figures = [_number(row[key]) for key in ("mean_a", "mean_b", "difference")]
        table.add_row(_PAIRED[name], *figures, interval, relative, verdict)
    console.print(table)
    _print_notes(console, result)


def _summary(result: Mapping[str, Any]) -> str:
    load = f"rate {result['request_rate']}/s, at most" if result["request_rate"] != "inf" else "concurrency"
    words = f"{result['completed']} completed, {result['failed']} failed in {result['duration']:.1f} s"
    return f"{words}; {load} {result['max_concurrency']}; {result['total_output_tokens']} output tokens"


def _latency_table(result: Mapping[str, Any]) -> Table:
    table = Table("milliseconds")
    for title in ("mean", "P50", "P95", "P99", "samples"):
        table.add_column(title, justify="right")
    for metric in METRICS:
        count = result[f"num_{metric}_samples"]
        if metric.startswith("ttft_") and not result["num_ttft_reasoning_samples"]:
            continue  # without reasoning there is only one first token
        cells = [_number(result[f"{key}_{metric}_ms"]) for key in ("mean", "median", "p95", "p99")]
        if 0 < count < MIN_SAMPLES_FOR_P99:
            cells[-1] += "*"
        table.add_row(_TITLES[metric], *cells, str(count))
    table.caption = f"* fewer than {MIN_SAMPLES_FOR_P99} samples"
    return table


def _print_notes(console: Console, result: Mapping[str, Any]) -> None:
    for note in result["notes"]:
        console.print(f"[dim]- {escape(note)}[/]", highlight=False)


def _number(value: float | None) -> str:
    if value is None:
        return "n/a"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"
