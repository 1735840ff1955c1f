"""Clients that go away: nothing stays behind."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from serving import Running

LONG: dict[str, Any] = {"model": "demo", "prompt": "Once upon a time", "max_tokens": 400, "ignore_eos": True}


@pytest.mark.parametrize("change", [{"stream": True}, {"stream": True, "n": 2}, {}, {"n": 2}], ids=str)
def test_a_client_that_goes_away_gives_its_pages_back(
    running: Running, http: httpx.Client, change: dict[str, Any]
) -> None:
    before = running.used_pages()  # CASES D6
    if change.get("stream"):
        with http.stream("POST", "/v1/completions", json=LONG | change) as response:
            next(response.iter_lines())
    else:
        with pytest.raises(httpx.ReadTimeout):
            http.post("/v1/completions", json=LONG | change, timeout=1.0)
    running.wait_until_idle()
    assert running.used_pages() == before
    running.engine.manager.check_integrity()
    assert http.get("/health").status_code == 200
