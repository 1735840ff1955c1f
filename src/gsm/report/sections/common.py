"""What sections share: the machine, quality figures, the profile of a step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from gsm.report.numbers import NA, interval, number, share
from gsm.report.page import Bar, BarChart, Note, Table

_PARTS = ("linear", "attention", "selection", "mass", "cache_writes", "smoothing", "host", "other")


def facts(environment: dict[str, Any] | None) -> list[tuple[str, str]]:
    """The machine and the software, as label and value."""
    if not environment:
        return []
    env = environment
    found = [
        ("model", _joined(env.get("model"), env.get("dtype"))),
        ("machine", _joined(env.get("cpu"), f"{env.get('cores')} cores", f"{env.get('threads') or '?'} threads")),
        ("software", _joined(f"torch {env.get('torch')}", f"transformers {env.get('transformers')}")),
        ("taken", str(env.get("started_at", ""))[:16].replace("T", " ") + " UTC"),
    ]
    if env.get("device") not in (None, "cpu"):
        found.insert(1, ("device", str(env["device"])))
    if env.get("other_cpu_share") is not None:
        found.append(("others meanwhile", share(env["other_cpu_share"]) + " of the machine"))
    return [(label, value) for label, value in found if value]


def environment_notes(data: dict[str, Any]) -> list[Note]:
    """What weakens every figure of the result."""
    env = data.get("environment") or {}
    notes = []
    if env.get("noisy"):
        used = share(env.get("other_cpu_share"))
        notes.append(Note(f"Noisy: others used {used} of the machine while this was measured."))
    if data.get("interrupted"):
        notes.append(Note("Interrupted: only what was complete is in here."))
    return notes


def notes_of(*lists: Iterable[str] | None) -> list[Note]:
    """Notes as sentences, each once."""
    said = dict.fromkeys(note for notes in lists for note in notes or ())
    return [Note(f"{note[0].upper()}{note[1:].rstrip('.')}.") for note in said if note]


def needles(pair: dict[str, Any] | None) -> str:
    """Needles found of those asked; the full cache's figure beside it."""
    if not pair:
        return NA
    lost = f", {pair['lost']} lost" if pair.get("lost") else ""
    return f"{pair['found']} of {pair['asked']} (full cache {pair['reference_found']}{lost})"


def quality_rows(qualities: Sequence[dict[str, Any] | None]) -> list[list[str]]:
    """One row per quality figure, one column per record."""

    def row(label: str, show: Any) -> list[str]:
        return [label, *(NA if not quality else show(quality) for quality in qualities)]

    return [
        row("KL to the full cache, nats", lambda q: number(q.get("kl"), 2)),
        row("95 % interval", lambda q: interval(q.get("kl_ci95"))),
        row("change of loss, nats", lambda q: number(q.get("nll_delta"), 2)),
        row("same best token", lambda q: share(q.get("top1_agreement"))),
        row("needles, asked in the prompt", lambda q: needles(q.get("prefill_pair"))),
        row("needles, asked afterwards", lambda q: needles(q.get("late_pair"))),
        row("windows", lambda q: str(q.get("n_windows", NA))),
    ]


def profile_blocks(profiles: Sequence[tuple[str, dict[str, Any]]]) -> list[BarChart | Table]:
    """Where the time of a decode step goes, one bar per named profile."""
    if not profiles:
        return []
    names = [name for name in _PARTS if any(name in profile["parts_ms"] for _, profile in profiles)]
    bars = [
        Bar(label, [float(profile["parts_ms"].get(name, 0.0)) for name in names], floor=profile["step_ms"]["median"])
        for label, profile in profiles
    ]
    chart = BarChart(
        "Where a decode step's time goes",
        "milliseconds per step",
        bars,
        [name.replace("_", " ") for name in names],
        floor_name="the step without timers inside",
    )
    rows = [[name.replace("_", " "), *(number(p["parts_ms"].get(name)) for _, p in profiles)] for name in names]
    rows.append(["sum", *(number(p["sum_ms"]) for _, p in profiles)])
    return [chart, Table("Parts of a step, ms", ["", *(label for label, _ in profiles)], rows)]


def _joined(*words: Any) -> str:
    return ", ".join(str(word) for word in words if word)
