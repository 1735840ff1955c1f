"""Sentences, words and what makes a sentence worth keeping. Pure text, any language with or without spaces."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence

_END = re.compile(r"(?:[.!?…]+[\"')\]]*(?=\s)|[。\uff01\uff1f]+[」』\u201d]*|\n+)\s*")
_FENCE = re.compile(r"^[ \t]*(```|~~~)[^\n]*\n.*?(?:^[ \t]*\1[^\n]*(?:\n|\Z)|\Z)", re.MULTILINE | re.DOTALL)
_TABLE_LINE = re.compile(r"^\s*\|.*\|\s*$|^[^\n\t]*\t[^\n\t]*\t", re.MULTILINE)
_CODE_LINE = re.compile(
    r"^(?:\t| {4,})\S|[;{}]\s*$"
    r"|^\s*(?:def|class|import|from|return|function|const|let|var|#include|public|for|if|while)\b.*"
    r"[:;({]\s*$",
    re.MULTILINE,
)
_WORD = re.compile(r"[^\W_]+(?:['\u2019][^\W_]+)*")
_CJK = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]")
_ABBREVIATION = re.compile(r"(?:\b(?:Mr|Mrs|Ms|Dr|Prof|St|vs|etc|e\.g|i\.e|No|Fig)\.|\b[A-Z]\.)\s*$")
_STOP_WORDS = """
    a about above after again all also am an and any are as at be because been before being below between both but by
    can could did do does doing down during each few for from further had has have having he her here hers him his how i
    if in into is it its just me more most my no nor not now of off on once only or other our out over own please same
    she should so some such tell than that the their them then there these they this those through to too under until up
    us very was we were what when where which while who whom why will with would you your yours remember again said say
    told know like get got one want need make use"""
_STOP = frozenset(_STOP_WORDS.split())


def sentences(text: str) -> list[tuple[int, int]]:
    """Characters [start, end) of sentences; they cover the text. A fenced block of code is one of them."""
    found: list[tuple[int, int]] = []
    at = 0
    for fence in _FENCE.finditer(text):
        found += _prose(text, at, fence.start())
        found.append((fence.start(), fence.end()))
        at = fence.end()
    return found + list(_prose(text, at, len(text)))


def _prose(text: str, start: int, stop: int) -> Iterator[tuple[int, int]]:
    at = start
    for match in _END.finditer(text, start, stop):
        if "\n" not in match[0] and _ABBREVIATION.search(text, at, match.end()):
            continue
        if text[at : match.end()].strip():
            yield at, match.end()
            at = match.end()
    if at < stop:
        yield at, stop


def is_code_or_table(text: str) -> bool:
    """Whether most lines look like code or like rows of a table."""
    if _FENCE.search(text):
        return True
    lines = [line for line in text.splitlines() if line.strip()]
    special = sum(bool(_TABLE_LINE.match(line) or _CODE_LINE.search(line)) for line in lines)
    return len(lines) > 1 and special * 2 >= len(lines)


def words(text: str) -> list[str]:
    """Lower-case words in order; scripts without spaces give pairs of characters."""
    found: list[str] = []
    for match in _WORD.finditer(text.lower()):
        word = match[0]
        if _CJK.search(word):
            found += [word[i : i + 2] for i in range(max(1, len(word) - 1))]
        else:
            found.append(word)
    return found


def stems(text: str) -> list[str]:
    """Content words with their commonest English endings off."""
    return [_stem(word) for word in words(text) if word not in _STOP]


def _stem(word: str) -> str:
    word = re.sub(r"['\u2019]s$", "", word)
    for ending in ("ing", "ed", "es", "s", "e"):
        if word.endswith(ending) and len(word) - len(ending) >= 3 and not word.endswith("ss"):
            return word[: -len(ending)]
    return word


class Relevance:
    """How much of a query's weight a sentence has; rare words weigh more (inverse document frequency)."""

    def __init__(self, texts: Sequence[str]) -> None:
        self._stems = [frozenset(stems(text)) for text in texts]
        counts = Counter(stem for found in self._stems for stem in found)
        self._weight = {stem: math.log(1 + len(texts) / count) for stem, count in counts.items()}

    def scores(self, query: str) -> list[float]:
        """For every text, the share (0 to 1) of the query's weight whose words it has."""
        wanted = {stem: self._weight.get(stem, 0.0) for stem in stems(query)}
        total = sum(wanted.values())
        if not total:
            return [0.0] * len(self._stems)
        return [sum(weight for stem, weight in wanted.items() if stem in found) / total for found in self._stems]


def density(text: str) -> float:
    """0 to 1: quotes, numbers, names and first-person statements make a sentence hard to guess from the rest."""
    score = 0.35 * bool(re.search(r"\d", text))
    score += 0.25 * bool(re.search(r"[\"\u201c\u201d«»「」`]|'\w[^']*\w'", text))
    score += 0.35 * bool(re.search(r"(?<!^)(?<![.!?]\s)(?<![\"'\-*•]\s)\b(?!I\b|I')[A-Z]\w+", text.strip()))
    score += 0.35 * bool(
        re.search(r"\b(?:my|our|I'm|I am|we're|call(?:ed)?|named?|remember|note that|prefer)\b", text, re.I)
    )
    return min(1.0, score)
