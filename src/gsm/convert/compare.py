"""Two models on the same tokens: perplexity, KL, agreement."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from gsm.convert.record import PerplexityChange
from gsm.errors import InputError
from gsm.quality import Progress
from gsm.stats import bootstrap_mean_ci

CONTEXT = 512  # tokens of a window, its first half is context only


def evaluation_windows(ids: Tensor, num_windows: int) -> Tensor:
    """int64 `[num_windows, CONTEXT + 1]`, evenly spaced, disjoint. Raises InputError when the text is too short."""
    needed = num_windows * (CONTEXT + 1)
    if len(ids) < needed:
        raise InputError(
            f"the evaluation text has {len(ids)} tokens but {num_windows} windows need {needed}; give a longer text or "
            "fewer windows"
        )
    step = (len(ids) - CONTEXT - 1) // max(1, num_windows - 1)
    return torch.stack([ids[i * step : i * step + CONTEXT + 1] for i in range(num_windows)])


@torch.inference_mode()
def window_logits(model: Any, window: Tensor) -> Tensor:
    """log-probabilities `[CONTEXT / 2, vocab]` of the scored half."""
    logits = model(window[None, :-1], use_cache=False, logits_to_keep=CONTEXT // 2).logits[0]
    return torch.log_softmax(logits.float(), dim=-1)


def compare(original: Any, others: dict[str, Any], windows: Tensor, progress: Progress) -> dict[str, Any]:
    """ "perplexity" of the original and a `PerplexityChange` by name for each other, window by window, all paired."""
    rows: dict[str, list[tuple[float, float, float]]] = {name: [] for name in others}
    plain = []
    for index, window in enumerate(windows):
        progress("evaluating", index, len(windows))
        targets = window[-CONTEXT // 2 :].unsqueeze(-1)
        expected = window_logits(original, window)
        plain.append(float(-expected.gather(-1, targets).mean()))
        for name, model in others.items():
            got = window_logits(model, window)
            kl = (expected.exp() * (expected - got)).sum(-1).mean()
            same = (expected.argmax(-1) == got.argmax(-1)).float().mean()
            rows[name].append((float(-got.gather(-1, targets).mean()), float(kl), float(same)))
    return {"perplexity": math.exp(sum(plain) / len(plain)), **{n: _change(plain, r) for n, r in rows.items()}}


def _change(plain: list[float], rows: list[tuple[float, float, float]]) -> PerplexityChange:
    nll, kl, same = (list(column) for column in zip(*rows, strict=True))
    deltas = [a - b for a, b in zip(nll, plain, strict=True)]
    interval = bootstrap_mean_ci(deltas) if len(deltas) > 1 else None
    return PerplexityChange(
        perplexity=math.exp(sum(nll) / len(nll)),
        ratio=math.exp(sum(deltas) / len(deltas)),
        ratio_ci95=(math.exp(interval.low), math.exp(interval.high)) if interval else None,
        kl=sum(kl) / len(kl),
        top1_agreement=sum(same) / len(same),
    )
