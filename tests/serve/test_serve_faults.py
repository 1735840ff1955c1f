"""Clients that go away, floods, wrong keys, large bodies, a dying engine: told clearly, and nothing stays behind."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from serving import Running, run_server

from gsm.models import LoadedModel

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


@pytest.fixture(scope="module")
def narrow(demo: LoadedModel) -> Iterator[Running]:
    """One request at a time, one may wait; keys and small limits."""
    limits = {"max_running": 1, "max_waiting": 1, "kv_pages": 100}
    keys = ("first-key-1234", "second-key-5678")
    with run_server(demo, {"engine": limits}, api_keys=keys, max_body_bytes=2000, max_request_s=30.0) as found:
        yield found


def ask(running: Running, key: str = "first-key-1234", **body: Any) -> httpx.Response:
    headers = {"Authorization": f"Bearer {key}"}
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


def test_a_dying_engine_is_told_and_nobody_hangs(demo: LoadedModel) -> None:
    with run_server(demo) as running:
        original = running.engine.step
        steps = 0

        def die() -> Any:
            nonlocal steps
            steps += 1
            if steps == 4:
                raise RuntimeError("made to die")
            return original()

        running.engine.step = die  # type: ignore[method-assign]
        body = LONG | {"max_tokens": 50}
        with httpx.Client(base_url=running.url, timeout=60, trust_env=False) as client:
            response = client.post("/v1/completions", json=body)
            assert response.status_code == 503
            assert "made to die" in response.json()["error"]["message"]
            health = client.get("/health")
            assert health.status_code == 503
            assert "made to die" in health.json()["reason"]
            assert client.post("/v1/completions", json=body | {"stream": True}).status_code == 503


def test_shutdown_lets_who_runs_finish(demo: LoadedModel) -> None:
    with run_server(demo) as running, httpx.Client(base_url=running.url, timeout=60, trust_env=False) as client:
        body = LONG | {"max_tokens": 8, "stream": True}
        with client.stream("POST", "/v1/completions", json=body) as response:
            lines = response.iter_lines()
            next(lines)
            running.listener.should_exit = True
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        deadline = time.monotonic() + 30
        while running.server.worker.is_alive and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not running.server.worker.is_alive
