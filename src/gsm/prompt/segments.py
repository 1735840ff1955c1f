"""The parts of a rendered prompt, what each is, and how it may be treated."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from gsm.prompt.dedup import passages_with_labels
from gsm.prompt.reasoning import think_spans
from gsm.prompt.render import Rendered, TextSpan
from gsm.prompt.spans import Message, text_of

Kind = Literal["system", "tools", "document", "user", "assistant", "tool", "think", "last_user", "template"]
Grade = Literal["protected", "normal", "fading"]
_PROTECTED = ("system", "tools", "last_user", "template")


@dataclass(frozen=True, slots=True)
class Segment:
    """Characters [start, end) of the prompt's text and the token positions [first, last) that hold them.

    `grade` says how its memory may be treated: protected never goes down, fading (thinking) goes first.
    """

    kind: Kind
    role: str
    message: int | None
    start: int
    end: int
    first: int = 0
    last: int = 0
    grade: Grade = "normal"


def segments(messages: Sequence[Message], rendered: Rendered, markers: Sequence[tuple[str, str]]) -> list[Segment]:
    """Segments that cover the text of a prompt once, in order, without token positions."""
    last_user = max((i for i, m in enumerate(messages) if m.get("role") == "user"), default=-1)
    found: list[Segment] = []
    at = 0
    for span in rendered.contents:
        found += _between(rendered, at, span.start)
        found += _of_content(messages, span, last_user, markers)
        at = span.end
    return [*found, *_between(rendered, at, len(rendered.text))]


def _of_content(
    messages: Sequence[Message], span: TextSpan, last_user: int, markers: Sequence[tuple[str, str]]
) -> Iterator[Segment]:
    message, number = messages[span.message], span.message
    role = str(message.get("role", ""))
    shown = text_of(message)[span.source : span.source + span.end - span.start]
    kind, inside = _kind(role, number, last_user), []
    if role == "assistant":
        inside = [(a, b, "think") for a, b in think_spans(shown, markers)]
    elif role == "user":
        inside = [(a, b, "document") for a, b in passages_with_labels(shown)]
    at = 0
    for start, end, inner in [*inside, (len(shown), len(shown), "")]:
        if start > at:
            yield _segment(kind, role, span, at, start, number >= last_user)
        if end > start:
            yield _segment(inner, role, span, start, end, number >= last_user)  # type: ignore[arg-type]
        at = max(at, end)


def _segment(kind: Kind, role: str, span: TextSpan, start: int, end: int, is_new: bool) -> Segment:
    grade: Grade = "protected" if kind in _PROTECTED or is_new else "normal"
    if kind == "think":
        grade = "fading"
    return Segment(kind, role, span.message, span.start + start, span.start + end, grade=grade)


def _kind(role: str, number: int, last_user: int) -> Kind:
    if role in ("system", "developer"):
        return "system"
    if role == "user":
        return "last_user" if number == last_user else "user"
    return "tool" if role in ("tool", "function") else "assistant"


def _between(rendered: Rendered, start: int, end: int) -> Iterator[Segment]:
    """What the template wrote itself, with the stretch that the tools caused on its own."""
    if rendered.tools is not None and start <= rendered.tools[0] < end:
        first, last = rendered.tools[0], min(rendered.tools[1], end)
        yield from _between_plain(start, first)
        yield Segment("tools", "system", None, first, last, grade="protected")
        start = last
    yield from _between_plain(start, end)


def _between_plain(start: int, end: int) -> Iterator[Segment]:
    if end > start:
        yield Segment("template", "", None, start, end, grade="protected")
