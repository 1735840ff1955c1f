"""One timed run of one arm: prefill in chunks, then greedy decoding, one token per step."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from gsm.quality import Arm, SessionStats

_BANDWIDTH_BYTES = 512 * 2**20  # larger than any cache level
_BANDWIDTH_REPEATS = 5


def timed_run(arm: Arm, prompt: torch.Tensor, new_tokens: int) -> tuple[float, float | None, SessionStats]:
    """(TTFT in ms, TPOT in ms or None for a single token, what the cache holds at the last token).

    ``prompt`` [batch, n]. TTFT ends when the first token is known. TPOT = (E2E - TTFT) / (new_tokens - 1). With a
    batch, both are per step of the whole batch. The last token is chosen but not fed, as in any decoder.
    """
    with arm.open() as session:
        wait = _synchroniser(prompt.device)
        start = time.perf_counter()
        token = session.prefill(prompt).argmax(-1, keepdim=True)
        wait()
        first = time.perf_counter()
        for _ in range(new_tokens - 1):
            token = session.step(token).argmax(-1, keepdim=True)
        wait()
        end = time.perf_counter()
        stats = session.stats()
    tpot_ms = 1e3 * (end - first) / (new_tokens - 1) if new_tokens > 1 else None
    return 1e3 * (first - start), tpot_ms, stats


def memory_bandwidth(device: torch.device) -> float:
    """Bytes per second that can be read here: the best of five over 512 MiB of float32.

    The code decides this as much as the memory chips do: a matrix-vector product is what decoding is made of, but
    torch's is slow on some processors, so a sum is tried as well.
    """
    columns = 4096
    matrix = torch.ones(_BANDWIDTH_BYTES // 4 // columns, columns, device=device)  # not zeros: those share one page
    vector = torch.ones(columns, device=device)
    wait = _synchroniser(device)
    best = float("inf")
    for read in (lambda: torch.mv(matrix, vector), matrix.sum):
        for _ in range(_BANDWIDTH_REPEATS):
            start = time.perf_counter()
            read()
            wait()
            best = min(best, time.perf_counter() - start)
    return matrix.nbytes / best


def _synchroniser(device: torch.device) -> Callable[[], None]:
    if device.type == "cuda":
        return lambda: torch.cuda.synchronize(device)
    return lambda: None
