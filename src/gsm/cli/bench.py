"""`gsm bench`."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import click

from gsm.cli.common import (
    backend_option,
    check_json_path,
    engine_option,
    json_option,
    model_options,
    progress_bar,
    quality_options,
    save,
)
from gsm.cli.tables import print_bench


@click.command()
@model_options
@backend_option
@engine_option
@click.option("--prompt-tokens", type=click.IntRange(min=1), default=1024, show_default=True)
@click.option("--new-tokens", type=click.IntRange(min=1), default=64, show_default=True)
@click.option("--runs", type=click.IntRange(min=1), default=3, show_default=True, help="Timed runs of each arm.")
@click.option("--batch-size", type=click.IntRange(min=1), default=1, show_default=True)
@click.option(
    "--arms",
    default="transformers,full,tiers,sparse",
    show_default=True,
    help="Comma-separated arms; the path of a config file is an arm too.",
)
@click.option("--chunk-tokens", type=click.IntRange(min=1), default=1024, show_default=True, help="Prefill chunk.")
@click.option("--quality/--no-quality", default=True, show_default=True, help="Measure quality beside speed.")
@quality_options
@click.option("--profile", is_flag=True, help="Split a decode step of every arm into its parts.")
@click.option("--wait", "wait_s", type=click.FloatRange(min=0), default=60.0, help="Seconds to wait for quiet.")
@json_option
def command(
    arms: str, quality: bool, json_path: str | None, backend: str, engine: str, window_tokens: int, **sizes: Any
) -> int:
    """Speed, memory and quality of several ways to run MODEL, side by side on this machine.

    MODEL is a directory, a hub id, a .gguf file, or the word demo. Ctrl-C keeps what is complete.
    """
    from gsm.measure.bench import BenchSpec, bench

    check_json_path(json_path)
    if not quality:
        sizes.update(num_windows=0, needles_per_depth=0)
    names = tuple(name.strip() for name in arms.split(",") if name.strip())
    if engine == "vllm":
        return _vllm(names, json_path, sizes)
    if backend == "llamacpp":
        return _llamacpp(json_path, window_tokens, sizes)
    with progress_bar() as progress:
        result = bench(BenchSpec(arms=names, **sizes), progress)
    print_bench(result)
    save(json_path, result)
    return 130 if result.interrupted else 0


def _llamacpp(json_path: str | None, window_tokens: int, sizes: dict[str, Any]) -> int:
    from gsm.measure.bench.llamacpp import GgufBenchSpec, bench_gguf

    names = ("prompt_tokens", "new_tokens", "runs", "threads", "text", "num_windows", "needles_per_depth", "wait_s")
    with progress_bar() as progress:
        spec = GgufBenchSpec(_gguf_path(sizes["model"]), window_tokens, **{name: sizes[name] for name in names})
        result = bench_gguf(spec, progress)
    print_bench(result)
    save(json_path, result)
    return 0


def _vllm(names: tuple[str, ...], json_path: str | None, sizes: dict[str, Any]) -> int:
    """Speed only; `gsm eval --engine vllm` measures quality."""
    from gsm.measure.vllm import VllmBenchSpec, bench_vllm

    sizes["arms"] = names
    with progress_bar() as progress:
        spec = VllmBenchSpec(**{f.name: sizes[f.name] for f in fields(VllmBenchSpec) if f.name in sizes})
        result = bench_vllm(spec, progress)
    print_bench(result)
    save(json_path, result)
    return 0


def _gguf_path(model: str) -> Any:
    from gsm.models.sources import DEMO, demo_gguf_path

    return demo_gguf_path() if model == DEMO else model
