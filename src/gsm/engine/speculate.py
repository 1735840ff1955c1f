"""Prompt lookup: what followed the last few tokens the previous time they occurred is guessed to follow again.

Source: prompt lookup decoding (github.com/apoorvumang/prompt-lookup-decoding). Costs a dictionary look-up per token
and no model. A guess is checked by the model as if it had been decoded token by token (`Span.is_draft`): the greedy
answer is the same with and without.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

_LENGTHS = (3, 2)  # tokens that must match, the longest match first


class PromptLookup:
    """Where every short run of tokens of one sequence was last followed by something."""

    def __init__(self, max_draft_tokens: int) -> None:
        self.max_draft_tokens = max_draft_tokens
        self._after: list[dict[tuple[int, ...], int]] = [{} for _ in _LENGTHS]
        self._num_seen = 0

    def propose(self, token_ids: Seq[int], max_tokens: int) -> list[int]:
        """Tokens that may follow `token_ids`, at most `max_tokens`; often none."""
        self._observe(token_ids)
        limit = min(max_tokens, self.max_draft_tokens)
        for length, after in zip(_LENGTHS, self._after, strict=True):
            start = after.get(tuple(token_ids[-length:]))
            if start is not None and limit > 0:
                return list(token_ids[start : start + limit])
        return []

    def _observe(self, token_ids: Seq[int]) -> None:
        """Index runs that end before the last token: the last one has no successor yet."""
        for end in range(max(1, self._num_seen), len(token_ids)):
            for length, after in zip(_LENGTHS, self._after, strict=True):
                if end >= length:
                    after[tuple(token_ids[end - length : end])] = end
        self._num_seen = len(token_ids)
