"""Numbers that tell something is wrong: repetition, distance, values that lie on a grid."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from gsm.config.smoothing import SmoothingConfig
from gsm.measure.diagnose.observe import Subject
from gsm.smoothing import apply

_LONGEST = 16


def repeated_share(items: Sequence[Hashable]) -> float:
    """The share of ``items`` that are equal to the one a fixed distance (1 to 16) before: 0 for prose, 1 for a loop."""
    if len(items) < 8:
        return 0.0
    return max(_share(items, distance) for distance in range(1, min(_LONGEST, len(items) // 2) + 1))


def _share(items: Sequence[Hashable], distance: int) -> float:
    pairs = len(items) - distance
    return sum(items[index] == items[index + distance] for index in range(pairs)) / pairs


def mean_kl(expected: Tensor, got: Tensor) -> float:
    """Mean KL(expected || got) of logits [n, vocab], nats."""
    p, q = (torch.log_softmax(logits.double(), -1) for logits in (expected, got))
    return float((p.exp() * (p - q)).sum(-1).mean())


@torch.inference_mode()
def kl_by_length(subject: Subject, section: SmoothingConfig, lengths: Sequence[int]) -> list[float]:
    """Mean KL between the plain and the smoothed model on rows of each length, at most eight rows."""
    text = torch.cat((subject.prompt, subject.forced)).to(subject.model.device)

    def logits() -> list[Tensor]:
        sizes = [min(n, len(text)) for n in lengths]
        rows = [text[: len(text) // n * n].view(-1, n)[:8] for n in sizes]
        return [subject.model(input_ids=row, use_cache=False).logits.flatten(0, 1).float().cpu() for row in rows]

    plain = logits()
    with apply(subject.model, section, samples=subject.samples, calibration=subject.calibration):
        smoothed = logits()
    return [mean_kl(before, after) for before, after in zip(plain, smoothed, strict=True)]


@torch.inference_mode()
def key_values(subject: Subject) -> Tensor:
    """Keys of a short prompt under plain transformers: the k projections' outputs [tokens, channels], all layers."""
    outputs: list[Tensor] = []
    handles = [
        module.register_forward_hook(lambda _m, _a, output: outputs.append(output.detach().float().flatten(0, -2)))
        for name, module in subject.model.named_modules()
        if name.endswith(("k_proj", "kv_proj", "qkv_proj"))
    ]
    try:
        subject.model(input_ids=subject.prompt[None, :64].to(subject.model.device), use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return torch.stack(outputs) if outputs else torch.empty(0)


def grid_bits(keys: Tensor, group: int = 64) -> int | None:
    """4 or 8 when groups of values take no more distinct values than a grid of so many bits has, else None.

    Quantised values are few: of several hundred numbers in one channel at most 16 (or 256) are different.
    """
    if keys.numel() < 64:
        return None
    channels = keys.flatten(0, -2) if keys.dim() > 2 else keys
    distinct = [len(torch.unique((channels[:, c] * 1e5).round())) for c in range(min(group, channels.shape[1]))]
    usual = sorted(distinct)[len(distinct) // 2]
    if usual <= 16:
        return 4
    return 8 if usual <= 256 and channels.shape[0] > 1024 else None
