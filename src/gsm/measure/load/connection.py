"""What aiohttp does not tell: when a request left for the network and when bytes came from it.

A coroutine learns of either only when the event loop gets to it. When 64 streams deliver a token at once, the last
would see its token after the 63 others were dealt with; that time is ours and must not look like the server's. So times
are taken where the loop hands bytes over: all sockets that are ready are read before any coroutine runs.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import aiohttp
from aiohttp.client_proto import ResponseHandler

from gsm.measure.load.record import RequestRecord

Clock = Callable[[], float]


class TimedHandler(ResponseHandler):
    """A connection that remembers when it was last read from."""

    def __init__(self, loop: asyncio.AbstractEventLoop, clock: Clock) -> None:
        super().__init__(loop)
        self._clock = clock
        self.read_s: float | None = None

    def data_received(self, data: bytes, *args: Any) -> None:
        if data:  # aiohttp calls this without data, too, to go on parsing what it has
            self.read_s = self._clock()
        super().data_received(data, *args)


class TimedConnector(aiohttp.TCPConnector):
    """A pool of `TimedHandler` connections."""

    def __init__(self, clock: Clock, limit: int) -> None:
        super().__init__(limit=limit, keepalive_timeout=60)
        # aiohttp has no public way to choose the handler. Should this name ever go, `arrival_clock` falls back.
        handler: Any = functools.partial(TimedHandler, asyncio.get_running_loop(), clock)
        self._factory = handler


def arrival_clock(response: aiohttp.ClientResponse, clock: Clock) -> Clock:
    """A clock that tells when the bytes that a response hands out were read; at worst the time it is asked."""
    protocol = response.connection.protocol if response.connection else None  # None: the whole body is here already
    if not isinstance(protocol, TimedHandler):
        return clock
    return lambda: clock() if protocol.read_s is None else protocol.read_s


def note_sending(clock: Clock) -> aiohttp.TraceConfig:
    """Sets `start_s` of the record that a request carries as its context when its body is written to the connection."""

    async def on_sent(_: object, context: SimpleNamespace, __: object) -> None:
        record: RequestRecord | None = context.trace_request_ctx
        if record is not None:
            record.start_s = clock()

    config = aiohttp.TraceConfig()
    config.on_request_chunk_sent.append(on_sent)
    return config
