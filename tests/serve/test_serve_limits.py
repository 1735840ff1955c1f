"""Keys, floods and large bodies, on a server with small limits."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from serving import Running, run_server

from gsm.models import LoadedModel


@pytest.fixture(scope="module")
def narrow(demo: LoadedModel) -> Iterator[Running]:
    """One request at a time, one may wait; keys and small limits."""
    limits = {"max_running": 1, "max_waiting": 1, "kv_pages": 100}
    keys = ("first-key-1234", "second-key-5678")
    with run_server(demo, {"engine": limits}, api_keys=keys, max_body_bytes=2000, max_request_s=30.0) as found:
        yield found


def ask(running: Running, key: str = "first-key-1234", **body: Any) -> httpx.Response:
    headers = {"Authorization": f"Bearer {key}".strip()}
    body = {"model": "demo", "prompt": "One two", "max_tokens": 2, "temperature": 0} | body
    return httpx.post(f"{running.url}/v1/completions", json=body, headers=headers, timeout=120, trust_env=False)


def test_keys(narrow: Running) -> None:
    assert ask(narrow).status_code == 200
    for wrong in ("", "first-key-123", "first-key-12345", "x"):
        response = ask(narrow, wrong)
        assert response.status_code == 401
        assert "first-key" not in response.text
    assert httpx.get(f"{narrow.url}/v1/models", trust_env=False).status_code == 401
    assert httpx.get(f"{narrow.url}/health", trust_env=False).status_code == 200


def test_prefixes_of_two_keys_are_apart(narrow: Running) -> None:
    prompt = "The same words for both keys, " * 6

    def cached(key: str) -> int:
        return ask(narrow, key, prompt=prompt).json()["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert [cached("first-key-1234"), cached("second-key-5678")] == [0, 0]
    assert cached("first-key-1234") > 0


def test_a_flood_gets_429_and_who_is_in_gets_an_answer(narrow: Running) -> None:
    async def flood() -> list[httpx.Response]:
        headers = {"Authorization": "Bearer first-key-1234"}
        body = {"model": "demo", "prompt": "One two", "max_tokens": 12, "ignore_eos": True}
        async with httpx.AsyncClient(timeout=120, trust_env=False) as client:
            url = f"{narrow.url}/v1/completions"
            return await asyncio.gather(*(client.post(url, json=body, headers=headers) for _ in range(8)))

    responses = asyncio.run(flood())
    codes = [response.status_code for response in responses]
    assert set(codes) == {200, 429}
    for response in responses:
        if response.status_code == 429:
            assert int(response.headers["retry-after"]) >= 1
            assert "waiting" in response.json()["error"]["message"]
    narrow.wait_until_idle()
    assert narrow.used_pages() == 0


def test_large_bodies_are_refused_before_they_are_read(narrow: Running) -> None:
    response = ask(narrow, prompt="x" * 3000)
    assert response.status_code == 413
    assert "2000" in response.json()["error"]["message"]

    def chunks() -> Iterator[bytes]:
        for _ in range(30):
            yield b'{"model": "demo", ' + b" " * 100

    headers = {"Authorization": "Bearer first-key-1234", "Content-Type": "application/json"}
    url = f"{narrow.url}/v1/completions"
    assert httpx.post(url, content=chunks(), headers=headers, trust_env=False).status_code == 413
    assert ask(narrow).status_code == 200


def test_what_never_fits_is_refused(narrow: Running) -> None:
    response = ask(narrow, prompt=[5] * 100, max_tokens=1700)
    assert response.status_code == 400
    assert "KV memory" in response.json()["error"]["message"]
