"""From token ids to text, piece by piece: no half characters, no piece of a stop string.

The pieces joined are exactly the text of all ids (up to a stop string, which is not part of it). An incomplete
character is held back until it is complete; a tail that might become a stop string is held back until it does not.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_CONTEXT_TOKENS = 4  # tokens before the text: some tokenizers write a space or not depending on what stands before
_MAX_OPEN_TOKENS = 64  # more tokens cannot be one character: they are no valid UTF-8
_REPLACEMENT = "\ufffd"


class Detokenizer:
    """Text of one choice. `stop_reason` is set once a stop string appeared; nothing is said after it."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        prompt_ids: Seq[int],
        stop: Seq[str] = (),
        skip_special_tokens: bool = True,
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special_tokens
        self._stop = tuple(stop)
        self._window = self._context(list(prompt_ids[-_CONTEXT_TOKENS:]))  # ids that are decoded anew every time
        self._num_read = len(self._window)  # of which that many are said
        self._said = self._decode(self._window)
        self._held = ""  # text that may be the beginning of a stop string
        self.stop_reason: str | None = None

    def feed(self, token_ids: Seq[int]) -> str:
        """Text that is certain after these tokens."""
        return "".join(self._filter(self._next(token_id)) for token_id in token_ids)

    def finish(self) -> str:
        """What was held back, now that nothing follows."""
        if self.stop_reason is not None:
            return ""
        rest = self._filter(self._decode(self._window)[len(self._said) :])
        held, self._held = self._held, ""
        return rest if self.stop_reason is not None else rest + held

    def _next(self, token_id: int) -> str:
        self._window.append(token_id)
        text = self._decode(self._window)
        is_open = text.endswith(_REPLACEMENT) and len(self._window) - self._num_read < _MAX_OPEN_TOKENS
        stable = text.rstrip(_REPLACEMENT) if is_open else text
        new = stable[len(self._said) :] if len(stable) > len(self._said) else ""
        if is_open:
            self._said = stable if new else self._said
        elif new or len(self._window) - self._num_read >= _MAX_OPEN_TOKENS:
            self._window = self._window[self._num_read :]  # the last said ids are context for the next
            self._num_read = len(self._window)
            self._said = self._decode(self._window)
        return new

    def _filter(self, new: str) -> str:
        """`new` and what was held back, cut at a stop string and at what may become one."""
        if not self._stop:
            return new
        if self.stop_reason is not None:
            return ""
        text = self._held + new
        found = [(at, stop) for stop in self._stop if (at := text.find(stop)) >= 0]
        if found:
            at, self.stop_reason = min(found, key=lambda hit: (hit[0], -len(hit[1])))
            self._held = ""
            return text[:at]
        keep = max(_overlap(text, stop) for stop in self._stop)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def _context(self, ids: list[int]) -> list[int]:
        """The end of the prompt, unless it ends within a character: then its text would change under us."""
        return [] if self._decode(ids).endswith(_REPLACEMENT) else ids

    def _decode(self, ids: list[int]) -> str:
        if not ids:
            return ""
        options = {"skip_special_tokens": self._skip_special, "clean_up_tokenization_spaces": False}
        return str(self._tokenizer.decode(ids, **options))


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a proper beginning of `stop`."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
