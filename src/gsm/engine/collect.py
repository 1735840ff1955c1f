"""From the logits of a step to events: pick tokens, check drafts, find out who is finished."""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gsm.engine.request import FinishReason, Sequence, TokenEvent, TokenLogprobs, Work
from gsm.engine.sampler import sample

if TYPE_CHECKING:
    from gsm.engine.engine import Engine


class Collector:
    """The last part of a step. Changes sequences; tells the engine who is over."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def collect(self, works: Seq[Work], logits: Seq[Tensor]) -> list[TokenEvent]:
        """`logits[i] [1 + len(draft), vocab]` belong to `works[i]`."""
        events, plain, rows = [], [], []
        for work, block in zip(works, logits, strict=True):
            if work.draft:
                token_ids = self._accepted(work, block)
                events.append(self._advance(work.sequence, token_ids, self._judged(work.sequence, block, token_ids)))
                continue
            choices = [work.sequence]
            if work.sequence.is_unforked:
                choices += self._engine.fork(work.sequence)
            plain += choices
            rows += [block[0]] * len(choices)
        if plain:
            sampled = sample(torch.stack(rows), [sequence.sampler for sequence in plain])
            for i, sequence in enumerate(plain):
                sequence.num_nonfinite += not sampled.is_finite[i]
                token_id, logprobs = sampled.token_ids[i], []
                if sequence.sampler.num_top is not None and sampled.logprobs is not None and sampled.top is not None:
                    logprobs.append(TokenLogprobs(token_id, sampled.logprobs[i], tuple(sampled.top[i])))
                events.append(self._advance(sequence, [token_id], logprobs))
        return events

    def _judged(self, sequence: Sequence, block: Tensor, token_ids: list[int]) -> list[TokenLogprobs]:
        """What the model thought of the tokens of an accepted draft."""
        rows, num_top = block[: len(token_ids)].float(), sequence.sampler.num_top
        sequence.num_nonfinite += int((~rows.amax(-1).isfinite()).sum())
        if num_top is None:
            return []
        logprobs = rows.log_softmax(-1)
        values, ids = (x.tolist() for x in logprobs.topk(num_top, dim=-1))
        own = logprobs[range(len(token_ids)), token_ids].tolist()
        tops = [tuple(zip(i, v, strict=True)) for i, v in zip(ids, values, strict=True)]
        return [TokenLogprobs(*judged) for judged in zip(token_ids, own, tops, strict=True)]

    def _accepted(self, work: Work, block: Tensor) -> list[int]:
        """The draft as far as the model agrees, and the model's own next token; what is wrong is taken back."""
        best = block.argmax(dim=-1).tolist()
        wrong = (i for i, (guess, token) in enumerate(zip(work.draft, best, strict=False)) if guess != token)
        num_accepted = next(wrong, len(work.draft))
        sequence, engine = work.sequence, self._engine
        assert sequence.slot is not None
        sequence.num_computed += num_accepted
        num_wrong = len(work.draft) - num_accepted
        if num_wrong:  # counted from the end: compacted positions are fewer than tokens
            engine.manager.crop(sequence.slot, engine.manager.num_tokens(sequence.slot) - num_wrong)
        engine.stats.num_draft_tokens += len(work.draft)
        engine.stats.num_accepted_tokens += num_accepted
        return best[: num_accepted + 1]

    def _advance(self, sequence: Sequence, token_ids: list[int], logprobs: list[TokenLogprobs]) -> TokenEvent:
        """Append new tokens up to the first that ends the sequence, and say what they mean."""
        sampling, detokenizer = sequence.request.sampling, sequence.detokenizer
        sequence.last_token_s = time.monotonic()
        if sequence.first_token_s is None:
            sequence.first_token_s = sequence.last_token_s
        taken: list[int] = []
        finish: FinishReason | None = None
        stop_reason: str | int | None = None
        text = ""
        for token_id in token_ids:
            sequence.token_ids.append(token_id)
            sequence.sampler.note([token_id])
            taken.append(token_id)
            is_eos = token_id in sequence.sampler.eos_ids and not sampling.ignore_eos
            if is_eos or token_id in sampling.stop_token_ids:
                finish, stop_reason = "stop", None if is_eos else token_id
                break
            text += detokenizer.feed([token_id])
            if detokenizer.stop_reason is not None and sequence.num_generated >= sampling.min_tokens:
                finish, stop_reason = "stop", detokenizer.stop_reason
                break
            if sequence.num_generated >= sampling.max_tokens:
                finish = "length"
                break
        if sequence.records:
            sequence.recorded += logprobs[: len(taken)]
        if finish is not None:
            text += detokenizer.finish()
            if detokenizer.stop_reason is not None and stop_reason is None:
                finish, stop_reason = "stop", detokenizer.stop_reason
            self._engine.finish(sequence, finish)
        self._engine.stats.num_generated_tokens += len(taken)
        request_id = sequence.request.request_id
        asked = _asked(logprobs[: len(taken)], sampling.logprobs)
        return TokenEvent(request_id, sequence.index, taken, text, asked, finish, stop_reason)


def _asked(logprobs: list[TokenLogprobs], num_top: int | None) -> list[TokenLogprobs]:
    """What the request asked for: scoring may have recorded more."""
    return [] if num_top is None else [TokenLogprobs(x.token_id, x.logprob, x.top[:num_top]) for x in logprobs]
