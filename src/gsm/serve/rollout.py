"""Which config is live: immutable numbered epochs, a canary, promotion, roll-back, and the last good one on disk.

A reload is a canary at 100 %: everybody gets it at once, and the config before it stays the stable one until the guard
has seen enough of its answers, or somebody promotes it. Roll-back is one assignment; requests that run keep the epoch
they were admitted with.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gsm.config import GsmConfig, RolloutConfig, fingerprint, load_config, needs_restart
from gsm.engine import Epoch, Score, Sequence
from gsm.errors import ConfigError, EngineDead
from gsm.serve.facts import Facts, facts_of
from gsm.serve.state import Record, State, StateFile
from gsm.serve.watch import Breach, Watch
from gsm.serve.worker import EngineWorker

_KEPT_RECORDS = 100
_log = logging.getLogger("gsm")


@dataclass(frozen=True, slots=True)
class Live:
    """What new requests get. Replaced as a whole, so that every reader sees one state. `weight` in percent."""

    stable: Epoch
    canary: Epoch | None = None
    weight: float = 0.0

    @property
    def leading(self) -> Epoch:
        """The epoch whose limits bound the engine."""
        return self.canary if self.canary is not None and self.weight >= 100.0 else self.stable

    def choose(self, identity: str) -> Epoch:
        """The epoch of a user, key or session: always the same one while this canary's weight does not fall."""
        if self.canary is None or share_of(identity, self.canary.number) * 100.0 >= self.weight:
            return self.stable
        return self.canary


def share_of(identity: str, number: int) -> float:
    """A number in [0, 1) that depends on both alone: the same in every process, another order for every canary."""
    digest = hashlib.blake2b(f"{number}\0{identity}".encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return (int.from_bytes(digest, "big") >> 11) / 2**53


class Rollout:
    """Changes come from the event loop, one at a time; a roll-back may come from the engine's thread at any time.

    `prepare` completes a config with what the server was told beside it (limits of the command line, KV memory).
    """

    def __init__(
        self,
        worker: EngineWorker,
        state_file: StateFile | None = None,
        state: State | None = None,
        prepare: Callable[[GsmConfig], GsmConfig] = lambda config: config,
        given: GsmConfig | None = None,
    ) -> None:
        engine = worker.engine
        self.worker = worker
        self.watch = Watch()
        self.last_error: dict[str, Any] | None = None  # of the last change that was refused
        self.num_rollbacks = 0
        self.on_facts: Callable[[Facts], None] | None = None
        self._state_file = state_file or StateFile(None)
        self._prepare = prepare
        self._given: dict[int, str] = {}  # epochs that came from the operator's file, and its fingerprint
        self._changing = asyncio.Lock()
        self._lock = threading.RLock()
        if state is None:
            config = given if given is not None else engine.config
            state = State(Record(1, _dump(config), "start", time.time(), "stable"), next_number=2)
        if given is not None:
            state.given = fingerprint(given)
        for record in state.history:
            if record.status == "canary":
                _end(record, "replaced", "the server was restarted before it was promoted")
        self.state = state
        engine.epochs.renumber(state.stable.number)
        self.live = Live(engine.epochs.current)
        self._state_file.save(state)
        self._judge_anew()
        engine.on_finish = self._note_finished
        engine.shadow.on_score = self._note_score

    # -- what requests ask -------------------------------------------------------------------------------------

    def admit(self, identity: str) -> tuple[Epoch, bool]:
        """The epoch of a new request, and whether its answer is to be scored."""
        live = self.live
        epoch = live.choose(identity)
        shadow = self.worker.engine.shadow
        return epoch, not shadow.is_full and random.random() < self._sample(live, epoch)

    def _sample(self, live: Live, epoch: Epoch) -> float:
        """Share of an epoch's answers that are scored: of the stable one as many as of the canary."""
        config = live.stable.config.rollout
        if not config.guard:
            return 0.0
        if live.canary is None:
            return config.steady_sample
        if epoch is live.canary:
            return config.canary_sample
        beside = live.weight / (100.0 - live.weight) if live.weight < 100.0 else 1.0
        return min(1.0, max(config.steady_sample, config.canary_sample * beside))

    # -- changes, from the event loop --------------------------------------------------------------------------

    async def reload(self, config: GsmConfig, source: str, *, given: GsmConfig | None = None) -> Record:
        """Serve `config` to everybody from now on. Unchanged: nothing happens. Raises ConfigError; then too.

        With the guard off it is the stable one at once, else once enough of its answers were scored.
        """
        async with self._changing:
            current = self.record(self.live.leading.number)
            if _dump(config) == current.config:
                self._remember(given)
                return current
            record = await self._open(config, source, 100.0)
            if given is not None:
                self._given[record.number] = fingerprint(given)
            if not self.live.stable.config.rollout.guard:
                self.promote("the guard is off")
            return record

    async def canary(self, config: GsmConfig | None, weight: float, source: str = "admin") -> Record:
        """Serve `config` to `weight` percent; without a config, change the weight of the canary that runs.

        Raises ConfigError, and then nothing has changed.
        """
        if not 0.0 <= weight <= 100.0:
            raise ConfigError(f"weight is {weight:g}; it is a percentage from 0 to 100")
        async with self._changing:
            if config is not None:
                return await self._open(config, source, weight)
            with self._lock:
                live = self.live
                if live.canary is None:
                    raise ConfigError("no canary runs whose weight could change; give a config with it")
                self._go_live(Live(live.stable, live.canary, weight))
                return self.record(live.canary.number)

    async def _open(self, config: GsmConfig, source: str, weight: float) -> Record:
        number = self.state.next_number
        prepared = self._prepare(config)
        epoch = await self._publish(number, prepared)
        record = Record(number, _dump(config), source, time.time())
        with self._lock:
            before = self.live.canary
            history = [*self.state.history, record][-_KEPT_RECORDS:]
            state = State(self.state.stable, number + 1, self.state.given, history)
            try:
                self._state_file.save(state)
            except ConfigError:
                self.worker.engine.epochs.retire(number)
                raise
            self.state = state
            self.last_error = None
            if before is not None:
                _end(self.record(before.number), "replaced", f"epoch {number} took its place", self.watch)
                self.worker.engine.epochs.retire(before.number)
            self._go_live(Live(self.live.stable, epoch, weight))
            self._judge_anew()
        _log.info("epoch %d (%s) serves %g %% of new requests", number, source, weight)
        return record

    def _remember(self, given: GsmConfig | None) -> None:
        """The operator's file says what is live already: a restart without another change goes on with it."""
        if given is not None:
            self.state.given = fingerprint(given)
            self._state_file.save(self.state)

    async def _publish(self, number: int, config: GsmConfig) -> Epoch:
        epochs = self.worker.engine.epochs
        if epochs.touches_model(config) and self.worker.is_running:  # hooks may only change between two steps
            return await self.worker.call(lambda: epochs.publish(number, config))
        return epochs.publish(number, config)

    def promote(self, reason: str = "by hand", number: int | None = None) -> Record:
        """The canary becomes the stable epoch. Raises ConfigError when there is none, or not that one."""
        with self._lock:
            live = self.live
            if live.canary is None or number not in (None, live.canary.number):
                raise ConfigError("no canary runs that could be promoted; start one first")
            record, old = self.record(live.canary.number), self.state.stable
            promoted = _changed(record, "stable", reason)
            retired = _ended(old, "retired", f"epoch {record.number} was promoted")
            history = [one for one in self.state.history if one.number != record.number]
            history.append(retired)
            given = self._given.pop(record.number, self.state.given)
            state = State(promoted, self.state.next_number, given, history[-_KEPT_RECORDS:])
            self._state_file.save(state)
            self.state = state
            self._go_live(Live(live.canary))
            self._judge_anew()
            self.worker.engine.epochs.retire(old.number)
            _log.info("epoch %d is the stable one (%s)", record.number, reason)
            return promoted

    async def rollback(self, reason: str = "by hand") -> Record:
        """Take the canary back; without one, go back to the config that was stable before. Raises ConfigError."""
        async with self._changing:
            if self.live.canary is not None:
                return self._take_back(reason)
            before = next((one for one in reversed(self.state.history) if one.status == "retired"), None)
            if before is None:
                raise ConfigError("there is no canary to take back, and no stable config before this one")
            await self._open(load_config(before.config), f"epoch {before.number}", 100.0)
            return self.promote(reason)

    def _take_back(self, reason: str) -> Record:
        """The weight goes back; works from any thread."""
        with self._lock:
            live = self.live
            if live.canary is None:
                raise ConfigError("no canary runs that could be taken back")
            record = self.record(live.canary.number)
            self.num_rollbacks += 1
            self.state.given = self._given.pop(record.number, self.state.given)  # do not try this file again
            _end(record, "rolled back", reason, self.watch)
            self._go_live(Live(live.stable))
            self._judge_anew()
            self.worker.engine.epochs.retire(record.number)
            try:
                self._state_file.save(self.state)
            except ConfigError as error:  # the stable epoch on disk is the right one anyway
                _log.error("%s", error)
            _log.warning("epoch %d was taken back: %s", record.number, reason)
            return record

    # -- in the engine's thread --------------------------------------------------------------------------------

    def _note_finished(self, sequence: Sequence) -> None:
        facts = facts_of(self.worker.engine, sequence)
        if facts is not None:
            self._act(self.watch.note(facts))
            if self.on_facts is not None:
                self.on_facts(facts)

    def _note_score(self, score: Score) -> None:
        self._act(self.watch.note_score(score, time.monotonic()))
        live = self.live
        enough = live.stable.config.rollout.promote_after
        if live.canary is None or score.epoch != live.canary.number or live.weight < 100.0 or enough is None:
            return
        if self.watch.num_scored >= enough:
            try:
                self.promote(f"{self.watch.num_scored} of its answers were scored", live.canary.number)
            except ConfigError as error:  # the state file, or somebody was faster
                _log.error("epoch %d was not promoted: %s", live.canary.number, error)

    def _act(self, breach: Breach | None) -> None:
        with self._lock:
            canary = self.live.canary
            if breach is not None and canary is not None and breach.epoch == canary.number:
                self._take_back(f"guard: {breach.reason}")

    # -- small things ------------------------------------------------------------------------------------------

    @property
    def rules(self) -> RolloutConfig:
        """The guard's settings: the stable epoch's, so that a canary does not judge itself."""
        return self.live.stable.config.rollout

    def record(self, number: int) -> Record:
        """Raises ConfigError for an epoch that nobody remembers."""
        for record in [self.state.stable, *self.state.history]:
            if record.number == number:
                return record
        raise ConfigError(f"epoch {number} is not known any more; see GET /admin/epochs")

    def refuse(self, source: str, error: Exception) -> None:
        """Remember and log that a change was refused; the live config stays."""
        self.last_error = {"source": source, "message": str(error), "at_s": time.time()}
        _log.error("the config (%s) was refused, epoch %d stays: %s", source, self.live.leading.number, error)

    def describe(self, with_configs: bool) -> dict[str, Any]:
        """The epochs, newest first, with weights and evidence; what they are configured to only for administrators."""
        live = self.live
        records = sorted([self.state.stable, *self.state.history], key=lambda record: record.number, reverse=True)
        return {
            "stable": live.stable.number,
            "canary": live.canary.number if live.canary is not None else None,
            "weight": live.weight,
            "guard": self.rules.guard,
            "promote_after": self.rules.promote_after,
            "num_scored": self.watch.num_scored,
            "last_error": self.last_error if with_configs else None,
            "epochs": [self._describe(record, live, with_configs) for record in records],
        }

    def _describe(self, record: Record, live: Live, with_configs: bool) -> dict[str, Any]:
        is_canary = live.canary is not None and record.number == live.canary.number
        is_stable = record.number == live.stable.number
        weight = live.weight if is_canary else 100.0 - live.weight if is_stable else 0.0
        found: dict[str, Any] = {
            "epoch": record.number,
            "status": record.status,
            "weight": weight,
            "source": record.source,
            "created_s": record.created_s,
            "ended_s": record.ended_s,
            "reason": record.reason,
            "evidence": self.watch.evidence(record.number) if is_canary or is_stable else record.evidence,
        }
        return found | ({"config": record.config} if with_configs else {})

    def _go_live(self, live: Live) -> None:
        self.live = live
        share = self.rules.canary_share if live.canary is not None else self.rules.steady_share
        self.worker.engine.shadow.share = share if self.rules.guard else 0.0
        self.worker.engine.shadow.max_tokens = self.rules.max_scored_tokens
        self.worker.engine.epochs.use(live.leading.number)

    def _judge_anew(self) -> None:
        live, rules = self.live, self.rules
        canary = live.canary.number if live.canary is not None else None
        self._go_live(live)
        self._in_engine(lambda: self.watch.begin(live.stable.number, canary, rules))

    def _in_engine(self, command: Callable[[], None]) -> None:
        if not self.worker.is_running or self.worker.owns_this_thread:
            command()
            return
        try:
            self.worker.post(command)
        except EngineDead:
            _log.debug("the engine stopped before a change of configs reached it")


def plan_start(state: State | None, given: GsmConfig | None) -> tuple[GsmConfig, State | None, GsmConfig | None]:
    """What to start with: (config of the first stable epoch, the state to go on with, a config to load after that).

    `given` is the operator's; None where it cannot be read. What was live last goes on unless the operator's config has
    changed since; a changed one is a reload, so that the guard watches it, or, where that needs a restart, the start.
    Raises ConfigError when there is nothing to start with.
    """
    if state is not None:
        try:
            last = load_config(state.stable.config)
        except ConfigError as error:
            _log.warning("the last good config is of no use any more: %s", error)
            state = None
    if state is None:
        if given is None:
            raise ConfigError("no config can be read and none was good before; mend the config file")
        return given, None, None
    if given is None or fingerprint(given) == state.given or _dump(given) == state.stable.config:
        return last, state, None
    if needs_restart(last, given):
        number = state.next_number
        history = [*state.history, _ended(state.stable, "retired", f"the server was started with epoch {number}")]
        return given, State(Record(number, _dump(given), "start", time.time(), "stable"), number + 1, "", history), None
    return last, state, given


def _dump(config: GsmConfig) -> dict[str, Any]:
    return config.model_dump(mode="json")


def _changed(record: Record, status: str, reason: str) -> Record:
    return Record(record.number, record.config, record.source, record.created_s, status, reason)


def _ended(record: Record, status: str, reason: str) -> Record:
    ended = _changed(record, status, reason)
    ended.ended_s = time.time()
    return ended


def _end(record: Record, status: str, reason: str, watch: Watch | None = None) -> None:
    """Evidence is kept with what ended."""
    record.status, record.reason, record.ended_s = status, reason, time.time()
    if watch is not None:
        record.evidence = watch.evidence(record.number)
