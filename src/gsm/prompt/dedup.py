"""Passages that a prompt repeats are kept once and referred to afterwards.

A passage is a block of text between blank lines. Equal ones are found by a hash of their words; near ones by MinHash
signatures over word shingles (Broder 1997; the `datasketch` library) and then compared exactly. Two passages that
differ in a number, a name or a negation are never the same, however similar: that is where facts are. Code, tables, the
system prompt and the last paragraph of the last user message (the question) are left alone; so is anything whose first
occurrence was said at another reasoning effort, because such prompts share no prefix.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from gsm.config.prompt import DedupConfig
from gsm.errors import InputError
from gsm.prompt.sentences import is_code_or_table, words
from gsm.prompt.spans import Draft, Edited, Message, Piece, Place, build, keep, text_of

_BLOCK = re.compile(r"\S(?:.|\n(?![ \t]*\n))*")  # up to the next blank line
_FENCE = re.compile(r"^[ \t]*(?:```|~~~)", re.MULTILINE)
_LABEL = re.compile(
    r"\s*(?P<label>(?:\[?(?:passage|document|doc|source|section|chunk|excerpt|text|result)\s*#?\w{1,6}\]?|\[\w{1,6}\])"
    r"\s*[:.)\-]?)\s+",
    re.IGNORECASE,
)
_NEGATION = re.compile(r"\b(?:not|no|never|none|nor|neither|without|except|unless|\w+n't)\b")
_SHINGLE = 4  # words
_PERMUTATIONS = 128


@dataclass(frozen=True)
class Passage:
    """A block of one message."""

    place: Place
    text: str
    effort: str  # passages of different efforts are strangers

    @cached_property
    def label(self) -> str:
        """ "Passage 3" of "Passage 3: ...", or nothing."""
        match = _LABEL.match(self.text)
        return match["label"].strip() if match else ""

    @cached_property
    def body(self) -> str:
        match = _LABEL.match(self.text)
        return self.text[match.end() :] if match else self.text

    @cached_property
    def words(self) -> list[str]:
        return words(self.body)

    @cached_property
    def digest(self) -> bytes:
        return hashlib.blake2b("\x00".join([self.effort, *self.words]).encode(), digest_size=16).digest()

    @cached_property
    def shingles(self) -> frozenset[str]:
        grams = range(max(1, len(self.words) - _SHINGLE + 1))
        return frozenset(" ".join(self.words[i : i + _SHINGLE]) for i in grams)

    @cached_property
    def facts(self) -> frozenset[str]:
        """Numbers, names and negations: words with a digit, and capitalised ones that do not begin a sentence."""
        names = re.findall(r"(?<![.!?]\s)(?<!^)\b[A-Z]\w+", self.body)
        names += _NEGATION.findall(self.body.lower())
        return frozenset(re.findall(r"\w*\d[\w.,:/-]*\w|\d", self.body)) | frozenset(names)


@dataclass(frozen=True, slots=True)
class Repeat:
    """One passage that went, and the one that is kept for it."""

    removed: Place
    kept: Place
    similarity: float
    reference: str


@dataclass(frozen=True, slots=True)
class DedupReport:
    """What went. `num_chars` were removed after the references were paid for."""

    repeats: tuple[Repeat, ...] = ()
    num_passages: int = 0

    @property
    def num_chars(self) -> int:
        return sum(r.removed.end - r.removed.start - len(r.reference) for r in self.repeats)


def deduplicate(messages: Sequence[Message], config: DedupConfig, effort: str = "") -> tuple[Edited, DedupReport]:
    """Messages without repeated passages. `effort` is that of messages which name none (`reasoning_effort`).

    Raises InputError for `near` without datasketch.
    """
    if config.mode == "off":
        return Edited.unchanged(messages), DedupReport()
    passages = [p for p in _passages(messages, effort) if _may_go(p, config)]
    protected = _question(messages)
    finder = _Finder(config)
    repeats: list[Repeat] = []
    for passage in passages:
        first = None if passage.place == protected else finder.find(passage)
        if first is None:
            finder.add(passage)
            continue
        kept, similarity = first
        reference = _reference(passage, kept)
        if len(reference) < len(passage.text):
            repeats.append(Repeat(passage.place, kept.place, similarity, reference))
    return _rewrite(messages, repeats), DedupReport(tuple(repeats), len(passages))


class _Finder:
    """Passages seen so far, by digest and (near) by signature."""

    def __init__(self, config: DedupConfig) -> None:
        self._config = config
        self._by_digest: dict[bytes, Passage] = {}
        self._passages: list[Passage] = []
        self._index = _MinHashIndex(config.similarity) if config.mode == "near" else None

    def add(self, passage: Passage) -> None:
        self._by_digest.setdefault(passage.digest, passage)
        if self._index is not None:
            self._index.add(len(self._passages), passage.shingles)
        self._passages.append(passage)

    def find(self, passage: Passage) -> tuple[Passage, float] | None:
        """The first passage that says the same, and how similar it is."""
        same = self._by_digest.get(passage.digest)
        if same is not None:
            return same, 1.0
        for number in self._index.candidates(passage.shingles) if self._index is not None else ():
            other = self._passages[number]
            similarity = len(other.shingles & passage.shingles) / len(other.shingles | passage.shingles)
            if similarity >= self._config.similarity and _says_as_much(other, passage):
                return other, similarity
        return None


def _says_as_much(kept: Passage, going: Passage) -> bool:
    """Nothing that could be asked for is lost."""
    return kept.effort == going.effort and going.facts <= kept.facts


class _MinHashIndex:
    """Locality-sensitive hashing over signatures; candidates only, the caller compares."""

    def __init__(self, similarity: float) -> None:
        try:
            from datasketch import MinHash, MinHashLSH
        except ImportError:
            raise InputError(
                "near duplicates need the datasketch package; pip install 'gsm-infer[prompt]', or dedup mode exact"
            ) from None
        self._signature_of: Any = MinHash
        self._lsh: Any = MinHashLSH(threshold=max(0.05, similarity - 0.15), num_perm=_PERMUTATIONS)

    def add(self, number: int, shingles: frozenset[str]) -> None:
        self._lsh.insert(str(number), self._signature(shingles))

    def candidates(self, shingles: frozenset[str]) -> list[int]:
        return sorted(int(key) for key in self._lsh.query(self._signature(shingles)))

    def _signature(self, shingles: frozenset[str]) -> Any:
        signature = self._signature_of(num_perm=_PERMUTATIONS, seed=1)
        signature.update_batch([shingle.encode() for shingle in sorted(shingles)])
        return signature


def _passages(messages: Sequence[Message], effort: str) -> Iterator[Passage]:
    for number, message in enumerate(messages):
        if message.get("role") in ("system", "developer"):
            continue
        said_at = str(message.get("reasoning_effort", effort))
        text = text_of(message)
        for start, end in _blocks(text):
            yield Passage(Place(number, start, end), text[start:end], said_at)


def _blocks(text: str) -> Iterator[tuple[int, int]]:
    """Blocks between blank lines; a fenced block of code is one, whatever blank lines it holds."""
    fences = [m.start() for m in _FENCE.finditer(text)]
    closed = list(zip(fences[::2], fences[1::2], strict=False))
    at = 0
    while (match := _BLOCK.search(text, at)) is not None:
        start, end = match.start(), match.end()
        for opening, closing in closed:
            if start <= opening < end:
                line_end = text.find("\n", closing)
                end = max(end, line_end if line_end >= 0 else len(text))
        yield start, len(text[:end].rstrip())
        at = end


def _may_go(passage: Passage, config: DedupConfig) -> bool:
    return len(passage.words) >= config.min_words and (config.code or not is_code_or_table(passage.text))


def _question(messages: Sequence[Message]) -> Place | None:
    """The last block of the last user message."""
    last = next((i for i in reversed(range(len(messages))) if messages[i].get("role") == "user"), None)
    if last is None:
        return None
    blocks = list(_blocks(text_of(messages[last])))
    return Place(last, *blocks[-1]) if blocks else None


def _reference(going: Passage, kept: Passage) -> str:
    """Short, and by name where the passages have names."""
    label = f"{going.label} " if going.label else ""
    if kept.label:
        return f"{label}(same as {kept.label.rstrip(':.)-').strip()})"
    opening = " ".join(kept.body.split()[:4])
    return f'{label}(repeats "{opening}...")'


def _rewrite(messages: Sequence[Message], repeats: Sequence[Repeat]) -> Edited:
    drafts = []
    for number, message in enumerate(messages):
        draft, text, at = Draft(message), text_of(message), 0
        for repeat in repeats:
            if repeat.removed.message == number:
                draft.pieces.append(keep(number, text, at, repeat.removed.start))
                draft.pieces.append(Piece(repeat.reference, None, (repeat.removed,)))
                at = repeat.removed.end
        draft.pieces.append(keep(number, text, at))
        drafts.append(draft)
    return build(messages, drafts, "duplicate")


def passages_with_labels(text: str) -> list[tuple[int, int]]:
    """Characters [start, end) of the blocks that carry a label ("Passage 3: ..."): documents inside a message."""
    return [(start, end) for start, end in _blocks(text) if _LABEL.match(text[start:end])]
