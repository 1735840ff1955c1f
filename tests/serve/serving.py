"""A real server on the real demo model, in this process, on a port of its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import uvicorn

from gsm.config import load_config
from gsm.engine import Engine
from gsm.models import LoadedModel
from gsm.serve.app import Server, create_app
from gsm.serve.settings import ServeSettings

ENGINE: dict[str, Any] = {"kv_pages": 600, "max_running": 8, "max_waiting": 32}


@dataclass
class Running:
    """A listening server: its URL and what is behind it."""

    url: str
    server: Server
    listener: uvicorn.Server

    @property
    def engine(self) -> Engine:
        return self.server.worker.engine

    def used_pages(self) -> int:
        """Pages that neither the prefix index nor anybody else gave back; call when nothing runs."""
        prefix = self.engine.prefix
        held = prefix.num_pages if prefix is not None else 0
        return sum(group.pages.num_used // group.streams_per_slot for group in self.engine.manager.groups) - held

    def wait_until_idle(self, timeout_s: float = 60.0) -> float:
        """Seconds until no request is left."""
        began = time.monotonic()
        while self.engine.has_work or self.engine.requests:
            assert time.monotonic() - began < timeout_s, "requests are left over"
            time.sleep(0.01)
        return time.monotonic() - began


@contextmanager
def run_server(loaded: LoadedModel, config: dict[str, Any] | None = None, **settings: Any) -> Iterator[Running]:
    merged = {"engine": ENGINE, **(config or {})}
    with Engine(loaded, load_config(merged)) as engine:
        server = Server(engine, ServeSettings(model_name="demo", **settings))
        options = uvicorn.Config(create_app(server), port=0, log_level="error", timeout_graceful_shutdown=5)
        listener = uvicorn.Server(options)
        thread = threading.Thread(target=listener.run, daemon=True)
        thread.start()
        while not listener.started:
            assert thread.is_alive(), "the server did not start"
            time.sleep(0.01)
        port = listener.servers[0].sockets[0].getsockname()[1]
        try:
            yield Running(f"http://127.0.0.1:{port}", server, listener)
        finally:
            listener.should_exit = True
            thread.join(30)
