"""What the commands share: options, progress, result files. No torch here, so that `--help` is instant."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from gsm.quality import Progress

F = TypeVar("F", bound=Callable[..., Any])
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


def backend_option(command: F) -> F:
    """--backend and --window."""
    for decorate in (
        click.option(
            "--window",
            "window_tokens",
            type=click.IntRange(min=64),
            default=2048,
            show_default=True,
            help="Window of the llamacpp back end: what it never exceeds.",
        ),
        click.option(
            "--backend",
            type=click.Choice(("transformers", "llamacpp")),
            default="transformers",
            show_default=True,
            help="llamacpp runs a .gguf file in llama.cpp itself.",
        ),
    ):
        command = decorate(command)
    return command


def engine_option(command: F) -> F:
    """--engine."""
    return click.option(
        "--engine",
        type=click.Choice(("gsm", "vllm")),
        default="gsm",
        show_default=True,
        help="vllm: inside vLLM 0.32, where that is installed (docs/vllm.md).",
    )(command)


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
        yield line_per_step()
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total}"))
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as bar:
        task = bar.add_task("starting", total=None)

        def show(label: str, done: int, total: int) -> None:
            bar.update(task, description=label, completed=done, total=total)

        yield show


def line_per_step() -> Progress:
    """Progress for logs: one line whenever something new begins."""
    last = ""

    def show(label: str, done: int, total: int) -> None:
        nonlocal last
        if label != last:
            click.echo(f"  [{done}/{total}] {label}", err=True)
        last = label

    return show


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
