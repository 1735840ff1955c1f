"""One API call from its prompts to its answer, streamed or whole."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from gsm.engine import TokenEvent, TokenLogprobs
from gsm.errors import GsmError
from gsm.integrations.transformers.grading import Lowered
from gsm.serve.errors import ApiError, ended, translate
from gsm.serve.protocol import ChatRequest, CompletionRequest
from gsm.serve.worker import Call, Stream

if TYPE_CHECKING:
    from gsm.serve.app import Server

_FINISHED_BADLY = ("abort", "error", "timeout")


@dataclass(slots=True)
class Prompt:
    """Text (empty where ids were given) and ids of one prompt; `lowered` are ranges of old turns whose KV goes."""

    text: str
    ids: list[int]
    lowered: Lowered | None = None
    num_removed_tokens: int = 0  # that the messages had more


@dataclass(slots=True)
class _Choice:
    """What has come of one choice so far."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    last_s: float | None = None


class Answer:
    """Runs the prompts of one call (one for chat, several for completions) and renders what comes."""

    def __init__(self, server: Server, body: ChatRequest | CompletionRequest, prompts: list[Prompt], calls: list[Call]):
        self._server, self._body = server, body
        self._prompts, self._calls = prompts, calls
        self._is_chat = isinstance(body, ChatRequest)
        self._id = ("chatcmpl-" if self._is_chat else "cmpl-") + uuid.uuid4().hex
        self._created = int(time.time())
        self._began_s = time.monotonic()
        self._n = calls[0].sampling.n
        self._choices = [_Choice() for _ in range(len(calls) * self._n)]
        self._streams: list[Stream] = []

    async def begin(self) -> None:
        """Queue every prompt, or none. Raises ApiError."""
        try:
            for call in self._calls:
                self._streams.append(await self._server.worker.submit(call))
        except GsmError as error:
            self.cancel()
            raise translate(error, self._server.retry_after_s) from error

    def cancel(self) -> None:
        """The client is gone, or something failed: give back whatever still runs."""
        for stream in self._streams:
            if stream.num_open:
                stream.num_open = 0
                self._server.cancel(stream.call.request_id)

    @property
    def headers(self) -> dict[str, str]:
        return {"x-gsm-epoch": str(self._streams[0].epoch), "x-request-id": self._id}

    # -- whole -------------------------------------------------------------------------------------------------

    async def whole(self) -> dict[str, Any]:
        """The complete response body. Raises ApiError."""
        try:
            async for index, event in self._events():
                self._take(index, event)
        finally:
            self.cancel()
        choices = [self._whole_choice(index, choice) for index, choice in enumerate(self._choices)]
        return self._head("chat.completion" if self._is_chat else "text_completion", choices) | {"usage": self._usage()}

    def _whole_choice(self, index: int, choice: _Choice) -> dict[str, Any]:
        content: dict[str, Any]
        if self._is_chat:
            content = {"message": {"role": "assistant", "content": choice.text, "refusal": None}}
        else:
            content = {"text": choice.text}
        return self._choice(index, choice, content, choice.logprobs)

    # -- streamed ----------------------------------------------------------------------------------------------

    async def stream(self) -> AsyncIterator[bytes]:
        """Server-sent events. An error after the beginning is an event of its own."""
        try:
            if self._is_chat:
                for index in range(len(self._choices)):
                    yield self._chunk([self._delta(index, {"role": "assistant", "content": ""}, [])])
            pending: dict[int, list[TokenLogprobs]] = {}
            async for index, event in self._events():
                self._take(index, event)
                pending.setdefault(index, []).extend(event.logprobs)
                if event.text or event.finish_reason:
                    yield self._chunk(self._deltas(index, event, pending.pop(index)))
            if self._body.usage_in_stream:
                yield self._chunk([], self._usage())
            yield b"data: [DONE]\n\n"
        except ApiError as error:
            yield _event(error.body)
        finally:
            self.cancel()

    def _deltas(self, index: int, event: TokenEvent, logprobs: list[TokenLogprobs]) -> list[dict[str, Any]]:
        return [self._delta(index, {"content": event.text} if event.text else {}, logprobs)]

    def _delta(self, index: int, delta: dict[str, Any], logprobs: list[TokenLogprobs]) -> dict[str, Any]:
        content = {"delta": delta} if self._is_chat else {"text": delta.get("content", "")}
        return self._choice(index, self._choices[index], content, logprobs)

    def _chunk(self, choices: list[dict[str, Any]], usage: dict[str, Any] | None = None) -> bytes:
        head = self._head("chat.completion.chunk" if self._is_chat else "text_completion", choices)
        if usage is not None or self._body.usage_in_every_chunk:
            head["usage"] = usage or self._usage()
        elif self._body.usage_in_stream:
            head["usage"] = None
        return _event(head)

    # -- both --------------------------------------------------------------------------------------------------

    async def _events(self) -> AsyncIterator[tuple[int, TokenEvent]]:
        """(index of the choice, event) of all prompts as they come. Raises ApiError when one ends badly or late."""
        merged: asyncio.Queue[tuple[int, TokenEvent | GsmError | None]] = asyncio.Queue()
        tasks = [asyncio.create_task(_pump(stream, number, merged)) for number, stream in enumerate(self._streams)]
        num_open, deadline_s = len(tasks), self._began_s + self._server.settings.max_request_s
        try:
            while num_open:
                number, item = await asyncio.wait_for(merged.get(), max(0.0, deadline_s - time.monotonic()))
                if item is None:
                    num_open -= 1
                elif isinstance(item, GsmError):
                    raise translate(item, self._server.retry_after_s)
                elif item.finish_reason in _FINISHED_BADLY:
                    raise ended(item.finish_reason, item.error, self._server.retry_after_s)
                else:
                    yield number * self._n + item.index, item
        except (TimeoutError, asyncio.TimeoutError):
            limit = self._server.settings.max_request_s
            raise ApiError(504, f"the request took longer than {limit:g} s; ask for fewer tokens", "timeout") from None
        finally:
            for task in tasks:
                task.cancel()
        await self._finished()

    def _take(self, index: int, event: TokenEvent) -> None:
        choice, now = self._choices[index], time.monotonic()
        metrics = self._server.metrics
        if choice.last_s is None:
            metrics.ttft_s.observe(now - self._began_s)
        elif event.token_ids:
            for _ in event.token_ids:
                metrics.itl_s.observe((now - choice.last_s) / len(event.token_ids))
        choice.last_s = now
        choice.text += event.text
        choice.token_ids += event.token_ids
        choice.logprobs += event.logprobs
        choice.finish_reason, choice.stop_reason = event.finish_reason, event.stop_reason

    async def _finished(self) -> None:
        """Everything came: observe it, and remember the ids for the next turn."""
        metrics, server = self._server.metrics, self._server
        metrics.e2e_s.observe(time.monotonic() - self._began_s)
        for number, (prompt, stream) in enumerate(zip(self._prompts, self._streams, strict=True)):
            metrics.queue_s.observe(stream.queued_s)
            metrics.prompt_tokens.observe(len(prompt.ids))
            for choice in self._choices[number * self._n : (number + 1) * self._n]:
                metrics.generation_tokens.observe(len(choice.token_ids))
                if prompt.text:
                    ids = choice.token_ids
                    is_ended = bool(ids) and ids[-1] in server.worker.engine.eos_ids
                    answer_ids = ids[:-1] if is_ended else ids
                    await server.tokens.remember(stream.call.salt, prompt.text, prompt.ids, answer_ids)

    def _choice(
        self, index: int, choice: _Choice, content: dict[str, Any], logprobs: list[TokenLogprobs]
    ) -> dict[str, Any]:
        rendered = {"index": index, **content, "logprobs": None, "finish_reason": choice.finish_reason}
        if choice.finish_reason is not None and choice.stop_reason is not None:
            rendered["stop_reason"] = choice.stop_reason
        if logprobs:
            rendered["logprobs"] = self._chat_logprobs(logprobs) if self._is_chat else self._old_logprobs(logprobs)
        return rendered

    def _chat_logprobs(self, logprobs: list[TokenLogprobs]) -> dict[str, Any]:
        def one(token_id: int, logprob: float) -> dict[str, Any]:
            text = self._server.tokens.token_text(token_id)
            return {"token": text, "logprob": _finite(logprob), "bytes": list(text.encode())}

        content = [
            one(t.token_id, t.logprob) | {"top_logprobs": [one(i, value) for i, value in t.top]} for t in logprobs
        ]
        return {"content": content, "refusal": None}

    def _old_logprobs(self, logprobs: list[TokenLogprobs]) -> dict[str, Any]:
        text = self._server.tokens.token_text
        return {
            "tokens": [text(t.token_id) for t in logprobs],
            "token_logprobs": [_finite(t.logprob) for t in logprobs],
            "top_logprobs": [{text(i): _finite(value) for i, value in t.top} for t in logprobs],
            "text_offset": [],
        }

    def _head(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        model = self._server.settings.model_name
        return {"id": self._id, "object": kind, "created": self._created, "model": model, "choices": choices}

    def _usage(self) -> dict[str, Any]:
        prompt = sum(len(p.ids) for p in self._prompts)
        completion = sum(len(choice.token_ids) for choice in self._choices)
        cached = sum(stream.num_cached_tokens for stream in self._streams)
        details = {"cached_tokens": cached}
        removed = sum(p.num_removed_tokens for p in self._prompts)
        if removed:
            details["removed_tokens"] = removed
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": details,
        }


async def _pump(stream: Stream, number: int, target: asyncio.Queue[tuple[int, TokenEvent | GsmError | None]]) -> None:
    try:
        async for event in stream.events():
            target.put_nowait((number, event))
        target.put_nowait((number, None))
    except GsmError as error:
        target.put_nowait((number, error))


def _event(body: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


def _finite(logprob: float) -> float:
    """JSON has no infinity; -9999 is what OpenAI sends."""
    return max(logprob, -9999.0)
