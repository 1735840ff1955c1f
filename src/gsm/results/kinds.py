"""Result files of any kind: read as plain data, and told apart by what is in them.

For those who read what they know and leave the rest (reports, diagnoses), so that older and newer files work alike.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gsm.errors import InputError
from gsm.results.files import read_text

Data = dict[str, Any]

# The first that matches decides, so the more specific come first.
_KINDS: tuple[tuple[str, Callable[[Data], bool]], ...] = (
    ("load", lambda d: d.get("kind") in ("load", "load_ab")),
    ("calibrate", lambda d: str(d.get("format", "")).startswith("gsm-calibration")),
    ("tune", lambda d: {"task", "bouts", "steps"} <= d.keys()),
    ("diagnose", lambda d: {"findings", "checked"} <= d.keys()),
    ("probe", lambda d: {"verdict", "token_ms", "levers"} <= d.keys()),
    ("smooth", lambda d: {"choices", "conclusion", "text_hashes"} <= d.keys()),
    ("eval", lambda d: {"quality", "tolerance", "passed"} <= d.keys()),
    ("bench", lambda d: {"arms", "workload"} <= d.keys() and isinstance(d["arms"], list)),
    ("explain", lambda d: {"positions", "stats"} <= d.keys()),
    ("plan", lambda d: {"capacities", "kv_bytes_per_token"} <= d.keys()),
    ("smooth_arms", lambda d: isinstance(d.get("arms"), dict) and "environment" in d),
    ("generate", lambda d: {"text", "prompt_tokens", "new_tokens"} <= d.keys()),
    ("doctor", lambda d: {"checks", "passed"} <= d.keys()),
)
KINDS = tuple(kind for kind, _ in _KINDS)


@dataclass(frozen=True)
class ResultFile:
    """One result: where it comes from, what kind it is, and its content."""

    name: str
    kind: str
    data: Data


def read_result_files(paths: Iterable[str | Path]) -> list[ResultFile]:
    """All files, in order; a file with a list holds several results. Raises InputError for one that is no result."""
    found = [result for path in paths for result in read_known(Path(path))[0]]
    if not found:
        raise InputError("no result file was given; name some, for example benchmarks/results/*.json")
    return found


def read_known(path: Path, strict: bool = True) -> tuple[list[ResultFile], list[str]]:
    """The results in one file and, unless ``strict``, the names of those that are none of ours. Raises InputError."""
    try:
        content = json.loads(read_text(path, "result file"))
    except json.JSONDecodeError as error:
        raise InputError(f"result file {path} is not JSON (line {error.lineno}: {error.msg})") from None
    items: Sequence[Any] = content if isinstance(content, list) else [content]
    known, unknown = [], []
    for index, item in enumerate(items):
        name = f"{path.name} #{index + 1}" if len(items) > 1 else path.name
        kind = _kind_of(item)
        if kind is not None:
            known.append(ResultFile(name, kind, item))
        elif strict:
            raise InputError(f"{path} is no result that is known here; give the JSON files of gsm {_names()}")
        else:
            unknown.append(name)
    return known, unknown


def _kind_of(item: Any) -> str | None:
    """What a result is, or None. One that names another kind of its own is no result of ours, whatever it holds."""
    if not isinstance(item, dict):
        return None
    named = item.get("kind")
    found = next((kind for kind, fits in _KINDS if fits(item)), None)
    return found if named is None or found == "load" else None


def _names() -> str:
    names = [kind for kind in KINDS if "_" not in kind]
    return f"{', '.join(names[:-1])} and {names[-1]}"


# What a calibration's kinds of sites are called where people read them.
SITE_NAMES = {
    "residual": "residual stream",
    "attn_norm": "norm before attention",
    "attn_out_input": "input of attention output",
    "attn_out_output": "output of attention",
    "mlp_norm": "norm before MLP",
    "mlp_out_input": "input of MLP output",
}
