"""What the commands share: options, progress on the terminal, tables. No torch here, so that `--help` is instant."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from gsm.quality import Progress
    from gsm.results import BenchResult, Quality, Spread

F = TypeVar("F", bound=Callable[..., Any])
NA = "n/a"
DTYPE_CHOICES = ("float32", "bfloat16", "float16", "auto")


def model_options(command: F) -> F:
    """MODEL, --dtype, --threads and --device."""
    for decorate in (
        click.option("--device", default="cpu", show_default=True, help="cpu, cuda or cuda:N."),
        click.option("--threads", type=click.IntRange(min=1), help="CPU threads; torch's own choice by default."),
        click.option("--dtype", type=click.Choice(DTYPE_CHOICES), default="float32", show_default=True),
        click.argument("model"),
    ):
        command = decorate(command)
    return command


def json_option(command: F) -> F:
    """--json FILE."""
    option = click.option("--json", "json_path", metavar="FILE", help="Write the result here as JSON.")
    return option(command)


def quality_options(command: F) -> F:
    """--text, --windows, --windows-per-prefill, --needles."""
    for decorate in (
        click.option(
            "--needles",
            "needles_per_depth",
            type=click.IntRange(min=0),
            default=10,
            show_default=True,
            help="Needles per depth (10, 50, 90 %) and case.",
        ),
        click.option(
            "--windows-per-prefill",
            type=click.IntRange(min=1),
            default=2,
            show_default=True,
            help="Consecutive windows that share one prefill.",
        ),
        click.option(
            "--windows",
            "num_windows",
            type=click.IntRange(min=0),
            default=16,
            show_default=True,
            help="Teacher-forced windows of 128 tokens.",
        ),
        click.option("--text", metavar="FILE", help="UTF-8 text to measure on; Python's help topics by default."),
    ):
        command = decorate(command)
    return command


@contextmanager
def progress_bar() -> Iterator[Progress]:
    """A progress bar on standard error; one line per new step where that is no terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        yield _line_per_label
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total}"))
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as bar:
        task = bar.add_task("starting", total=None)

        def show(label: str, done: int, total: int) -> None:
            bar.update(task, description=label, completed=done, total=total)

        yield show


def _line_per_label(label: str, done: int, total: int) -> None:
    click.echo(f"  [{done}/{total}] {label}", err=True)


def format_ms(spread: Spread | None) -> str:
    """Median with its spread, in milliseconds."""
    if spread is None or spread.median is None:
        return NA
    digits = 0 if spread.median >= 1000 else 1
    return f"{spread.median:.{digits}f} ({spread.min:.{digits}f}-{spread.max:.{digits}f})"


def format_bytes(number: int | None) -> str:
    """Mebibytes with one digit."""
    return NA if number is None else f"{number / 2**20:.1f}"


def format_number(number: float | None, digits: int = 4) -> str:
    return NA if number is None else f"{number:.{digits}g}"


def format_share(share: float | None) -> str:
    """A share from 0 to 1 in per cent."""
    return NA if share is None else f"{100 * share:.1f}"


def format_needles(quality: Quality | None) -> str:
    """Needles found in both cases, of how many."""
    if quality is None or not (quality.prefill_pair and quality.late_pair):
        return NA
    return f"{quality.prefill_pair.found} / {quality.late_pair.found} of {quality.n_needles}"


def format_kl(quality: Quality | None) -> str:
    """Mean KL with its interval."""
    if quality is None or quality.kl is None:
        return NA
    if quality.kl_ci95 is None:
        return f"{quality.kl:.2g}"
    return f"{quality.kl:.2g} [{quality.kl_ci95[0]:.2g}, {quality.kl_ci95[1]:.2g}]"


def print_table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """One table on standard output, never cut at the terminal's width."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for index, name in enumerate(header):
        table.add_column(name, justify="left" if index == 0 else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    console = Console(soft_wrap=True)
    needed = console.measure(table).maximum
    Console(width=max(needed, console.width), soft_wrap=True).print(table)


def print_bench(result: BenchResult) -> None:
    """The table of a benchmark, then what one must know to read it."""
    work, env = result.workload, result.environment
    title = (
        f"{env.model}, {env.dtype}, {env.device}, {env.threads} threads: {work.prompt_tokens} prompt + "
        f"{work.new_tokens} new tokens, batch {work.batch_size}, {work.runs} runs"
    )
    header = (
        "arm", "TTFT ms", "TPOT ms", "floor ms", "KV MiB", "reserved", "peak RSS", "attended",
        "KL", "top-1 %", "needles (in / late)",
    )  # fmt: skip
    rows = [
        (
            arm.name,
            format_ms(arm.ttft_ms),
            format_ms(arm.tpot_ms),
            format_number(arm.bound.tpot_ms if arm.bound else None, 3),
            format_bytes(arm.kv_bytes),
            format_bytes(arm.kv_pool_bytes),
            format_bytes(arm.peak_rss_bytes),
            format_number(arm.attended_tokens_mean, 5),
            format_kl(arm.quality),
            format_share(arm.quality.top1_agreement if arm.quality else None),
            format_needles(arm.quality),
        )
        for arm in result.arms
    ]
    print_table(title, header, rows)
    for line in bench_notes(result):
        click.echo(line)


def bench_notes(result: BenchResult) -> list[str]:
    """How the numbers were taken and what weakens them."""
    work, env = result.workload, result.environment
    notes = [
        f"median (min-max) of {work.runs} runs, arms in turn, prefill in chunks of {work.prefill_chunk_tokens}; "
        + ("one warm-up run of each arm was thrown away." if work.warmup_runs else "no warm-up run.")
    ]
    for arm in result.arms:
        if arm.ttft_unchunked_ms:
            notes.append(f"TTFT of {arm.name} without chunks: {format_ms(arm.ttft_unchunked_ms)} ms.")
    if env.noisy:
        notes.append(f"NOISY: others used {100 * (env.other_cpu_share or 0):.0f} % of the machine meanwhile.")
    if result.interrupted:
        notes.append("INTERRUPTED: only complete runs and windows are in here.")
    notes += [f"note: {note}." for note in result.notes]
    for arm in result.arms:
        notes += [f"note: {arm.name}: {note}." for note in (arm.quality.notes if arm.quality else ())]
    return notes


def save(json_path: str | None, result: Any) -> None:
    """Write the result file, if one was asked for."""
    from gsm.results import write_result

    if json_path is not None:
        write_result(json_path, result)
        click.echo(f"written: {json_path}", err=True)


def check_json_path(json_path: str | None) -> None:
    """Refuse an impossible --json before anything is measured."""
    from gsm.results import check_writable

    if json_path is not None:
        check_writable(json_path)


def is_interactive() -> bool:
    return sys.stdout.isatty()
