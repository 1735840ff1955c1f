"""Why `gsm load` uses aiohttp: the cost of one streamed token in bare aiohttp and bare httpx, 64 streams at once.

    python benchmarks/load/http_clients.py

A server in another process sends 100 tokens on each of 64 streams, the first after 50 ms, then one every 50 ms. Both
clients only read and parse. TTFT errors are client minus script.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from multiprocessing.connection import Connection

import aiohttp
import httpx
from scripted_server import ScriptedServer, steady

NUM_STREAMS, NUM_TOKENS = 64, 100

Stream = Callable[[], AsyncIterator[bytes]]


def serve(connection: Connection) -> None:
    script = steady(NUM_TOKENS, 0.05, 0.05)
    with ScriptedServer(lambda _: script) as server:
        connection.send(server.url)
        connection.recv()


async def with_httpx(url: str) -> dict[str, float]:
    limits = httpx.Limits(max_connections=NUM_STREAMS, max_keepalive_connections=NUM_STREAMS)
    async with httpx.AsyncClient(timeout=None, limits=limits, trust_env=False) as client:

        async def stream() -> AsyncIterator[bytes]:
            async with client.stream("POST", url, json={}) as response:
                async for data in response.aiter_raw():
                    yield data

        return await measure(stream)


async def with_aiohttp(url: str) -> dict[str, float]:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=NUM_STREAMS)) as session:

        async def stream() -> AsyncIterator[bytes]:
            async with session.post(url, json={}) as response:
                async for data in response.content.iter_any():
                    yield data

        return await measure(stream)


async def measure(stream: Stream) -> dict[str, float]:
    async def one() -> float:
        start_s, first_s = time.perf_counter(), 0.0
        async for data in stream():
            for line in data.split(b"\n"):
                if line.startswith(b"data: {") and json.loads(line[6:])["choices"][:1] and b"word" in line:
                    first_s = first_s or time.perf_counter()
        return 1e3 * (first_s - start_s) - 50.0

    await together(one)
    cpu_s, wall_s = time.process_time(), time.perf_counter()
    errors_ms = sorted(await together(one))
    cpu_s, wall_s = time.process_time() - cpu_s, time.perf_counter() - wall_s
    num_tokens = NUM_STREAMS * NUM_TOKENS
    return {
        "cpu_us_per_token": round(1e6 * cpu_s / num_tokens, 1),
        "cpu_percent_per_100_tokens_per_s": round(1e4 * cpu_s / num_tokens, 2),
        "ttft_error_median_ms": round(errors_ms[len(errors_ms) // 2], 1),
        "ttft_error_max_ms": round(errors_ms[-1], 1),
        "wall_s": round(wall_s, 2),
    }


async def together(one: Callable[[], Awaitable[float]]) -> list[float]:
    return list(await asyncio.gather(*(one() for _ in range(NUM_STREAMS))))


def main() -> None:
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=serve, args=(theirs,))
    process.start()
    url = ours.recv()
    for _ in range(2):
        for name, client in (("httpx", with_httpx), ("aiohttp", with_aiohttp)):
            print(json.dumps({"client": name} | asyncio.run(client(url))), flush=True)
    ours.send("stop")
    process.join()


if __name__ == "__main__":
    main()
