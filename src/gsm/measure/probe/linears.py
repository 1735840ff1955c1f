"""How long all of a model's matrix products take in another dtype, or for several rows at once."""

from __future__ import annotations

import time

import torch
import torch.nn.functional as F
from torch import nn

from gsm.measure.profile import synchroniser

_REPEATS = 3


@torch.inference_mode()
def linear_seconds(model: nn.Module, rows: int = 1, dtype: torch.dtype | None = None) -> float:
    """Seconds that one pass through every matrix of ``model`` takes for ``rows`` tokens; the best of three.

    ``dtype`` None is the weights' own; another one needs room for a copy of the largest matrix only, but reads it from
    memory like any other: the copies are made one after the other and timed in a second pass over all of them.
    """
    weights = matrices(model)
    if dtype is not None:
        weights = [w.to(dtype) for w in weights]
    inputs = {w.shape[1]: torch.randn(rows, w.shape[1], device=w.device).to(w.dtype) for w in weights}
    wait = synchroniser(weights[0].device)
    best = float("inf")
    for _ in range(1 + _REPEATS):  # the first pass touches the copies
        start = time.perf_counter()
        for weight in weights:
            F.linear(inputs[weight.shape[1]], weight)
        wait()
        best = min(best, time.perf_counter() - start)
    return best


def matrices(model: nn.Module) -> list[torch.Tensor]:
    """Weights of all linear layers, a tied output head included, each once."""
    found = {id(m.weight): m.weight for m in model.modules() if isinstance(m, nn.Linear)}
    return list(found.values())
