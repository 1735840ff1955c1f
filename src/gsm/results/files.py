"""Reading and writing result files. A file is either complete or absent; a bad one is refused with the reason."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from gsm.errors import InputError
from gsm.results.records import Record

R = TypeVar("R", bound=Record)


def write_result(path: str | Path, result: Record) -> None:
    """Write ``result`` as JSON: to a temporary name in the same folder, then moved into place.

    Raises InputError when the folder is missing or not writable.
    """
    target = Path(path)
    text = result.model_dump_json(indent=2) + "\n"
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, target)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise InputError(
            f"result file {target} cannot be written ({error.strerror}); name a file in a folder that exists"
        ) from None


def check_writable(path: str | Path) -> None:
    """Raise InputError now rather than after a long measurement if ``path`` cannot become a result file."""
    target = Path(path)
    if target.is_dir():
        raise InputError(f"result file {target} is a folder; name a file in it")
    if not target.parent.is_dir():
        raise InputError(f"result file {target} is in a folder that does not exist; create {target.parent} first")
    if not os.access(target.parent, os.W_OK):
        raise InputError(f"result file {target} is in a folder you may not write to; choose another")


def read_text(path: str | Path, what: str) -> str:
    """The content of a UTF-8 file; raises InputError that calls it ``what``, for example "text file"."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise InputError(f"{what} {path} does not exist") from None
    except UnicodeDecodeError:
        raise InputError(f"{what} {path} cannot be read: it is not UTF-8; convert it first") from None
    except OSError as error:
        raise InputError(f"{what} {path} cannot be read: {error.strerror}") from None


def read_result(path: str | Path, kind: type[R]) -> R:
    """Read a result file as ``kind``; raises InputError naming the first thing that is wrong with it."""
    text = read_text(path, "result file")
    try:
        return kind.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "the file"
        message = first["msg"][0].lower() + first["msg"][1:]
        raise InputError(f"result file {path} is no {kind.__name__}: {where}: {message}") from None
