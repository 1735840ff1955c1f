"""The HTTP side: sends one request, notes when bytes arrive, and turns every foreign error into a `Failure`.

aiohttp and not httpx: with 64 streams of 20 tokens per second httpx took 340 us of CPU per token against 45 us, and
64 requests that started together took it 0.7 s to get on their way (benchmarks/load/README.md).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from types import TracebackType
from typing import Any

from gsm.errors import ConfigError, MeasurementError
from gsm.measure.load.protocol import BadResponse, StreamReader, error_text, read_whole
from gsm.measure.load.record import Failure, RequestRecord
from gsm.measure.load.target import Target, without_credentials
from gsm.measure.load.workload import Prompt

try:
    import aiohttp
    import yarl

    from gsm.measure.load.connection import TimedConnector, arrival_clock, note_sending
except ImportError as error:
    raise MeasurementError("gsm load needs aiohttp; install it with: pip install 'gsm-infer[load]'") from error

MAX_RESPONSE_BYTES = 256 << 20
MAX_REDIRECTS = 3
_LOOPBACK = {"localhost", "127.0.0.1", "::1"}


class LoadClient:
    """An open connection pool to one target. Use as `async with LoadClient(target, n) as client`."""

    def __init__(
        self,
        target: Target,
        max_connections: int,
        keep_text: bool = False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.target = target
        self._keep_text = keep_text
        self._clock = clock
        self._max_connections = max_connections
        self._session: aiohttp.ClientSession

    async def __aenter__(self) -> LoadClient:
        self._session = aiohttp.ClientSession(
            connector=TimedConnector(self._clock, self._max_connections),
            timeout=aiohttp.ClientTimeout(total=self.target.timeout_s),
            headers={"User-Agent": "gsm-load", "Accept-Encoding": "identity", **self.target.headers},
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            trace_configs=[note_sending(self._clock)],
            trust_env=yarl.URL(self.target.url).host not in _LOOPBACK,  # a proxy of the environment, never for loopback
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._session.close()

    async def send(self, prompt: Prompt, scheduled_s: float | None = None) -> RequestRecord:
        """Sends one request and reads its whole response; never raises for what the server does."""
        now_s = self._clock()
        record = RequestRecord(now_s if scheduled_s is None else scheduled_s, now_s)
        try:
            async with self._open("POST", self.target.endpoint, self._payload(prompt), record) as response:
                await self._read(response, record)
        except BadResponse as error:
            record.failure = error.failure
        except (TimeoutError, asyncio.TimeoutError):
            record.failure = Failure("timeout", f"no complete response within {self.target.timeout_s:g} s")
        except (aiohttp.ClientError, OSError) as error:
            record.failure = Failure(*_explain(error))
        return record

    async def prepare(self) -> list[str]:
        """Finds the model's name, then sends one short request to see that everything works.

        Where the server rejects `stream_options`, it is left out from then on. Returns notes for the report; raises
        MeasurementError when the server cannot be measured.
        """
        notes = []
        if self.target.model is None:
            self.target = replace(self.target, model=await self._first_model())
        failure = await self._try()
        rejected = failure and failure.kind in ("http_400", "http_422")
        if rejected and self.target.stream and self.target.usage_fields:
            before, self.target = self.target, replace(self.target, usage_fields={})
            if await self._try() is None:
                notes.append(f"the server rejects stream_options ({failure.message if failure else ''}); sent without")
                failure = None
            else:
                self.target = before
        if failure:
            raise MeasurementError(f"a first request to {self.target.shown_url} failed: {failure.message}")
        return notes

    async def _try(self) -> Failure | None:
        return (await self.send(Prompt("Hello", 2))).failure

    def _payload(self, prompt: Prompt) -> bytes:
        target = self.target
        body: dict[str, Any] = {"model": target.model, "stream": target.stream}
        if target.api == "chat":
            body["messages"] = prompt.messages()
        elif isinstance(prompt.content, str):
            body["prompt"] = prompt.content
        else:
            raise ConfigError("the prompts are chat messages, which --api completions cannot send; use --api chat")
        if "max_completion_tokens" not in target.body:
            body["max_tokens"] = prompt.max_tokens
        if target.stream and target.usage_fields:
            body["stream_options"] = dict(target.usage_fields)
        return json.dumps(body | dict(target.body)).encode()

    async def _read(self, response: aiohttp.ClientResponse, record: RequestRecord) -> None:
        if response.status != 200:
            text = error_text(await _limited(response.content, 64 << 10))
            raise BadResponse(f"http_{response.status}", f"HTTP {response.status} {response.reason or ''}: {text}")
        if (encoding := response.headers.get("Content-Encoding", "identity")) != "identity":
            raise BadResponse("bad_body", f"the response is compressed ({encoding}) though identity was asked for")
        if not self.target.stream:
            read_whole(record, await _limited(response.content, MAX_RESPONSE_BYTES), self._clock(), self._keep_text)
            return
        if response.content_type == "application/json":
            raise BadResponse("no_stream", "a stream was asked for but plain JSON came; measure with --no-stream")
        reader, num_bytes = StreamReader(record, self._keep_text), 0
        clock = arrival_clock(response, self._clock)
        async for data in response.content.iter_any():
            reader.feed(data, clock())
            num_bytes += len(data)
            if num_bytes > MAX_RESPONSE_BYTES:
                raise BadResponse("bad_stream", f"the response is larger than {MAX_RESPONSE_BYTES} bytes")
        reader.close(clock())

    @contextlib.asynccontextmanager
    async def _open(
        self, method: str, url: str, data: bytes | None = None, record: RequestRecord | None = None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """The response to a request, redirects followed only to the same scheme, host and port."""
        options: dict[str, Any] = {"allow_redirects": False, "trace_request_ctx": record}
        if data is not None:
            options |= {"data": data, "headers": {"Content-Type": "application/json"}}
        for _ in range(MAX_REDIRECTS + 1):
            async with self._session.request(method, url, **options) as response:
                if response.status not in (301, 302, 303, 307, 308):
                    yield response
                    return
                url = _same_origin(response)
                options["trace_request_ctx"] = None  # the time of the first sending counts
        raise BadResponse("redirect", f"more than {MAX_REDIRECTS} redirects, the last to {url}; give the final URL")

    async def _first_model(self) -> str:
        url = f"{self.target.url}/models"
        shown = without_credentials(url)
        try:
            async with self._open("GET", url) as response:
                body = await _limited(response.content, 4 << 20)
                if response.status != 200:
                    raise BadResponse("http", f"HTTP {response.status}: {error_text(body)}")
            model = json.loads(body)["data"][0]["id"]
        except BadResponse as error:
            raise MeasurementError(f"no model name from {shown}: {error}; give it with --model") from error
        except (TimeoutError, asyncio.TimeoutError, aiohttp.ClientError, OSError) as error:
            raise MeasurementError(f"no answer from {shown}: {_explain(error)[1]}; is the server running?") from error
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise MeasurementError(f"{shown} lists no model; give its name with --model") from error
        return str(model)


async def _limited(content: aiohttp.StreamReader, max_bytes: int) -> bytes:
    body = bytearray()
    async for data in content.iter_any():
        body += data
        if len(body) > max_bytes:
            raise BadResponse("bad_body", f"the response is larger than {max_bytes} bytes")
    return bytes(body)


def _same_origin(response: aiohttp.ClientResponse) -> str:
    """Where a redirect leads, if that is the same scheme, host and port."""
    location = response.headers.get("Location", "")
    try:
        there = response.url.join(yarl.URL(location))
        stays = bool(location) and there.origin() == response.url.origin()
    except ValueError:
        stays = False
    if not stays:
        raise BadResponse("redirect", f"the server redirects to another host ({location!r}); give that URL yourself")
    if response.status not in (307, 308) and response.method == "POST":
        raise BadResponse("redirect", f"HTTP {response.status} would turn POST into GET; give {there} as the URL")
    return str(there)


def _explain(error: BaseException) -> tuple[str, str]:
    """Kind and sentence for an error of the network or of aiohttp."""
    if isinstance(error, aiohttp.ClientConnectorError):
        return "connection", f"cannot connect to {error.host}:{error.port}: {error.os_error.strerror or error.os_error}"
    if isinstance(error, aiohttp.ClientPayloadError | aiohttp.ServerDisconnectedError | ConnectionResetError):
        return "cut_off", f"the connection was closed before the response was complete: {error}"
    return "connection", f"{type(error).__name__}: {error}"
