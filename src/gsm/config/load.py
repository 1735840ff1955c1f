"""From a dict, a path or a config object to a validated `GsmConfig`, with errors a person can act on."""

from __future__ import annotations

import difflib
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast, get_args

import yaml
from pydantic import BaseModel, ValidationError

from gsm.config.schema import GsmConfig
from gsm.errors import ConfigError

ConfigLike = GsmConfig | Mapping[str, Any] | str | Path | None


def load_config(source: ConfigLike = None) -> GsmConfig:
    """Return a frozen `GsmConfig`.

    ``source`` is a config object (returned unchanged), a mapping, a path to a YAML or JSON file, or None for the
    defaults. The source is never modified. Raises ConfigError.
    """
    if isinstance(source, GsmConfig):
        return source
    if source is None:
        return GsmConfig()
    if isinstance(source, (str, Path)):
        return _validate(_read(Path(source)), where=str(source))
    if isinstance(source, Mapping):
        return _validate(dict(source), where="the config")
    raise ConfigError(f"a config is a GsmConfig, a mapping or a path, not {type(source).__name__}")


def fingerprint(config: BaseModel) -> str:
    """A short hash of a config (or section) that is independent of key order and of the process."""
    text = json.dumps(config.model_dump(mode="json"), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _read(path: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))  # JSON is a subset of YAML
    except FileNotFoundError:
        raise ConfigError(f"config file {path} does not exist") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"config file {path} cannot be read: {error}") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f" at line {mark.line + 1}" if mark else ""
        raise ConfigError(f"config file {path} is not valid YAML{line}: {getattr(error, 'problem', error)}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"config file {path} must hold a mapping, found {type(content).__name__}")
    return content


def _validate(values: dict[str, Any], where: str) -> GsmConfig:
    try:
        return GsmConfig.model_validate(values)
    except ValidationError as error:
        problems = [_explain(cast("dict[str, Any]", item)) for item in error.errors()]
        raise ConfigError(f"{where}: " + "; ".join(problems)) from None


def _explain(problem: dict[str, Any]) -> str:
    path = [str(part) for part in problem["loc"]]
    name = ".".join(path) or "config"
    if problem["type"] == "extra_forbidden":
        siblings = list(_section_at(path[:-1]).model_fields)
        near = difflib.get_close_matches(path[-1], siblings, n=1, cutoff=0.5)
        hint = f"did you mean '{near[0]}'?" if near else f"known here: {', '.join(siblings)}"
        return f"unknown setting '{name}'; {hint}"
    message = problem["msg"].removeprefix("Value error, ")
    if problem["type"] == "literal_error":
        near = difflib.get_close_matches(
            str(problem["input"]), problem["ctx"]["expected"].replace("'", "").split(), n=1
        )
        return f"{name} is {problem['input']!r}; {message[0].lower() + message[1:]}" + (
            f"; did you mean '{near[0].rstrip(',')}'?" if near else ""
        )
    if problem["type"] == "value_error":
        return f"{name}: {message}"
    return f"{name} is {problem['input']!r}; {message[0].lower() + message[1:]}"


def _section_at(path: list[str]) -> type[BaseModel]:
    section: type[BaseModel] = GsmConfig
    for part in path:
        annotation = section.model_fields[part].annotation
        candidates = [annotation, *get_args(annotation)]
        section = next(c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel))
    return section
