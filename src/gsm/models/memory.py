"""Refuse before the machine starts to swap or the kernel ends the process."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from gsm.errors import ModelError
from gsm.models.sizes import format_bytes


def available_bytes(device: str = "cpu") -> int:
    """Free memory of ``device`` in bytes ("cpu", "cuda" or "cuda:N")."""
    if device.startswith("cuda"):
        import torch

        return int(torch.cuda.mem_get_info(device)[0])
    import psutil

    free = int(psutil.virtual_memory().available)
    limit = container_limit()
    return free if limit is None else max(0, min(free, limit.max_bytes - limit.used_bytes))


def total_bytes() -> int:
    """Memory of this machine, or of the container we run in where that is less."""
    import psutil

    total = int(psutil.virtual_memory().total)
    limit = container_limit()
    return total if limit is None else min(total, limit.max_bytes)


@dataclass(frozen=True)
class ContainerLimit:
    """Memory limit of a container and what it uses, page cache that can be given back not counted."""

    max_bytes: int
    used_bytes: int


def container_limit(root: Path = Path("/sys/fs/cgroup")) -> ContainerLimit | None:
    """The cgroup's memory limit (version 2, then 1), or None where there is none."""
    for folder, max_name, used_name, cache_name in (
        (root, "memory.max", "memory.current", "inactive_file"),
        (root / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        try:
            maximum = (folder / max_name).read_text().strip()
            used = int((folder / used_name).read_text())
            lines = (folder / "memory.stat").read_text().split("\n")
        except (OSError, ValueError):
            continue
        if not maximum.isdigit() or int(maximum) >= 1 << 60:  # "max", or version 1's way to say it
            return None
        statistics = dict(line.split() for line in lines if line.strip())
        return ContainerLimit(int(maximum), used - int(statistics.get(cache_name, 0)))
    return None


def require_memory(num_bytes: int, purpose: str, device: str = "cpu") -> None:
    """Raise ModelError unless ``num_bytes`` are free on ``device``."""
    free = available_bytes(device)
    if num_bytes > free:
        raise ModelError(
            f"{purpose} needs about {format_bytes(num_bytes)} of memory but {format_bytes(free)} are free on {device}; "
            "use a smaller dtype (--dtype bfloat16), a smaller model, or free memory"
        )


def default_memory() -> tuple[int, str]:
    """(bytes, where) free on the first CUDA device, or in this machine's memory where there is none."""
    import torch

    if torch.cuda.is_available():
        return available_bytes("cuda"), f"free on {torch.cuda.get_device_name()}"
    return available_bytes(), "free in this machine's memory now"
