"""What the machine and the software are, as far as it matters for a number."""

from __future__ import annotations

import datetime
import os
import platform
import shlex
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

import gsm
from gsm.results.records import Environment


def collect_environment(**known: Any) -> Environment:
    """The environment of this process; ``known`` adds what only the caller can know (model, dtype, threads, device)."""
    return Environment(
        python=platform.python_version(),
        torch=_version("torch"),
        transformers=_version("transformers"),
        gsm=gsm.__version__,
        platform=platform.platform(),
        cpu=_cpu_name(),
        cores=psutil.cpu_count() or 1,
        memory_bytes=psutil.virtual_memory().total,
        command=_command_line(),
        started_at=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        load_average_before=load_average(),
        **known,
    )


def load_average() -> tuple[float, float, float] | None:
    """Load average over 1, 5 and 15 minutes, or None where the system has none."""
    try:
        one, five, fifteen = os.getloadavg()
    except (AttributeError, OSError):
        return None
    return round(one, 2), round(five, 2), round(fifteen, 2)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _command_line() -> str:
    program, *arguments = sys.argv or ["python"]
    return shlex.join([Path(program).name, *arguments])


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
