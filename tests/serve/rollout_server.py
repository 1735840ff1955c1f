"""A server on a tiny random model with an admin key, its state in a file, and clients for both sides."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import uvicorn

from gsm.config import GsmConfig, load_config
from gsm.engine import Engine
from gsm.models import LoadedModel
from gsm.serve.app import Server, create_app
from gsm.serve.reload import ConfigFile
from gsm.serve.rollout import Rollout, plan_start
from gsm.serve.settings import ServeSettings
from gsm.serve.state import StateFile

ADMIN, API = "admin-key-0123", "api-key-0123"
BASE: dict[str, Any] = {
    "cache": {"page_size": 4, "hot_size": 8, "recent_tokens": 4, "sink_tokens": 2},
    "engine": {"chunk_tokens": 16, "max_batch_tokens": 40, "max_running": 8, "kv_memory_mib": 64.0},
}


def with_cache(rollout: dict[str, Any] | None = None, **cache: Any) -> dict[str, Any]:
    return {**BASE, "cache": {**BASE["cache"], **cache}, **({"rollout": rollout} if rollout is not None else {})}


SPARSE = with_cache(sparse={"enabled": True, "budget_tokens": 16})  # very bad on purpose: most of the context is unread


@dataclass
class Served:
    url: str
    server: Server
    admin: httpx.Client
    client: httpx.Client

    @property
    def rollout(self) -> Rollout:
        return self.server.rollout

    @property
    def engine(self) -> Engine:
        return self.server.worker.engine

    def ask(self, ids: list[int], max_tokens: int = 16, **more: Any) -> httpx.Response:
        """A greedy completion of token ids."""
        headers = more.pop("headers", {})
        body = {"model": "tiny", "prompt": ids, "max_tokens": max_tokens, "temperature": 0, **more}
        return self.client.post("/v1/completions", json=body, headers=headers)

    def epochs(self) -> dict[str, Any]:
        found: dict[str, Any] = self.admin.get("/admin/epochs").json()
        return found

    def wait_for(self, condition: Callable[[], bool], timeout_s: float = 60.0) -> float:
        """Seconds until something is so."""
        began = time.monotonic()
        while not condition():
            assert time.monotonic() - began < timeout_s, "it did not come about"
            time.sleep(0.005)
        return time.monotonic() - began


@contextmanager
def serve_tiny(
    loaded: LoadedModel,
    config: dict[str, Any] | GsmConfig | None = None,
    *,
    state: Path | None = None,
    file: Path | None = None,
    keys: tuple[str, ...] = (API,),
    admin_keys: tuple[str, ...] = (ADMIN,),
    change: Callable[[Engine], None] = lambda engine: None,
) -> Iterator[Served]:
    given = load_config(file if file is not None else config if config is not None else BASE)
    state_file = StateFile(state)
    start, kept, pending = plan_start(state_file.load(), given)
    with Engine(loaded, start) as engine:
        change(engine)
        server = Server(
            engine,
            ServeSettings(model_name="tiny", api_keys=keys, admin_keys=admin_keys),
            lambda worker: Rollout(worker, state_file, kept, given=start if pending is not None else given),
            ConfigFile(file, lambda: load_config(file), pending) if file is not None else None,
        )
        listener = uvicorn.Server(
            uvicorn.Config(create_app(server), port=0, log_level="error", timeout_graceful_shutdown=5)
        )
        thread = threading.Thread(target=listener.run, daemon=True)
        thread.start()
        while not listener.started:
            assert thread.is_alive(), "the server did not start"
            time.sleep(0.005)
        url = f"http://127.0.0.1:{listener.servers[0].sockets[0].getsockname()[1]}"
        options: dict[str, Any] = {"base_url": url, "timeout": 60, "trust_env": False}
        with (
            httpx.Client(headers={"authorization": f"Bearer {ADMIN}"}, **options) as admin,
            httpx.Client(headers={"authorization": f"Bearer {API}"}, **options) as client,
        ):
            try:
                yield Served(url, server, admin, client)
            finally:
                listener.should_exit = True
                thread.join(30)
