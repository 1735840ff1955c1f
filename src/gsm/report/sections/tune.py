"""`gsm tune`: every variable with its candidates, and what they led to."""

from __future__ import annotations

from typing import Any

from gsm.report.numbers import NA, share, signed_share
from gsm.report.page import Block, LineChart, Section, Series, Table, Verdict
from gsm.report.sections.common import environment_notes, facts, notes_of
from gsm.results.kinds import ResultFile


def tune_section(result: ResultFile) -> Section:
    data = result.data
    blocks: list[Block] = [*tune_verdicts(result), *environment_notes(data), *_charts(data)]
    for step in data["steps"]:
        if step.get("skipped"):
            blocks += notes_of([f"{step['variable']} was not tried: {step['skipped']}"])
        else:
            blocks.append(_table(f"{step['variable']}: {step['question']}", step["candidates"], step.get("chosen")))
    if data.get("combined"):
        blocks.append(_table("Everything that helped, together, on text no step has seen", data["combined"], None))
    blocks += notes_of(data.get("notes"))
    noise = ", ".join(f"{share(value)} at {int(length):,}" for length, value in (data.get("noise") or {}).items())
    lengths = ", ".join(f"{length:,}" for length in data["lengths"])
    return Section(
        title=f"Tuning for {data['task']}",
        sources=[result.name],
        lead=f"At {lengths} tokens; two identical runs differ by {noise or NA}.",
        blocks=blocks,
        command=data["environment"]["command"],
        facts=facts(data["environment"]),
    )


def tune_verdicts(result: ResultFile) -> list[Verdict]:
    data = result.data
    level: Any = "good" if data.get("proposed") else "warn" if data.get("interrupted") else "plain"
    return [Verdict(level, f"Tuning for {data['task']}: {data['conclusion']}.", result.name)]


def _charts(data: dict[str, Any]) -> list[Block]:
    """The last measured state against plain transformers: time, memory and quality by length."""
    comparisons = data.get("against_plain") or []
    if not comparisons:
        return []
    xs = [item["prompt_tokens"] for item in comparisons]
    time = Series(
        "time per token", xs, [100 * c["time"]["mean"] for c in comparisons],
        [100 * c["time"]["low"] for c in comparisons], [100 * c["time"]["high"] for c in comparisons],
    )  # fmt: skip
    memory = Series("KV memory", xs, [100 * item["kv_bytes"] for item in comparisons], colour=1)
    return [
        LineChart(
            "The combined state against plain transformers", "prompt tokens", "change in per cent (below 0 is less)",
            [time, memory], caption="Lines: 95 % interval of paired blocks.",
        )
    ]  # fmt: skip


def _table(title: str, candidates: list[dict[str, Any]], chosen: str | None) -> Table:
    rows = [_row(candidate, chosen) for candidate in candidates]
    return Table(title, ["value", "at", "time", "KV memory", "decision"], rows)


def _row(candidate: dict[str, Any], chosen: str | None) -> list[str]:
    if not candidate["comparisons"]:
        return [candidate["value"], "", "", "", candidate["reason"]]
    last = candidate["comparisons"][-1]
    mark = "chosen: " if candidate["value"] == chosen else ""
    return [
        candidate["value"],
        f"{last['prompt_tokens']:,}",
        signed_share(last["time"]["mean"]),
        signed_share(last["kv_bytes"]),
        mark + candidate["reason"],
    ]
