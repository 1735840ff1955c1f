"""The HTTP client against a scripted server on loopback."""

import asyncio
import importlib
import itertools
import json
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
from aiohttp.client_proto import ResponseHandler
from scripted_server import (
    DONE,
    Request,
    Script,
    ScriptedServer,
    Step,
    event,
    models,
    sse,
    steady,
    usage,
    usage_event,
)

from gsm.errors import MeasurementError
from gsm.measure.load import client as client_module
from gsm.measure.load.client import LoadClient
from gsm.measure.load.record import RequestRecord
from gsm.measure.load.target import Target
from gsm.measure.load.workload import Prompt

JSON = {"Content-Type": "application/json"}
GOOD = event("Hi") + event("", finish="stop") + usage_event(2) + DONE


def once(body: bytes = GOOD, **fields: Any) -> Script:
    return Script([Step(0.0, body)] if body else [], **fields)


def ask(answer: Callable[[Request], Script], **target: Any) -> tuple[RequestRecord, list[Request]]:
    async def main(url: str) -> RequestRecord:
        settings = {"model": "m", "timeout_s": 20.0} | target
        async with LoadClient(Target(f"{url}/v1", **settings), 1, keep_text=True) as client:
            return await client.send(Prompt("Hello", 7))

    with ScriptedServer(answer) as server:
        return asyncio.run(main(server.url)), server.requests


def kind(record: RequestRecord) -> str | None:
    return record.failure.kind if record.failure else None


def test_a_chat_request_looks_as_the_api_wants_it() -> None:
    record, requests = ask(lambda _: once(), headers={"X-Mode": "b"}, body={"temperature": 0})
    assert record.failure is None
    (request,) = requests
    assert (request.method, request.path) == ("POST", "/v1/chat/completions")
    assert request.headers["x-mode"] == "b"
    assert request.headers["accept-encoding"] == "identity"
    assert request.body == {
        "model": "m",
        "messages": [{"role": "user", "content": "Hello"}],
        "max_tokens": 7,
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0,
    }


def test_a_completions_request_sends_a_prompt() -> None:
    body = sse({"choices": [{"text": "Hi", "finish_reason": "stop"}]}) + DONE
    record, (request,) = ask(lambda _: once(body), api="completions")
    assert record.answer == "Hi"
    assert request.path == "/v1/completions"
    assert request.body["prompt"] == "Hello"


def test_newer_servers_can_be_given_their_own_limit() -> None:
    _, (request,) = ask(lambda _: once(), body={"max_completion_tokens": 3})
    assert request.body["max_completion_tokens"] == 3
    assert "max_tokens" not in request.body


def test_text_cut_anywhere_by_the_network_arrives_whole() -> None:  # CASES.md E10
    text = "漢字 👩‍👩‍👧 é🎉"
    body = b"".join(event(character) for character in text) + event("", finish="stop") + DONE
    record, _ = ask(lambda _: Script([Step(0.0, body[i : i + 1]) for i in range(len(body))]))
    assert record.answer == text


def test_the_clock_is_read_when_bytes_arrive() -> None:
    record, _ = ask(lambda _: Script([Step(0.0, event("", role="assistant")), Step(0.05, GOOD)]))
    (chunk,) = record.chunks
    assert 0.05 <= chunk.at_s - record.start_s < 5.0


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/moved"])
def test_a_request_starts_when_it_is_written_to_its_connection(path: str) -> None:
    """What this client needed before that, here one tick, is queue time; a redirect does not start it anew."""
    ticks = itertools.count(1)

    def answer(request: Request) -> Script:
        return once() if request.path == path else once(b"", status=307, headers={"Location": path})

    async def main(url: str) -> RequestRecord:
        async with LoadClient(Target(f"{url}/v1", model="m"), 1, clock=lambda: float(next(ticks))) as client:
            return await client.send(Prompt("Hello", 7))

    with ScriptedServer(answer) as server:
        record = asyncio.run(main(server.url))
    assert record.failure is None
    assert (record.scheduled_s, record.start_s) == (1.0, 2.0)


def test_bytes_arrive_when_the_loop_reads_them_and_not_when_we_get_to_them() -> None:
    """While this client is busy the bytes of a token wait in the connection; they came before that."""
    busy_s = 0.3

    async def main(url: str) -> RequestRecord:
        async with LoadClient(Target(f"{url}/v1", model="m"), 1) as client:
            await client.send(Prompt("Hello", 7))  # opens the connection
            read = ResponseHandler.data_received

            def read_then_be_busy(self: ResponseHandler, data: bytes, *args: Any) -> None:
                read(self, data, *args)
                if b"Hi" in data:
                    time.sleep(busy_s)

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(ResponseHandler, "data_received", read_then_be_busy)
                started_s = time.perf_counter()
                record = await client.send(Prompt("Hello", 7))
                assert time.perf_counter() - started_s > busy_s
            return record

    script = Script([Step(0.0, event("", role="assistant")), Step(0.02, GOOD)])
    with ScriptedServer(lambda _: script) as server:
        record = asyncio.run(main(server.url))
    (chunk,) = record.chunks
    assert chunk.at_s - record.start_s < busy_s


def test_whole_responses() -> None:
    body = {"choices": [{"message": {"content": "Hi"}, "finish_reason": "stop"}], "usage": usage(2)}
    record, (request,) = ask(lambda _: once(json.dumps(body).encode(), headers=JSON), stream=False)
    assert (record.answer, record.num_output_tokens) == ("Hi", 2)
    assert request.body["stream"] is False
    assert "stream_options" not in request.body


@pytest.mark.parametrize(
    ("script", "expected", "words"),
    [
        (once(b'{"error": {"message": "too busy"}}', status=503, headers=JSON), "http_503", "too busy"),
        (once(b"<html>gone</html>", status=404, headers={"Content-Type": "text/html"}), "http_404", "gone"),
        (once(b"", status=500), "http_500", "500"),
        (once(event("a"), cut=True), "cut_off", "closed"),
        (once(event("a")), "cut_off", "finish reason"),
        (once(b""), "cut_off", "finish reason"),
        (once(b"data: {nonsense\n\n"), "bad_stream", "cannot be read"),
        (once(b"{}", headers=JSON), "no_stream", "--no-stream"),
        (once(GOOD, headers={"Content-Type": "text/event-stream", "Content-Encoding": "gzip"}), "bad_body", "gzip"),
        (once(sse({"error": {"message": "out of memory"}})), "server_error", "out of memory"),
    ],
)
def test_whatever_a_server_does_is_a_failure_with_a_reason(script: Script, expected: str, words: str) -> None:
    record, _ = ask(lambda _: script)
    assert kind(record) == expected
    assert record.failure
    assert words in record.failure.message


def test_a_response_that_takes_too_long_is_a_failure() -> None:
    record, _ = ask(lambda _: Script([Step(0.0, event("a")), Step(30.0, GOOD)]), timeout_s=0.2)
    assert kind(record) == "timeout"


def test_a_response_without_end_is_cut_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "MAX_RESPONSE_BYTES", 10_000)
    record, _ = ask(lambda _: Script([Step(0.0, event("x" * 500)) for _ in range(100)]))
    assert kind(record) == "bad_stream"


def test_nobody_listening_is_a_failure_and_not_a_crash() -> None:
    with ScriptedServer(lambda _: once()) as server:
        url = server.url

    async def main() -> RequestRecord:
        async with LoadClient(Target(f"{url}/v1", model="m"), 1) as client:
            return await client.send(Prompt("Hello", 7))

    record = asyncio.run(main())
    assert kind(record) == "connection"
    assert record.failure
    assert "cannot connect to 127.0.0.1" in record.failure.message


def redirect(to: str, status: int = 307) -> Callable[[Request], Script]:
    def answer(request: Request) -> Script:
        if request.path == "/moved":
            return once()
        return once(b"", status=status, headers={"Location": to})

    return answer


@pytest.mark.parametrize("to", ["http://example.org/v1", "//example.org/", "http://127.0.0.1:1/x", "file:///x", ""])
def test_redirects_to_other_hosts_are_refused(to: str) -> None:
    record, requests = ask(redirect(to), headers={"Authorization": "Bearer secret"})
    assert kind(record) == "redirect"
    assert len(requests) == 1


@pytest.mark.parametrize("status", [301, 302, 303])
def test_redirects_that_would_turn_post_into_get_are_refused(status: int) -> None:
    record, requests = ask(redirect("/moved", status))
    assert kind(record) == "redirect"
    assert len(requests) == 1


def test_a_redirect_on_the_same_server_is_followed_but_not_for_ever() -> None:
    record, requests = ask(redirect("/moved"))
    assert record.failure is None
    assert [request.path for request in requests] == ["/v1/chat/completions", "/moved"]
    assert requests[1].method == "POST"
    record, requests = ask(redirect("/round"))
    assert kind(record) == "redirect"
    assert len(requests) == 4


def prepare(answer: Callable[[Request], Script], **target: Any) -> tuple[LoadClient, list[str], list[Request]]:
    async def main(url: str) -> tuple[LoadClient, list[str]]:
        async with LoadClient(Target(f"{url}/v1", **target), 1) as client:
            return client, await client.prepare()

    with ScriptedServer(answer) as server:
        return *asyncio.run(main(server.url)), server.requests


def test_the_model_is_asked_for_when_none_is_named() -> None:
    client, notes, requests = prepare(lambda r: models("big") if r.method == "GET" else steady(2, 0.0, 0.0))
    assert client.target.model == "big"
    assert notes == []
    assert [r.path for r in requests] == ["/v1/models", "/v1/chat/completions"]
    assert requests[1].body["model"] == "big"


@pytest.mark.parametrize(
    "answer",
    [
        once(b"", status=404),
        once(b'{"data": []}', headers=JSON),
        once(b"no json", headers=JSON),
        once(b"", status=302, headers={"Location": "http://example.org"}),
    ],
)
def test_a_server_that_lists_no_model_asks_for_a_name(answer: Script) -> None:
    with pytest.raises(MeasurementError, match="--model"):
        prepare(lambda _: answer)


def test_a_password_in_the_url_is_used_but_not_shown() -> None:
    async def main(url: str) -> None:
        async with LoadClient(Target(f"{url.replace('//', '//me:secret@')}/v1"), 1) as client:
            await client.prepare()

    with ScriptedServer(lambda _: once(b"", status=404)) as server, pytest.raises(MeasurementError) as caught:
        asyncio.run(main(server.url))
    assert server.requests[0].headers["authorization"].startswith("Basic ")
    assert "secret" not in str(caught.value)


def test_a_server_that_rejects_stream_options_is_measured_without() -> None:
    def answer(request: Request) -> Script:
        if "stream_options" in request.body:
            return once(b'{"detail": "unknown field stream_options"}', status=422, headers=JSON)
        return once()

    client, notes, requests = prepare(answer, model="m")
    assert not client.target.usage_fields
    assert len(requests) == 2
    (note,) = notes
    assert "unknown field stream_options" in note


def test_a_server_that_rejects_everything_cannot_be_measured() -> None:
    with pytest.raises(MeasurementError, match="no such model"):
        prepare(lambda _: once(b'{"error": {"message": "no such model"}}', status=400, headers=JSON), model="m")


def test_without_aiohttp_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    monkeypatch.delitem(sys.modules, "gsm.measure.load.client")
    with pytest.raises(MeasurementError, match=r"pip install 'gsm-infer\[load\]'"):
        importlib.import_module("gsm.measure.load.client")
