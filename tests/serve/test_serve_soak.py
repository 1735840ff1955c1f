"""Ten minutes of everything at once, and requests made up from our own description of the API. Slow."""

from __future__ import annotations

import asyncio
import os
import random
import time
from typing import Any

import httpx
import psutil
import pytest
from serving import Running, run_server

from gsm.models import LoadedModel

SOAK_S = float(os.environ.get("GSM_SOAK_S", "600"))
WORDS = ["the", "of", "and", "to", "in", "is", "you", "that", "it", "he", "was", "for", "on", "are", "as", "with"]


async def one(client: httpx.AsyncClient, order: random.Random, counts: dict[str, int]) -> None:
    """One request of a random kind; whatever happens is counted, nothing is raised."""
    kind = order.choices(["whole", "stream", "leave", "large", "malformed", "choices"], [4, 4, 3, 1, 1, 2])[0]
    words = " ".join(order.choices(WORDS, k=order.choice([3, 40, 300])))
    marker = order.randrange(10**6)
    body: dict[str, Any] = {"model": "demo", "prompt": f"{marker} {words}", "max_tokens": order.choice([1, 8, 30])}
    try:
        if kind == "malformed":
            response = await client.post("/v1/completions", content=order.randbytes(50))
            assert response.status_code == 400
        elif kind == "large":
            response = await client.post("/v1/completions", json=body | {"prompt": "word " * 20_000})
            assert response.status_code in (400, 413)
        elif kind == "leave":
            async with client.stream("POST", "/v1/completions", json=body | {"stream": True}) as response:
                await anext(response.aiter_bytes())
        elif kind == "stream":
            async with client.stream("POST", "/v1/completions", json=body | {"stream": True}) as response:
                text = await response.aread()
            assert response.status_code in (429, 503) or text.endswith(b"data: [DONE]\n\n")
        else:
            response = await client.post("/v1/completions", json=body | {"n": 2 if kind == "choices" else 1})
            if response.status_code == 200:
                answer = response.json()
                assert len(answer["choices"]) == (2 if kind == "choices" else 1)
                assert all(choice["finish_reason"] in ("stop", "length") for choice in answer["choices"])
            else:
                assert response.status_code in (429, 503)
        counts[kind] = counts.get(kind, 0) + 1
    except (httpx.ReadTimeout, StopAsyncIteration):
        counts["late"] = counts.get("late", 0) + 1


async def load(url: str, until_s: float) -> dict[str, int]:
    counts: dict[str, int] = {}
    async with httpx.AsyncClient(base_url=url, timeout=120, trust_env=False) as client:

        async def worker(seed: int) -> None:
            order = random.Random(seed)
            while time.monotonic() < until_s:
                await one(client, order, counts)

        await asyncio.gather(*(worker(seed) for seed in range(12)))
    return counts


@pytest.mark.slow
@pytest.mark.timeout(SOAK_S + 600)
def test_soak(demo: LoadedModel) -> None:
    config = {"engine": {"kv_pages": 80, "max_running": 6, "max_waiting": 6, "draft_tokens": 4}}
    with run_server(demo, config, max_body_bytes=50_000) as running:
        asyncio.run(load(running.url, time.monotonic() + SOAK_S / 4))  # pools have grown, kernels are compiled
        running.wait_until_idle()
        before = psutil.Process().memory_info().rss
        counts = asyncio.run(load(running.url, time.monotonic() + SOAK_S * 3 / 4))
        running.wait_until_idle()
        assert counts["whole"] > 0
        assert counts.get("late", 0) == 0
        assert running.used_pages() == 0
        running.engine.manager.check_integrity()
        assert psutil.Process().memory_info().rss - before < 100 * 2**20
        assert not running.engine.requests


@pytest.mark.slow
def test_requests_made_up_from_our_own_description(running: Running) -> None:
    schemathesis = pytest.importorskip("schemathesis")
    schema = schemathesis.openapi.from_url(f"{running.url}/openapi.json")
    for operation in schema.get_all_operations():
        _try_many(operation.ok())


def _try_many(operation: Any) -> None:
    """No request of this operation may make the server fail."""
    from hypothesis import HealthCheck, given, settings

    @settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(case=operation.as_strategy())
    def check(case: Any) -> None:
        if isinstance(case.body, dict):
            case.body["max_tokens"] = 1
        response = case.call(timeout=120)
        assert response.status_code < 500, response.text

    check()
