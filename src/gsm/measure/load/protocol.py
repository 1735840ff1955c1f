"""OpenAI's response format, streamed or whole, turned into a `RequestRecord`. No network and no clock in here."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from gsm.measure.load.record import Chunk, Failure, RequestRecord
from gsm.measure.load.sse import SSEParser

MAX_TOKENS = 100_000_000  # a larger count is a broken server's, and one sample per token must fit into memory
_MALFORMED = (ValueError, TypeError, AttributeError, KeyError, IndexError)  # JSON of another shape than OpenAI's


class BadResponse(Exception):
    """The server's answer cannot be used; `failure` says why. Never leaves this package."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.failure = Failure(kind, message)


class StreamReader:
    """Reads one streamed response: `feed(bytes, at_s)` for every network read, then `close()`.

    Raises BadResponse for an error event, for JSON or UTF-8 that cannot be read, and at the end for a stream that was
    cut off (neither a finish reason nor `[DONE]`).
    """

    def __init__(self, record: RequestRecord, keep_text: bool = False) -> None:
        self._record = record
        self._keep_text = keep_text
        self._parser = SSEParser()
        self._done = False

    def feed(self, data: bytes, at_s: float) -> None:
        self._take(self._parser.feed, data, at_s)

    def close(self, at_s: float) -> None:
        self._take(lambda _: self._parser.close(), b"", at_s)
        if not self._done and self._record.finish_reason is None:
            raise BadResponse("cut_off", "the stream ended without a finish reason or [DONE]")

    def _take(self, parse: Callable[[bytes], list[str]], data: bytes, at_s: float) -> None:
        try:
            for payload in parse(data):
                self._event(payload, at_s)
        except UnicodeDecodeError as error:
            raise BadResponse("bad_stream", f"the stream is no valid UTF-8: {error.reason}") from error
        except _MALFORMED as error:
            raise BadResponse("bad_stream", f"the stream cannot be read: {type(error).__name__}: {error}") from error

    def _event(self, payload: str, at_s: float) -> None:
        if payload.strip() == "[DONE]":
            self._done = True
            return
        event = _object(json.loads(payload))
        record = self._record
        running = _take_usage(record, event)
        choices = event.get("choices")
        if not choices:
            return
        choice = choices[0]
        reasoning, answer = _texts(choice)
        if reasoning or answer:
            record.chunks.append(Chunk(at_s, len(reasoning), len(answer), running))
            record.end_s = at_s
            if self._keep_text:
                record.reasoning += reasoning
                record.answer += answer
        if finish := choice.get("finish_reason"):
            record.finish_reason = finish
            record.end_s = at_s


def read_whole(record: RequestRecord, body: bytes, at_s: float, keep_text: bool = False) -> None:
    """Reads a response that was not streamed; raises BadResponse when it is none."""
    try:
        response = _object(json.loads(body))
        choice = response["choices"][0]
        _take_usage(record, response)
        record.finish_reason = choice.get("finish_reason")
        texts = _texts(choice)
    except _MALFORMED as error:
        raise BadResponse("bad_body", f"the body cannot be read: {type(error).__name__}: {error}") from error
    record.end_s = at_s
    if keep_text:
        record.reasoning, record.answer = texts


def error_text(body: bytes) -> str:
    """The server's own explanation in an error body, shortened to one line."""
    text = body.decode(errors="replace")
    try:
        parsed = json.loads(text)
    except ValueError:
        parsed = None
    if isinstance(parsed, dict):
        error = parsed.get("error", parsed.get("detail", parsed.get("message")))
        text = str(error.get("message", error)) if isinstance(error, dict) else str(error or text)
    text = " ".join(text.split())
    return text if len(text) <= 300 else text[:297] + "..."


def _object(event: Any) -> dict[str, Any]:
    if not isinstance(event, dict):
        raise ValueError(f"expected a JSON object, got {type(event).__name__}")
    if event.get("error"):
        raise BadResponse("server_error", error_text(json.dumps(event).encode()))
    return event


def _texts(choice: Mapping[str, Any]) -> tuple[str, str]:
    """Reasoning and answer text of one choice. Tool calls and refusals are tokens of the answer, too."""
    delta = choice.get("delta") or choice.get("message")
    if delta is None:
        return "", choice.get("text") or ""
    reasoning = delta.get("reasoning_content") or delta.get("reasoning") or ""
    answer = delta.get("content") or delta.get("refusal") or ""
    for call in delta.get("tool_calls") or ():
        function = call.get("function") or {}
        answer += (function.get("name") or "") + (function.get("arguments") or "")
    return reasoning, answer


def _take_usage(record: RequestRecord, event: Mapping[str, Any]) -> int | None:
    """Keeps the token counts of an event that has them; returns the output tokens so far."""
    usage = event.get("usage")
    if not usage:
        return None
    completion = _count(usage, "completion_tokens")
    if completion is not None:
        record.num_output_tokens = completion
    if (prompt := _count(usage, "prompt_tokens")) is not None:
        record.num_prompt_tokens = prompt
    if (cached := _count(usage.get("prompt_tokens_details") or {}, "cached_tokens")) is not None:
        record.num_cached_tokens = cached
    return completion


def _count(usage: Mapping[str, Any], name: str) -> int | None:
    value = usage.get(name)
    if value is not None and not (type(value) is int and 0 <= value <= MAX_TOKENS):
        raise ValueError(f"usage.{name} is {value!r}, not a count of tokens")
    return value
