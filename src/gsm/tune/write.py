"""The proposal as a config file: only the settings that differ from the defaults, with where they come from."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import yaml

from gsm.config import GsmConfig, load_config
from gsm.errors import InputError
from gsm.tune.records import TuneResult


def write_proposal(path: str | Path, result: TuneResult, evidence: str | None) -> None:
    """Write ``result.proposed`` as YAML, complete or not at all. Raises InputError where that is impossible."""
    assert result.proposed is not None
    target = Path(path)
    settings = yaml.safe_dump(differences(load_config(result.proposed)), sort_keys=False)
    header = [
        f"# Measured by `{result.environment.command}`",
        f"# on {result.environment.model}, {result.environment.started_at}: {result.conclusion}.",
        f"# Evidence: {evidence or 'not kept; use --json FILE'}",
    ]
    partial = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        partial.write_text("\n".join(header) + "\n" + settings, encoding="utf-8")
        os.replace(partial, target)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise InputError(f"the config cannot be written to {target}: {error.strerror}; choose another place") from None


def differences(config: GsmConfig) -> dict[str, Any]:
    """The settings of ``config`` that are not the defaults, as nested plain data."""
    return _differences(config.model_dump(mode="json"), GsmConfig().model_dump(mode="json"))


def _differences(own: dict[str, Any], default: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in own.items():
        usual = default.get(key)
        if isinstance(value, dict) and isinstance(usual, dict):
            if inner := _differences(value, usual):
                found[key] = inner
        elif value != usual:
            found[key] = value
    return found
