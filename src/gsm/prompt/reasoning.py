"""Think segments and their steps, found while tokens pass by.

A think segment lies between an opening and a closing marker. It is cut into steps at blank lines and before discourse
markers ("Wait", "So", "Next", ...). A segment that its turn ends without closing is none: a user who writes "<think>"
does not make the rest of the prompt a thought.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

_BLANK_LINE = re.compile(r"\n[ \t]*\n[ \t]*$")
_TAIL = 64  # characters of text in which a marker is looked for; markers are shorter


@dataclass(frozen=True, slots=True)
class Thought:
    """A think segment: token positions [start, end) without its markers; `end` is None while it runs."""

    start: int
    end: int | None
    borders: tuple[int, ...]  # first token of every step after the first

    def finished_steps(self) -> list[tuple[int, int]]:
        """Token ranges of the steps that are over, oldest first."""
        ends = [*self.borders, *([self.end] if self.end is not None else [])]
        return [(a, b) for a, b in zip([self.start, *ends], ends, strict=False) if b > a]


@dataclass(frozen=True, slots=True)
class _State:
    """What the tracker knows after a number of tokens; immutable, so that a crop can go back to one."""

    num_tokens: int = 0
    tail: str = ""
    open_at: int | None = None
    open_marker: int = -1
    borders: tuple[int, ...] = ()
    thoughts: tuple[Thought, ...] = ()
    has_words: bool = False  # the running step is more than white space


class ThinkTracker:
    """Follows one sequence of token ids. Deterministic; the same whether tokens come one by one or all at once."""

    def __init__(
        self,
        tokenizer: Any,
        markers: Sequence[tuple[str, str]],
        discourse: Sequence[str],
        pieces: dict[int, str] | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._markers = tuple(markers)
        self._discourse = frozenset(mark.split()[0] for mark in discourse)
        self._turn_ends = _turn_ends(tokenizer, self._markers)
        self._pieces = pieces if pieces is not None else {}  # token id -> its text; may be shared
        self._ids: list[int] = []
        self._state = _State()
        self._saved: list[_State] = []

    def feed(self, token_ids: Sequence[int]) -> bool:
        """Take the next tokens; true when a step or a segment ended with them."""
        before = self._state
        for token_id in token_ids:
            self._take(token_id)
        return self._state.borders != before.borders or self._state.thoughts != before.thoughts

    def crop(self, num_tokens: int) -> None:
        """Forget all but the first `num_tokens` tokens."""
        if num_tokens >= len(self._ids):
            return
        while self._saved and self._saved[-1].num_tokens > num_tokens:
            self._saved.pop()
        self._state = self._saved[-1] if self._saved else _State()
        ids, self._ids = self._ids[self._state.num_tokens : num_tokens], self._ids[: self._state.num_tokens]
        self.feed(ids)

    def copy(self) -> ThinkTracker:
        """A tracker of the same tokens that goes its own way."""
        twin: ThinkTracker = object.__new__(ThinkTracker)
        twin.__dict__.update(self.__dict__)
        twin._ids, twin._saved = list(self._ids), list(self._saved)
        return twin

    @property
    def num_tokens(self) -> int:
        return len(self._ids)

    @property
    def is_thinking(self) -> bool:
        return self._state.open_at is not None

    @property
    def thoughts(self) -> list[Thought]:
        """All segments so far, the running one last."""
        state = self._state
        running = [Thought(state.open_at, None, state.borders)] if state.open_at is not None else []
        return [*state.thoughts, *running]

    def _take(self, token_id: int) -> None:
        state, piece = self._state, self._piece(token_id)
        self._ids.append(token_id)
        n = state.num_tokens + 1
        tail = (state.tail + piece)[-_TAIL:]
        if "\ufffd" in tail:  # a character in several tokens
            tail = self._decode(self._ids[-_TAIL:])[-_TAIL:]
        if state.open_at is None:
            opened = next((i for i, (mark, _) in enumerate(self._markers) if tail.rstrip("\n").endswith(mark)), None)
            if opened is not None:
                self._save(_State(n, "", n, opened, (), state.thoughts))
            else:
                self._state = _State(n, tail, None, -1, (), state.thoughts)
            return
        close = self._markers[state.open_marker][1]
        if tail.rstrip("\n").endswith(close):
            end = n - self._tokens_of(close, n)
            thought = Thought(state.open_at, max(state.open_at, end), tuple(b for b in state.borders if b < end))
            self._save(_State(n, "", None, -1, (), (*state.thoughts, thought)))
        elif token_id in self._turn_ends:
            self._save(_State(n, "", None, -1, (), state.thoughts))
        elif state.has_words and self._begins_step(state.tail, piece):
            self._save(_State(n, tail, state.open_at, state.open_marker, (*state.borders, n - 1), state.thoughts, True))
        else:
            words = state.has_words or bool(piece.strip())
            self._state = _State(n, tail, state.open_at, state.open_marker, state.borders, state.thoughts, words)

    def _begins_step(self, before: str, piece: str) -> bool:
        """Whether a token with this text is the first of a step, given the text before it."""
        if not piece.strip():
            return False
        if _BLANK_LINE.search(before):
            return True
        stripped = before.rstrip(" \t")
        ends_sentence = stripped.endswith((".", "!", "?", ":", "\n")) or not stripped
        return ends_sentence and piece.strip() in self._discourse

    def _tokens_of(self, marker: str, n: int) -> int:
        """How many of the last tokens spell a marker."""
        count = 1
        while count < n and marker not in self._decode(self._ids[n - count : n]):
            count += 1
        return count

    def _save(self, state: _State) -> None:
        self._state = state
        self._saved.append(state)

    def _piece(self, token_id: int) -> str:
        piece = self._pieces.get(token_id)
        if piece is None:
            piece = self._pieces[token_id] = self._decode([token_id])
        return piece

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def _turn_ends(tokenizer: Any, markers: Sequence[tuple[str, str]]) -> frozenset[int]:
    """Special tokens that end a turn: all that are part of no marker."""
    spelled = "".join(text for pair in markers for text in pair)
    special = zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True)
    return frozenset(i for token, i in special if str(token) and str(token) not in spelled)


def think_spans(text: str, markers: Sequence[tuple[str, str]]) -> list[tuple[int, int]]:
    """Characters [start, end) of every closed think segment of a text, markers included."""
    found: list[tuple[int, int]] = []
    for opening, closing in markers:
        at = 0
        while (start := text.find(opening, at)) >= 0:
            stop = text.find(closing, start + len(opening))
            if stop < 0:
                break
            at = stop + len(closing)
            if not any(a < at and start < b for a, b in found):
                found.append((start, at))
    return sorted(found)
