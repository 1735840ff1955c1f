"""From a loaded model to a listening server, and back in order."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import psutil
import torch
import uvicorn

from gsm.config import GsmConfig
from gsm.engine import Engine
from gsm.errors import ConfigError, GsmError
from gsm.models import LoadedModel
from gsm.quality import calibration_samples
from gsm.serve.app import Server, create_app
from gsm.serve.reload import ConfigFile
from gsm.serve.rollout import Rollout, plan_start
from gsm.serve.settings import ServeSettings
from gsm.serve.state import StateFile
from gsm.serve.worker import EngineWorker
from gsm.smoothing import apply

_KV_SHARE = 0.5  # of the memory that is free once the model is loaded
_log = logging.getLogger("gsm")


def serve(
    loaded: LoadedModel,
    read: Callable[[], GsmConfig],
    settings: ServeSettings,
    *,
    host: str,
    port: int,
    prefix_dir: str | Path | None = None,
    config_path: Path | None = None,
    state_path: Path | None = None,
) -> None:
    """Serve until SIGINT or SIGTERM: then no new request is taken, running ones may finish for 30 seconds.

    `read` gives the operator's config; it is called again when `config_path`, its file, changes. `state_path` keeps the
    last good config across restarts. Raises what the engine raises at its start, or the error that killed its thread.
    """
    with ExitStack() as kept:
        server = open_server(loaded, read, settings, prefix_dir, config_path, state_path, kept)
        options = uvicorn.Config(
            create_app(server),
            host=host,
            port=port,
            log_level="warning",
            access_log=False,
            timeout_graceful_shutdown=30,
            timeout_keep_alive=30,
        )
        uvicorn.Server(options).run()
        error = server.worker.error
        if error is not None and not isinstance(error, GsmError):
            raise GsmError(f"the engine stopped with {type(error).__name__}: {error}") from error


def open_server(
    loaded: LoadedModel,
    read: Callable[[], GsmConfig],
    settings: ServeSettings,
    prefix_dir: str | Path | None,
    config_path: Path | None,
    state_path: Path | None,
    kept: ExitStack,
) -> Server:
    """An engine with the config that was good last, or the one given, and everything around it; not listening yet."""
    state_file = StateFile(state_path)
    state = state_file.load()
    given: GsmConfig | None = None
    try:
        given = read()
    except ConfigError as error:
        if state is None:
            raise
        _log.error("the config given cannot be used, so the last good one is served: %s", error)
    start, state, pending = plan_start(state, given)
    engine = kept.enter_context(open_engine(loaded, start, prefix_dir, kept))
    bound = engine.config.engine

    def prepare(config: GsmConfig) -> GsmConfig:
        """A config that bounds no KV memory gets the bound that the server started with."""
        if config.engine.kv_memory_mib is not None or config.engine.kv_pages is not None:
            return config
        limits = config.engine.model_copy(update={"kv_memory_mib": bound.kv_memory_mib})
        return config.model_copy(update={"engine": limits})

    def make_rollout(worker: EngineWorker) -> Rollout:
        return Rollout(worker, state_file, state, prepare, start if pending is not None else given or start)

    file = ConfigFile(config_path, read, pending) if config_path is not None else None
    return Server(engine, settings, make_rollout, file)


def open_engine(loaded: LoadedModel, config: GsmConfig, prefix_dir: str | Path | None, kept: ExitStack) -> Engine:
    """The engine of a config: smoothing and int8 are applied to the model for as long as `kept` is open."""
    window = None
    if config.smoothing.active:
        samples = calibration_samples(loaded, config.smoothing)
        window = kept.enter_context(apply(loaded.model, config.smoothing, samples=samples)).window
    return Engine(loaded, with_kv_memory(config), window=window, prefix_dir=prefix_dir)


def with_kv_memory(config: GsmConfig) -> GsmConfig:
    """The config with a bound on KV memory: half of what is free, where it has none."""
    if config.engine.kv_memory_mib is not None or config.engine.kv_pages is not None:
        return config
    free = torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else psutil.virtual_memory().available
    engine = config.engine.model_copy(update={"kv_memory_mib": _KV_SHARE * free / 2**20})
    return config.model_copy(update={"engine": engine})
