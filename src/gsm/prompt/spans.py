"""What became of every character of a prompt: kept, replaced by something shorter, or removed, and why.

A *place* is a stretch of one message's content. A transformation says for each stretch of the messages it got where it
went in those it returns; two transformations in a row compose. Rendering and encoding then carry a place on to token
positions, the positions that `gsm.Cache.explain` knows (SPEC P5, K8).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Message = dict[str, Any]
How = Literal["kept", "replaced", "removed"]


@dataclass(frozen=True, slots=True, order=True)
class Place:
    """Characters [start, end) of the content of one message."""

    message: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Link:
    """Where a stretch went. Kept stretches have the same length in both; a replaced one is stood for by `new`."""

    old: Place
    new: Place | None
    how: How = "kept"
    reason: str = ""


@dataclass(frozen=True, slots=True)
class SpanMap:
    """Links that cover every character of the old messages once, in order."""

    links: tuple[Link, ...]

    @classmethod
    def identity(cls, messages: Sequence[Message]) -> SpanMap:
        places = [Place(i, 0, len(text_of(message))) for i, message in enumerate(messages)]
        return cls(tuple(Link(place, place) for place in places if place.end))

    def find(self, message: int, char: int) -> Link | None:
        """The link of one character of the old messages; None where there is no such character."""
        found = (link for link in self.links if link.old.message == message and link.old.start <= char < link.old.end)
        return next(found, None)

    def origins(self, message: int, char: int) -> list[Place]:
        """What one character of the new messages stands for: itself (one character), or all that it replaces."""
        found = []
        for link in self.links:
            if link.new is not None and link.new.message == message and link.new.start <= char < link.new.end:
                at = link.old.start + char - link.new.start
                found.append(Place(link.old.message, at, at + 1) if link.how == "kept" else link.old)
        return found

    def then(self, later: SpanMap) -> SpanMap:
        """This map followed by another."""
        return SpanMap(tuple(link for first in self.links for link in _follow(first, later)))

    def num_chars(self, how: How) -> int:
        """Characters of the old messages that were kept, replaced or removed."""
        return sum(link.old.end - link.old.start for link in self.links if link.how == how)

    def removals(self) -> list[Link]:
        """Everything that is not there word for word any more."""
        return [link for link in self.links if link.how != "kept"]


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a new message: a stretch kept word for word, or words of ours that may stand for other stretches."""

    text: str
    source: Place | None = None
    stands_for: tuple[Place, ...] = ()


@dataclass(slots=True)
class Draft:
    """A new message in the making: the fields of `base`, with the content made of `pieces`."""

    base: Message
    pieces: list[Piece] = field(default_factory=list)

    @property
    def content(self) -> str:
        return "".join(piece.text for piece in self.pieces)


@dataclass(frozen=True, slots=True)
class Edited:
    """What a transformation returns: new messages and what became of the old ones."""

    messages: list[Message]
    spans: SpanMap

    @classmethod
    def unchanged(cls, messages: Sequence[Message]) -> Edited:
        return cls(list(messages), SpanMap.identity(messages))


def build(old: Sequence[Message], drafts: Sequence[Draft], reason: str) -> Edited:
    """Finish drafts. What no piece keeps or stands for is removed, for `reason`."""
    links: list[Link] = []
    for number, draft in enumerate(drafts):
        at = 0
        for piece in draft.pieces:
            new = Place(number, at, at + len(piece.text))
            if piece.source is not None:
                links.append(Link(piece.source, new))
            links += [Link(place, new, "replaced", reason) for place in piece.stands_for]
            at += len(piece.text)
    messages = [{**draft.base, "content": draft.content} for draft in drafts]
    return Edited(messages, SpanMap(tuple(_with_gaps(old, sorted(links, key=lambda link: link.old), reason))))


def keep(message: int, text: str, start: int = 0, end: int | None = None) -> Piece:
    """A piece of the content `text` of an old message, word for word."""
    end = len(text) if end is None else end
    return Piece(text[start:end], Place(message, start, end))


def text_of(message: Message) -> str:
    """The content of a message as text: parts of a list are joined, what is no text counts as nothing."""
    content = message.get("content")
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return content if isinstance(content, str) else ""


def plain(messages: Iterable[Message]) -> list[Message]:
    """The same messages with text contents, which is what all transformations work on."""
    return [{**message, "content": text_of(message)} for message in messages]


def _with_gaps(old: Sequence[Message], links: Sequence[Link], reason: str) -> Iterator[Link]:
    by_message: dict[int, list[Link]] = {}
    for link in links:
        by_message.setdefault(link.old.message, []).append(link)
    for number, message in enumerate(old):
        at = 0
        for link in by_message.get(number, []):
            if link.old.start > at:
                yield Link(Place(number, at, link.old.start), None, "removed", reason)
            if link.old.end > link.old.start:
                yield link
            at = max(at, link.old.end)
        if at < len(text_of(message)):
            yield Link(Place(number, at, len(text_of(message))), None, "removed", reason)


def _follow(first: Link, later: SpanMap) -> Iterator[Link]:
    if first.new is None:
        yield first
        return
    met = [link for link in later.links if _overlaps(link.old, first.new)]
    if first.how == "replaced":
        yield _replaced_again(first, met)
        return
    for link in met:
        low, high = max(link.old.start, first.new.start), min(link.old.end, first.new.end)
        shift = first.old.start - first.new.start
        old = Place(first.old.message, low + shift, high + shift)
        if link.how == "kept" and link.new is not None:
            at = link.new.start + low - link.old.start
            yield Link(old, Place(link.new.message, at, at + high - low))
        else:
            yield Link(old, link.new, link.how, link.reason)


def _replaced_again(first: Link, met: Sequence[Link]) -> Link:
    """What stood for something was itself changed: whatever is left of it stands for it now."""
    left = [_part(link, first.new) for link in met if link.new is not None and first.new is not None]
    if not left:
        return Link(first.old, None, "removed", met[-1].reason if met else first.reason)
    same = [place for place in left if place.message == left[0].message]
    hull = Place(left[0].message, min(p.start for p in same), max(p.end for p in same))
    return Link(first.old, hull, "replaced", first.reason)


def _part(link: Link, wanted: Place) -> Place:
    """Where the part of a link's stretch that lies in `wanted` went."""
    assert link.new is not None
    if link.how != "kept":
        return link.new
    shift = link.new.start - link.old.start
    low, high = max(link.old.start, wanted.start), min(link.old.end, wanted.end)
    return Place(link.new.message, low + shift, high + shift)


def _overlaps(a: Place, b: Place) -> bool:
    return a.message == b.message and a.start < b.end and b.start < a.end
