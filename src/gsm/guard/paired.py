"""A paired quality test: the same tokens through the original and the changed model.

The original is run once; of every position its likeliest tokens and their log-probabilities are kept, which is enough
for the exact NLL and, with the remaining probability taken as one event, for a KL that can only be a little too small.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gsm.config.smoothing import GuardConfig
from gsm.errors import InputError
from gsm.guard.records import Change, Verdict
from gsm.stats import bootstrap_mean_ci

WINDOW_TOKENS, SHORT_TOKENS = 256, 32
_MIN_WINDOWS, _SHORT_SEQUENCES = 4, 64
_KEPT_TOKENS = 256
_BATCH_TOKENS = 512


@dataclass(frozen=True)
class _Scores:
    """Of one arm, per position: NLL of the true token, KL to the reference, whether the best token is the same."""

    nll: Tensor
    kl: Tensor
    top1: Tensor


class PairedTest:
    """Compares a model with what it was when the test was made.

    ``ids`` [num_tokens] int64 is evaluation text; it is cut into windows of 256 tokens and, again, into sequences of
    32. Raises InputError when the text is too short.
    """

    def __init__(self, model: Any, ids: Tensor, num_tokens: int, limits: GuardConfig) -> None:
        self.model, self.limits = model, limits
        self._long = _rows(ids, WINDOW_TOKENS, max(_MIN_WINDOWS, num_tokens // WINDOW_TOKENS))
        self._short = _rows(ids, SHORT_TOKENS, _SHORT_SEQUENCES)
        self._references = [_Reference(model, rows) for rows in (self._long, self._short)]

    @property
    def num_tokens(self) -> int:
        return self._long.numel()

    def measure(self) -> Verdict:
        """The model as it is now against the original."""
        long, short = (reference.compare(self.model) for reference in self._references)
        before = float(self._references[0].nll.mean())
        change = (long.nll - self._references[0].nll).mean(1)
        finite = bool(torch.isfinite(long.nll).all() and torch.isfinite(short.nll).all())
        if not finite:
            return _not_finite(self.num_tokens, before)
        verdict = Verdict(
            num_tokens=self.num_tokens,
            perplexity_before=math.exp(before),
            perplexity_after=math.exp(before + float(change.mean())),
            perplexity_change=_relative(change),
            kl=_interval(long.kl.mean(1)),
            top1=float(long.top1.float().mean()),
            short_change=_relative((short.nll - self._references[1].nll).mean(1)),
        )
        return verdict.model_copy(update={"failures": list(_failures(verdict, self.limits))})


class _Reference:
    """What is kept of the original model's answers to ``rows`` [n, t]."""

    def __init__(self, model: Any, rows: Tensor) -> None:
        self.rows = rows
        nlls, tokens, logs = [], [], []
        for batch, log_probs in _log_probs(model, rows):
            nlls.append(_nll(batch, log_probs))
            top = log_probs.topk(min(_KEPT_TOKENS, log_probs.shape[-1]), -1)
            tokens.append(top.indices.int())
            logs.append(top.values)
        self.nll, self._tokens, self._logs = torch.cat(nlls), torch.cat(tokens), torch.cat(logs)

    def compare(self, model: Any) -> _Scores:
        nlls, kls, top1s, start = [], [], [], 0
        for batch, log_probs in _log_probs(model, self.rows):
            tokens = self._tokens[start : start + len(batch)].long()
            logs = self._logs[start : start + len(batch)]
            nlls.append(_nll(batch, log_probs))
            kls.append(_coarse_kl(logs, log_probs.gather(-1, tokens)))
            top1s.append(log_probs.argmax(-1) == tokens[..., 0])
            start += len(batch)
        return _Scores(torch.cat(nlls), torch.cat(kls), torch.cat(top1s))


@torch.inference_mode()
def _log_probs(model: Any, rows: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches of ``rows`` with the log-probabilities [batch, t - 1, vocab] of each next token, float32 on the CPU."""
    device = next(model.parameters()).device
    size = max(1, _BATCH_TOKENS // rows.shape[1])
    for batch in rows.split(size):
        logits = model(input_ids=batch.to(device), use_cache=False).logits[:, :-1]
        yield batch, logits.float().log_softmax(-1).cpu()


def _nll(batch: Tensor, log_probs: Tensor) -> Tensor:
    return -log_probs.gather(-1, batch[:, 1:, None])[..., 0]


def _coarse_kl(p: Tensor, q: Tensor) -> Tensor:
    """KL of log-probabilities [..., k] with all other tokens taken as one event; float64, never negative."""
    p, q = p.double(), q.double()
    rest_p = (1 - p.exp().sum(-1)).clamp_min(1e-12)
    rest_q = (1 - q.exp().sum(-1)).clamp_min(1e-12)
    return ((p.exp() * (p - q)).sum(-1) + rest_p * (rest_p / rest_q).log()).clamp_min(0)


def _rows(ids: Tensor, length: int, most: int) -> Tensor:
    """Up to ``most`` disjoint rows of ``length`` tokens, spread evenly over the text."""
    whole = len(ids) // length
    if whole < _MIN_WINDOWS:
        raise InputError(
            f"the evaluation text has {len(ids)} tokens; the guard needs at least {_MIN_WINDOWS * length}, give more"
        )
    rows = ids[: whole * length].view(whole, length)
    return rows[torch.linspace(0, whole - 1, min(most, whole)).long()]


def _interval(samples: Tensor) -> Change:
    ends = bootstrap_mean_ci(samples.double().tolist())
    return Change(mean=ends.mean, low=ends.low, high=ends.high)


def _relative(nll_change: Tensor) -> Change:
    """Per-window mean NLL differences as a relative change of the perplexity."""
    ends = _interval(nll_change)
    return Change(mean=math.expm1(ends.mean), low=math.expm1(ends.low), high=math.expm1(ends.high))


def _failures(verdict: Verdict, limits: GuardConfig) -> Iterator[str]:
    for word, change, tolerance in (
        ("perplexity", verdict.perplexity_change, limits.tolerance),
        ("perplexity on short sequences", verdict.short_change, limits.short_tolerance),
    ):
        if change is not None and change.high > tolerance:
            yield f"{word} changed by {change.mean:+.2%} (up to {change.high:+.2%}), tolerance {tolerance:.2%}"
    if limits.max_kl is not None and verdict.kl is not None and verdict.kl.high > limits.max_kl:
        yield f"KL is {verdict.kl.mean:.4f} (up to {verdict.kl.high:.4f}), tolerance {limits.max_kl}"


def _not_finite(num_tokens: int, before: float) -> Verdict:
    return Verdict(
        num_tokens=num_tokens,
        perplexity_before=math.exp(before),
        finite=False,
        failures=["the model's output holds NaN or infinity: raise smoothing.precision, or keep a module in precision"],
    )
