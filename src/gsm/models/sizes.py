"""Sizes with units. GB is 10^9 bytes and GiB is 2^30 bytes; which one was meant is never guessed."""

from __future__ import annotations

import re

from gsm.errors import InputError

_UNITS = {
    "": 1, "B": 1,
    "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40,
}  # fmt: skip
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8": 1, "int8": 1}
_DTYPE_NAMES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp8": "float8"}


def parse_bytes(text: str) -> int:
    """Bytes of "24GB", "24 GiB" or "1000". Raises InputError; "24G" is one, because it may mean either."""
    match = _SIZE.fullmatch(text)
    number, unit = match.groups() if match else ("", text)
    factor = _UNITS.get(unit.upper())
    if match is None or factor is None:
        hint = f"write {number}{unit[0]}B or {number}{unit[0]}iB" if match and len(unit) == 1 else "write 24GB or 24GiB"
        raise InputError(f"size {text!r} is not a number with a unit; {hint} (GB is 10^9 bytes, GiB is 2^30)")
    return int(float(number) * factor)


def format_bytes(num_bytes: float) -> str:
    """Three significant places and a decimal unit: "12.0 GB"."""
    for unit in ("B", "KB", "MB", "GB"):
        if abs(num_bytes) < 1000:
            return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:,.3g} TB" if abs(num_bytes) < 1000 else f"{num_bytes:,.0f} TB"


def parse_dtype(name: str) -> str:
    """The full name of a dtype in which keys and values can be kept. Raises InputError."""
    plain = name.removeprefix("torch.")
    full = _DTYPE_NAMES.get(plain, plain)
    if full not in DTYPE_BYTES:
        raise InputError(f"dtype {name!r} is unknown; use one of {', '.join(DTYPE_BYTES)}")
    return full
