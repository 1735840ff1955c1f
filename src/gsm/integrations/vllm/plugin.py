"""The entry point vLLM calls in every process: API server, engine core and workers.

It only tells vLLM where our classes are. What they do is decided by the config of each engine; without one they behave
as what they replace.
"""

from __future__ import annotations

import logging
import re

from gsm.errors import GsmError

logger = logging.getLogger("vllm.gsm")

SUPPORTED = (0, 32)  # vLLM moves these interfaces between minor versions
BACKENDS = {
    "CPU_ATTN": "gsm.integrations.vllm.cpu.GsmCPUAttentionBackend",
    "FLASH_ATTN": "gsm.integrations.vllm.cuda.GsmFlashAttentionBackend",
    "TRITON_ATTN": "gsm.integrations.vllm.cuda.GsmTritonAttentionBackend",
}
_done = False


def register() -> None:
    """Register back ends, cache spec and smoothing layer. Light, and may be called again."""
    global _done
    if _done:
        return
    import vllm

    found = version_of(vllm.__version__)
    if found != SUPPORTED:
        logger.error("gsm knows vLLM %d.%d and stays inactive under %s", *SUPPORTED, vllm.__version__)
        return
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    for name, path in BACKENDS.items():
        register_backend(AttentionBackendEnum[name], path)
    try:
        from gsm.integrations.vllm.kv import register_spec
        from gsm.integrations.vllm.smoothing import register_layer

        register_spec()
        register_layer()
    except (ImportError, GsmError):
        logger.exception("gsm stays inactive")
        for name in BACKENDS:
            AttentionBackendEnum[name].clear_override()
        return
    _done = True


def version_of(text: str) -> tuple[int, int]:
    """(major, minor) of a version such as 0.32.0+cpu."""
    match = re.match(r"(\d+)\.(\d+)", text)
    return (int(match[1]), int(match[2])) if match else (0, 0)
