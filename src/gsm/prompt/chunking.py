"""Cutting text where cutting does not change its tokens.

Two ways. `chunk` cuts the ids of the whole text, so that the chunks joined are the whole by construction, and moves
every cut to where both sides are whole characters. `cut` finds the place nearest to a wish at which encoding the two
sides alone gives the ids of the whole: what must hold where the sides are encoded at different times.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from gsm.errors import InputError


@dataclass(frozen=True, slots=True)
class Chunk:
    """Characters [start, end) of the text and their ids."""

    start: int
    end: int
    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Encoded:
    """Ids of a text and the characters [start, end) each stands for."""

    ids: tuple[int, ...]
    offsets: tuple[tuple[int, int], ...]

    def borders(self) -> list[tuple[int, int]]:
        """(character, number of ids before it) wherever ids and characters can be cut together, in order."""
        found, reached = [], 0
        for number, (start, end) in enumerate(self.offsets):
            if start >= reached:
                found.append((start, number))
            reached = max(reached, end)
        return [*found, (reached, len(self.ids))] if self.ids else []

    def tokens(self, start: int, end: int) -> tuple[int, int]:
        """Token positions [first, last) of the tokens that hold characters [start, end)."""
        inside = [i for i, (a, b) in enumerate(self.offsets) if a < end and b > start]
        return (inside[0], inside[-1] + 1) if inside else (0, 0)


def encode(tokenizer: Any, text: str) -> Encoded:
    """Ids and offsets without added special tokens. Raises InputError for a tokenizer that knows no offsets."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(f"the text is no valid Unicode at character {error.start}; send UTF-8") from None
    if not getattr(tokenizer, "is_fast", False):
        raise InputError("this tokenizer does not tell which characters a token stands for; use a fast one")
    batch = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    return Encoded(tuple(batch["input_ids"]), tuple((a, b) for a, b in batch["offset_mapping"]))


def chunk(tokenizer: Any, text: str, max_tokens: int) -> list[Chunk]:
    """The text in chunks of at most `max_tokens` ids, their ids joined being those of the whole text.

    A chunk is longer only where a single character takes more ids than that. Raises InputError.
    """
    if max_tokens < 1:
        raise InputError(f"a chunk of {max_tokens} tokens holds nothing; use at least 1")
    whole = encode(tokenizer, text)
    borders = whole.borders()
    chunks: list[Chunk] = []
    last = borders[0] if borders else (0, 0)
    last = (0, last[1])  # characters that no token stands for go with the first chunk
    for here, after in zip(borders[1:], [*borders[2:], None], strict=False):
        is_full = after is None or after[1] - last[1] > max_tokens
        if is_full:
            end = len(text) if after is None else here[0]
            chunks.append(Chunk(last[0], end, whole.ids[last[1] : here[1]]))
            last = (end, here[1])
    return chunks


def cut(tokenizer: Any, text: str, at: int) -> int:
    """The character nearest to `at` where the sides, encoded alone, have the ids of the whole; 0 or the length if
    there is none between. Raises InputError for a place outside the text."""
    if not 0 <= at <= len(text):
        raise InputError(f"there is no character {at} in a text of {len(text)}")
    whole = encode(tokenizer, text)
    for char, number in _nearest(whole.borders(), at):
        if char in (0, len(text)):
            return char
        left, right = encode(tokenizer, text[:char]).ids, encode(tokenizer, text[char:]).ids
        if left == whole.ids[:number] and right == whole.ids[number:]:
            return char
    return 0


def _nearest(borders: list[tuple[int, int]], at: int) -> Iterator[tuple[int, int]]:
    yield from sorted(borders, key=lambda border: (abs(border[0] - at), border[0]))
