"""The last good config in a file, so that it survives a restart: written whole or not at all."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from gsm.errors import ConfigError

_VERSION = 1
_log = logging.getLogger("gsm")


@dataclass(slots=True)
class Record:
    """One epoch as it is remembered. `config` is what was asked for; times are seconds since 1970."""

    number: int
    config: dict[str, Any]
    source: str  # start | file | admin
    created_s: float
    status: str = "canary"  # canary | stable | retired | rolled back | replaced
    reason: str = ""
    ended_s: float | None = None
    evidence: list[dict[str, Any]] = field(default_factory=list)


@dataclass(slots=True)
class State:
    """What a server remembers. `given` is a fingerprint of the config it was last given by its operator's file."""

    stable: Record
    next_number: int
    given: str = ""
    history: list[Record] = field(default_factory=list)


class StateFile:
    """Loads and saves a `State`. `path` None keeps nothing."""

    def __init__(self, path: Path | None) -> None:
        self.path = path

    def load(self) -> State | None:
        """What was saved last, or None; a file that cannot be used is reported and left as it is."""
        if self.path is None:
            return None
        try:
            content = json.loads(self.path.read_text(encoding="utf-8"))
            if content.pop("version") != _VERSION:
                raise ValueError("it is of another version")
            stable, history = content.pop("stable"), content.pop("history")
            return State(stable=Record(**stable), history=[Record(**record) for record in history], **content)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            _log.warning("the state file %s cannot be used (%s); starting from the config given", self.path, error)
            return None

    def save(self, state: State) -> None:
        """Replace the file in one step: a crash leaves either the old state or the new one. Raises ConfigError."""
        if self.path is None:
            return
        content = json.dumps({"version": _VERSION, **asdict(state)}, indent=1)
        temporary = None
        try:
            handle, temporary = tempfile.mkstemp(dir=self.path.parent, prefix=f".{self.path.name}.")
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, self.path)
        except OSError as error:
            if temporary is not None:
                with contextlib.suppress(OSError):
                    os.unlink(temporary)
            raise ConfigError(
                f"the state file {self.path} cannot be written ({error.strerror or error}), so the change would not "
                "survive a restart; mend that first"
            ) from None
