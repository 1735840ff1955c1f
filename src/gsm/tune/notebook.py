"""Measurements written down as they are made, so that an interrupted run goes on where it stopped.

The rest of tuning is a pure function of bouts: taking a run up again means running it again and looking bouts up.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path

from gsm.errors import InputError
from gsm.results import read_result, write_result
from gsm.tune.bout import Contestant
from gsm.tune.records import Bout, TuneResult


def bout_key(third: str, length: int, contestants: Sequence[Contestant]) -> str:
    """What makes two bouts the same: text, length, and every contestant's settings, in order."""
    configs = [[c.name, None if c.config is None else c.config.model_dump(mode="json")] for c in contestants]
    text = json.dumps([third, length, configs], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class Notebook:
    """The bouts so far, in memory and in a file. ``result`` makes the record to write from the bouts."""

    def __init__(self, path: Path | None, fingerprint: str) -> None:
        self.path = path
        self.bouts: dict[str, Bout] = {}
        self.num_reused = 0
        if path is not None and path.exists():
            self._take_up(path, fingerprint)

    def _take_up(self, path: Path, fingerprint: str) -> None:
        state = read_result(path, TuneResult)
        if state.fingerprint != fingerprint:
            raise InputError(
                f"{path} holds a tuning run of another model, text, length or plan; name another file with --json, or "
                "delete it to start anew"
            )
        self.bouts = {bout.key: bout for bout in state.bouts}

    def get(self, key: str) -> Bout | None:
        bout = self.bouts.get(key)
        self.num_reused += bout is not None
        return bout

    def add(self, bout: Bout, result: Callable[[], TuneResult]) -> None:
        """Note a bout and write the file, complete or not at all."""
        self.bouts[bout.key] = bout
        self.write(result())

    def write(self, result: TuneResult) -> None:
        if self.path is not None:
            write_result(self.path, result)
