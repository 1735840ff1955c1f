"""`gsm calibrate` and `gsm smooth`: where tails are heavy, and what taming them gave."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any

from gsm.report.numbers import NA, mebibytes, number, share, signed_share, spread
from gsm.report.page import Bar, BarChart, Block, Level, LineChart, Section, Series, Table, Verdict
from gsm.report.sections.common import facts, notes_of
from gsm.results.kinds import SITE_NAMES, ResultFile

_MOST_ROWS = 12
_SINGLE = (("tpot_ms", "Time per token", "milliseconds"), ("ttft_s", "First token", "seconds"))
_COLOURS = {"before": 7, "after": 0}


def calibrate_section(result: ResultFile) -> Section:
    data = result.data
    sites = data["sites"]
    caption = "Excess kurtosis without the first token of each sample; 0 for a normal distribution."
    blocks: list[Block] = [
        LineChart("Kurtosis by layer", "block", "excess kurtosis (log)", _by_block(sites, "kurtosis_body"), y_log=True,
                  caption=caption),
        LineChart("Largest value by layer", "block", "largest absolute value (log)", _by_block(sites, "max_body"),
                  y_log=True),
        _heaviest(sites),
    ]  # fmt: skip
    if any(site.get("sensitivity") for site in sites):
        blocks.insert(1, LineChart("Sensitivity by layer", "block", "gradient squared x activation error (log)",
                                   _by_block(sites, "sensitivity"), y_log=True))  # fmt: skip
    return Section(
        title=f"Calibration of {data['model']}",
        sources=[result.name],
        lead=f"{data['num_samples']} samples of {data['sample_tokens']} tokens, {len(sites)} sites.",
        blocks=blocks,
    )


def calibrate_verdicts(result: ResultFile) -> list[Verdict]:
    sites = result.data["sites"]
    worst = max(sites, key=lambda site: site["kurtosis_body"])
    place = SITE_NAMES.get(worst["kind"], worst["kind"])
    text = (
        f"The heaviest tail of {result.data['model']} is at {worst['name']} ({place}): excess kurtosis "
        f"{number(worst['kurtosis_body'])}."
    )
    return [Verdict("plain", text, result.name)]


def smooth_section(result: ResultFile) -> Section:
    data = result.data
    blocks: list[Block] = [*smooth_verdicts(result)]
    if outcome := data.get("outcome"):
        blocks += [_steps_chart(outcome), _verdict_table(data, outcome)]
        if outcome.get("culprits"):
            blocks += notes_of([f"culprits, rolled back: {', '.join(outcome['culprits'])}"])
    if data.get("speed"):
        blocks.insert(1, _speed_chart(data["speed"]))
    chosen = [choice for choice in data["choices"] if choice["chosen"]]
    if chosen:
        rows = [[choice["name"], choice["reason"]] for choice in chosen[:_MOST_ROWS]]
        more = f"{len(chosen) - _MOST_ROWS} more are in the file." if len(chosen) > _MOST_ROWS else ""
        blocks.append(Table("Smoothed sites", ["site", "why"], rows, more))
    blocks += notes_of(data.get("notes"))
    env = data["environment"]
    return Section("Smoothing", [result.name], blocks=blocks, command=env["command"], facts=facts(env))


def smooth_verdicts(result: ResultFile) -> list[Verdict]:
    data = result.data
    worth = data.get("worth_it")
    level: Level = "plain" if worth is None else "good" if worth else "bad"
    text = str(data["conclusion"])
    return [Verdict(level, f"Smoothing: {text}.", result.name)]


def smooth_arms_section(result: ResultFile) -> Section:
    """Several smoothing settings side by side: whatever was measured of each, as charts and one table."""
    data, arms = result.data, result.data["arms"]
    blocks: list[Block] = []
    for key, title, unit in (
        ("decode_ms", "A decode step", "milliseconds"),
        ("prefill_s", "Prefill", "seconds"),
        ("products_ms", "One block's products", "milliseconds"),
    ):
        bars = [
            Bar(f"{name}, {when}", [record["median"]], record["min"], record["max"], colour=_COLOURS[when])
            for name, arm in arms.items()
            for when in ("before", "after")
            if (record := arm.get(f"{key}_{when}")) and record["median"] is not None
        ]
        if bars:
            blocks.append(BarChart(title, unit, bars))
    for key, title, unit in _SINGLE:
        figures = [Bar(name, [arm[key]]) for name, arm in arms.items() if _is_number(arm.get(key))]
        if figures:
            blocks.append(BarChart(title, unit, figures))
    fields = dict.fromkeys(key for arm in arms.values() for key, value in arm.items() if _is_figure(value))
    rows = [[key.replace("_", " "), *(_figure(key, arm.get(key)) for arm in arms.values())] for key in fields]
    blocks.append(Table("All figures", ["", *arms], rows))
    blocks += notes_of(data.get("notes"))
    env = data["environment"]
    command = str(data.get("command", env["command"]))
    return Section(
        f"{len(arms)} settings side by side", [result.name], blocks=blocks, command=command, facts=facts(env)
    )


def smooth_arms_verdicts(result: ResultFile) -> list[Verdict]:
    found = []
    for name, arm in result.data["arms"].items():
        prefill, decode = arm.get("prefill_gain"), arm.get("decode_gain")
        if prefill and decode:
            text = f"{name}: prefill {prefill:.2f} times, decode at short context {decode:.2f} times as fast."
            found.append(Verdict("good" if min(prefill, decode) > 1.05 else "plain", text, result.name))
    return found


def _is_figure(value: Any) -> bool:
    return (isinstance(value, dict) and "median" in value) or _is_number(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _figure(key: str, value: Any) -> str:
    if key.endswith("_bytes") and _is_number(value):
        return f"{mebibytes(value)} MiB"
    return spread(value) if isinstance(value, dict) else number(value)


def _by_block(sites: list[dict[str, Any]], field: str) -> list[Series]:
    points: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for site in sites:
        value = site.get(field)
        if value is not None and value > 0 and math.isfinite(value):
            points[site["kind"]].append((site["block"], value))
    return [
        Series(SITE_NAMES.get(kind, kind), [x for x, _ in rows], [y for _, y in rows], colour=index)
        for index, (kind, rows) in enumerate(points.items())
    ]


def _heaviest(sites: list[dict[str, Any]]) -> Table:
    ranked = sorted(sites, key=lambda site: -site["kurtosis_body"])[:_MOST_ROWS]
    rows = [
        [
            site["name"],
            number(site["kurtosis"]),
            number(site["kurtosis_body"]),
            number(site["max"]),
            share(site["sink_share"]),
            f"{site['top_channel']} ({share(site['top_channel_share'])})",
            NA if site.get("sensitivity") is None else number(site["sensitivity"], 2),
        ]
        for site in ranked
    ]
    header = ["site", "kurtosis", "without first token", "largest", "first token's share", "top channel", "sensitivity"]
    return Table("Heaviest tails", header, rows)


def _speed_chart(speed: dict[str, Any]) -> BarChart:
    pairs = (
        ("prefill", "prefill_s", 1e3 / max(1, speed["prompt_tokens"])),
        ("decode, short context", "decode_ms", 1.0),
        ("one block's products", "products_ms", 1.0),
    )
    bars = []
    for title, key, factor in pairs:
        for when in ("before", "after"):
            record = speed[f"{key}_{when}"]
            if record["median"] is not None:
                ends = [record[name] * factor for name in ("median", "min", "max")]
                bars.append(Bar(f"{title}, {when}", [ends[0]], ends[1], ends[2], colour=_COLOURS[when]))
    return BarChart("Speed before and after", "milliseconds (prefill: per token)", bars)


def _steps_chart(outcome: dict[str, Any]) -> Table:
    rows = [
        [
            step["what"],
            str(step["num_active"]),
            signed_share(step["perplexity_change"]),
            number(step["kl"], 2),
            "passed" if step["passed"] else "failed",
        ]
        for step in outcome["steps"]
    ]
    return Table("What the guard tried", ["step", "modules", "perplexity", "KL", ""], rows)


def _verdict_table(data: dict[str, Any], outcome: dict[str, Any]) -> Table:
    verdict = outcome["verdict"]
    rows = [
        ["perplexity", number(verdict["perplexity_before"], 4), number(verdict["perplexity_after"], 4)],
        ["change (95 % interval)", "", _change(verdict["perplexity_change"])],
        ["on sequences of 32 tokens", "", _change(verdict["short_change"])],
        ["same best token", "", share(verdict["top1"])],
        ["weights, MiB", mebibytes(data["weight_bytes_before"]), mebibytes(data["weight_bytes_after"])],
    ]
    if speed := data.get("speed"):
        rows += [
            ["prefill, s", spread(speed["prefill_s_before"]), spread(speed["prefill_s_after"])],
            ["decode, ms", spread(speed["decode_ms_before"]), spread(speed["decode_ms_after"])],
            ["prefill with GSM's linear layers, s", spread(speed.get("prefill_s_linear")), ""],
            ["decode with GSM's linear layers, ms", spread(speed.get("decode_ms_linear")), ""],
            ["own cost, ms per token", "0", number(speed["own_cost_ms_per_token"])],
        ]
    return Table(f"Verdict on {verdict['num_tokens']:,} tokens", ["", "before", "after"], rows)


def _change(change: dict[str, float] | None) -> str:
    if not change:
        return NA
    return f"{signed_share(change['mean'])} ({signed_share(change['low'])} to {signed_share(change['high'])})"
