"""`gsm probe`: time per token against length, what a step waits for, and what each lever would give."""

from __future__ import annotations

from typing import Any

from gsm.report.numbers import NA, number, share
from gsm.report.page import Bar, BarChart, Block, LineChart, Section, Series, Table, Verdict
from gsm.report.sections.common import environment_notes, facts, notes_of, profile_blocks
from gsm.results.kinds import ResultFile

_NAMES = {
    "kv": "KV-bound",
    "weights": "Weight-bound",
    "overhead": "Overhead-bound",
    "prefill": "Prefill-bound",
    "cannot_tell": "Cannot tell",
}
_MOST_POINTS = 1500


def probe_section(result: ResultFile) -> Section:
    data = result.data
    work = data.get("workload") or {}
    blocks: list[Block] = [*probe_verdicts(result), *environment_notes(data), _curve(data)]
    if shares := data.get("shares"):
        names = ("prefill", "weights", "kv", "overhead")
        bar = Bar("the request", [100 * shares[name] for name in names])
        blocks.append(BarChart("What the request's time is spent on", "per cent", [bar], names))
    if data.get("profile"):
        blocks += profile_blocks([("plain step", data["profile"])])
    if data.get("levers"):
        blocks.append(_levers(data["levers"]))
    first = [f"Cheaper first: {hint}" for hint in data.get("cheaper_first") or ()]
    blocks += notes_of(first, data.get("notes"))
    return Section(
        title=f"Is it worth it? {work.get('prompt_tokens', '?'):,} prompt tokens",
        sources=[result.name],
        lead=f"{work.get('new_tokens', '?')} tokens were generated and every one was timed.",
        blocks=blocks,
        command=data["environment"]["command"],
        facts=facts(data["environment"]),
    )


def probe_verdicts(result: ResultFile) -> list[Verdict]:
    verdict, tokens = result.data["verdict"], (result.data.get("workload") or {}).get("prompt_tokens")
    because = str(verdict["because"]).rstrip(".")
    text = f"{_NAMES.get(verdict['kind'], verdict['kind'])} after {tokens:,} tokens, because {because}."
    level: Any = {"kv": "good", "cannot_tell": "warn"}.get(verdict["kind"], "plain")
    return [Verdict(level, text, result.name)]


def _curve(data: dict[str, Any]) -> LineChart:
    xs, ys = list(data["context_tokens"]), list(data["token_ms"])
    step = max(1, len(xs) // _MOST_POINTS)
    series = [Series("one token", xs[::step], ys[::step], style="dots", colour=0)]
    caption, growth = "", data.get("growth")
    if growth and xs:
        ends = [min(xs), max(xs)]
        fit = [growth["intercept_ms"] + growth["us_per_token"] * x / 1e3 for x in ends]
        series.append(Series("robust line", ends, fit, style="dashed", colour=1))
        caption = (
            f"Slope {number(growth['us_per_token'])} microseconds per token of context "
            f"(95 %: {number(growth['low'])} to {number(growth['high'])})."
        )
    return LineChart(
        "Time per token against length", "tokens before it", "milliseconds per token", series, caption=caption
    )


def _levers(levers: list[dict[str, Any]]) -> Table:
    rows = [
        [
            f"{lever['name']} at {lever['context_tokens']:,}",
            f"{lever['predicted_gain']:.2f} times",
            NA if lever.get("measured_gain") is None else f"{lever['measured_gain']:.2f} times",
            share(lever.get("error")),
            lever["how"],
        ]
        for lever in levers
    ]
    return Table("Levers", ["lever", "predicted", "measured", "error", "the prediction rests on"], rows)
