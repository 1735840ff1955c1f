"""`gsm bench`: arms side by side; and several benchmarks together, as curves over the length."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from gsm.report.numbers import NA, interval, mebibytes, number
from gsm.report.page import Bar, BarChart, Block, Level, LineChart, Section, Series, Table, Verdict
from gsm.report.sections.common import environment_notes, facts, notes_of, profile_blocks, quality_rows
from gsm.results import Tolerance
from gsm.results.kinds import ResultFile

PLAIN = "transformers"
_TIERS = ("hot", "warm", "cold", "bookkeeping")


def bench_section(result: ResultFile) -> Section:
    data = result.data
    work, arms = data["workload"], data["arms"]
    blocks: list[Block] = [*environment_notes(data), _speed_chart(arms), *_memory_charts(arms)]
    blocks += [chart for chart in (_quality_chart(arms),) if chart]
    blocks.append(_table(arms))
    profiles = [(arm["name"], arm["profile"]) for arm in arms if arm.get("profile")]
    blocks += profile_blocks(profiles)
    said = [note for arm in arms for note in (arm.get("quality") or {}).get("notes", ())]
    blocks += notes_of(data.get("notes"), said)
    return Section(
        title=f"Benchmark after {work['prompt_tokens']:,} tokens",
        sources=[result.name],
        lead=f"{work['prompt_tokens']:,} prompt and {work['new_tokens']} new tokens, batch {work['batch_size']}, "
        f"median of {work['runs']} runs.",
        blocks=blocks,
        command=data["environment"]["command"],
        facts=facts(data["environment"]),
    )


def bench_verdicts(result: ResultFile) -> list[Verdict]:
    """What each arm gains over plain transformers, with its price."""
    arms = {arm["name"]: arm for arm in result.data["arms"]}
    plain = arms.get(PLAIN)
    if plain is None:
        return []
    return [_verdict(result, plain, arm) for name, arm in arms.items() if name != PLAIN]


def _verdict(result: ResultFile, plain: dict[str, Any], arm: dict[str, Any]) -> Verdict:
    tokens, parts, good = result.data["workload"]["prompt_tokens"], [], False
    slower = False
    before, after = plain["tpot_ms"]["median"], arm["tpot_ms"]["median"]
    if before and after:
        ratio = before / after
        faster = arm["tpot_ms"]["max"] < plain["tpot_ms"]["min"]
        slower = arm["tpot_ms"]["min"] > plain["tpot_ms"]["max"]
        good = ratio >= 1.05 and faster
        parts.append(f"{ratio:.2f} times as fast per token" + ("" if faster or slower else " (within the spread)"))
    if plain.get("kv_bytes") and arm.get("kv_bytes"):
        parts.append(f"{arm['kv_bytes'] / plain['kv_bytes']:.2f} of the KV memory")
    quality = arm.get("quality") or {}
    kl = quality.get("kl")
    parts.append("quality not measured" if kl is None else f"KL {number(kl, 2)} ({interval(quality.get('kl_ci95'))})")
    level: Level = "good" if good and kl is not None else "plain"
    allowed = Tolerance().kl
    if kl is not None and (quality.get("kl_ci95") or [kl])[-1] > allowed:
        parts.append(f"more than the {allowed:g} that `gsm eval` allows")
        level = "warn"
    if slower:
        level = "bad"
    return Verdict(level, f"{arm['name']} after {tokens:,} tokens: {', '.join(parts)}.", result.name)


def _speed_chart(arms: Sequence[dict[str, Any]]) -> BarChart:
    bars = [
        Bar(
            arm["name"],
            [arm["tpot_ms"]["median"] or 0.0],
            arm["tpot_ms"]["min"],
            arm["tpot_ms"]["max"],
            (arm.get("bound") or {}).get("tpot_ms"),
        )
        for arm in arms
    ]
    return BarChart(
        "Time per token",
        "milliseconds per token",
        bars,
        floor_name="bytes that must be read / bandwidth" if any(bar.floor for bar in bars) else "",
        caption="Whiskers: smallest to largest run.",
    )


def _memory_charts(arms: Sequence[dict[str, Any]]) -> list[BarChart]:
    charts = []
    if any(arm.get("kv_bytes") for arm in arms):
        bars = [Bar(arm["name"], _tier_mebibytes(arm)) for arm in arms if arm.get("kv_bytes")]
        names = ["full precision", "warm codes", "cold codes", "tables, summaries, statistics"]
        charts.append(BarChart("KV memory by tier", "MiB at the last token", bars, names))
    if any(arm.get("peak_rss_bytes") for arm in arms):
        peaks = [Bar(arm["name"], [(arm.get("peak_rss_bytes") or 0) / 2**20]) for arm in arms]
        charts.append(BarChart("Peak memory above the loaded model", "MiB", peaks))
    return charts


def _tier_mebibytes(arm: dict[str, Any]) -> list[float]:
    tiers = arm.get("bytes_by_tier")
    if not tiers:  # plain transformers has one tier
        return [arm["kv_bytes"] / 2**20, 0.0, 0.0, 0.0]
    return [tiers.get(name, 0) / 2**20 for name in _TIERS]


def _quality_chart(arms: Sequence[dict[str, Any]]) -> LineChart | None:
    """Quality against what a step attends."""
    points = [
        arm
        for arm in arms
        if (arm.get("quality") or {}).get("kl") and arm.get("attended_tokens_mean") and arm["name"] != PLAIN
    ]
    if len(points) < 2:
        return None
    names = [arm["name"] for arm in arms]  # an arm keeps its colour in every chart
    return LineChart(
        "Quality against budget",
        "tokens attended per step and head",
        "KL to the full cache, nats (log)",
        [_quality_point(arm, names.index(arm["name"])) for arm in points],
        y_log=True,
        caption="Lines: 95 % interval. Lower is closer to the full cache.",
    )


def _quality_point(arm: dict[str, Any], index: int) -> Series:
    quality, x = arm["quality"], [arm["attended_tokens_mean"]]
    ends = quality.get("kl_ci95")
    lows, highs = ([ends[0]], [ends[1]]) if ends else (None, None)
    return Series(arm["name"], x, [quality["kl"]], lows, highs, "points", index)


def _table(arms: Sequence[dict[str, Any]]) -> Table:
    def row(label: str, show: Any) -> list[str]:
        return [label, *(show(arm) for arm in arms)]

    rows = [
        row("first token, ms", lambda arm: number(arm["ttft_ms"]["median"])),
        row("smallest to largest", lambda arm: _ends(arm["ttft_ms"])),
        row("each token, ms", lambda arm: number(arm["tpot_ms"]["median"])),
        row("smallest to largest", lambda arm: _ends(arm["tpot_ms"])),
        row("physical floor, ms", lambda arm: number((arm.get("bound") or {}).get("tpot_ms"))),
        row("KV cache, MiB", lambda arm: mebibytes(arm.get("kv_bytes"))),
        row("peak memory, MiB", lambda arm: mebibytes(arm.get("peak_rss_bytes"))),
        row("peak GPU memory, MiB", lambda arm: mebibytes(arm.get("peak_device_bytes"))),
        row("tokens attended", lambda arm: number(arm.get("attended_tokens_mean"), 4)),
        *quality_rows([arm.get("quality") for arm in arms]),
    ]
    rows = [row for row in rows if set(row[1:]) != {NA}]
    return Table("All figures", ["", *(arm["name"] for arm in arms)], rows)


def _ends(record: dict[str, float | None]) -> str:
    return NA if record["min"] is None else f"{number(record['min'])} to {number(record['max'])}"


def lengths_section(results: Sequence[ResultFile]) -> Section | None:
    """Several benchmarks of one model as curves over the prompt length; None where there is only one length."""
    by_model: dict[tuple[Any, ...], list[ResultFile]] = defaultdict(list)
    for result in results:
        env, work = result.data["environment"], result.data["workload"]
        by_model[env.get("model"), env.get("dtype"), env.get("device"), work["batch_size"]].append(result)
    groups = [group for group in by_model.values() if len({r.data["workload"]["prompt_tokens"] for r in group}) > 1]
    if not groups:
        return None
    blocks: list[Block] = []
    for group in groups:
        group.sort(key=lambda result: result.data["workload"]["prompt_tokens"])
        model = f" ({group[0].data['environment'].get('model')})" if len(groups) > 1 else ""
        figures = (
            ("Time per token against length", "milliseconds per token", _tpot),
            ("KV memory against length", "MiB at the last token", _kv),
            ("First token against length", "seconds to the first token", _ttft),
        )
        for title, label, read in figures:
            series = _curves(group, read)
            if series:
                blocks.append(LineChart(f"{title}{model}", "prompt tokens", label, series))
    return Section("Over the length", [r.name for group in groups for r in group], blocks=blocks)


Point = tuple[float, float, float]


def _tpot(arm: dict[str, Any]) -> Point | None:
    return _spread_point(arm["tpot_ms"], 1.0)


def _ttft(arm: dict[str, Any]) -> Point | None:
    return _spread_point(arm["ttft_ms"], 1e-3)


def _kv(arm: dict[str, Any]) -> Point | None:
    value = arm.get("kv_bytes")
    return None if value is None else (value / 2**20,) * 3


def _spread_point(record: dict[str, float | None], factor: float) -> Point | None:
    middle, low, high = record.get("median"), record.get("min"), record.get("max")
    if middle is None or low is None or high is None:
        return None
    return middle * factor, low * factor, high * factor


def _curves(group: Sequence[ResultFile], read: Any) -> list[Series]:
    points: dict[str, list[tuple[float, Point]]] = defaultdict(list)
    for result in group:
        for arm in result.data["arms"]:
            if (point := read(arm)) is not None:
                points[arm["name"]].append((float(result.data["workload"]["prompt_tokens"]), point))
    return [
        Series(
            name,
            [x for x, _ in rows],
            [point[0] for _, point in rows],
            [point[1] for _, point in rows],
            [point[2] for _, point in rows],
            colour=index,
        )
        for index, (name, rows) in enumerate(points.items())
    ]
