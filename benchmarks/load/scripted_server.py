"""A fake OpenAI-compatible server that says scripted bytes at scripted times. For tests and for measuring the client.

    with ScriptedServer(lambda request: steady(num_tokens=16, ttft_s=0.1, itl_s=0.02)) as server:
        ... server.url ...

Times are seconds after the request's body was read. Every step is one write of its own.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

DONE = b"data: [DONE]\n\n"


class Step(NamedTuple):
    at_s: float
    data: bytes


@dataclass
class Script:
    """One response. `cut` closes the connection after the last step instead of ending the response properly."""

    steps: Sequence[Step] = ()
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=lambda: {"Content-Type": "text/event-stream"})
    cut: bool = False


@dataclass
class Request:
    method: str
    path: str
    headers: dict[str, str]
    body: dict[str, Any]


Answer = Callable[[Request], Script]


class ScriptedServer:
    """Runs in a thread of its own between `__enter__` and `__exit__`; `requests` are all it was asked."""

    def __init__(self, answer: Answer, port: int = 0) -> None:
        self._answer = answer
        self._port = port
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self.requests: list[Request] = []
        self.read_s: list[float] = []  # when each request had been read, on the monotonic clock
        self.late_s: list[float] = []  # by how much each step was written later than scripted
        self.url = ""

    def __enter__(self) -> ScriptedServer:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._open(), self._loop).result()
        return self

    def __exit__(self, *exc: object) -> None:
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _open(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self._port, backlog=1024)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def _close(self) -> None:
        self._server.close()
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                request = await _read_request(reader)
                self.requests.append(request)
                self.read_s.append(self._loop.time())
                if not await self._write(writer, self._answer(request), self.read_s[-1]):
                    break
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass  # the client went away, which is its right, or this server closes
        finally:
            writer.close()

    async def _write(self, writer: asyncio.StreamWriter, script: Script, started_s: float) -> bool:
        """Writes one response, chunked; returns whether the connection stays open."""
        lines = [f"HTTP/1.1 {script.status} Scripted", "Transfer-Encoding: chunked"]
        lines += [f"{name}: {value}" for name, value in script.headers.items()]
        writer.write("\r\n".join(lines).encode() + b"\r\n\r\n")
        for step in script.steps:
            due_s = started_s + step.at_s
            await asyncio.sleep(due_s - self._loop.time())
            writer.write(b"%x\r\n%s\r\n" % (len(step.data), step.data))
            self.late_s.append(self._loop.time() - due_s)
        if script.cut:
            return False
        writer.write(b"0\r\n\r\n")
        await writer.drain()
        return True


async def _read_request(reader: asyncio.StreamReader) -> Request:
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    first, *lines = head.split("\r\n")
    method, path, _ = first.split(" ")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines if line)}
    body = await reader.readexactly(int(headers.get("content-length", 0)))
    return Request(method, path, headers, json.loads(body) if body else {})


def event(content: str | None = None, **fields: Any) -> bytes:
    """One chat event. `role`, `reasoning`, `reasoning_content`, `finish` and `usage` are optional."""
    delta = {key: fields[key] for key in ("role", "reasoning", "reasoning_content", "tool_calls") if key in fields}
    if content is not None:
        delta["content"] = content
    choice = {"index": 0, "delta": delta, "finish_reason": fields.get("finish")}
    return sse({"object": "chat.completion.chunk", "choices": [choice], "usage": fields.get("usage")})


def usage(completion: int, prompt: int = 10) -> dict[str, int]:
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def usage_event(completion: int, prompt: int = 10) -> bytes:
    """The last event that `stream_options.include_usage` asks for."""
    return sse({"object": "chat.completion.chunk", "choices": [], "usage": usage(completion, prompt)})


def sse(payload: Any) -> bytes:
    return b"data: " + json.dumps(payload, ensure_ascii=False).encode() + b"\n\n"


def steady(num_tokens: int, ttft_s: float, itl_s: float) -> Script:
    """One token at `ttft_s`, then one every `itl_s`; finish reason, usage and [DONE] with the last."""
    steps = [Step(0.0, event("", role="assistant"))]
    steps += [Step(ttft_s + i * itl_s, event(" word")) for i in range(num_tokens)]
    end = event("", finish="length") + usage_event(num_tokens) + DONE
    return Script([*steps, Step(steps[-1].at_s, end)])


def models(name: str = "scripted") -> Script:
    """The answer to GET /v1/models."""
    body = json.dumps({"object": "list", "data": [{"id": name, "object": "model"}]}).encode()
    return Script([Step(0.0, body)], headers={"Content-Type": "application/json"})
