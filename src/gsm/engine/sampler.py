"""Picks the next token of every sequence from its logits.

All random sequences of a step are handled by one batch of tensor operations. Each draws one number per token from its
own generator and inverts the cumulative distribution with it, so what a seeded request gets does not depend on its
company.
Order of operations: bias and penalties, temperature, then top-k, top-p and min-p on what is left.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gsm.engine.params import SamplingParams


@dataclass(slots=True)
class SamplerState:
    """What sampling remembers of one sequence: its random numbers and the tokens that penalties count."""

    params: SamplingParams
    eos_ids: frozenset[int]
    prompt_ids: Seq[int]
    index: int = 0
    random: random.Random = field(init=False)
    num_top: int | None = field(init=False)  # alternatives to report beside each token, None: nothing
    counts: Counter[int] = field(default_factory=Counter)  # generated tokens

    def __post_init__(self) -> None:
        self.num_top = self.params.logprobs  # an answer that is to be scored reports more
        seed = self.params.seed
        self.random = random.Random(None if seed is None else f"{seed}/{self.index}")

    def note(self, token_ids: Seq[int]) -> None:
        """These tokens were generated."""
        self.counts.update(token_ids)


@dataclass(frozen=True, slots=True)
class Sampled:
    """Tokens int `[B]`, whether a row was finite; for rows that asked, log-probabilities `[B]` and alternatives."""

    token_ids: list[int]
    is_finite: list[bool]
    logprobs: list[float] | None
    top: list[list[tuple[int, float]]] | None


def sample(logits: Tensor, states: Seq[SamplerState]) -> Sampled:
    """Pick one token per row of `logits [B, vocab]` (any float dtype); plain greedy requests cost an argmax."""
    raw = logits.float()
    changed = raw
    if any(s.params.changes_logits for s in states):
        changed = raw.clone()
        for row, state in zip(changed, states, strict=True):
            if state.params.changes_logits:
                _penalise(row, state)
    token_ids = changed.argmax(dim=-1)
    drawn = [i for i, state in enumerate(states) if not state.params.is_greedy]
    if drawn:
        where = torch.tensor(drawn, device=logits.device)
        token_ids[where] = _draw(changed[where], [states[i] for i in drawn])
    return _with_logprobs(raw, token_ids, states)


def _penalise(row: Tensor, state: SamplerState) -> None:
    """Apply bias and penalties to one row `[vocab]` in place."""
    p = state.params
    if p.repetition_penalty != 1.0:
        seen = torch.tensor(sorted({*state.prompt_ids, *state.counts}), device=row.device)
        values = row[seen]
        row[seen] = torch.where(values > 0, values / p.repetition_penalty, values * p.repetition_penalty)
    if state.counts and (p.presence_penalty or p.frequency_penalty):
        ids = torch.tensor(list(state.counts), device=row.device)
        counts = torch.tensor(list(state.counts.values()), device=row.device, dtype=row.dtype)
        row[ids] -= p.presence_penalty + p.frequency_penalty * counts
    if p.logit_bias:
        ids = torch.tensor(list(p.logit_bias), device=row.device)
        row[ids] += torch.tensor(list(p.logit_bias.values()), device=row.device, dtype=row.dtype)
    if state.counts.total() < p.min_tokens:
        row[torch.tensor(sorted({*state.eos_ids, *p.stop_token_ids}), device=row.device, dtype=torch.long)] = -torch.inf


def _draw(logits: Tensor, states: Seq[SamplerState]) -> Tensor:
    """int64 `[B]` drawn from `logits [B, vocab]`."""
    device, vocab = logits.device, logits.shape[-1]

    def column(values: list[float]) -> Tensor:
        return torch.tensor(values, device=device).unsqueeze(-1)

    logits = logits / column([s.params.temperature for s in states])
    widths = [s.params.top_k or vocab for s in states]
    ordered, ids = logits.topk(min(max(widths), vocab), dim=-1)
    probabilities = (ordered - logits.logsumexp(-1, keepdim=True)).exp()
    rank = torch.arange(ordered.shape[-1], device=device)
    before = probabilities.cumsum(-1) - probabilities  # what the likelier tokens take
    out = rank >= column([float(width) for width in widths])
    kept = probabilities.masked_fill(out, 0.0)
    total = kept.sum(-1, keepdim=True)
    out = out | (before >= column([s.params.top_p for s in states]) * total) & (rank > 0)
    out = out | (probabilities < column([s.params.min_p for s in states]) * probabilities[:, :1])
    cumulative = probabilities.masked_fill(out, 0.0).double().cumsum(-1)
    point = column([s.random.random() for s in states]).double() * cumulative[:, -1:]
    chosen = (cumulative <= point).sum(-1, keepdim=True)
    last = (rank.expand_as(out).masked_fill(out, 0)).amax(-1, keepdim=True)  # rounding must not pick what is out
    return ids.gather(-1, torch.minimum(chosen, last)).squeeze(-1)


def _with_logprobs(raw: Tensor, token_ids: Tensor, states: Seq[SamplerState]) -> Sampled:
    wanted = [s.num_top for s in states]
    most = max((n for n in wanted if n is not None), default=None)
    is_finite = raw.amax(dim=-1).isfinite().tolist()  # a NaN is larger than anything, and -inf is allowed
    if most is None:
        return Sampled(token_ids.tolist(), is_finite, None, None)
    logprobs = raw.log_softmax(dim=-1)
    own = logprobs.gather(-1, token_ids.unsqueeze(-1)).squeeze(-1).tolist()
    values, ids = (x.tolist() for x in logprobs.topk(most, dim=-1))
    top = [list(zip(i[: n or 0], v[: n or 0], strict=True)) for i, v, n in zip(ids, values, wanted, strict=True)]
    return Sampled(token_ids.tolist(), is_finite, own, top)
