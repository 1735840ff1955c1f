"""What runs in the next step: everyone who decodes, then chunks of prompts, then whoever waits and fits.

* A chunk of a prompt ends at a multiple of `chunk_tokens`, and a sequence computes at most one per step. So neither the
  company nor the order of arrival changes what a request computes, and a long prompt leaves room for short ones.
* A sequence is admitted when its whole prompt fits beside what the running ones still need for theirs.
* When pages run out, cached prefixes go first, then the sequence admitted last is put back and computes anew later.
* Those who wait take turns by tenant; within one, first come, first served.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator

from gsm.config import EngineConfig
from gsm.engine.request import Sequence, Work
from gsm.kv.room import KVRoom

_MAX_SPAN_DRAFT = 15  # with the token before them, what the KV store can take back


class FairQueue:
    """Sequences that wait; `head` is the next one. Tenants take turns."""

    def __init__(self) -> None:
        self._by_tenant: OrderedDict[str, deque[Sequence]] = OrderedDict()

    def __len__(self) -> int:
        return sum(len(queue) for queue in self._by_tenant.values())

    def __iter__(self) -> Iterator[Sequence]:
        return (sequence for queue in self._by_tenant.values() for sequence in queue)

    @property
    def head(self) -> Sequence | None:
        return next(iter(self._by_tenant.values()))[0] if self._by_tenant else None

    def append(self, sequence: Sequence) -> None:
        self._by_tenant.setdefault(sequence.request.tenant, deque()).append(sequence)

    def put_back(self, sequence: Sequence) -> None:
        """A preempted sequence is the next of all."""
        tenant = sequence.request.tenant
        self._by_tenant.setdefault(tenant, deque()).appendleft(sequence)
        self._by_tenant.move_to_end(tenant, last=False)

    def pop(self) -> Sequence:
        tenant, queue = next(iter(self._by_tenant.items()))
        sequence = queue.popleft()
        self._by_tenant.move_to_end(tenant)
        if not queue:
            del self._by_tenant[tenant]
        return sequence

    def remove(self, sequence: Sequence) -> None:
        tenant = sequence.request.tenant
        self._by_tenant[tenant].remove(sequence)
        if not self._by_tenant[tenant]:
            del self._by_tenant[tenant]


class Scheduler:
    """Decides; touches no tensor. `admit` gives a sequence its slot, `preempt` takes it, `make_room` frees cached pages
    and tells whether it could."""

    def __init__(
        self,
        limits: EngineConfig,
        room: KVRoom,
        admit: Callable[[Sequence], None],
        preempt: Callable[[Sequence], None],
        make_room: Callable[[], bool],
    ) -> None:
        self.limits = limits
        self.waiting = FairQueue()
        self.running: list[Sequence] = []  # in the order of their admission
        self._room = room
        self._admit, self._preempt, self._make_room = admit, preempt, make_room

    def schedule(self) -> list[Work]:
        """The next step, or nothing to do. Pages for all of it are surely there."""
        works = self._decoding()
        left = self.limits.max_batch_tokens - sum(work.num_tokens + len(work.draft) for work in works)
        left = self._prefilling(works, left)
        while (sequence := self._next_admissible(works)) is not None and left > 0:
            self.waiting.pop()
            self._admit(sequence)
            self.running.append(sequence)
            left = self._prefilling(works, left, [sequence])
        return works

    def _decoding(self) -> list[Work]:
        works = [Work(s, 1) for s in self.running if s.is_decoding]
        room_for_drafts = self.limits.max_batch_tokens - len(works)
        for work in works:
            work.draft = self._draft(work.sequence, room_for_drafts)
            room_for_drafts -= len(work.draft)
        while works and not self._fits(works):
            if any(work.draft for work in works):
                for work in works:
                    work.draft = ()
                continue
            victim = self.running.pop()
            works = [work for work in works if work.sequence is not victim]
            self._preempt(victim)
        return works

    def _draft(self, sequence: Sequence, most: int) -> list[int]:
        """Guesses within the current page: what a decode step of any of them sees is complete before the step."""
        if sequence.lookup is None:
            return []
        page_size = self._room.manager.config.page_size
        left_in_page = page_size - sequence.num_computed % page_size - 1
        left_to_generate = sequence.request.sampling.max_tokens - sequence.num_generated - 1
        return sequence.lookup.propose(sequence.token_ids, min(left_in_page, left_to_generate, most, _MAX_SPAN_DRAFT))

    def _prefilling(self, works: list[Work], left: int, among: list[Sequence] | None = None) -> int:
        """Add one chunk of every sequence that has a prompt to compute; returns the tokens that are left."""
        for sequence in list(among if among is not None else self.running):
            if sequence.is_decoding or sequence.slot is None or sequence.num_remaining == 0:
                continue
            work = Work(sequence, self._chunk(sequence))
            if work.num_tokens <= left or (not works and left > 0):
                if not self._fits([*works, work]):
                    continue  # the rest of the step may free what it needs
                works.append(work)
                left -= work.num_tokens
        if not works and self.running and among is None and any(s.num_remaining for s in self.running):
            self._preempt(self.running.pop())  # nobody can go on: give the others the room of the last one
            return self._prefilling(works, left)
        return left

    def _chunk(self, sequence: Sequence) -> int:
        """Up to the next border of the grid; generated tokens are computed anew as they were: one by one, unless
        that cannot make a difference."""
        computed, end = sequence.num_computed, len(sequence.token_ids)
        if not sequence.request.recomputes_in_bulk:
            if computed >= sequence.num_prompt_tokens:
                return 1
            end = sequence.num_prompt_tokens
        grid = sequence.request.config.engine.chunk_tokens
        border = (computed // grid + 1) * grid
        return min(border, end) - computed

    def _next_admissible(self, works: list[Work]) -> Sequence | None:
        """The head of the queue, if there is room for the whole of it; nobody overtakes it."""
        sequence = self.waiting.head
        if sequence is None:
            return None
        num_choices = 1 if sequence.num_generated else len(sequence.request.sequences)
        unforked = sum(len(s.request.sequences) - 1 for s in self.running if s.is_unforked)
        if self.running and len(self.running) + unforked + num_choices > self.limits.max_running:
            return None
        wants = {s.slot: s.num_remaining for s in self.running if s.slot is not None}
        spare = self._room.manager.config.page_size * (num_choices + len(self.running))
        while not self._room.has_room(wants, len(sequence.token_ids) + spare * bool(self.running)):
            if not self._make_room():
                return None
        return sequence

    def _fits(self, works: list[Work]) -> bool:
        wants = {w.sequence.slot: w.num_tokens + len(w.draft) for w in works if w.sequence.slot is not None}
        while not self._room.has_room(wants):
            if not self._make_room():
                return False
        return True
