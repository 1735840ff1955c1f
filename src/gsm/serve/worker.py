"""One thread owns the engine; everybody else talks to it through a mailbox.

Commands run between two steps. What a step brings goes to the event loop in one call and from there to the queue of
each request. When the thread dies, every request is told at once and no new one is taken.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from gsm.config import SparseConfig
from gsm.engine import Engine, Epoch, Request, SamplingParams, TokenEvent
from gsm.errors import EngineDead, GsmError
from gsm.integrations.transformers.grading import Lowered

_Found = TypeVar("_Found")
_log = logging.getLogger("gsm")
_IDLE_PAGES = 16  # prefix pages written to disk at a time while nobody waits


@dataclass(frozen=True, slots=True)
class Call:
    """What `Engine.add` is told."""

    request_id: str
    prompt_ids: list[int]
    sampling: SamplingParams
    sparse: SparseConfig | None = None
    tenant: str = ""
    salt: str = ""
    epoch: Epoch | None = None
    is_scored: bool = False
    effort: str | None = None
    lowered: Lowered | None = None


@dataclass(slots=True)
class Stream:
    """Events of one request as they come; ends after the last choice has finished. Times are `time.monotonic()`."""

    call: Call
    loop: asyncio.AbstractEventLoop
    num_open: int
    queue: asyncio.Queue[TokenEvent | GsmError] = field(default_factory=asyncio.Queue)
    request: Request | None = None  # as the engine knows it, once it is queued

    @property
    def num_cached_tokens(self) -> int:
        return self.request.num_cached_tokens if self.request is not None else 0

    @property
    def queued_s(self) -> float:
        request = self.request
        if request is None or request.first_scheduled_s is None:
            return 0.0
        return request.first_scheduled_s - request.arrival_s

    @property
    def epoch(self) -> int:
        return self.request.epoch if self.request is not None else 0

    async def events(self) -> AsyncIterator[TokenEvent]:
        """Raises EngineDead when the engine dies meanwhile."""
        while self.num_open:
            item = await self.queue.get()
            if isinstance(item, GsmError):
                raise item
            self.num_open -= item.finish_reason is not None
            yield item


class EngineWorker:
    """Runs an engine in a thread of its own, from `start` to `stop`."""

    def __init__(self, engine: Engine, on_step: Callable[[Engine], None] | None = None) -> None:
        self.engine = engine
        self.error: BaseException | None = None
        self._on_step = on_step
        self._streams: dict[str, Stream] = {}  # changed by the engine's thread only
        self._commands: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="gsm-engine", daemon=True)
        self.last_step_s = time.monotonic()

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float = 30.0) -> None:
        """End the thread after the step it is in; what still runs is told that the server stops."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        self._thread.join(timeout_s)

    @property
    def is_alive(self) -> bool:
        return self.error is None and self._thread.is_alive()

    @property
    def why_dead(self) -> str | None:
        """What ended the engine, or None while it lives."""
        return None if self.is_alive else str(self._dead())

    async def submit(self, call: Call) -> Stream:
        """Queue a request. Raises what `Engine.add` raises, or EngineDead."""
        loop = asyncio.get_running_loop()
        stream = Stream(call, loop, call.sampling.n)
        added: asyncio.Future[None] = loop.create_future()
        self.post(lambda: self._add(stream, added))
        try:
            await added
        except asyncio.CancelledError:
            self.cancel(call.request_id)
            raise
        return stream

    def cancel(self, request_id: str) -> None:
        """End a request; its pages are free after the step that runs now. Does nothing for one that is over."""
        if self.error is None:
            self.post(lambda: self._cancel(request_id))

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive()

    @property
    def owns_this_thread(self) -> bool:
        return threading.current_thread() is self._thread

    async def call(self, function: Callable[[], _Found]) -> _Found:
        """What `function` returns or raises (GsmError), called in the engine's thread between two steps."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[_Found] = loop.create_future()

        def command() -> None:
            try:
                found = function()
            except GsmError as error:
                _call_soon(loop, _settle, done, error)
            else:
                _call_soon(loop, _settle, done, None, found)

        self.post(command)
        return await done

    def post(self, command: Callable[[], None]) -> None:
        """Have `command`, which raises nothing, called in the engine's thread. Raises EngineDead."""
        with self._wake:
            if self.error is not None or self._stopping:
                raise self._dead()
            self._commands.append(command)
            self._wake.notify()

    def _dead(self) -> EngineDead:
        if self.error is None:
            return EngineDead("the server is shutting down; try another one")
        return EngineDead(f"the engine stopped with {type(self.error).__name__}: {self.error}; restart the server")

    # -- in the engine's thread --------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._next_commands():
                if self.engine.has_work:
                    self._deliver(self.engine.step())
                    self.last_step_s = time.monotonic()
                self.engine.use_spare_time()
                if self._on_step is not None:
                    self._on_step(self.engine)
        except BaseException as error:
            _log.exception("the engine's thread died")
            with self._wake:
                self.error = error
        else:
            with self._wake:
                self.error = EngineDead("the server is shutting down; try another one")
        self._bury()

    def _next_commands(self) -> bool:
        """Run what was posted; waits while there is nothing to do. False when the thread is to end."""
        with self._wake:
            while not (self._commands or self._stopping or self._has_work()):
                self._wake.wait()
            commands, stopping = list(self._commands), self._stopping
            self._commands.clear()
        for command in commands:
            command()
        return not stopping

    def _has_work(self) -> bool:
        return self.engine.has_work or self.engine.shadow.has_work or self._has_idle_work()

    def _has_idle_work(self) -> bool:
        """Use an idle moment to write prefix pages to disk, a few at a time."""
        prefix = self.engine.prefix
        return prefix is not None and prefix.save_some(_IDLE_PAGES) > 0

    def _add(self, stream: Stream, added: asyncio.Future[None]) -> None:
        call = stream.call
        try:
            stream.request = self.engine.add(
                call.request_id,
                call.prompt_ids,
                call.sampling,
                sparse=call.sparse,
                tenant=call.tenant,
                salt=call.salt,
                epoch=call.epoch,
                is_scored=call.is_scored,
                effort=call.effort,
                lowered=call.lowered,
            )
        except GsmError as error:
            _call_soon(stream.loop, _settle, added, error)
            return
        self._streams[call.request_id] = stream
        _call_soon(stream.loop, _settle, added, None)

    def _cancel(self, request_id: str) -> None:
        self._streams.pop(request_id, None)
        self.engine.cancel(request_id)

    def _deliver(self, events: list[TokenEvent]) -> None:
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[Stream, TokenEvent]]] = {}
        for event in events:
            stream = self._streams.get(event.request_id)
            if stream is None:
                continue
            by_loop.setdefault(stream.loop, []).append((stream, event))
        for request_id in {event.request_id for event in events} - self.engine.requests.keys():
            self._streams.pop(request_id, None)
        for loop, pairs in by_loop.items():
            _call_soon(loop, _put_all, pairs)

    def _bury(self) -> None:
        """Tell everybody who waits that nothing will come."""
        with self._wake:
            commands = list(self._commands)
            self._commands.clear()
        for command in commands:
            command()
        for stream in list(self._streams.values()):
            _call_soon(stream.loop, stream.queue.put_nowait, self._dead())
        self._streams.clear()


def _call_soon(loop: asyncio.AbstractEventLoop, function: Callable[..., Any], *args: Any) -> None:
    try:
        loop.call_soon_threadsafe(function, *args)
    except RuntimeError:  # the loop is closed: nobody listens any more
        _log.debug("an event loop was closed before its requests were")


def _settle(added: asyncio.Future[Any], error: GsmError | None, result: Any = None) -> None:
    if added.done():
        return
    if error is None:
        added.set_result(result)
    else:
        added.set_exception(error)


def _put_all(pairs: list[tuple[Stream, TokenEvent]]) -> None:
    for stream, event in pairs:
        stream.queue.put_nowait(event)
