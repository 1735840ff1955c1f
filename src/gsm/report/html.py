"""The page as one HTML file that needs nothing else: no script, no font, no network."""

from __future__ import annotations

from importlib import resources

from gsm.errors import InputError
from gsm.report.page import BarChart, LineChart, Note, Page, StackChart, Table, Verdict
from gsm.report.svg import NARROW, NUM_COLOURS, WIDE, draw

_LONGEST_FIGURE = 34  # characters; a longer cell is a sentence


def render_html(page: Page) -> str:
    """The whole document. Raises InputError when jinja2 is missing."""
    try:
        import jinja2
        from markupsafe import Markup
    except ImportError:
        raise InputError("the HTML report needs jinja2; install gsm-infer[report], or write Markdown (.md)") from None
    files = resources.files("gsm.report")
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    environment.globals.update(
        kind=_kind,
        wide=lambda chart: Markup(draw(chart, WIDE)),
        narrow=lambda chart: Markup(draw(chart, NARROW)),
        legend=legend,
        words=_columns_of_words,
    )
    template = environment.from_string(files.joinpath("page.html.j2").read_text(encoding="utf-8"))
    style = files.joinpath("page.css").read_text(encoding="utf-8")
    return template.render(page=page, style=Markup(style))


def legend(chart: LineChart | BarChart | StackChart) -> list[tuple[str, str]]:
    """(CSS class of the swatch, words). Plain bars carry their names themselves."""
    if isinstance(chart, LineChart):
        named = [(f"c{series.colour % NUM_COLOURS} {series.style}", series.label) for series in chart.series]
        return named if len(named) > 1 else []
    if isinstance(chart, StackChart):
        return [(f"c{index}", name) for index, (name, shares) in enumerate(chart.layers) if any(shares)]
    used = [any(index < len(bar.parts) and bar.parts[index] for bar in chart.bars) for index in range(NUM_COLOURS)]
    names = [(f"c{index}", name) for index, name in enumerate(chart.part_names) if index < NUM_COLOURS and used[index]]
    return [*names, *([("floor", chart.floor_name)] if chart.floor_name else [])]


def _columns_of_words(table: Table) -> set[int]:
    """Columns that hold sentences: they are set to the left and may wrap."""
    return {index for row in table.rows for index, cell in enumerate(row) if index and len(cell) > _LONGEST_FIGURE}


def _kind(block: object) -> str:
    kinds = {Table: "table", Note: "note", Verdict: "verdict"}
    return kinds.get(type(block), "chart")
