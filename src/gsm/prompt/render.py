"""Through the chat template, without losing sight of which character came from where.

A template is a program. It is run once on the messages and once on stand-ins; where both agree on what stands around
the contents, the place of every content is known exactly. A template that changes contents (trims them, drops think
blocks) falls back to a search in order, and what it dropped is reported as dropped.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from gsm.errors import InputError
from gsm.prompt.spans import Message, text_of

_STAND_IN = "\ue000{}\ue001"  # private-use characters: no prompt has them, no template touches them
_FOUND = re.compile("\ue000(\\d+)\ue001")
_SHORTEST_PIECE = 8  # characters of a changed content that are looked for


@dataclass(frozen=True, slots=True)
class TextSpan:
    """Characters [start, end) of the rendered text that are characters [source, ...) of a message's content."""

    message: int
    start: int
    end: int
    source: int


@dataclass(frozen=True, slots=True)
class Rendered:
    """The text a template makes. `contents` are in order; what lies between them is the template's own."""

    text: str
    contents: tuple[TextSpan, ...]
    tools: tuple[int, int] | None  # characters that are there because of the tools
    dropped: tuple[tuple[int, int, int], ...]  # (message, start, end): content the template left out


def render(tokenizer: Any, messages: Sequence[Message], *, open_answer: bool = True, **template: Any) -> Rendered:
    """Apply the tokenizer's chat template. Raises InputError when it has none or refuses the messages."""
    text = _apply(tokenizer, messages, open_answer, template)
    contents = _exact(tokenizer, messages, text, open_answer, template)
    if contents is None:
        contents = tuple(_search(messages, text))
    tools = None
    if template.get("tools"):
        without = _apply(tokenizer, messages, open_answer, {**template, "tools": None})
        tools = _difference(without, text)
    return Rendered(text, contents, tools, tuple(_dropped(messages, contents)))


def has_template(tokenizer: Any) -> bool:
    return bool(getattr(tokenizer, "chat_template", None))


def _apply(tokenizer: Any, messages: Sequence[Message], open_answer: bool, template: dict[str, Any]) -> str:
    if not has_template(tokenizer):
        raise InputError("this model has no chat template; give the prompt as plain text")
    try:
        return str(
            tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=open_answer, **template)
        )
    except Exception as error:  # a template is a program of the model's author and may raise anything
        raise InputError(f"the chat template refused the messages: {error}") from error


def _exact(
    tokenizer: Any, messages: Sequence[Message], text: str, open_answer: bool, template: dict[str, Any]
) -> tuple[TextSpan, ...] | None:
    """Spans by stand-ins, or None where the template does not treat contents as they are."""
    stand_ins = [
        {**message, "content": _STAND_IN.format(i)} if text_of(message) else dict(message)
        for i, message in enumerate(messages)
    ]
    try:
        frame = _apply(tokenizer, stand_ins, open_answer, template)
    except InputError:
        return None
    spans, at, last = [], 0, 0
    for match in _FOUND.finditer(frame):
        between, number = frame[last : match.start()], int(match[1])
        content = text_of(messages[number])
        if not text.startswith(between, at):
            return None
        at, last = at + len(between), match.end()
        shown = content if text.startswith(content, at) else content.strip()
        if not text.startswith(shown, at):
            return None
        spans.append(TextSpan(number, at, at + len(shown), content.find(shown)))
        at += len(shown)
    return tuple(spans) if text[at:] == frame[last:] else None


def _search(messages: Sequence[Message], text: str) -> Iterator[TextSpan]:
    """Every content in order, whole, trimmed, or its longest line-wise parts."""
    at = 0
    for number, message in enumerate(messages):
        content = text_of(message)
        for source, piece in _candidates(content):
            found = text.find(piece, at)
            if found >= 0:
                yield TextSpan(number, found, found + len(piece), source)
                at = found + len(piece)


def _candidates(content: str) -> Iterator[tuple[int, str]]:
    """The trimmed content if it is short, else its paragraphs: a template may have dropped some of them."""
    parts = [(m.start(), m[0]) for m in re.finditer(r"\S(?:.*\S)?", content)]
    if len(parts) <= 1 or len(content) < _SHORTEST_PIECE:
        yield from parts
        return
    yield from (part for part in parts if len(part[1]) >= 2)


def _dropped(messages: Sequence[Message], contents: Sequence[TextSpan]) -> Iterator[tuple[int, int, int]]:
    """Stretches of contents (other than white space) that are not in the text."""
    shown: dict[int, list[TextSpan]] = {}
    for span in contents:
        shown.setdefault(span.message, []).append(span)
    for number, message in enumerate(messages):
        content, at = text_of(message), 0
        for span in shown.get(number, []):
            if content[at : span.source].strip():
                yield number, at, span.source
            at = span.source + span.end - span.start
        if content[at:].strip():
            yield number, at, len(content)


def _difference(without: str, text: str) -> tuple[int, int]:
    """The stretch of `text` that `without` lacks."""
    most = min(len(without), len(text))
    start = next((i for i in range(most) if without[i] != text[i]), most)
    tail = next((i for i in range(most - start) if without[-1 - i] != text[-1 - i]), most - start)
    return start, len(text) - tail
