"""What a report consists of, free of HTML and Markdown: both are drawn from these."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

Level = Literal["good", "bad", "warn", "plain"]


@dataclass(frozen=True)
class Series:
    """One line of a chart. ``lows`` and ``highs`` are the ends of each point's spread or interval, if it has one."""

    label: str
    xs: Sequence[float]
    ys: Sequence[float]
    lows: Sequence[float] | None = None
    highs: Sequence[float] | None = None
    style: Literal["line", "points", "dashed", "dots"] = "line"  # dots: many small points without a line
    colour: int = 0


@dataclass(frozen=True)
class LineChart:
    """Series over a common x axis. Labels carry their units."""

    title: str
    x_label: str
    y_label: str
    series: Sequence[Series]
    x_log: bool = False
    y_log: bool = False
    caption: str = ""


@dataclass(frozen=True)
class Bar:
    """One bar of stacked parts; ``low`` and ``high`` are the spread of its total, ``floor`` a mark such as a bound.

    ``colour`` is that of the first part; by default bars of one part take turns.
    """

    label: str
    parts: Sequence[float]
    low: float | None = None
    high: float | None = None
    floor: float | None = None
    colour: int | None = None


@dataclass(frozen=True)
class BarChart:
    """Horizontal bars. ``part_names`` is the legend of stacked parts, one name for plain bars."""

    title: str
    x_label: str
    bars: Sequence[Bar]
    part_names: Sequence[str] = ()
    floor_name: str = ""
    caption: str = ""


@dataclass(frozen=True)
class StackChart:
    """Shares (0 to 1) stacked over positions: ``layers[i]`` holds one share per bin of ``bin_width`` on the x axis."""

    title: str
    x_label: str
    y_label: str
    bin_width: float
    layers: Sequence[tuple[str, Sequence[float]]]
    caption: str = ""


@dataclass(frozen=True)
class Table:
    """The first column is a label, the others are figures."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""


@dataclass(frozen=True)
class Verdict:
    """One sentence that decides something."""

    level: Level
    text: str
    source: str = ""


@dataclass(frozen=True)
class Note:
    """What weakens or explains the figures beside it."""

    text: str


Block = LineChart | BarChart | StackChart | Table | Verdict | Note


@dataclass
class Section:
    """The part of a report that belongs to one file, or to several of a kind."""

    title: str
    sources: Sequence[str]
    lead: str = ""
    blocks: list[Block] = field(default_factory=list)
    command: str = ""
    facts: Sequence[tuple[str, str]] = ()


@dataclass
class Page:
    """A whole report. ``verdicts`` open it."""

    title: str
    verdicts: list[Verdict] = field(default_factory=list)
    sections: list[Section] = field(default_factory=list)
    made_by: str = ""
