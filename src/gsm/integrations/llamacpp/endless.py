"""A llama.cpp context that never ends: when its window is full, chosen token ranges go and the rest moves up.

llama.cpp's own context shift forgets the oldest half after the first `n_keep` tokens. Here the ranges are chosen
(`choose`), then the library's sequence removal and position shift do the work: keys are re-rotated by llama.cpp itself
in the next decode, and nothing is computed again.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from gsm.errors import InputError, ModelError, UnsupportedModel
from gsm.integrations.llamacpp.choose import Protected, Range, choose_ranges, shifted
from gsm.integrations.llamacpp.state import SavedKeys, read_keys

Forget = Literal["oldest", "same", "half"]


@dataclass(frozen=True)
class EndlessOptions:
    """How a window is kept. ``forget``: ``oldest``, ``same`` (as many, in blocks of the least distinctive keys), or
    ``half`` (llama.cpp's own context shift: the oldest half)."""

    window_tokens: int = 2048
    forget: Forget = "oldest"
    free_share: float = 0.25  # of the window, each time it is full
    sink_tokens: int = 4
    recent_share: float = 0.25  # of the window, never forgotten
    block_tokens: int = 32


def load_gguf(path: str | Path, window_tokens: int, threads: int | None = None) -> Any:
    """A `llama_cpp.Llama` on the CPU with a window of that many tokens. Raises ModelError or InputError."""
    try:
        import llama_cpp
    except ImportError:
        raise ModelError(
            "the llamacpp back end needs the package llama-cpp-python; pip install 'gsm-infer[llamacpp]'"
        ) from None
    path = Path(path)
    if path.suffix != ".gguf" or not path.is_file():
        raise InputError(f"{path} is no .gguf file; the llamacpp back end reads GGUF only")
    if window_tokens < 64:
        raise InputError(f"the window is {window_tokens} tokens; use at least 64")
    try:
        llm = llama_cpp.Llama(str(path), n_ctx=window_tokens, n_batch=512, n_threads=threads, verbose=False)
    except (ValueError, RuntimeError) as error:
        raise ModelError(f"llama.cpp cannot load {path}: {error}") from None
    if not llama_cpp.llama_memory_can_shift(llama_cpp.llama_get_memory(llm._ctx.ctx)):
        raise UnsupportedModel(
            f"llama.cpp cannot shift positions in the cache of {path.name} (recurrent state, or positions of several "
            "dimensions), so its window cannot be kept; use the transformers back end"
        )
    return llm


@dataclass
class Endless:
    """Feeds tokens to a `llama_cpp.Llama` for ever. Counts are tokens since the beginning."""

    llm: Any
    options: EndlessOptions = field(default_factory=EndlessOptions)
    protected: tuple[Range, ...] = ()  # positions now; they move when others go
    num_first: int = 0  # leading tokens that never go: at least the sinks
    num_seen: int = 0
    num_forgotten: int = 0
    num_compactions: int = 0

    def __post_init__(self) -> None:
        self.num_first = max(self.num_first, self.options.sink_tokens)

    @property
    def num_held(self) -> int:
        """Tokens in the window now."""
        held: int = self.llm.n_tokens
        return held

    def feed(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Read tokens, making room as often as needed; returns the logits after the last one. Raises InputError."""
        if not len(tokens):
            raise InputError("there are no tokens to read; give at least one")
        step = min(512, max(1, self._room_made))
        for start in range(0, len(tokens), step):
            part = tokens[start : start + step]
            if self.num_held + len(part) > self.options.window_tokens:
                self.make_room(len(part))
            self.llm.eval(part)
            self.num_seen += len(part)
        return self.logits()

    def logits(self) -> NDArray[np.float32]:
        """Of the last token read, `[vocabulary]`."""
        pointer = self.llm._ctx.get_logits_ith(-1)
        return np.ctypeslib.as_array(pointer, shape=(self.llm.n_vocab(),)).copy()

    def protect(self, num_last: int) -> None:
        """The last tokens read (a user's message, say) never go, nor do ranges protected before."""
        self.protected = (*self.protected, (self.num_held - num_last, self.num_held))

    @property
    def _room_made(self) -> int:
        return int(self.options.window_tokens * self.options.free_share)

    def make_room(self, num_needed: int) -> list[Range]:
        """Forget ranges so that at least `num_needed` tokens fit; returns them."""
        ranges = self._choose(max(num_needed, self._room_made))
        self._remove(ranges)
        return ranges

    def _choose(self, num_to_free: int) -> list[Range]:
        o = self.options
        if o.forget == "half":
            nothing_else = Protected(self.num_first, 0)
            return choose_ranges(
                self.num_held, max(num_to_free, (self.num_held - self.num_first) // 2), nothing_else, None
            )
        protected = Protected(self.num_first, int(o.window_tokens * o.recent_share), self.protected)
        keys = self.saved_keys() if o.forget == "same" else None
        return choose_ranges(self.num_held, num_to_free, protected, keys, o.block_tokens)

    def saved_keys(self, every: int = 2) -> SavedKeys:
        """Keys of every other layer as the library saves them: about half of the cache, copied once per compaction."""
        import llama_cpp

        context = self.llm._ctx.ctx
        size = llama_cpp.llama_state_seq_get_size(context, 0)
        buffer = (ctypes.c_uint8 * size)()
        written = llama_cpp.llama_state_seq_get_data(context, buffer, size, 0)
        return read_keys(memoryview(buffer).cast("B")[:written], every)

    def _remove(self, ranges: list[Range]) -> None:
        """Last range first, so that the positions of the others stay what they are until their turn."""
        num_held = self.num_held
        for first, last in reversed(ranges):
            self.llm._ctx.kv_cache_seq_rm(0, first, last)
            self.llm._ctx.kv_cache_seq_shift(0, last, num_held, first - last)
            self.llm.input_ids[first : num_held - (last - first)] = self.llm.input_ids[last:num_held].copy()
            num_held -= last - first
        self.num_forgotten += self.num_held - num_held
        self.num_compactions += 1
        self.llm.n_tokens = num_held
        self.protected = shifted(self.protected, ranges)

    def reset(self) -> None:
        """An empty window."""
        self.llm.reset()
        self.llm._ctx.kv_cache_clear()
        self.protected = ()
        self.num_seen = self.num_forgotten = self.num_compactions = 0

    def kv_bytes(self) -> int:
        """Bytes of the tokens held, as the library saves them."""
        import llama_cpp

        size: int = llama_cpp.llama_state_seq_get_size(self.llm._ctx.ctx, 0)
        return size
