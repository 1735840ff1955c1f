"""Results as tables on the terminal. What was not measured is "n/a"."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from gsm.results import ArmResult, BenchResult, NeedlePair, Profile, Quality, Spread

NA = "n/a"


def format_number(number: float | None, digits: int = 3) -> str:
    """``digits`` significant digits, but never fewer than the integer part has."""
    if number is None:
        return NA
    return f"{number:.0f}" if abs(number) >= 10 ** (digits - 1) else f"{number:.{digits}g}"


def format_range(spread: Spread | None) -> str:
    if spread is None or spread.min is None or spread.max is None:
        return NA
    return f"{format_number(spread.min)}-{format_number(spread.max)}"


def format_bytes(number: int | None) -> str:
    """Mebibytes with one digit."""
    return NA if number is None else f"{number / 2**20:.1f}"


def format_share(share: float | None) -> str:
    """A share from 0 to 1 in per cent."""
    return NA if share is None else f"{100 * share:.1f}"


def format_interval(quality: Quality) -> str:
    """The 95 % interval of the KL."""
    return NA if quality.kl_ci95 is None else " to ".join(f"{end:.2g}" for end in quality.kl_ci95)


def format_needles(pair: NeedlePair | None) -> str:
    """Needles found, of how many; in brackets how many of the full cache's were lost."""
    if pair is None:
        return NA
    return f"{pair.found}/{pair.asked}" + (f" (-{pair.lost})" if pair.lost else "")


QUALITY_ROWS: tuple[tuple[str, Callable[[Quality], str]], ...] = (
    ("KL to the full cache, nats", lambda q: NA if q.kl is None else f"{q.kl:.2g}"),
    ("  95 % interval", format_interval),
    ("change of loss, nats", lambda q: NA if q.nll_delta is None else f"{q.nll_delta:+.2g}"),
    ("same best token, %", lambda q: format_share(q.top1_agreement)),
    ("needles, asked in prompt", lambda q: format_needles(q.prefill_pair)),
    ("needles, asked afterwards", lambda q: format_needles(q.late_pair)),
)
ARM_ROWS: tuple[tuple[str, Callable[[ArmResult], str]], ...] = (
    ("first token (TTFT), ms", lambda arm: format_number(arm.ttft_ms.median)),
    ("  min-max", lambda arm: format_range(arm.ttft_ms)),
    ("each token (TPOT), ms", lambda arm: format_number(arm.tpot_ms.median)),
    ("  min-max", lambda arm: format_range(arm.tpot_ms)),
    ("  physical floor", lambda arm: format_number(arm.bound.tpot_ms if arm.bound else None)),
    ("KV cache, MiB", lambda arm: format_bytes(arm.kv_bytes)),
    ("  reserved", lambda arm: format_bytes(arm.kv_pool_bytes)),
    ("peak memory, MiB", lambda arm: format_bytes(arm.peak_rss_bytes)),
    ("peak GPU memory, MiB", lambda arm: format_bytes(arm.peak_device_bytes)),
    ("tokens attended", lambda arm: format_number(arm.attended_tokens_mean, 4)),
)


def quality_rows(qualities: Sequence[Quality | None]) -> list[list[str]]:
    """One row per quality figure, one column per record."""
    return [[label, *(NA if q is None else show(q) for q in qualities)] for label, show in QUALITY_ROWS]


def arm_rows(arms: Sequence[ArmResult]) -> list[list[str]]:
    """One row per figure of speed and memory; the GPU's only where there is one."""
    rows = [[label, *(show(arm) for arm in arms)] for label, show in ARM_ROWS]
    return [row for row in rows if "GPU" not in row[0] or set(row[1:]) != {NA}]


def print_table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """One table on standard output. Arms are columns, so that four of them fit 80 characters."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for index, name in enumerate(header):
        table.add_column(name, justify="left" if index == 0 else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    click.echo(title)
    Console(width=1000, highlight=False, markup=False).print(table)


PROFILE_ROWS = (
    ("linear layers", "linear"),
    ("attention", "attention"),
    ("choosing pages", "selection"),
    ("attention mass", "mass"),
    ("cache writes", "cache_writes"),
    ("smoothing", "smoothing"),
    ("host and small operations", "host"),
    ("other", "other"),
)


def print_profiles(names: Sequence[str], profiles: Sequence[Profile | None]) -> None:
    """Where a decode step's time goes, one column per arm; nothing when nothing was profiled."""
    known = [profile for profile in profiles if profile is not None]
    if not known:
        return
    rows = [
        [label, *(NA if p is None else f"{p.parts_ms[part]:.1f}" for p in profiles)] for label, part in PROFILE_ROWS
    ]
    rows += [
        ["sum", *(NA if p is None else f"{p.sum_ms:.1f}" for p in profiles)],
        ["step without timers", *(NA if p is None else format_number(p.step_ms.median) for p in profiles)],
        ["sum against step, %", *(NA if p is None else f"{100 * p.sum_error:+.1f}" for p in profiles)],
    ]
    print_table(f"Where a decode step goes after {known[0].context_tokens} tokens, ms", ["", *names], rows)
    for name, profile in zip(names, profiles, strict=True):
        if profile is not None and not profile.explains_step:
            click.echo(f"Note: the profile of {name} does not explain its step; measure again on a quiet machine.")


def print_bench(result: BenchResult) -> None:
    """The table of a benchmark, then what one must know to read it."""
    work, env = result.workload, result.environment
    title = (
        f"{env.model}, {env.dtype}, {env.device}, {env.threads} threads: {work.prompt_tokens} prompt + "
        f"{work.new_tokens} new tokens, batch {work.batch_size}"
    )
    rows = arm_rows(result.arms) + quality_rows([arm.quality for arm in result.arms])
    names = [arm.name for arm in result.arms]
    print_table(title, ["", *names], rows)
    print_profiles(names, [arm.profile for arm in result.arms])
    for line in bench_notes(result):
        click.echo(line)


def bench_notes(result: BenchResult) -> list[str]:
    """How the numbers were taken and what weakens them."""
    work, env = result.workload, result.environment
    notes = [
        f"Median of {work.runs} runs, arms in turn, prefill in chunks of {work.prefill_chunk_tokens} tokens; "
        + ("one warm-up run of each arm was thrown away." if work.warmup_runs else "no warm-up run.")
    ]
    for arm in result.arms:
        if arm.ttft_unchunked_ms:
            median = format_number(arm.ttft_unchunked_ms.median)
            notes.append(f"First token of {arm.name} with the prompt in one chunk: {median} ms.")
    if env.noisy:
        notes.append(f"NOISY: others used {100 * (env.other_cpu_share or 0):.0f} % of the machine meanwhile.")
    if result.interrupted:
        notes.append("INTERRUPTED: only complete runs and windows are in here.")
    said = [*result.notes, *(note for arm in result.arms if arm.quality for note in arm.quality.notes)]
    return notes + [f"Note: {note}." for note in dict.fromkeys(said)]
