"""Old turns within a token budget, word for word or not at all.

The conversation is replayed turn by turn, so that the result is a pure function of the messages and the prompt of the
next turn begins with that of this one wherever nothing had to go. While a prompt fits nothing happens. When it does not
fit, the turns before the last `keep_turns` are cut at one go to `low_water` of the budget: sentences are ranked by
relevance to the message being answered, by what cannot be guessed (numbers, quotes, names, what people say about
themselves) and by position. Turns cut before stay as they were while the new ones find room beside them, because every
change costs the prefix behind it. Sentences that went and that a later message asks for are quoted in front of that
message: at the end, where they disturb no prefix.

System prompt, tools, the last user message and all that follows it are never touched, nor are tool calls.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, field

from gsm.config.prompt import HistoryConfig
from gsm.prompt.sentences import Relevance, density, sentences, stems
from gsm.prompt.spans import Draft, Edited, Message, Piece, Place, build, keep, text_of

Count = Callable[[str], int]
Summarise = Callable[[list[Message], int], str]

_GAP = "… "
_WORTH = 0.3  # sentences below it are not kept even if there is room: the next turns need that more
_ASKED_FOR = 0.34  # share of a message's weight that a sentence must have to be quoted again
_LEAST_PER_EXCHANGE = 24  # tokens; with less than that for new turns, the earlier ones are cut again


@dataclass(frozen=True, slots=True)
class HistoryReport:
    """Tokens are those of contents and the template's frame around each, as counted here."""

    num_tokens_before: int = 0
    num_tokens_after: int = 0
    num_cuts: int = 0  # turns at which old ones were cut, the replay included
    num_recalled: int = 0  # sentences quoted before the last message
    is_over_budget: bool = False  # even without any old turn
    fell_back: str = ""  # why a summariser was not used, if one was given


@dataclass(slots=True)
class _Entry:
    """One message in the replay."""

    number: int
    message: Message
    parts: list[tuple[int, int]]
    costs: list[int]
    kept: list[bool]
    recalled: list[Place] = field(default_factory=list)
    note: str = ""
    summary: str = ""

    @property
    def text(self) -> str:
        return text_of(self.message)

    @property
    def is_whole(self) -> bool:
        return all(self.kept) and not self.summary

    @property
    def must_stay(self) -> bool:
        """Whether other messages refer to this one."""
        return self.message.get("role") in ("tool", "function") or bool(self.message.get("tool_calls"))


class TextHistory:
    """Compresses conversations. `count` gives the tokens of a text, `frame_tokens` those around each message.

    `summarise(messages, max_tokens)` may write a summary of old turns instead; it has `time_limit_s`, its results are
    cached by content, and extraction takes over when it fails.
    """

    def __init__(
        self,
        config: HistoryConfig,
        count: Count,
        frame_tokens: int = 0,
        summarise: Summarise | None = None,
        time_limit_s: float = 30.0,
    ) -> None:
        self._config = config
        self._count = count
        self._frame = frame_tokens
        self._summarise = summarise
        self._time_limit_s = time_limit_s
        self._summaries: dict[bytes, str] = {}
        self._fell_back = ""

    def compress(self, messages: Sequence[Message]) -> tuple[Edited, HistoryReport]:
        """Messages for the model, what became of the old ones, and a report."""
        entries = [self._entry(i, message) for i, message in enumerate(messages)]
        head, exchanges = _exchanges(entries)
        before = sum(self._cost(entry) for entry in entries)
        num_cuts, squeezed, self._fell_back = 0, 0, ""
        for turn in range(len(exchanges)):
            asked = exchanges[turn][:1]  # what follows it was not there yet when its prompt was made
            if self._total(head, exchanges[:turn], asked) > self._config.budget_tokens:
                stop = max(0, turn - self._config.keep_turns)
                if stop > 0:
                    squeezed = self._squeeze(head, exchanges, squeezed, stop, asked)
                    num_cuts += 1
            self._recall(exchanges[:turn], exchanges[turn][0])
        after = self._total(head, exchanges[:-1], exchanges[-1]) if exchanges else before
        num_recalled = len(exchanges[-1][0].recalled) if exchanges else 0
        is_over = after > self._config.budget_tokens
        report = HistoryReport(before, after, num_cuts, num_recalled, is_over, self._fell_back)
        if num_cuts == 0:
            return Edited.unchanged(messages), report
        return build(messages, list(self._drafts(head, exchanges)), "history"), report

    # -- costs -------------------------------------------------------------------------------------------------

    def _entry(self, number: int, message: Message) -> _Entry:
        text = text_of(message)
        parts = sentences(text)
        return _Entry(number, message, parts, [self._count(text[a:b]) for a, b in parts], [True] * len(parts))

    def _cost(self, entry: _Entry) -> int:
        kept = sum(cost for cost, is_kept in zip(entry.costs, entry.kept, strict=True) if is_kept)
        said = sum(self._count(text) for text in (entry.note, entry.summary) if text)
        return self._frame + kept + said

    def _total(self, head: Sequence[_Entry], past: Sequence[Sequence[_Entry]], asked: Sequence[_Entry]) -> int:
        shown = [entry for exchange in past if _is_shown(exchange) for entry in exchange]
        return sum(self._cost(entry) for entry in (*head, *shown, *asked))

    # -- cutting -----------------------------------------------------------------------------------------------

    def _squeeze(
        self,
        head: Sequence[_Entry],
        exchanges: Sequence[Sequence[_Entry]],
        squeezed: int,
        stop: int,
        asked: Sequence[_Entry],
    ) -> int:
        """Cut exchanges up to `stop`; those before `squeezed` were cut already. Returns the new `squeezed`."""
        turn = next(i for i, exchange in enumerate(exchanges) if exchange[0] is asked[0])
        for exchange in exchanges[:stop]:
            exchange[0].note, exchange[0].recalled = "", []
        fixed = self._total(head, exchanges[stop:turn], asked)
        allowance = max(0, int(self._config.budget_tokens * self._config.low_water) - fixed)
        if self._summarise is not None and self._write_summary(
            exchanges[:stop], max(allowance, self._config.budget_tokens // 8)
        ):
            return stop
        earlier = self._total([], exchanges[:squeezed], [])
        first = squeezed
        if allowance - earlier < _LEAST_PER_EXCHANGE * (stop - squeezed):
            first, earlier = 0, 0
        self._choose(exchanges[first:stop], allowance - earlier, asked[0].text)
        return stop

    def _choose(self, exchanges: Sequence[Sequence[_Entry]], allowance: int, query: str) -> None:
        """Keep the best sentences of some exchanges within `allowance` tokens."""
        places = [(e, entry, i) for e, x in enumerate(exchanges) for entry in x for i in range(len(entry.parts))]
        texts = [_part(entry, i) for _, entry, i in places]
        relevance = Relevance(texts).scores(query)
        worth = [
            _worth(text, asked, entry, i, e / len(exchanges))
            for text, asked, (e, entry, i) in zip(texts, relevance, places, strict=True)
        ]
        was_kept = [entry.kept[i] for _, entry, i in places]
        for _, entry, i in places:
            entry.kept[i] = False
        opened = {e for e, exchange in enumerate(exchanges) if any(entry.must_stay for entry in exchange)}
        left = allowance - sum(self._frame * len(exchanges[e]) for e in opened)
        for index in sorted(range(len(places)), key=lambda k: (-worth[k], k)):
            e, entry, i = places[index]
            cost = entry.costs[i] + (0 if e in opened else self._frame * len(exchanges[e]) + 2)
            if was_kept[index] and worth[index] >= _WORTH and cost <= left:
                entry.kept[i] = True
                opened.add(e)
                left -= cost

    def _write_summary(self, exchanges: Sequence[Sequence[_Entry]], max_tokens: int) -> bool:
        """Let the summariser stand for some exchanges; false where it did not deliver."""
        entries = [entry for exchange in exchanges for entry in exchange]
        text = self._summary_of([entry.message for entry in entries], max_tokens)
        if text is None:
            return False
        for entry in entries:
            entry.kept, entry.summary = [False] * len(entry.kept), ""
        exchanges[0][0].summary = f"(What was said before, in short: {text})"
        return True

    def _summary_of(self, messages: list[Message], max_tokens: int) -> str | None:
        assert self._summarise is not None
        parts = [f"{m.get('role')}\x00{text_of(m)}\x00" for m in messages]
        key = hashlib.blake2b("".join(parts).encode() + str(max_tokens).encode(), digest_size=16).digest()
        if key not in self._summaries:
            pool = ThreadPoolExecutor(1, thread_name_prefix="gsm-summary")
            try:
                text = pool.submit(self._summarise, messages, max_tokens).result(self._time_limit_s).strip()
            except FutureTimeout:
                self._fell_back = f"the summariser took longer than {self._time_limit_s:g} s"
                return None
            except Exception as error:  # whatever somebody else's summariser raises, extraction still works
                self._fell_back = f"the summariser failed with {type(error).__name__}: {error}"
                return None
            finally:
                pool.shutdown(wait=False, cancel_futures=True)
            if not text or self._count(text) > max_tokens:
                self._fell_back = f"the summary has {self._count(text)} tokens, allowed are 1 to {max_tokens}"
                return None
            self._summaries[key] = text
        return self._summaries[key]

    # -- quoting again -----------------------------------------------------------------------------------------

    def _recall(self, past: Sequence[Sequence[_Entry]], asking: _Entry) -> None:
        """Quote sentences that went, if the message `asking` shares enough of their words."""
        gone = [(entry, i) for x in past for entry in x for i, is_kept in enumerate(entry.kept) if not is_kept]
        if not gone or not self._config.recall_tokens:
            return
        everything = [(entry, i) for x in past for entry in x for i in range(len(entry.parts))]
        scores = Relevance([_part(entry, i) for entry, i in everything]).scores(asking.text)
        score_of = {(entry.number, i): score for (entry, i), score in zip(everything, scores, strict=True)}
        ranked = sorted(gone, key=lambda place: (-score_of[place[0].number, place[1]], place[0].number, place[1]))
        left, chosen = self._config.recall_tokens, []
        said = {_part(entry, i).strip() for entry, i in everything if entry.kept[i]}
        for entry, i in ranked:
            sentence = _part(entry, i).strip()
            if score_of[entry.number, i] < _ASKED_FOR:
                break
            if entry.costs[i] <= left and sentence not in said and _adds(sentence, asking.text):
                chosen.append((entry, i))
                said.add(sentence)
                left -= entry.costs[i]
        chosen.sort(key=lambda place: (place[0].number, place[1]))
        if chosen:
            asking.recalled = [Place(entry.number, *entry.parts[i]) for entry, i in chosen]
            asking.note = "(Earlier " + " ".join(_quoted(entry, i) for entry, i in chosen) + ")\n\n"

    # -- the result --------------------------------------------------------------------------------------------

    def _drafts(self, head: Sequence[_Entry], exchanges: Sequence[Sequence[_Entry]]) -> Iterator[Draft]:
        shown = [x for i, x in enumerate(exchanges) if i == len(exchanges) - 1 or _is_shown(x)]
        summarised = [e for x in exchanges for e in x if not any(e.kept)]
        told: set[Place] = set()  # a stretch is stood for once
        for entry in [*head, *(entry for exchange in shown for entry in exchange)]:
            draft = Draft(entry.message)
            if entry.summary:
                places = tuple(Place(e.number, 0, len(e.text)) for e in summarised if e.text)
                told.update(place for place in places)
                draft.pieces.append(Piece(entry.summary, None, places))
            if entry.note:
                fresh = tuple(p for p in entry.recalled if p not in told and not entry.summary)
                told.update(fresh)
                draft.pieces.append(Piece(entry.note, None, fresh))
            draft.pieces += _kept_pieces(entry)
            yield draft


def old_messages(messages: Sequence[Message], config: HistoryConfig, count: Count, frame_tokens: int) -> list[int]:
    """Numbers of the messages whose KV is lowered under `mode: kv`: whole exchanges, oldest first, until the rest fits
    the budget. The last `keep_turns` exchanges before the last message stay."""
    entries = [_Entry(i, m, [], [], []) for i, m in enumerate(messages)]
    _, exchanges = _exchanges(entries)
    total = frame_tokens + sum(count(text_of(message)) + frame_tokens for message in messages)  # and the answer's head
    old: list[int] = []
    for exchange in exchanges[: max(0, len(exchanges) - 1 - config.keep_turns)]:
        if total <= config.budget_tokens:
            break
        old += [entry.number for entry in exchange]
        total -= sum(count(entry.text) + frame_tokens for entry in exchange)
    return old


def _exchanges(entries: Sequence[_Entry]) -> tuple[list[_Entry], list[list[_Entry]]]:
    """What precedes the first user message (system prompts), and the rest cut before every user message."""
    first = next((i for i, entry in enumerate(entries) if entry.message.get("role") == "user"), len(entries))
    exchanges: list[list[_Entry]] = []
    for entry in entries[first:]:
        # a user message while a tool call is open belongs to the same exchange
        if entry.message.get("role") == "user":
            exchanges.append([])
        exchanges[-1].append(entry)
    return list(entries[:first]), exchanges


def _is_shown(exchange: Sequence[_Entry]) -> bool:
    return any(any(e.kept) or e.must_stay or e.summary or e.note or _is_protected(e) for e in exchange)


def _is_protected(entry: _Entry) -> bool:
    return entry.message.get("role") in ("system", "developer")


def _part(entry: _Entry, index: int) -> str:
    start, end = entry.parts[index]
    return entry.text[start:end]


def _worth(text: str, asked: float, entry: _Entry, index: int, recency: float) -> float:
    if _is_protected(entry):
        return 10.0
    by_user = entry.message.get("role") == "user"
    value = asked + 0.6 * density(text) + 0.25 * by_user + 0.05 * (index == 0) + 0.1 * recency
    return value / (1 + len(text) / 400)


def _adds(sentence: str, message: str) -> bool:
    """Whether a sentence tells more than `message` does itself: a question does not, nor does what repeats it."""
    is_question = sentence.rstrip().endswith(("?", "\uff1f"))
    return not is_question and not set(stems(sentence)) <= set(stems(message))


def _quoted(entry: _Entry, index: int) -> str:
    who = {"user": "I said", "assistant": "you said"}.get(str(entry.message.get("role")), "it was said")
    return f"{who}: {_part(entry, index).strip()}"


def _kept_pieces(entry: _Entry) -> Iterator[Piece]:
    """Runs of kept sentences word for word, with a mark for every gap."""
    if entry.is_whole:
        yield keep(entry.number, entry.text)
        return
    runs: list[tuple[int, int]] = []
    for (start, end), is_kept in zip(entry.parts, entry.kept, strict=True):
        if not is_kept:
            continue
        if runs and runs[-1][1] == start:
            runs[-1] = (runs[-1][0], end)
        else:
            runs.append((start, end))
    at = 0
    for start, end in runs:
        if start > at:
            yield Piece(_GAP)
        yield keep(entry.number, entry.text, start, end)
        at = end
    if at < len(entry.text) and not entry.summary:
        yield Piece(_GAP.strip())
