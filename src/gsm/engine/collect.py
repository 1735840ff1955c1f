"""From the logits of a step to events: pick tokens, check drafts, find out who is finished."""

from __future__ import annotations

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
                events.append(self._advance(work.sequence, self._accepted(work, block), []))
                continue
            choices = [work.sequence]
            if work.sequence.is_unforked:
                choices += self._engine.fork(work.sequence)
            plain += choices
            rows += [block[0]] * len(choices)
        if plain:
            sampled = sample(torch.stack(rows), [sequence.sampler for sequence in plain])
            for i, sequence in enumerate(plain):
                token_id, wanted = sampled.token_ids[i], sequence.request.sampling.logprobs is not None
                logprobs = []
                if wanted and sampled.logprobs is not None and sampled.top is not None:
                    logprobs.append(TokenLogprobs(token_id, sampled.logprobs[i], tuple(sampled.top[i])))
                events.append(self._advance(sequence, [token_id], logprobs))
        return events

    def _accepted(self, work: Work, block: Tensor) -> list[int]:
        """The draft as far as the model agrees, and the model's own next token; what is wrong is taken back."""
        best = block.argmax(dim=-1).tolist()
        wrong = (i for i, (guess, token) in enumerate(zip(work.draft, best, strict=False)) if guess != token)
        num_accepted = next(wrong, len(work.draft))
        sequence, engine = work.sequence, self._engine
        assert sequence.slot is not None
        sequence.num_computed += num_accepted
        if num_accepted < len(work.draft):
            engine.manager.crop(sequence.slot, sequence.num_computed)
        engine.stats.num_draft_tokens += len(work.draft)
        engine.stats.num_accepted_tokens += num_accepted
        return best[: num_accepted + 1]

    def _advance(self, sequence: Sequence, token_ids: list[int], logprobs: list[TokenLogprobs]) -> TokenEvent:
        """Append new tokens up to the first that ends the sequence, and say what they mean."""
        sampling, detokenizer = sequence.request.sampling, sequence.detokenizer
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
        if finish is not None:
            text += detokenizer.finish()
            if detokenizer.stop_reason is not None and stop_reason is None:
                finish, stop_reason = "stop", detokenizer.stop_reason
            self._engine.finish(sequence, finish)
        self._engine.stats.num_generated_tokens += len(taken)
        request_id = sequence.request.request_id
        return TokenEvent(request_id, sequence.index, taken, text, logprobs, finish, stop_reason)
