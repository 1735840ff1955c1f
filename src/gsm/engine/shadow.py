"""Shadow scoring: finished answers read again exactly, between the steps that serve.

One prefill over prompt and answer with pages in full precision, the full cache and no window smoothing, in a store of
its own that neither reads nor feeds the prefix cache. At every token of the answer the exact distribution is compared
with what the serving config said: its log-probability of the token, and its 20 likeliest. This is what notices fluent,
wrong answers.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from gsm.config import GsmConfig, load_config
from gsm.core.batch import Span
from gsm.engine.request import Sequence, TokenLogprobs
from gsm.engine.runner import Runner
from gsm.engine.windows import Windows
from gsm.models import LoadedModel

NUM_TOP = 20  # alternatives that are kept of every served token
_CHUNK_TOKENS = 64  # of one forward pass: how long somebody who comes meanwhile may have to wait
_MAX_WAITING = 16  # answers; beyond it new ones are not scored
_MAX_CREDIT_S = 2.0  # of unused share that is kept for later
_SMALLEST = 1e-6  # probability of everything beyond the likeliest tokens, at least
_log = logging.getLogger("gsm")


@dataclass(frozen=True, slots=True)
class Score:
    """One answer against the exact model, means over its tokens. Natural logarithms."""

    epoch: int
    num_tokens: int
    kl: float  # KL(exact || served) over the served 20 likeliest and the rest as one event
    top1: float  # share of tokens where the exact model's likeliest token is another
    gap: float  # log-probability of the sampled token, served minus exact


@dataclass(slots=True)
class _Job:
    """An answer that waits, or is being read: `num_read` of its tokens are."""

    epoch: int
    ids: list[int]
    num_prompt_tokens: int
    served: list[TokenLogprobs]
    num_read: int = 0
    slot: int | None = None

    @property
    def num_scored(self) -> int:
        return len(self.served)

    @property
    def num_to_read(self) -> int:
        """The last token's own successor was never sampled."""
        return len(self.ids) - 1


class Shadow:
    """Takes finished sequences, hands out scores. `share` bounds its time beside the engine's own; idle time is free.

    Owned by the engine's thread. `on_score` is called there.
    """

    def __init__(self, loaded: LoadedModel, windows: Windows, max_tokens: int = 4096) -> None:
        self.share = 0.0
        self.max_tokens = max_tokens
        self.on_score: Callable[[Score], None] | None = None
        self.num_scored = self.num_left_out = 0
        self.spent_s = 0.0  # in forward passes, idle time included
        self._credit_s = 0.0
        self._loaded, self._windows = loaded, windows
        self._reader: _Reader | None = None
        self._waiting: deque[_Job] = deque()
        self._scores: list[tuple[Tensor, Tensor, Tensor]] = []  # of the first job, chunk by chunk

    @property
    def has_work(self) -> bool:
        return bool(self._waiting)

    @property
    def is_full(self) -> bool:
        """Whether answers that finish now would not be scored."""
        return len(self._waiting) >= _MAX_WAITING

    def submit(self, sequence: Sequence) -> None:
        """Score a finished sequence whose tokens were recorded, if there is room for it."""
        if not sequence.recorded or len(sequence.recorded) != sequence.num_generated:
            return
        if self.is_full or len(sequence.token_ids) > self.max_tokens:
            self.num_left_out += 1
            return
        ids, epoch = list(sequence.token_ids), sequence.request.epoch
        self._waiting.append(_Job(epoch, ids, sequence.num_prompt_tokens, sequence.recorded))

    def earn(self, duration_s: float) -> None:
        """The engine worked that long on answers."""
        self._credit_s = min(_MAX_CREDIT_S, self._credit_s + self.share * duration_s)

    def run(self, is_idle: bool) -> None:
        """One chunk of the first answer that waits: when nobody else wants the model, or from what was earned."""
        if not self._waiting or not (is_idle or self._credit_s > 0.0):
            return
        job, began = self._waiting[0], time.perf_counter()
        try:
            self._read(job)
        except Exception as error:  # foreign code; a score is never worth an answer
            _log.warning("an answer could not be scored: %s: %s", type(error).__name__, error)
            self._drop()
        duration = time.perf_counter() - began
        self.spent_s += duration
        if not is_idle:
            self._credit_s -= duration

    def _read(self, job: _Job) -> None:
        if self._reader is None:
            self._reader = _Reader(self._loaded, self._windows)
        end = min(job.num_read + _CHUNK_TOKENS, job.num_to_read)
        first = max(job.num_read, job.num_prompt_tokens - 1)  # whose successor is the answer's next token
        logits = self._reader.read(job, end, end - first)
        if logits is not None:
            start = first - (job.num_prompt_tokens - 1)
            self._scores.append(compare(logits, job.served[start : start + len(logits)]))
        job.num_read = end
        if end == job.num_to_read:
            self._finish(job)

    def _finish(self, job: _Job) -> None:
        kl, is_other, gap = (torch.cat(parts) for parts in zip(*self._scores, strict=True))
        score = Score(job.epoch, len(kl), *(float(x.float().mean()) for x in (kl, is_other, gap)))
        self._drop()
        self.num_scored += 1
        if self.on_score is not None:
            self.on_score(score)

    def _drop(self) -> None:
        """Forget the first job, and the memory that a long one took."""
        job = self._waiting.popleft()
        self._scores.clear()
        if self._reader is not None:
            self._reader.free(job)
            if len(job.ids) > self.max_tokens // 4:
                self._reader = None


class _Reader(Runner):
    """The model with a store of its own: full precision, everything attended, no window."""

    def __init__(self, loaded: LoadedModel, windows: Windows) -> None:
        self.config: GsmConfig = load_config({"cache": {"preset": "full"}})
        super().__init__(loaded, self.config, windows)

    @torch.inference_mode()
    def read(self, job: _Job, end: int, num_wanted: int) -> Tensor | None:
        """Compute tokens up to `end`; logits `[num_wanted, vocab]` of the last ones, None where none are wanted."""
        if job.slot is None:
            job.slot = self.cache.manager.add_sequence()
        ids = job.ids[job.num_read : end]
        self._windows.suspend()
        self.cache.plan([Span(job.slot, 0, 0, len(ids))], [self.config.cache.sparse])
        kept = list(range(len(ids) - max(0, num_wanted), len(ids)))
        logits = self._call(ids, list(range(job.num_read, end)), kept)
        return logits if kept else None

    def free(self, job: _Job) -> None:
        if job.slot is not None:
            self.cache.manager.free(job.slot)


def compare(logits: Tensor, served: list[TokenLogprobs]) -> tuple[Tensor, Tensor, Tensor]:
    """KL, whether the likeliest token is another, and the gap, each `[N]`, of exact `logits [N, vocab]`."""
    exact = logits.float().log_softmax(-1).cpu()
    num_top = min(len(token.top) for token in served)
    ids = torch.tensor([[i for i, _ in token.top[:num_top]] for token in served])
    log_p = torch.tensor([[value for _, value in token.top[:num_top]] for token in served])
    log_q = exact.gather(-1, ids)
    rest_p = (1 - log_p.exp().sum(-1)).clamp_min(_SMALLEST)
    rest_q = (1 - log_q.exp().sum(-1)).clamp_min(_SMALLEST)
    kl = (log_q.exp() * (log_q - log_p)).sum(-1) + rest_q * (rest_q / rest_p).log()
    own = torch.tensor([token.logprob for token in served])
    sampled = torch.tensor([[token.token_id] for token in served])
    return kl.clamp_min(0.0), exact.argmax(-1) != ids[:, 0], own - exact.gather(-1, sampled)[:, 0]
