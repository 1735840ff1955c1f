"""Why prompts that should share a prefix do not: where they part, what caused it, and what to do about it.

One conversation is rendered turn by turn as a server would see it, and every prompt is compared with the one before it
and its answer. A log of requests is replayed against a prefix index of pages, as it is and with every remedy applied.
Only the tokenizer is needed, never the model.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from gsm.prompt.chunking import encode
from gsm.prompt.reasoning import think_spans
from gsm.prompt.render import render
from gsm.prompt.spans import Message, plain, text_of
from gsm.results import Record

_SEAM_TOKENS = 2  # at the end of a prompt, which may join the first characters of the answer
_CONTEXT = 40  # characters shown around a break
# what changes from one request to the next, in the words of the first message
_VOLATILE = (
    ("a date or time", r"\b\d{4}-\d{2}-\d{2}(?:[T ]\d{2}:\d{2}(?::\d{2}(?:\.\d+)?)?(?:Z|[+-]\d{2}:?\d{2})?)?"),
    ("a time", r"\b\d{1,2}:\d{2}(?::\d{2})?(?:\s?[AP]M)?\b"),
    ("a date", r"\b(?:Mon|Tues?|Wed(?:nes)?|Thu(?:rs)?|Fri|Sat(?:ur)?|Sun)(?:day)?,? [A-Z][a-z]{2,8}\.? \d{1,2}\b"),
    ("a date", r"\b(?:\d{1,2} )?(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)[a-z]{0,6}(?: \d{1,2},?)? \d{4}\b"),
    ("an id", r"\b[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}\b"),
    ("an id", r"\b(?:req|request|session|trace|user|conv|msg)[-_ ]?(?:id)?[-_:= ]+[\w-]*\d[\w-]{3,}\b"),
    ("a time stamp", r"\b1[5-9]\d{8}(?:\d{3})?\b"),
    ("a random string", r"\b(?=[0-9a-f]*\d)(?=[0-9a-f]*[a-f])[0-9a-f]{16,}\b"),
)  # fmt: skip
VOLATILE = [(name, re.compile(pattern)) for name, pattern in _VOLATILE]


@dataclass(frozen=True, slots=True)
class Conversation:
    """One request: what reaches the chat template."""

    messages: list[Message]
    template: dict[str, Any] = field(default_factory=dict)  # tools, reasoning_effort, ...

    @property
    def tools(self) -> list[Any]:
        return list(self.template.get("tools") or [])


@dataclass(frozen=True, slots=True)
class Finding:
    """One cause. `at_token` is where the prefix breaks, `lost_tokens` what is computed anew because of it."""

    cause: str
    where: str
    remedy: str
    at_token: int
    lost_tokens: int
    count: int = 1


class LintFinding(Record):
    """A `Finding` in a result file."""

    cause: str
    where: str
    remedy: str
    at_token: int
    lost_tokens: int
    count: int


class LintReport(Record):
    """`hit_rate` is the share of prompt tokens found in a prefix index, now and with every remedy applied."""

    findings: tuple[LintFinding, ...]
    num_requests: int
    num_tokens: int
    hit_rate: float
    hit_rate_after: float


class Linter:
    """Lints with one tokenizer. `page_size` is that of the prefix index."""

    def __init__(self, tokenizer: Any, markers: Sequence[tuple[str, str]], page_size: int = 16) -> None:
        self._tokenizer = tokenizer
        self._markers = markers
        self._page_size = page_size

    def lint(
        self, conversations: Sequence[Conversation], progress: Callable[[int, int], None] | None = None
    ) -> LintReport:
        """One conversation is looked at turn by turn, several as a log in order. Raises InputError."""
        requests = [c for one in conversations for c in _turns(one)] if len(conversations) == 1 else list(conversations)
        now, after = _Index(self._page_size), _Index(self._page_size)
        findings: list[Finding] = []
        seen: list[tuple[Conversation, list[int], str]] = []
        for number, request in enumerate(requests):
            text, ids = self._prompt(request)
            now.add(ids)
            after.add(self._prompt(self._mended(request))[1])
            nearest = max(seen, key=lambda other: _shared(other[1], ids), default=None)
            findings += self._within(request, text, ids)
            if nearest is not None:
                findings += self._between(nearest, request, text, ids)
            seen = [*seen[-63:], (request, ids, text)]
            if progress is not None:
                progress(number + 1, len(requests))
        total = sum(len(ids) for ids in now.prompts)
        return LintReport(
            findings=tuple(LintFinding(**asdict(finding)) for finding in _merged(findings)),
            num_requests=len(requests),
            num_tokens=total,
            hit_rate=now.hit_rate,
            hit_rate_after=after.hit_rate,
        )

    def _prompt(self, request: Conversation) -> tuple[str, list[int]]:
        text = render(self._tokenizer, plain(request.messages), **request.template).text
        return text, list(encode(self._tokenizer, text).ids)

    # -- one request -------------------------------------------------------------------------------------------

    def _within(self, request: Conversation, text: str, ids: list[int]) -> list[Finding]:
        """What a single request shows: text that changes every time, in front of everything else."""
        first = request.messages[0] if request.messages else {}
        if first.get("role") not in ("system", "developer"):
            return []
        content = text_of(first)
        found = [(match.start(), name, match[0]) for name, pattern in VOLATILE for match in pattern.finditer(content)]
        if not found:
            return []
        at, name, example = min(found)
        token = self._token_at(text, text.find(content) + at)
        remedy = "move it behind the conversation (into the last user message), or round it to what may be shared"
        return [Finding(f"{name} in the system prompt", f"{example!r}", remedy, token, len(ids) - token)]

    # -- two requests ------------------------------------------------------------------------------------------

    def _between(
        self, before: tuple[Conversation, list[int], str], request: Conversation, text: str, ids: list[int]
    ) -> list[Finding]:
        """Why `request` does not begin with the prompt `before` that it shares most with (and its answer)."""
        earlier, earlier_ids, earlier_text = before
        shared = _shared(earlier_ids, ids)
        expected = self._with_answer(earlier, request, earlier_ids)
        if shared >= len(earlier_ids) - _SEAM_TOKENS and text.startswith(earlier_text):
            return self._answer_kept(earlier, request, expected, ids)
        char = len(self._tokenizer.decode(ids[:shared], skip_special_tokens=False))
        lost = min(len(earlier_ids), len(ids)) - shared
        cause, remedy = self._cause(earlier, request, earlier_text, text, char)
        return [Finding(cause, _around(text, char), remedy, shared, lost)] if cause else []

    def _cause(
        self, earlier: Conversation, request: Conversation, earlier_text: str, text: str, char: int
    ) -> tuple[str, str]:
        if sorted(map(_canonical, earlier.tools)) == sorted(map(_canonical, request.tools)):
            if [json.dumps(t) for t in earlier.tools] != [json.dumps(t) for t in request.tools]:
                return "the same tools in another order", "sort tools (and the keys in them) before every request"
        elif earlier.tools or request.tools:
            return "different tools", "offer all tools always and forbid some in the text, or keep sets apart"
        efforts = [c.template.get("reasoning_effort") for c in (earlier, request)]
        if efforts[0] != efforts[1] and self._effort_is_in(text, request, char):
            return (
                f"the reasoning effort ({efforts[0]} -> {efforts[1]}) stands before the conversation",
                "keep one effort per conversation, or send efforts to replicas of their own",
            )
        if earlier.template != request.template and efforts[0] == efforts[1]:
            return "different template arguments", "keep chat_template_kwargs the same within a conversation"
        return self._cause_in_messages(earlier, request, earlier_text, text, char)

    def _cause_in_messages(
        self, earlier: Conversation, request: Conversation, earlier_text: str, text: str, char: int
    ) -> tuple[str, str]:
        old, new = plain(earlier.messages), plain(request.messages)
        same = next((i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), min(len(old), len(new)))
        if same < min(len(old), len(new)):
            return self._cause_in_message(old, new, same)
        if same < len(old):
            return "", ""  # the shorter one of two branches of a conversation
        if earlier_text == text[: len(earlier_text)]:
            return (
                "the same text was split into other tokens",
                "encode prompts with the server's own tokenizer, or let the server keep the ids of earlier turns",
            )
        if any(think_spans(text_of(message), self._markers) for message in old):
            return _THINK_STRIPPED
        return (
            "the chat template writes earlier turns differently once others follow",
            "use a template that renders a message the same wherever it stands",
        )

    def _cause_in_message(self, old: list[Message], new: list[Message], at: int) -> tuple[str, str]:
        role = new[at].get("role")
        if role in ("system", "developer") and old[at].get("role") == role:
            masked = [_masked(text_of(m)) for m in (old[at], new[at])]
            if masked[0] == masked[1]:
                return "", ""  # told by `_within` already
            return "the system prompt differs", "keep one system prompt; put what varies behind the conversation"
        if any(text_of(old[at]) and text_of(old[at]) == text_of(m) for m in new[at + 1 :]):
            return "something was inserted before earlier turns", "append new context at the end, not in front"
        if any(text_of(new[at]) and text_of(new[at]) == text_of(m) for m in old[at + 1 :]):
            return (
                "early turns were cut off at the front",
                "cut rarely and much (history mode text keeps the prefix), or drop their KV instead (mode kv)",
            )
        if at == len(old) - 1 or at <= 1:
            return "", ""  # another question after the same beginning: nothing is wrong
        return "an earlier turn was changed", "send earlier turns as they were, word for word"

    def _effort_is_in(self, text: str, request: Conversation, char: int) -> bool:
        without = {**request.template, "reasoning_effort": None}
        other = render(self._tokenizer, plain(request.messages), **without).text
        return other[: char + 1] != text[: char + 1]

    # -- the answer between two prompts ------------------------------------------------------------------------

    def _with_answer(self, earlier: Conversation, request: Conversation, earlier_ids: list[int]) -> list[int]:
        """The ids after `earlier` was answered with what `request` says it was."""
        n = len(earlier.messages)
        if len(request.messages) <= n or request.messages[n].get("role") != "assistant":
            return earlier_ids
        answer = text_of(request.messages[n])
        return [*earlier_ids, *encode(self._tokenizer, answer).ids]

    def _answer_kept(
        self, earlier: Conversation, request: Conversation, expected: list[int], ids: list[int]
    ) -> list[Finding]:
        """The next prompt begins with the last one; does it go on with the answer as it was generated?"""
        shared = _shared(expected, ids)
        lost = len(expected) - shared
        if lost <= 1:  # the last token of an answer may join what follows it
            return []
        answer = text_of(request.messages[len(earlier.messages)])
        where = repr(self._tokenizer.decode(expected[shared : shared + 8]))
        if think_spans(answer, self._markers):
            return [Finding(_THINK_STRIPPED[0], where, _THINK_STRIPPED[1], shared, lost)]
        if request.messages[len(earlier.messages)].get("reasoning_content"):
            return [Finding(_THINK_STRIPPED[0], where, _THINK_STRIPPED[1], shared, lost)]
        return [
            Finding(
                "an answer's text is split into other tokens than were generated, or trimmed by the template",
                where,
                "let the server keep the ids of earlier answers (gsm serve does), and do not trim answers",
                shared,
                lost,
            )
        ]

    # -- remedies ----------------------------------------------------------------------------------------------

    def _mended(self, request: Conversation) -> Conversation:
        """The request with every remedy applied: what varies at the end, tools sorted, one effort, no thoughts."""
        messages = [dict(message) for message in request.messages]
        if messages and messages[0].get("role") in ("system", "developer"):
            content = text_of(messages[0])
            varying = [match[0] for _, pattern in VOLATILE for match in pattern.finditer(content)]
            if varying:
                messages[0]["content"] = _masked(content)
                messages[-1]["content"] = f"{text_of(messages[-1])}\n({', '.join(dict.fromkeys(varying))})"
        for message in messages:
            if message.get("role") == "assistant":
                # a template that strips thoughts cannot be talked out of it; without them the answer stays
                message["content"] = _without_thoughts(text_of(message), self._markers)
        template = dict(request.template)
        if request.tools:
            template["tools"] = sorted((_sorted_keys(tool) for tool in request.tools), key=_canonical)
        template.pop("reasoning_effort", None)
        return Conversation(messages, template)

    def _token_at(self, text: str, char: int) -> int:
        return encode(self._tokenizer, text).tokens(max(0, char), max(0, char) + 1)[0]


_THINK_STRIPPED = (
    "the chat template drops thoughts from earlier turns",
    "nothing after a thought is found again: keep thoughts short, or use a template that keeps them; GSM does not "
    "index pages behind a graded thought",
)


class _Index:
    """Pages of prompts seen so far, by a hash chain, as the KV store keeps them."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._pages: set[bytes] = set()
        self.prompts: list[list[int]] = []
        self._num_hits = 0

    def add(self, ids: list[int]) -> None:
        self.prompts.append(ids)
        most, name, is_hit = (len(ids) - 1) // self._page_size, b"", True
        for page in range(len(ids) // self._page_size):
            tokens = ids[page * self._page_size : (page + 1) * self._page_size]
            name = hashlib.blake2b(name + repr(tokens).encode(), digest_size=16).digest()
            is_hit = is_hit and name in self._pages and page < most
            self._num_hits += self._page_size * is_hit
            self._pages.add(name)

    @property
    def hit_rate(self) -> float:
        total = sum(len(ids) for ids in self.prompts)
        return self._num_hits / total if total else 0.0


def _turns(conversation: Conversation) -> list[Conversation]:
    """The prompts a server saw on the way to this conversation: one for every user message."""
    messages = conversation.messages
    ends = [i + 1 for i, message in enumerate(messages) if message.get("role") in ("user", "tool")]
    ends = [end for end in ends if end == len(messages) or messages[end].get("role") == "assistant"]
    return [Conversation(messages[:end], conversation.template) for end in ends] or [conversation]


def _merged(findings: Iterable[Finding]) -> list[Finding]:
    """One finding per cause, the costliest example of it, everything it cost."""
    by_cause: dict[str, list[Finding]] = {}
    for finding in findings:
        by_cause.setdefault(finding.cause, []).append(finding)
    merged = []
    for same in by_cause.values():
        worst = max(same, key=lambda f: f.lost_tokens)
        lost = sum(f.lost_tokens for f in same)
        merged.append(Finding(worst.cause, worst.where, worst.remedy, worst.at_token, lost, len(same)))
    return sorted(merged, key=lambda f: (-f.lost_tokens, f.cause))


def _shared(a: Sequence[int], b: Sequence[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _around(text: str, char: int) -> str:
    return repr(text[max(0, char - _CONTEXT) : char] + " >|< " + text[char : char + _CONTEXT])


def _masked(text: str) -> str:
    for name, pattern in VOLATILE:
        text = pattern.sub(f"<{name}>", text)
    return text


def _without_thoughts(text: str, markers: Sequence[tuple[str, str]]) -> str:
    for start, end in reversed(think_spans(text, markers)):
        text = text[:start] + text[end:].lstrip("\n")
    return text


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def _sorted_keys(value: Any) -> Any:
    return json.loads(_canonical(value))
