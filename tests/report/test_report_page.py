"""From result files to HTML and Markdown: everything that was measured is there, nothing is invented."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from click.testing import CliRunner
from report_samples import COMMITTED, Save, bench, everything, saver

from gsm.cli.report import command
from gsm.errors import InputError
from gsm.report import compose, write_report
from gsm.report.html import render_html
from gsm.report.markdown import render_markdown
from gsm.report.page import LineChart, Page, Section, Series, StackChart, Table, Verdict
from gsm.report.svg import NARROW, WIDE, draw

_LOADS_SOMETHING = re.compile(r"""(src|href)=["'](?!#|data:)|@import|url\((?!['"]?data:)|<script""")


@pytest.fixture
def save(tmp_path: Path) -> Save:
    return saver(tmp_path)


def test_one_file_holds_every_kind_and_loads_nothing(save: Save) -> None:
    html = render_html(compose(everything(save)))
    assert not _LOADS_SOMETHING.search(html)
    for title in ("Time per token against length", "KV memory by tier", "Quality against budget",
                  "Tier map over the sequence", "Kurtosis by layer", "Where a decode step"):  # fmt: skip
        assert title in html
    assert html.count('<div class="wide"><svg') == html.count('<div class="narrow"><svg') > 8


def test_every_chart_is_well_formed_and_labelled(save: Save) -> None:
    page = compose(everything(save))
    charts = [
        b for s in page.sections for b in s.blocks if not isinstance(b, Table | Verdict) and hasattr(b, "x_label")
    ]
    assert len(charts) > 8
    for chart in charts:
        for width in (WIDE, NARROW):
            root = ElementTree.fromstring(draw(chart, width))  # type: ignore[arg-type]
            words = [element.text for element in root.iter("text")]
            assert chart.x_label in words
            assert isinstance(chart, LineChart | StackChart) is (getattr(chart, "y_label", None) in words)
            numbers = [float(v) for e in root.iter() for k, v in e.attrib.items() if k in ("x", "y", "cx", "cy", "x1")]
            assert all(-1 <= value <= width + 80 for value in numbers)


def test_the_curves_join_several_lengths(save: Save) -> None:
    page = compose([save("a.json", bench(512)), save("b.json", bench(1024, 14.0, 6.5))])
    chart = next(block for block in page.sections[0].blocks if isinstance(block, LineChart))
    sparse = next(series for series in chart.series if series.label == "sparse")
    assert (list(sparse.xs), list(sparse.ys)) == ([512, 1024], [6.0, 6.5])


def test_one_length_has_no_curve(save: Save) -> None:
    page = compose([save("a.json", bench(512))])
    assert [section.title for section in page.sections] == ["Benchmark after 512 tokens"]


def test_verdicts_say_the_gain_with_its_price(save: Save) -> None:
    page = compose([save("a.json", bench(512))])
    sparse = next(verdict for verdict in page.verdicts if verdict.text.startswith("sparse"))
    assert "1.67 times as fast per token" in sparse.text
    assert "KL 0.004 (0.002 to 0.008)" in sparse.text
    assert sparse.level == "good"
    costly = compose([save("b.json", bench(512, kl=0.006))]).verdicts[-1]
    assert costly.level == "warn"
    assert "more than the 0.01 that `gsm eval` allows" in costly.text


def test_sections_of_one_title_are_told_apart_by_their_files(save: Save) -> None:
    page = compose([save("a.json", bench(512)), save("b.json", bench(512))])
    titles = [section.title for section in page.sections]
    assert titles[-2:] == ["Benchmark after 512 tokens · a", "Benchmark after 512 tokens · b"]


def test_a_slower_arm_is_called_slower_only_outside_the_spread(save: Save) -> None:
    slow = compose([save("a.json", bench(512, 10.0, 12.0))]).verdicts[-1]
    level = compose([save("b.json", bench(512, 10.0, 10.1))]).verdicts[-1]
    assert (slow.level, level.level) == ("bad", "plain")
    assert "within the spread" in level.text


def test_names_from_files_are_escaped() -> None:
    series = [Series("<b>a</b>", [1, 2], [1, 2])]
    page = Page("<script>alert(1)</script>", sections=[Section("x", [], blocks=[LineChart("t", "x", "<y>", series)])])
    html = render_html(page)
    assert "<script" not in html
    assert "<y>" not in html


def test_markdown_has_the_tables_and_the_figures_of_charts(save: Save) -> None:
    text = render_markdown(compose(everything(save)))
    assert "| each token, ms | 10 | 9 | 6 |" in text
    assert "**Tier map over the sequence**" in text
    widths = [line.count("|") for line in text.splitlines() if line.startswith("|---")]
    assert widths
    assert "![" not in text


def test_the_committed_results_make_a_report(tmp_path: Path) -> None:
    target = tmp_path / "report.html"
    result = CliRunner().invoke(command, [*map(str, COMMITTED), "-o", str(target), "--json", str(tmp_path / "v.json")])
    assert result.exit_code == 0, result.output
    assert target.stat().st_size > 20_000
    assert json.loads((tmp_path / "v.json").read_text())["verdicts"]


@pytest.mark.parametrize(
    ("content", "words"),
    [("not json", "not JSON"), ("{}", "no result that is known here"), ("[]", "no result was given"),
     ('{"kind": "vllm-parallel", "checks": {}, "passed": true}', "no result that is known here"),
     ('{"arms": [{}], "workload": {}}', "damaged")],
)  # fmt: skip
def test_bad_files_are_refused_in_one_sentence(tmp_path: Path, content: str, words: str) -> None:
    path = tmp_path / "bad.json"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(InputError, match=words):
        compose([path])


def test_a_missing_file_and_an_unknown_ending_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="does not exist"):
        compose([tmp_path / "none.json"])
    with pytest.raises(InputError, match=r"\.html"):
        write_report(tmp_path / "report.pdf", Page("x"))
    with pytest.raises(InputError, match="cannot be written"):
        write_report(tmp_path / "nowhere" / "report.md", Page("x"))
    assert not list(tmp_path.iterdir())
