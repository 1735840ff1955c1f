"""The page in a real browser: no complaints on the console, charts there, readable on a phone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from report_samples import Save, everything, saver

from gsm.report import compose, write_report

pytestmark = pytest.mark.slow

_VISIBLE_CHARTS = """
() => [...document.querySelectorAll('figure svg')].map(svg => svg.getBoundingClientRect())
      .filter(box => box.width > 0).map(box => [box.left, box.right, box.width, box.height])
"""
_SMALLEST_TEXT_PX = """
() => Math.min(...[...document.querySelectorAll('svg text')].map(text => text.getBoundingClientRect().height)
      .filter(height => height > 0))
"""


@pytest.fixture
def save(tmp_path: Path) -> Save:
    return saver(tmp_path)


@pytest.fixture
def report(save: Save, tmp_path: Path) -> Path:
    target = tmp_path / "report.html"
    write_report(target, compose(everything(save)))
    return target


@pytest.mark.parametrize(("width", "scheme"), [(1200, "light"), (1200, "dark"), (390, "light")])
def test_the_page_is_quiet_and_fits(browser: Any, report: Path, width: int, scheme: str) -> None:
    context = browser.new_context(viewport={"width": width, "height": 844}, color_scheme=scheme)
    page = context.new_page()
    complaints: list[str] = []
    requests: list[str] = []
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", lambda request: requests.append(request.url))
    page.goto(report.as_uri())
    charts = page.evaluate(_VISIBLE_CHARTS)
    assert complaints == []
    assert [url for url in requests if not url.startswith(("file:", "data:"))] == []
    assert len(charts) > 8
    assert all(left >= 0 and right <= width and w > 250 and h > 60 for left, right, w, h in charts)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate(_SMALLEST_TEXT_PX) >= 11
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (background == "rgb(16, 20, 24)") is (scheme == "dark")
    context.close()
