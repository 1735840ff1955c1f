"""Refuse before the machine starts to swap or the kernel ends the process."""

from __future__ import annotations

from gsm.errors import ModelError

_GB = 1e9


def available_bytes(device: str = "cpu") -> int:
    """Free memory of ``device`` in bytes ("cpu", "cuda" or "cuda:N")."""
    if device.startswith("cuda"):
        import torch

        return int(torch.cuda.mem_get_info(device)[0])
    import psutil

    return int(psutil.virtual_memory().available)


def require_memory(num_bytes: int, purpose: str, device: str = "cpu") -> None:
    """Raise ModelError unless ``num_bytes`` are free on ``device``."""
    free = available_bytes(device)
    if num_bytes > free:
        raise ModelError(
            f"{purpose} needs about {num_bytes / _GB:.1f} GB of memory but {free / _GB:.1f} GB are free on {device}; "
            "use a smaller dtype (--dtype bfloat16), a smaller model, or free memory"
        )


def default_memory() -> tuple[int, str]:
    """(bytes, where) free on the first CUDA device, or in this machine's memory where there is none."""
    import torch

    if torch.cuda.is_available():
        return available_bytes("cuda"), f"free on {torch.cuda.get_device_name()}"
    return available_bytes(), "free in this machine's memory now"
