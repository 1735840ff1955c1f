"""The live page in a real browser: what an administrator does with it, by mouse and by keyboard, wide and narrow."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rollout_server import ADMIN, API, SPARSE, Served, serve_tiny, with_cache

from support_engine import load_tiny, prompt_ids

PICTURES = os.environ.get("GSM_SCREENSHOTS")  # a folder, to look at what the tests saw
RULES = {"tolerance": {"ttft": None, "itl": None}, "promote_after": None, "canary_share": 1.0}


@pytest.fixture(scope="module")
def served(tiny_model: Any) -> Iterator[Served]:
    with serve_tiny(load_tiny(tiny_model("llama")), with_cache(RULES)) as found:
        yield found


@pytest.fixture
def page(browser: Any, served: Served) -> Iterator[Any]:
    """The page, open; any message on the console, any error and any request to elsewhere fails the test."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    found = context.new_page()
    troubles: list[str] = []
    found.on("console", lambda message: troubles.append(f"{message.type}: {message.text}"))
    found.on("pageerror", lambda error: troubles.append(str(error)))
    found.on("request", lambda request: request.url.startswith((served.url, "data:")) or troubles.append(request.url))
    found.goto(served.url)
    found.wait_for_selector("#list > li")
    yield found
    context.close()
    expected = [text for text in troubles if "401" not in text and "400" not in text]  # refused on purpose, below
    assert not expected


def wait_text(page: Any, selector: str, text: str) -> None:
    page.locator(selector, has_text=text).wait_for()


def until(page: Any, expression: str) -> None:
    """Poll from here: the page's own policy forbids to evaluate text in it."""
    for _ in range(300):
        if page.evaluate(expression):
            return
        page.wait_for_timeout(100)
    raise AssertionError(expression)


def picture(page: Any, name: str) -> None:
    if PICTURES is not None:
        page.screenshot(path=str(Path(PICTURES) / f"{name}.png"), full_page=True)


def ask_some(served: Served, first: int, number: int, **more: Any) -> None:
    for i in range(first, first + number):
        served.ask(prompt_ids(40, i), 12, user=f"u{i}", **{"temperature": 0.7, **more})


def start_canary(page: Any, config: dict[str, Any], weight: int = 50) -> None:
    page.fill("#admin-key", ADMIN)
    if not page.evaluate("document.querySelector('#start').open"):
        page.click("#start > summary")
    page.fill("#config", json.dumps(config))
    page.evaluate(f"weight.value = {weight}; weight.dispatchEvent(new Event('input'))")
    page.click("#start button[type=submit]")


def test_a_canary_is_promoted_from_the_page(served: Served, page: Any) -> None:
    ask_some(served, 0, 6)
    before = served.rollout.live.stable.number
    assert page.is_disabled("#promote")
    start_canary(page, with_cache(RULES, recent_tokens=8), 40)
    page.wait_for_selector(".badge.canary")
    assert "40 %" in page.inner_text("#split")
    picture(page, "canary")
    page.click("#promote")
    wait_text(page, "#answer", "stable one now")
    until(page, "!document.querySelector('.badge.canary')")
    assert served.rollout.live.stable.number == before + 1
    assert served.rollout.live.canary is None


def test_a_canary_is_rolled_back_by_keyboard_alone(served: Served, page: Any) -> None:
    stable = served.rollout.live.stable.number
    served.admin.post("/admin/canary", json={"config": with_cache(RULES, hot_size=12), "weight": 10})
    page.wait_for_selector(".badge.canary")
    page.focus("#theme")
    page.keyboard.press("Tab")
    for _ in range(12):
        if page.evaluate("document.activeElement.id") == "admin-key":
            break
        page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.id") == "admin-key"
    page.keyboard.type(ADMIN)
    page.keyboard.press("Tab")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.id") == "rollback"
    outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    assert outline != "none", "who uses the keyboard must see where it is"
    page.keyboard.press("Enter")
    wait_text(page, "#answer", "taken back")
    assert served.rollout.live.canary is None
    assert served.rollout.live.stable.number == stable


def test_the_guard_takes_a_bad_canary_back_and_the_page_says_why(served: Served, page: Any) -> None:
    start_canary(page, {**SPARSE, "rollout": RULES})
    page.wait_for_selector(".badge.canary")
    for first in range(100, 400, 10):
        if served.rollout.live.canary is None:
            break
        ask_some(served, first, 10)
    served.wait_for(lambda: served.rollout.live.canary is None)
    page.locator("#list .note.bad", has_text="guard: ").first.wait_for()
    page.wait_for_selector("#list details[open] meter")
    picture(page, "taken-back")


def test_a_wrong_key_and_a_wrong_config_are_told(served: Served, page: Any) -> None:
    start_canary(page, {"cach": {}})
    wait_text(page, "#answer", "did you mean 'cache")
    page.fill("#config", "{")
    page.click("#start button[type=submit]")
    wait_text(page, "#answer", "not valid JSON")
    page.fill("#admin-key", "wrong-key-1")
    page.fill("#config", "{}")
    page.click("#start button[type=submit]")
    wait_text(page, "#answer", "missing or wrong")
    assert served.rollout.live.canary is None


def test_the_live_config_can_be_filled_in(page: Any) -> None:
    page.fill("#admin-key", ADMIN)
    page.click("#start > summary")
    page.click("#load")
    until(page, "document.querySelector('#config').value.includes('hot_size')")
    assert json.loads(page.input_value("#config"))["cache"]["page_size"] == 4


def test_the_try_it_box_streams(served: Served, page: Any) -> None:
    page.wait_for_selector("#key-field:not([hidden])")
    page.fill("#api-key", API)
    page.fill("#prompt", " w5 w6 w7")
    page.fill("#max-tokens", "200")
    page.click("#send")
    until(page, "document.querySelector('#output').textContent.length > 5")
    wait_text(page, "#try-note", "200 tokens, ")
    assert "epoch" in page.inner_text("#try-note")
    page.fill("#max-tokens", "400")
    page.click("#send")
    until(page, "document.querySelector('#output').textContent.length > 5")
    page.click("#stop")
    wait_text(page, "#try-note", "stopped")
    served.wait_for(lambda: not served.engine.requests)
    page.fill("#api-key", "wrong-key-1")
    page.click("#send")
    wait_text(page, "#try-note", "API key")


def test_numbers_charts_and_themes(served: Served, page: Any) -> None:
    ask_some(served, 500, 12)
    until(page, "!document.querySelector('#tiles').textContent.includes('no answer yet')")
    assert page.locator(".chart svg").count() == 4
    label = page.get_attribute(".chart svg", "aria-label")
    assert "Arrow keys" in label
    page.focus(".chart svg")
    page.keyboard.press("ArrowLeft")
    assert "ago" in page.inner_text(".chart output")
    page.hover(".chart:nth-child(2) svg")
    assert page.locator(".chart:nth-child(2) .cursor").count() == 1
    picture(page, "light")
    page.click("#theme")
    page.click("#theme")
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(16, 21, 28)"
    picture(page, "dark")


@pytest.mark.parametrize("width", [320, 390, 768, 1280])
def test_nothing_sticks_out_at_any_width(page: Any, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 800})
    time.sleep(0.2)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    small = page.evaluate(
        "[...document.querySelectorAll('button, input:not([type=range])')].filter(e => e.offsetParent)"
        ".map(e => [e.id, e.getBoundingClientRect().height]).filter(([, h]) => h < 30)"
    )
    assert not small, "too small for a finger"
    picture(page, f"width-{width}")


def test_a_server_that_goes_away_is_told(browser: Any, tiny_model: Any) -> None:
    with serve_tiny(load_tiny(tiny_model("llama", seed=1)), admin_keys=()) as other:
        page = browser.new_context().new_page()
        page.goto(other.url)
        page.wait_for_selector("#no-admin:not([hidden])")
        assert page.is_hidden("#admin")
    wait_text(page, "#health", "no connection")
    assert threading.active_count() > 0
    page.close()


def test_the_page_is_closed_to_everything_from_elsewhere(served: Served) -> None:
    response = served.client.get("/")
    policy = response.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    for path in ("/", "/page/app.js", "/page/app.css"):
        text = served.client.get(path).text
        for scheme in ("https://", "//cdn", "@import"):
            assert scheme not in text
        assert "http://" not in text.replace("http://www.w3.org/2000/svg", "")
    assert served.client.get("/page/other.js").status_code == 404
