"""The page as Markdown: tables stay tables, charts become the table of their figures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gsm.report.numbers import NA, number, share
from gsm.report.page import BarChart, Block, LineChart, Note, Page, Section, StackChart, Table

_MOST_COLUMNS = 8


def render_markdown(page: Page) -> str:
    """The whole document."""
    lines = [f"# {page.title}", ""]
    if page.verdicts:
        marks = {"good": "✓", "bad": "✗", "warn": "!", "plain": "·"}
        lines += [f"* {marks[verdict.level]} {verdict.text} ({verdict.source})" for verdict in page.verdicts] + [""]
    for section in page.sections:
        lines += _section(section)
    if page.made_by:
        lines += [f"`{page.made_by}`", ""]
    return "\n".join(lines)


def _section(section: Section) -> Iterator[str]:
    yield f"## {section.title}"
    yield ""
    if section.lead:
        yield section.lead
        yield ""
    for block in section.blocks:
        yield from _block(block)
        yield ""
    if section.command:
        yield f"`{section.command}`"
        yield ""
    if section.facts:
        yield "; ".join(f"{label}: {value}" for label, value in section.facts)
        yield ""


def _block(block: Block) -> Iterator[str]:
    if isinstance(block, Note):
        yield f"> {block.text}"
    elif isinstance(block, Table):
        yield f"**{block.title}**"
        yield ""
        yield from _table(block.header, block.rows)
    elif isinstance(block, BarChart):
        yield f"**{block.title}** ({block.x_label})"
        yield ""
        yield from _bars(block)
    elif isinstance(block, LineChart):
        yield f"**{block.title}** ({block.y_label})"
        yield ""
        yield from _lines(block)
    elif isinstance(block, StackChart):
        yield f"**{block.title}** ({block.y_label})"
        yield ""
        yield from _shares(block)


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield "| " + " | ".join(_cell(name) for name in header) + " |"
    yield "|" + "---|" + "---:|" * (len(header) - 1)
    for row in rows:
        yield "| " + " | ".join(_cell(cell) for cell in row) + " |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _bars(chart: BarChart) -> Iterator[str]:
    names = list(chart.part_names) if len(chart.part_names) > 1 else []
    header = ["", *names, "total" if names else "value"]
    rows = []
    for bar in chart.bars:
        ends = f" ({number(bar.low)} to {number(bar.high)})" if bar.low is not None and bar.high is not None else ""
        parts = [number(part) for part in bar.parts] if names else []
        rows.append([bar.label, *parts, number(sum(bar.parts)) + ends])
    yield from _table(header, rows)


def _lines(chart: LineChart) -> Iterator[str]:
    """One row per series, at no more than eight places of the x axis."""
    places = sorted({x for series in chart.series for x in series.xs})
    step = max(1, -(-len(places) // _MOST_COLUMNS))
    places = places[::step]
    rows = []
    for series in chart.series:
        known = dict(zip(series.xs, series.ys, strict=True))
        rows.append([series.label, *(number(known[x]) if x in known else NA for x in places)])
    yield from _table([chart.x_label, *(number(x, 4) for x in places)], rows)


def _shares(chart: StackChart) -> Iterator[str]:
    num_bins = max((len(shares) for _, shares in chart.layers), default=0)
    step = max(1, -(-num_bins // _MOST_COLUMNS))
    picks = range(0, num_bins, step)
    header = [chart.x_label, *(number(index * chart.bin_width, 4) for index in picks)]
    yield from _table(header, [[name, *(share(shares[index]) for index in picks)] for name, shares in chart.layers])
