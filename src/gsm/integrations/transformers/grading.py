"""What a sequence's tokens are, told to its pages: thoughts fade by effort, old turns go down once a prompt is read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gsm.config.prompt import HistoryConfig
from gsm.config.reasoning import EffortLevel, ReasoningConfig
from gsm.kv.grading import lower
from gsm.kv.manager import KVManager
from gsm.kv.policies.graded import COLD, REMOVED, Thinking, graded_tiers, range_tiers
from gsm.prompt.reasoning import ThinkTracker

LOWERED_TIERS = {"int4": COLD, "drop": REMOVED}


@dataclass(frozen=True, slots=True)
class Lowered:
    """Token ranges of old turns that go to `tier` ("int4" or "drop") when `num_prompt_tokens` are computed.

    Not sooner: so that a prompt's pages are the same for everybody who shares them.
    """

    ranges: tuple[tuple[int, int], ...]
    tier: str
    num_prompt_tokens: int


class Grader:
    """Follows one sequence. Call `advance` after every step that stored tokens of it."""

    def __init__(
        self,
        tracker: ThinkTracker | None,
        level: EffortLevel | None = None,
        min_tokens: int = 0,
        lowered: Lowered | None = None,
    ) -> None:
        self._tracker = tracker
        self._level = level
        self._min_tokens = min_tokens
        self._lowered = lowered if lowered is not None and lowered.ranges else None
        self._num_seen = 0
        self._reasoning_left = False  # some graded pages could not go down yet: too new, or not complete
        self._history_left = self._lowered is not None

    @property
    def num_shared_tokens(self) -> int | None:
        """How many leading tokens have pages that others may share: up to the first thought. None: all of them.

        What follows a thought was computed while parts of the thought were gone.
        """
        thoughts = self._tracker.thoughts if self._tracker is not None else []
        return thoughts[0].start if thoughts else None

    def advance(self, manager: KVManager, slot: int, token_ids: Sequence[int]) -> None:
        """`token_ids` are the sequence's tokens that are stored by now and were not told before."""
        if not token_ids:
            return
        page_size = manager.config.page_size
        before, self._num_seen = self._num_seen, self._num_seen + len(token_ids)
        has_new_page = before // page_size != self._num_seen // page_size
        if self._tracker is not None and (self._tracker.feed(token_ids) or (self._reasoning_left and has_new_page)):
            self._lower_thoughts(manager, slot)
        if self._lowered is not None and self._history_left and self._num_seen >= self._lowered.num_prompt_tokens:
            tiers = range_tiers(
                self._lowered.ranges, LOWERED_TIERS[self._lowered.tier], manager.num_tokens(slot), page_size
            )
            lower(manager, slot, tiers, "history")
            self._history_left = False

    def crop(self, num_tokens: int) -> None:
        """The sequence was shortened. What went down stays down."""
        self._num_seen = min(self._num_seen, num_tokens)
        if self._tracker is not None:
            self._tracker.crop(num_tokens)

    def restart(self) -> None:
        """The sequence will be computed anew from its first token."""
        self.crop(0)
        self._reasoning_left, self._history_left = False, self._lowered is not None

    def copy(self) -> Grader:
        """For a sequence that goes its own way from here."""
        tracker = self._tracker.copy() if self._tracker is not None else None
        twin = Grader(tracker, self._level, self._min_tokens, self._lowered)
        twin._num_seen = self._num_seen
        twin._reasoning_left, twin._history_left = self._reasoning_left, self._history_left
        return twin

    @property
    def num_seen(self) -> int:
        return self._num_seen

    def _lower_thoughts(self, manager: KVManager, slot: int) -> None:
        assert self._tracker is not None
        assert self._level is not None
        thoughts = [Thinking(tuple(t.finished_steps()), t.end is not None) for t in self._tracker.thoughts]
        if not any(thought.steps for thought in thoughts):
            return
        level, page_size = self._level, manager.config.page_size
        num_tokens, over = manager.num_tokens(slot), [t for t in thoughts if t.is_over]
        newest = level.keep * (1 - level.heavy)
        tiers = graded_tiers(thoughts, newest, level.int8, self._min_tokens, num_tokens, page_size, level.running)
        num_over = sum(end - start for thought in over for start, end in thought.steps)
        num_heavy = int(level.keep * level.heavy * num_over) // page_size
        reached = lower(manager, slot, tiers, "reasoning", num_heavy)
        self._reasoning_left = bool((tiers[reached:] > 0).any())


def make_grader(
    tokenizer: Any,
    config: ReasoningConfig,
    effort: int | str | None = None,
    lowered: Lowered | None = None,
    pieces: dict[int, str] | None = None,
) -> Grader | None:
    """A grader for one sequence, or None where there is nothing to grade. Raises InputError for an unknown effort.

    `pieces` remembers the text of tokens and may be shared by all sequences of a tokenizer.
    """
    if not config.enabled:
        return Grader(None, lowered=lowered) if lowered is not None and lowered.ranges else None
    tracker = ThinkTracker(tokenizer, config.markers, config.discourse, pieces)
    return Grader(tracker, config.level(effort), config.min_tokens, lowered)


def needs_cold_pool(reasoning: ReasoningConfig, history: HistoryConfig) -> bool:
    """Whether pages may be asked to become int4."""
    return reasoning.enabled or (history.mode == "kv" and history.tier == "int4")
