"""`gsm load`: latency percentiles of a server, alone or paired."""

from __future__ import annotations

from typing import Any

from gsm.report.numbers import number
from gsm.report.page import Bar, BarChart, Block, Section, Table, Verdict
from gsm.report.sections.common import facts, notes_of
from gsm.results.kinds import ResultFile

_METRICS = {
    "ttft": "first token (TTFT)",
    "tpot": "each token (TPOT)",
    "itl": "between tokens (ITL)",
    "e2el": "whole response (E2E)",
}
_PERCENTILES = ("p50", "p95", "p99")


def load_section(result: ResultFile) -> Section:
    data = result.data
    arms = {name: data[name] for name in "AB"} if data["kind"] == "load_ab" else {"": data}
    blocks: list[Block] = []
    for metric, title in _METRICS.items():
        bars = [
            Bar(f"{name} {percentile.upper()}".strip(), [value])
            for name, arm in arms.items()
            for percentile in _PERCENTILES
            if (value := arm.get(f"{percentile}_{metric}_ms")) is not None
        ]
        if bars:
            blocks.append(BarChart(title, "milliseconds", bars))
    blocks.append(_table(arms))
    blocks += notes_of(data.get("notes"), *(arm.get("notes") for arm in arms.values() if arm is not data))
    env = data.get("environment")
    target = next(iter(arms.values())).get("target") or {}
    return Section(
        title="Load test" if len(arms) == 1 else "Load test, paired",
        sources=[result.name],
        lead=f"{target.get('url', '')} {next(iter(arms.values())).get('model_id', '')}".strip(),
        blocks=blocks,
        command=(env or {}).get("command", ""),
        facts=facts(env),
    )


def load_verdicts(result: ResultFile) -> list[Verdict]:
    data = result.data
    if data["kind"] == "load_ab":
        return []
    p50, p99 = number(data.get("p50_ttft_ms")), number(data.get("p99_ttft_ms"))
    text = (
        f"{number(data.get('output_throughput'))} tokens/s with {number(data.get('mean_concurrency'))} requests in "
        f"flight; first token {p50} ms (P50), {p99} ms (P99); {data['completed']} completed, {data['failed']} failed."
    )
    return [Verdict("bad" if data["failed"] else "plain", text, result.name)]


def _table(arms: dict[str, dict[str, Any]]) -> Table:
    rows = [
        [title, *(number(arm.get(key)) for arm in arms.values())]
        for key, title in (
            ("completed", "requests completed"),
            ("failed", "requests failed"),
            ("mean_concurrency", "mean requests in flight"),
            ("request_throughput", "requests/s"),
            ("output_throughput", "output tokens/s"),
            ("total_token_throughput", "input + output tokens/s"),
        )
    ]
    for metric, title in _METRICS.items():
        for name in ("mean", *_PERCENTILES):
            values = [number(arm.get(f"{name}_{metric}_ms")) for arm in arms.values()]
            rows.append([f"{title}, {name}, ms", *values])
    return Table("All figures", ["", *(name or "server" for name in arms)], rows)
