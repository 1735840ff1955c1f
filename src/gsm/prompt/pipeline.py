"""Messages -> de-duplicated and compressed messages -> the template's text -> ids, with every step traceable."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from gsm.config.prompt import PromptConfig
from gsm.config.reasoning import MARKERS
from gsm.prompt.chunking import encode
from gsm.prompt.dedup import DedupReport, deduplicate
from gsm.prompt.history import HistoryReport, Summarise, TextHistory, old_messages
from gsm.prompt.render import Rendered, has_template, render
from gsm.prompt.segments import Segment, segments
from gsm.prompt.spans import Link, Message, Place, SpanMap, plain

_MAX_COUNTED = 50_000  # texts whose token counts are remembered


@dataclass(frozen=True, slots=True)
class Trace:
    """Where one character of the original messages is: token positions [first, last), or why it is nowhere."""

    tokens: tuple[int, int] | None
    how: str  # kept, replaced, removed, dropped by the template
    reason: str = ""


@dataclass(frozen=True)
class Prompt:
    """A prompt and its history. Token positions are those of `ids`, which are the KV cache's logical positions."""

    messages: list[Message]
    text: str
    ids: list[int]
    segments: tuple[Segment, ...]
    spans: SpanMap  # from the original messages to `messages`
    rendered: Rendered
    token_starts: tuple[int, ...]  # the first character of every token
    lowered: tuple[tuple[int, int], ...] = ()  # token ranges whose KV goes down once the prompt is computed
    dedup: DedupReport = field(default_factory=DedupReport)
    history: HistoryReport = field(default_factory=HistoryReport)

    def trace(self, message: int, char: int) -> Trace:
        """What became of one character of an original message."""
        link = self.spans.find(message, char)
        if link is None:
            return Trace(None, "removed", "there is no such character")
        if link.new is None:
            return Trace(None, link.how, link.reason)
        return self._trace_link(link, char)

    def _trace_link(self, link: Link, char: int) -> Trace:
        assert link.new is not None
        start = link.new.start + (char - link.old.start if link.how == "kept" else 0)
        end = start + 1 if link.how == "kept" else link.new.end
        for span in self.rendered.contents:
            low, high = max(start, span.source), min(end, span.source + span.end - span.start)
            if span.message == link.new.message and low < high:
                shift = span.start - span.source
                return Trace(self.tokens(low + shift, high + shift), link.how, link.reason)
        return Trace(None, "dropped", "the chat template left it out")

    def tokens(self, start: int, end: int) -> tuple[int, int]:
        """Token positions [first, last) that hold characters [start, end) of the text."""
        first = bisect_left(self.token_starts, start + 1) - 1
        # several tokens may share a character: the first of them
        while first > 0 and self.token_starts[first - 1] == self.token_starts[first]:
            first -= 1
        return max(0, first), bisect_left(self.token_starts, end)

    def origins(self, token: int) -> list[Place]:
        """The stretches of the original messages that a token stands for; none for the template's own words."""
        start = self.token_starts[token]
        for span in self.rendered.contents:
            if span.start <= start < span.end:
                return self.spans.origins(span.message, span.source + start - span.start)
        return []


class PromptPipeline:
    """One per tokenizer and config; deterministic. `summarise` is for history mode text (see `TextHistory`)."""

    def __init__(
        self,
        tokenizer: Any,
        config: PromptConfig | None = None,
        *,
        markers: Sequence[tuple[str, str]] = MARKERS,
        summarise: Summarise | None = None,
        time_limit_s: float = 30.0,
    ) -> None:
        self.tokenizer = tokenizer
        self.config = config or PromptConfig()
        self._markers = tuple(markers)
        self._counts: dict[str, int] = {}
        self._frame = self._frame_tokens() if self.config.history.mode != "off" else 0
        self._history = TextHistory(self.config.history, self.count, self._frame, summarise, time_limit_s)

    def edit(self, messages: Sequence[Message], effort: str = "") -> Edits:
        """The transformations alone, without template and ids. Raises InputError."""
        original = plain(messages)
        edited, dedup = deduplicate(original, self.config.dedup, effort)
        spans, history = edited.spans, HistoryReport()
        if self.config.history.mode == "text":
            compressed, history = self._history.compress(edited.messages)
            edited, spans = compressed, edited.spans.then(compressed.spans)
        return Edits(edited.messages, spans, dedup, history)

    def process(self, messages: Sequence[Message], *, open_answer: bool = True, **template: Any) -> Prompt:
        """The whole way. `template` reaches the chat template (`tools`, `reasoning_effort`, ...). Raises InputError."""
        effort = str(template.get("reasoning_effort") or "")
        edits = self.edit(messages, effort)
        rendered = render(self.tokenizer, edits.messages, open_answer=open_answer, **template)
        encoded = encode(self.tokenizer, rendered.text)
        starts = tuple(start for start, _ in encoded.offsets)
        prompt = Prompt(
            edits.messages, rendered.text, list(encoded.ids), (), edits.spans, rendered, starts,
            dedup=edits.dedup, history=edits.history,
        )  # fmt: skip
        found = segments(edits.messages, rendered, self._markers)
        placed = [replace(s, first=t[0], last=t[1]) for s in found if (t := prompt.tokens(s.start, s.end))]
        return replace(prompt, segments=tuple(placed), lowered=self.lowered(edits.messages, rendered, prompt.tokens))

    def lowered(self, messages: Sequence[Message], rendered: Rendered, tokens: Any) -> tuple[tuple[int, int], ...]:
        """Token ranges of old turns under history mode kv; `tokens` turns characters of the text into positions."""
        if self.config.history.mode != "kv":
            return ()
        old = set(old_messages(messages, self.config.history, self.count, self._frame))
        shown = [span for span in rendered.contents if span.message in old]
        if not shown:
            return ()
        # one stretch with the template's words between: old exchanges are a run by construction
        return (tokens(shown[0].start, shown[-1].end),)

    def count(self, text: str) -> int:
        """Tokens of a text on its own."""
        found = self._counts.get(text)
        if found is None:
            if len(self._counts) >= _MAX_COUNTED:
                self._counts.clear()
            found = len(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
            self._counts[text] = found
        return found

    def _frame_tokens(self) -> int:
        """What the template adds per message, on average over a question and an answer."""
        if not has_template(self.tokenizer):
            return 0
        pair = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "x"}]
        one, two = (render(self.tokenizer, pair * n, open_answer=False).text for n in (1, 2))
        return max(0, (self.count(two) - self.count(one)) // 2 - 1)


@dataclass(frozen=True, slots=True)
class Edits:
    """What the transformations did to the messages."""

    messages: list[Message]
    spans: SpanMap
    dedup: DedupReport
    history: HistoryReport


def token_finder(tokenizer: Any, ids: Sequence[int]) -> Any:
    """`(start, end)` characters -> token positions, for ids that were not encoded at one go.

    By bisection over decoded prefixes: exact wherever a character is not split between tokens.
    """

    def at(char: int) -> int:
        low, high = 0, len(ids)
        while low < high:
            middle = (low + high) // 2
            text = tokenizer.decode(ids[: middle + 1], skip_special_tokens=False, clean_up_tokenization_spaces=False)
            low, high = (middle + 1, high) if len(text) <= char else (low, middle)
        return low

    def tokens(start: int, end: int) -> tuple[int, int]:
        return at(start), at(end - 1) + 1

    return tokens
