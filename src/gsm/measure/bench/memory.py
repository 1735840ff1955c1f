"""Peak memory of this process. Resident figures come from Linux's /proc; elsewhere they are None, not 0."""

from __future__ import annotations

from pathlib import Path

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")


class PeakMemory:
    """Peak memory above what was there when this was made.

    The kernel's high-water mark (VmHWM) is reset first, so that loading the model does not count.
    """

    def __init__(self) -> None:
        self._can_reset = _reset_high_water_mark()
        self._resident = _status_bytes("VmRSS")
        _reset_device_peak()

    def rss_bytes(self) -> int | None:
        """Peak resident size since then, minus the resident size at that moment."""
        peak = _status_bytes("VmHWM")
        if not self._can_reset or peak is None or self._resident is None:
            return None
        return max(0, peak - self._resident)


def device_peak_bytes() -> int | None:
    """Peak bytes of tensors on the current CUDA device, or None without one in use."""
    import torch

    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):
        return None
    return torch.cuda.max_memory_allocated()


def _reset_high_water_mark() -> bool:
    try:
        _CLEAR_REFS.write_text("5", encoding="ascii")
    except OSError:
        return False
    return True


def _reset_device_peak() -> None:
    import torch

    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.reset_peak_memory_stats()


def _status_bytes(field: str) -> int | None:
    try:
        for line in _STATUS.read_text(encoding="ascii").splitlines():
            if line.startswith(f"{field}:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None
