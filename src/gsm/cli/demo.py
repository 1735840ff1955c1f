"""`gsm demo`."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import click

from gsm.cli.common import check_json_path, json_option, progress_bar, save
from gsm.cli.tables import print_bench

if TYPE_CHECKING:
    from gsm.measure.bench import BenchSpec
    from gsm.results import ArmResult, BenchResult


@click.command()
@click.option("--quick", is_flag=True, help="A smaller workload: under 90 seconds on two cores.")
@click.option("--threads", type=click.IntRange(min=1), help="CPU threads; torch's own choice by default.")
@json_option
def command(quick: bool, threads: int | None, json_path: str | None) -> int:
    """See on a real model what GSM does: speed, memory and quality of several ways to run it.

    The fixed workload takes less than 6 minutes on two cores, --quick less than 90 seconds.
    """
    from gsm.measure.bench import bench

    check_json_path(json_path)
    with progress_bar() as progress:
        result = bench(demo_spec(quick, threads), progress)
    print_bench(result)
    click.echo()
    click.echo(verdict(result))
    save(json_path, result)
    return 130 if result.interrupted else 0


def demo_spec(quick: bool, threads: int | None = None) -> BenchSpec:
    """The fixed workload."""
    from gsm.measure.bench import BenchSpec

    full = BenchSpec(
        "demo", 2560, new_tokens=32, runs=1, num_windows=2, window_tokens=64, needles_per_depth=1, threads=threads,
        unchunked=False, wait_s=5,
    )  # fmt: skip
    if quick:
        return replace(
            full, prompt_tokens=1280, new_tokens=16, arms=("transformers", "sparse"), num_windows=1,
            window_tokens=32,
        )  # fmt: skip
    return full


def verdict(result: BenchResult) -> str:
    """Two sentences: what sparse attention over tiers gains here, and what it costs."""
    arms = {arm.name: arm for arm in result.arms}
    plain, sparse = arms["transformers"], arms["sparse"]
    if plain.tpot_ms.median is None or sparse.tpot_ms.median is None:
        return "The demo was interrupted before every arm was measured. No verdict."
    ratio = plain.tpot_ms.median / sparse.tpot_ms.median
    speed = f"{ratio:.2f} times as fast" if ratio >= 1 else f"{1 / ratio:.2f} times slower"
    first = (
        f"At {result.workload.prompt_tokens} tokens of context, sparse attention over tiers decodes {speed} per token "
        f"{'as' if ratio >= 1 else 'than'} plain transformers{_memory(plain, sparse)}."
    )
    noisy = ", on a machine that others were using" if result.environment.noisy else ""
    return f"{first} {_price(sparse)}{noisy}; for numbers to rely on, run `gsm bench demo --prompt-tokens 7680`."


def _memory(plain: ArmResult, sparse: ArmResult) -> str:
    if not plain.kv_bytes or sparse.kv_bytes is None:
        return ""
    return f", and holds the whole context in {sparse.kv_bytes / plain.kv_bytes:.0%} of its KV bytes"


def _price(sparse: ArmResult) -> str:
    quality = sparse.quality
    if quality is None or quality.kl is None:
        return "What that costs in quality was not measured"
    price = f"It costs {quality.kl:.2g} nats of KL per token"
    if quality.prefill_pair and quality.late_pair:
        lost = quality.prefill_pair.lost + quality.late_pair.lost
        known = quality.prefill_pair.reference_found + quality.late_pair.reference_found
        price += f" and {lost} of {known} needles that the full cache finds"
    return f"{price} (few samples: an impression)"
