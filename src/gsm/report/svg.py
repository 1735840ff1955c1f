"""Charts as plain SVG text: no script, no network, colours by CSS class so that light and dark both work.

Text keeps its size whatever the width: every chart is drawn twice, for a wide and for a narrow screen, and CSS shows
one of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from html import escape

from gsm.report.numbers import linear_ticks, log_ticks, number
from gsm.report.page import Bar, BarChart, LineChart, Series, StackChart

WIDE, NARROW = 760, 340
NUM_COLOURS = 8
_CHARACTER = 6.7  # mean width of a character at the chart's font size, in pixels


def draw(chart: LineChart | BarChart | StackChart, width: int) -> str:
    """The chart as an SVG element of the given width in CSS pixels."""
    if isinstance(chart, LineChart):
        return _draw_lines(chart, width)
    if isinstance(chart, BarChart):
        return _draw_bars(chart, width)
    return _draw_stack(chart, width)


@dataclass
class _Canvas:
    """SVG elements with a plot area inside."""

    width: int
    height: int
    left: float
    right: float
    top: float
    bottom: float
    parts: list[str] = field(default_factory=list)

    @property
    def x_end(self) -> float:
        return self.width - self.right

    @property
    def y_end(self) -> float:
        return self.height - self.bottom

    def add(self, element: str) -> None:
        self.parts.append(element)

    def text(self, x: float, y: float, words: str, anchor: str = "start", kind: str = "tick") -> None:
        self.add(f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" class="{kind}">{escape(words)}</text>')

    def line(self, x1: float, y1: float, x2: float, y2: float, kind: str) -> None:
        self.add(f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{kind}"/>')

    def svg(self, label: str) -> str:
        body = "".join(self.parts)
        return (
            f'<svg viewBox="0 0 {self.width} {self.height}" width="{self.width}" height="{self.height}" role="img" '
            f'aria-label="{escape(label)}">{body}</svg>'
        )


@dataclass(frozen=True)
class _Scale:
    """From values to pixels, linear or logarithmic."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        low, high = self._map(self.low), self._map(self.high)
        place = (self._map(max(value, self.low) if self.log else value) - low) / (high - low or 1)
        return self.start + place * (self.end - self.start)

    def _map(self, value: float) -> float:
        return math.log10(value) if self.log else value

    def ticks(self, most: int) -> list[float]:
        return (log_ticks if self.log else linear_ticks)(self.low, self.high, most)


# -- lines ---------------------------------------------------------------------------------------------------------


def _draw_lines(chart: LineChart, width: int) -> str:
    height = 300 if width > 500 else 260
    xs = [x for series in chart.series for x in series.xs]
    ys = [y for series in chart.series for y in _extent(series)]
    y_scale_values = _range(ys, chart.y_log, from_zero=True)
    canvas = _Canvas(width, height, left=0, right=14, top=30, bottom=44)
    y = _Scale(*y_scale_values, canvas.y_end, canvas.top, chart.y_log)
    labels = [number(tick) for tick in y.ticks(6)]
    canvas.left = 10 + _CHARACTER * max(map(len, labels), default=1)
    air = 24 if any(series.style == "points" for series in chart.series) else 6
    x = _Scale(*_range(xs, chart.x_log, from_zero=False), canvas.left + air, canvas.x_end - air + 6, chart.x_log)
    _axes(canvas, x, y, chart.x_label, chart.y_label)
    for series in chart.series:
        _draw_series(canvas, series, x, y)
    return canvas.svg(f"{chart.title}: {chart.y_label} against {chart.x_label}")


def _extent(series: Series) -> Iterable[float]:
    yield from series.ys
    yield from series.lows or ()
    yield from series.highs or ()


def _range(values: Sequence[float], log: bool, from_zero: bool) -> tuple[float, float]:
    """Axis limits with a little air; a linear y axis starts at zero."""
    if log:
        positive = [value for value in values if value > 0] or [0.1, 1.0]
        return min(positive) / 1.4, max(positive) * 1.4
    low, high = min(values, default=0.0), max(values, default=1.0)
    if from_zero:
        return min(0.0, low * 1.08), max(high * 1.08, 0.0) if high > 0 or low < 0 else 1.0
    return (low, high) if high > low else (low - 1, high + 1)


def _axes(canvas: _Canvas, x: _Scale, y: _Scale, x_label: str, y_label: str) -> None:
    for tick in y.ticks(6):
        canvas.line(canvas.left, y(tick), canvas.x_end, y(tick), "grid")
        canvas.text(canvas.left - 6, y(tick) + 4, number(tick), "end")
    most = 7 if canvas.width > 500 else 4
    for tick in x.ticks(most):
        canvas.line(x(tick), canvas.y_end, x(tick), canvas.y_end + 4, "axis")
        anchor = "end" if x(tick) > canvas.x_end - 14 else "middle"
        canvas.text(min(x(tick), canvas.x_end), canvas.y_end + 17, number(tick, 4), anchor)
    canvas.line(canvas.left, canvas.y_end, canvas.x_end, canvas.y_end, "axis")
    canvas.text(0, 13, y_label, "start", "label")
    canvas.text((canvas.left + canvas.x_end) / 2, canvas.height - 6, x_label, "middle", "label")


def _draw_series(canvas: _Canvas, series: Series, x: _Scale, y: _Scale) -> None:
    colour = f"c{series.colour % NUM_COLOURS}"
    points = [(x(a), y(b)) for a, b in zip(series.xs, series.ys, strict=True)]
    for index, (low, high) in enumerate(zip(series.lows or (), series.highs or (), strict=True)):
        at = points[index][0]
        canvas.line(at, y(low), at, y(high), f"whisker {colour}")
    if series.style in ("line", "dashed") and len(points) > 1:
        path = "M" + "L".join(f"{a:.1f} {b:.1f}" for a, b in points)
        canvas.add(f'<path d="{path}" class="line {colour}{" dashed" if series.style == "dashed" else ""}"/>')
    if series.style == "dashed" or (series.style == "line" and len(points) > 60):
        return
    radius = 1.4 if series.style == "dots" else 3.5
    for (a, b), value_x, value_y in zip(points, series.xs, series.ys, strict=True):
        tip = escape(f"{series.label}: {number(value_y)} at {number(value_x, 4)}")
        title = "" if series.style == "dots" else f"<title>{tip}</title>"
        canvas.add(f'<circle cx="{a:.1f}" cy="{b:.1f}" r="{radius}" class="point {colour}">{title}</circle>')


# -- bars ----------------------------------------------------------------------------------------------------------


def _draw_bars(chart: BarChart, width: int) -> str:
    beside = width > 500  # labels beside the bars, or above them
    row = 30 if beside else 44
    canvas = _Canvas(width, int(14 + row * len(chart.bars) + 44), left=0, right=64, top=8, bottom=44)
    longest = max((len(bar.label) for bar in chart.bars), default=0)
    canvas.left = min(width * 0.36, 12 + _CHARACTER * longest) if beside else 2
    ends = [value for bar in chart.bars for value in (sum(bar.parts), bar.high, bar.floor) if value is not None]
    x = _Scale(0, max([*ends, 0]) or 1, canvas.left, canvas.x_end)
    for tick in x.ticks(6 if beside else 4):
        canvas.line(x(tick), canvas.top, x(tick), canvas.y_end, "grid")
        canvas.text(x(tick), canvas.y_end + 16, number(tick), "middle" if tick or beside else "start")
    canvas.text((canvas.left + canvas.x_end) / 2, canvas.height - 6, chart.x_label, "middle", "label")
    for index, bar in enumerate(chart.bars):
        top = canvas.top + index * row
        usual = 0 if len(chart.part_names) > 1 else index
        colour = usual if bar.colour is None else bar.colour
        _draw_bar(canvas, bar, x, top + (5 if beside else 19), chart, colour)
        if beside:
            canvas.text(canvas.left - 8, top + 19, _shorten(bar.label, canvas.left), "end", "name")
        else:
            canvas.text(canvas.left, top + 14, bar.label, "start", "name")
    canvas.line(canvas.left, canvas.top, canvas.left, canvas.y_end, "axis")
    return canvas.svg(f"{chart.title}: {chart.x_label}")


def _draw_bar(canvas: _Canvas, bar: Bar, x: _Scale, top: float, chart: BarChart, colour: int) -> None:
    thick, at = 20.0, 0.0
    for index, part in enumerate(bar.parts):
        name = chart.part_names[index] if index < len(chart.part_names) else bar.label
        box = x(at + part) - x(at)
        canvas.add(
            f'<rect x="{x(at):.1f}" y="{top:.1f}" width="{max(0.0, box):.1f}" height="{thick:.1f}" '
            f'class="bar c{(colour + index) % NUM_COLOURS}"><title>{escape(f"{bar.label}, {name}: {number(part)}")}'
            "</title></rect>"
        )
        at += part
    if bar.low is not None and bar.high is not None and bar.high > bar.low:
        middle = top + thick / 2
        canvas.line(x(bar.low), middle, x(bar.high), middle, "spread")
        for end in (bar.low, bar.high):
            canvas.line(x(end), middle - 4, x(end), middle + 4, "spread")
    if bar.floor is not None:
        canvas.line(x(bar.floor), top - 2, x(bar.floor), top + thick + 2, "floor")
    canvas.text(x(max(at, bar.high or 0)) + 6, top + thick / 2 + 4, number(at), "start", "value")


def _shorten(label: str, room: float) -> str:
    most = int((room - 10) / _CHARACTER)
    return label if len(label) <= most else label[: max(1, most - 1)] + "…"


# -- stacked shares ------------------------------------------------------------------------------------------------


def _draw_stack(chart: StackChart, width: int) -> str:
    canvas = _Canvas(width, 240 if width > 500 else 210, left=44, right=14, top=30, bottom=44)
    num_bins = max((len(shares) for _, shares in chart.layers), default=0)
    x = _Scale(0, max(1, num_bins) * chart.bin_width, canvas.left, canvas.x_end)
    y = _Scale(0, 1, canvas.y_end, canvas.top)
    base = [0.0] * num_bins
    for index, (name, shares) in enumerate(chart.layers):
        top = [low + share for low, share in zip(base, shares, strict=True)]
        if any(shares):
            outline = _steps(top, chart.bin_width, x, y) + _steps(base, chart.bin_width, x, y)[::-1]
            path = "M" + "L".join(f"{a:.1f} {b:.1f}" for a, b in outline) + "Z"
            canvas.add(f'<path d="{path}" class="area c{index}"><title>{escape(name)}</title></path>')
        base = top
    for tick in (0, 0.25, 0.5, 0.75, 1):
        canvas.text(canvas.left - 6, y(tick) + 4, f"{tick:.0%}", "end")
        canvas.line(canvas.left, y(tick), canvas.x_end, y(tick), "grid")
    for tick in x.ticks(7 if width > 500 else 4):
        anchor = "end" if x(tick) > canvas.x_end - 14 else "middle"
        canvas.text(min(x(tick), canvas.x_end), canvas.y_end + 17, number(tick, 4), anchor)
    canvas.text(0, 13, chart.y_label, "start", "label")
    canvas.text((canvas.left + canvas.x_end) / 2, canvas.height - 6, chart.x_label, "middle", "label")
    return canvas.svg(f"{chart.title}: {chart.y_label} against {chart.x_label}")


def _steps(values: Sequence[float], bin_width: float, x: _Scale, y: _Scale) -> list[tuple[float, float]]:
    """The outline of a staircase; runs of equal values become one step."""
    corners: list[tuple[float, float]] = []
    add: Callable[[tuple[float, float]], None] = corners.append
    for index, value in enumerate(values):
        if index and value == values[index - 1]:
            corners[-1] = (x((index + 1) * bin_width), y(value))
            continue
        add((x(index * bin_width), y(value)))
        add((x((index + 1) * bin_width), y(value)))
    return corners
