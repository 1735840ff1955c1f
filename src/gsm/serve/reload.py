"""Follow the config file: what is saved there is live a moment later, or refused and the old config stays."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

from gsm.config import GsmConfig
from gsm.errors import GsmError
from gsm.serve.rollout import Rollout

_SETTLE_MS = 100  # an editor's several writes are one change
_log = logging.getLogger("gsm")


class ConfigFile:
    """Watches the directory of `path`, because editors and Kubernetes replace files instead of writing them.

    `read` loads the file as the server was told to (limits of the command line laid over it); raises ConfigError.
    `pending` is a config to load as soon as the server runs.
    """

    def __init__(self, path: Path, read: Callable[[], GsmConfig], pending: GsmConfig | None = None) -> None:
        self.path = path
        self._read = read
        self._pending = pending

    async def watch(self, rollout: Rollout) -> None:
        """Until cancelled."""
        from watchfiles import awatch

        if self._pending is not None:
            await self._load(rollout, lambda: self._pending)
        last = _content(self.path)
        try:
            async for _ in awatch(self.path.parent, debounce=_SETTLE_MS, step=20, recursive=False):
                content = _content(self.path)
                if content is not None and content != last:
                    last = content
                    await self._load(rollout, self._read)
        except asyncio.CancelledError:
            raise
        except Exception as error:  # the operating system's notifications: the server goes on without them
            _log.error("the config file is not watched any more: %s: %s", type(error).__name__, error)

    async def _load(self, rollout: Rollout, read: Callable[[], GsmConfig | None]) -> None:
        try:
            config = read()
            if config is not None:
                await rollout.reload(config, "file", given=config)
        except GsmError as error:
            rollout.refuse("file", error)


def _content(path: Path) -> bytes | None:
    """None while the file is away."""
    try:
        return path.read_bytes()
    except OSError:
        return None
