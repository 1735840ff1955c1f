"""Every KV byte: sequences, their pages and tiers.

A forward pass is a `KVStep`: `begin` opens the pages the new tokens need, every layer calls `write`, attention reads
through `view`, and `commit` records attention mass, summarises completed pages, drops what the policy calls cold and
demotes what left the hot zone. `abort` takes a step back, so that an exception in the middle of a model leaves the
store as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from gsm.config import CacheConfig
from gsm.core.batch import Span
from gsm.core.scorers import make_scorer
from gsm.core.view import Window
from gsm.errors import ConfigError, KVError
from gsm.kv.compact import Compactor, Cut, check_crop_below_cut, num_cut_tokens
from gsm.kv.group import Geometry, StreamGroup
from gsm.kv.mass import MassStatistics
from gsm.kv.policies import PageFacts, beyond
from gsm.kv.positions import PositionMap, position_map
from gsm.kv.removal import removal_code
from gsm.kv.report import KVStats, collect
from gsm.kv.rules import Rules, make_rules
from gsm.kv.step import KVStep, SpanMass
from gsm.kv.windows import check_crop, forget_unseen

# A step of 2 to this many tokens over existing history may be a draft that is cropped away again. What it changes for
# good (mass, demotion, drops) waits for the next step: a rejected draft leaves nothing.
_MAX_DRAFT_TOKENS = 16
_JUDGE_EVERY_TOKENS = 16  # how often a policy that needs attention mass judges


@dataclass(slots=True)
class SequenceState:
    """Host-side counters of one sequence."""

    rules: Rules
    num_tokens: int = 0
    num_complete: int = 0  # full pages whose keys are summarised
    demoted: range = range(0)  # pages this sequence no longer needs in full precision
    owns_last: bool = True  # the last page, if it is not full, is surely nobody else's and writable
    num_judged: int = 0  # length at which the policy last judged
    num_dropped: int = 0  # pages dropped below the current length, summed over layers and heads
    num_unwindowed: int = 0  # length at which windowed layers last gave pages back
    cut: Cut | None = None  # under positions: compact, what was cut out; num_tokens and all counters do not count it
    unsettled: bool = False  # the last step may still be cropped
    unsettled_from: int = 0  # length before it
    unsettled_mass: SpanMass = field(default_factory=dict)  # one observation per token of it


class KVManager:
    """Page tables and pools of one model. Not thread-safe: one manager serves one forward pass at a time.

    `max_pages` limits the pages of every layer and head together: `max_pages` for each of them on average. `windows`
    tells which layers see a bounded stretch of the past only (None: all of it); their older pages are given back.
    """

    def __init__(
        self,
        num_layers: int,
        config: CacheConfig,
        max_pages: int | None = None,
        windows: Seq[Window | None] | None = None,
        has_cold_pool: bool = False,
        needs_mass: bool = False,
    ) -> None:
        self.config = config
        self.windows = tuple(windows) if windows is not None else (None,) * num_layers
        self.num_layers = num_layers
        self.max_pages = max_pages
        self.has_cold_pool = has_cold_pool or config.cold == "int4"  # somebody lowers pages to int4 (`gsm.kv.grading`)
        self.compactor: Compactor | None = None  # given by who knows the model's rotary embedding (`make_compactor`)
        self.rules = make_rules(config)
        self.needs_mass = self.rules.needs_mass or needs_mass
        self.statistics = MassStatistics(config.observation_window, config.mass_decay) if self.needs_mass else None
        self.scorer = make_scorer(config.sparse.scorer, config.sparse.sigma)
        self.groups: list[StreamGroup] = []
        self.sequences: dict[int, SequenceState] = {}
        self.counters = {"demoted": 0, "chilled": 0, "dropped": 0, "reopened": 0}
        self.attended_tokens = 0.0  # summed over decode steps, sequences and layers, averaged over heads
        self.attended_samples = 0
        self.recalled_tokens = 0.0  # of those, older than the hot zone
        self._group_of: dict[int, StreamGroup] = {}
        self._abandoned: list[int] = []
        # who owns pages beside sequences: page ids (one per ownership) of the group with that number
        self.holders: list[Callable[[int], Tensor]] = []

    # -- sequences ---------------------------------------------------------------------------------------------

    def add_sequence(self, rules: Rules | None = None) -> int:
        """A new empty sequence, judged by `rules` (default: the store's config); returns its slot."""
        self._free_abandoned()
        slot = next(i for i in range(len(self.sequences) + 1) if i not in self.sequences)
        sinks = self.config.num_sink_pages
        self.sequences[slot] = SequenceState(rules or self.rules, demoted=range(sinks, sinks))
        return slot

    def fork(self, slot: int) -> int:
        """A second sequence with the same tokens; pages are shared until one of them writes."""
        source = self._sequence(slot)
        target = self.add_sequence()
        source.owns_last = False  # nor does the twin
        self.sequences[target] = replace(source)
        for group in self.groups:
            group.fit_table(target + 1, self._num_pages(source.num_tokens))
            group.share(slot, target, self._num_pages(source.num_tokens), source.demoted)
        return target

    def free(self, slot: int) -> None:
        """Forget a sequence and give its pages back."""
        state = self._sequence(slot)
        for group in self.groups:
            group.release(slot, 0, self._num_pages(state.num_tokens), state.demoted)
        del self.sequences[slot]

    def abandon(self, slots: list[int]) -> None:
        """Forget sequences at the next opportunity. For finalizers, which may run in the middle of anything."""
        self._abandoned.extend(slots)

    def _free_abandoned(self) -> None:
        while self._abandoned:
            self.free(self._abandoned.pop())

    def crop(self, slot: int, num_tokens: int) -> None:
        """Shorten a sequence to its first `num_tokens` tokens. What was dropped below stays dropped."""
        state = self._sequence(slot)
        if not 0 <= num_tokens <= state.num_tokens:
            raise KVError(
                f"cannot crop to {num_tokens} tokens: the sequence has {state.num_tokens}; crop only shortens"
            )
        check_crop_below_cut(state, num_tokens, self.config.page_size)
        for group in self.groups:
            check_crop(group, state, num_tokens)
        old_pages, new_pages = self._num_pages(state.num_tokens), self._num_pages(num_tokens)
        full_pages = num_tokens // self.config.page_size
        if full_pages < min(new_pages, state.num_complete):
            self._own(slot, full_pages, num_tokens % self.config.page_size)
        for group in self.groups:
            group.release(slot, new_pages, old_pages, state.demoted)
        start = state.demoted.start
        state.demoted = range(start, max(start, min(state.demoted.stop, full_pages)))
        state.num_complete = min(state.num_complete, full_pages)
        state.num_tokens = num_tokens
        state.cut = state.cut if num_tokens else None
        state.num_judged = min(state.num_judged, num_tokens)
        state.num_unwindowed = min(state.num_unwindowed, num_tokens)
        state.num_dropped = sum(group.num_dropped(slot, new_pages) for group in self._unbounded() if state.num_dropped)
        state.owns_last = False

    def num_tokens(self, slot: int) -> int:
        """Length in positions: dropped tokens count, those cut out by compaction do not."""
        return self._sequence(slot).num_tokens

    def num_logical_tokens(self, slot: int) -> int:
        """Every token the sequence ever had; equal to `num_tokens` under `positions: logical`."""
        state = self._sequence(slot)
        return state.num_tokens + num_cut_tokens(state, self.config.page_size)

    def num_kept_tokens(self, slot: int) -> int:
        """Tokens a head still holds on average."""
        state = self._sequence(slot)
        streams = sum(group.streams_per_slot for group in self._unbounded())
        dropped = state.num_dropped * self.config.page_size // max(1, streams)
        return state.num_tokens - min(dropped, state.num_tokens)

    # -- one forward pass --------------------------------------------------------------------------------------

    def begin(self, spans: Seq[Span]) -> KVStep:
        """Open the pages that `spans` need. Raises OutOfPages, in which case nothing changed."""
        self._free_abandoned()
        self._make_room(spans)
        opened: list[tuple[Span, int]] = []
        try:
            for span in spans:
                opened.append((span, self._num_pages(self._sequence(span.slot).num_tokens)))
                self._open(span)
        except BaseException:
            self._close(opened)
            raise
        return KVStep(self, tuple(spans))

    def group_for(self, layer: int, k: Tensor, v: Tensor, spans: Seq[Span]) -> StreamGroup:
        """The group of a layer, decided by the first K and V it writes; pages are opened for it then."""
        group = self._group_of.get(layer)
        if group is not None:
            return group
        geometry = Geometry(k.shape[1], k.shape[-1], v.shape[-1], k.dtype, k.device, self.windows[layer])
        group = next((g for g in self.groups if g.geometry == geometry), None)
        if group is None:
            layout = (geometry, self.config.page_size, self.config.warm.codec, self.scorer, self.num_layers)
            group = StreamGroup(*layout, self.statistics, self.has_cold_pool)
            self.groups.append(group)
        row = group.add_layer(layer)
        if self.max_pages is not None:
            group.pages.limit(self.max_pages * group.streams_per_slot)
        self._group_of[layer] = group
        for span in spans:
            state = self._sequence(span.slot)
            num_pages = self._num_pages(state.num_tokens + span.num_tokens)
            group.fit_table(span.slot + 1, num_pages)
            group.open_pages(span.slot, 0, num_pages, slice(row, row + 1))
        return group

    def can_append(self, num_tokens_by_slot: Mapping[int, int]) -> bool:
        """Whether `begin` would find pages for that many new tokens per slot; asking changes nothing."""
        self._free_abandoned()
        new = shared = 0
        for slot, num_tokens in num_tokens_by_slot.items():
            held = self.num_tokens(slot)
            new += self._num_pages(held + num_tokens) - self._num_pages(held)
            shared += held % self.config.page_size > 0 and not self._sequence(slot).owns_last
        if not self.groups:
            return self.max_pages is None or new <= self.max_pages
        # a shared last page is copied before it is written: count one for each open page
        return all(group.pages.can_allocate((new + shared) * group.streams_per_slot) for group in self.groups)

    def commit(self, spans: Seq[Span], observed: Seq[SpanMass]) -> None:
        """The step is over: its tokens count from now on. `observed` has the attention mass seen by every span."""
        for span, mass in zip(spans, observed, strict=True):
            state = self._sequence(span.slot)
            past = state.num_tokens
            state.num_tokens += span.num_tokens
            if self.may_be_draft(past, span.num_tokens):
                state.unsettled, state.unsettled_from, state.unsettled_mass = True, past, mass
            else:
                self._record_mass(span.slot, mass)
                self._settle(span.slot, state, decoding=past > 0 and span.num_tokens == 1)

    def may_be_draft(self, num_past: int, num_new: int) -> bool:
        """Whether a step of that shape might be taken back by a crop, as drafts are."""
        return num_past > 0 and 1 < num_new <= _MAX_DRAFT_TOKENS

    def abort(self, spans: Seq[Span]) -> None:
        """Take back the pages that `begin` opened for `spans`."""
        self._close([(span, self._num_pages(self._sequence(span.slot).num_tokens)) for span in spans])

    # -- tiers -------------------------------------------------------------------------------------------------

    def _settle(self, slot: int, state: SequenceState, decoding: bool) -> None:
        """Summaries for completed pages, then the policy, then demotion of what it left."""
        num_full = state.num_tokens // self.config.page_size
        if num_full > state.num_complete:
            for group in self.groups:
                group.complete(slot, state.num_complete, num_full)
            state.num_complete = num_full
        hot_start = max(state.demoted.stop, (state.num_tokens - state.rules.config.hot_size) // self.config.page_size)
        if self._is_time_to_judge(state, hot_start, decoding):
            self._judge(slot, state, state.demoted.start, hot_start)
        self.demote_until(slot, hot_start)

    def demote_until(self, slot: int, page: int) -> None:
        """Complete pages before `page` are no longer needed in full precision, however new they are."""
        state = self._sequence(slot)
        if page > state.demoted.stop:
            for group in self.groups:
                self.counters["demoted"] += group.demote(slot, state.demoted.stop, page)
            state.demoted = range(state.demoted.start, page)

    def _settle_draft(self, slot: int, state: SequenceState) -> None:
        """What was left of the last step after cropping counts for good."""
        num_accepted = max(0, state.num_tokens - state.unsettled_from)
        self._record_mass(slot, {layer: mass[:num_accepted] for layer, mass in state.unsettled_mass.items()})
        state.unsettled, state.unsettled_mass = False, {}
        self._settle(slot, state, decoding=True)

    def _record_mass(self, slot: int, mass_by_layer: SpanMass) -> None:
        """One tensor operation per group and observation, whatever the number of layers."""
        for group in self.groups if mass_by_layer else ():
            device = group.geometry.device
            mass = torch.stack([mass_by_layer[layer] for layer in group.rows], dim=1)  # [N, rows, H, pages]
            pages = torch.arange(mass.shape[-1], device=device).expand(1, mass.shape[-2], -1)
            slots = torch.tensor([slot], device=device)
            places = torch.cat([group.places(layer, slots, pages).flatten() for layer in group.rows])
            for observation in mass:
                group.observe(places, observation.flatten())

    def _is_time_to_judge(self, state: SequenceState, hot_start: int, decoding: bool) -> bool:
        if state.rules.config.cold == "keep" or hot_start <= state.demoted.start:
            return False
        if state.rules.policy.needs_mass:
            return decoding and state.num_tokens - state.num_judged >= _JUDGE_EVERY_TOKENS
        return hot_start > state.demoted.stop

    def _judge(self, slot: int, state: SequenceState, first: int, last: int) -> None:
        """Drop (or turn into int4) what the policy calls cold in pages [first, last), then what exceeds `warm_size`."""
        state.num_judged = state.num_tokens
        config = state.rules.config
        reasons = [state.rules.policy.name] + ["warm_size"] * (config.warm_size is not None)
        for group in self.groups:
            for reason in reasons:
                cold = self._cold(group, slot, state, first, last, reason)
                if cold is not None and config.cold == "int4":
                    self.counters["chilled"] += group.chill(slot, cold)
                elif cold is not None:
                    code = removal_code(self.num_logical_tokens(slot), reason)
                    num_dropped = group.drop(slot, cold, state.demoted, code)
                    state.num_dropped += num_dropped if group.geometry.window is None else 0
                    self.counters["dropped"] += num_dropped

    def _cold(
        self, group: StreamGroup, slot: int, state: SequenceState, first: int, last: int, reason: str
    ) -> Tensor | None:
        """bool `[rows, H, last]`: cold pages. Content sinks, pages with much mass wherever they are, never are."""
        entries = group.table[slot, : len(group.rows), :, :last]
        present = entries >= 0
        present[..., :first] = False
        mass = group.mean_mass(entries)
        facts = PageFacts(present, mass, state.num_tokens, self.config.page_size)
        config, policy = state.rules.config, state.rules.policy
        cold = beyond(facts, config.warm_size or 0) if reason == "warm_size" else policy.cold(facts)
        if cold is None:
            return None
        cold = cold & present
        if mass is not None and config.sink_mass is not None:
            cold &= ~(mass >= config.sink_mass)
        return cold

    # -- looking in --------------------------------------------------------------------------------------------

    def stats(self) -> KVStats:
        """Bytes and pages by tier, and what was counted since the start."""
        self._free_abandoned()
        return collect(self)

    def explain(self, slot: int) -> PositionMap:
        """Where every token of a sequence is, or why and when it went."""
        return position_map(self, slot)

    def check_integrity(self) -> None:
        """Prove that every page is free or owned exactly as often as counted. Raises KVIntegrityError."""
        self._free_abandoned()
        for number, group in enumerate(self.groups):
            owners = torch.zeros(group.pages.capacity, dtype=torch.long, device=group.geometry.device)
            for slot, state in self.sequences.items():
                ids = group.ids(slot, 0, self._num_pages(state.num_tokens))
                owners.index_add_(0, ids, torch.ones_like(ids))
            for held_ids in self.holders:
                ids = held_ids(number)
                owners.index_add_(0, ids, torch.ones_like(ids))
            group.pages.check(owners, "page")
            live = (group.pages.refs > 0).nonzero().flatten()
            for name, pool in group.pools.items():
                units = group.pages.fields[name][live].long()
                pool.check(torch.bincount(units[units >= 0], minlength=pool.capacity), name)

    # -- helpers -----------------------------------------------------------------------------------------------

    def _make_room(self, spans: Seq[Span]) -> None:
        if self.compactor is not None:
            self.compactor.make_room(self, spans)
        elif self.config.positions == "compact":
            raise ConfigError("positions: compact needs the model's rotary embedding; set manager.compactor first")

    def _open(self, span: Span) -> None:
        state = self._sequence(span.slot)
        if state.unsettled:
            self._settle_draft(span.slot, state)
        held = self._num_pages(state.num_tokens)
        needed = self._num_pages(state.num_tokens + span.num_tokens)
        if not state.owns_last and state.num_tokens % self.config.page_size:
            self._own(span.slot, held - 1, state.num_tokens % self.config.page_size)
        state.owns_last = True
        for group in self.groups:
            forget_unseen(group, span.slot, state)
            group.fit_table(span.slot + 1, needed)
            if needed > held:
                group.open_pages(span.slot, held, needed)
        state.num_unwindowed = state.num_tokens

    def _own(self, slot: int, page: int, num_kept: int) -> None:
        was_demoted = page in self._sequence(slot).demoted
        for group in self.groups:
            self.counters["reopened"] += group.own(slot, page, was_demoted, num_kept)

    def _close(self, opened: Seq[tuple[Span, int]]) -> None:
        for span, held in opened:
            demoted = self._sequence(span.slot).demoted
            for group in self.groups:
                group.release(span.slot, held, group.table.shape[-1], demoted)

    def _unbounded(self) -> list[StreamGroup]:
        """The groups whose layers see the whole past: what budgets and kept tokens are counted by."""
        return [group for group in self.groups if group.geometry.window is None]

    def _num_pages(self, num_tokens: int) -> int:
        return -(-num_tokens // self.config.page_size)

    def _sequence(self, slot: int) -> SequenceState:
        try:
            return self.sequences[slot]
        except KeyError:
            raise KVError(f"sequence {slot} does not exist or was freed; add or fork one first") from None
