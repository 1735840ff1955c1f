"""A dying engine and a shutdown: told clearly, nobody hangs."""

from __future__ import annotations

import time
from typing import Any

import httpx
from serving import run_server

from gsm.models import LoadedModel

LONG: dict[str, Any] = {"model": "demo", "prompt": "Once upon a time", "max_tokens": 400, "ignore_eos": True}


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
