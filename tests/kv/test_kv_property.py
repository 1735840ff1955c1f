"""Random lives of sequences: the store always holds exactly what a plain list of tokens would."""

from __future__ import annotations

import hypothesis.strategies as st
import torch
from hypothesis import HealthCheck, settings
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule
from kv_model import LAYERS, Tokens, append, assert_holds, make_config, pages_in_use, random_tokens, write

from gsm.kv.manager import KVManager

QUICK = settings(
    max_examples=40,
    stateful_step_count=25,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


class StoreMachine(RuleBasedStateMachine):
    """Appends, ragged batches, forks, crops, frees and aborted steps over 3 layers x 2 heads."""

    slots = Bundle("slots")

    @initialize(
        codec=st.sampled_from(["none", "int8"]),
        page_size=st.sampled_from([1, 4, 16]),
        hot_size=st.sampled_from([4, 7, 40]),
        sinks=st.sampled_from([0, 1, 5]),
        seed=st.integers(0, 1000),
    )
    def start(self, codec: str, page_size: int, hot_size: int, sinks: int, seed: int) -> None:
        config = make_config(page_size=page_size, hot_size=hot_size, sink_tokens=sinks, warm={"codec": codec})
        self.manager = KVManager(LAYERS, config)
        self.model: dict[int, Tokens] = {}
        self.generator = torch.Generator().manual_seed(seed)

    def _new(self, slot: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        k, v = random_tokens(length, self.generator)
        self.model[slot] = self.model[slot].plus(k, v)
        return k, v

    @rule(target=slots, length=st.integers(0, 40))
    def add(self, length: int) -> int:
        slot = self.manager.add_sequence()
        self.model[slot] = Tokens.none()
        if length:
            append(self.manager, {slot: self._new(slot, length)})
        return slot

    @rule(slot=slots, length=st.integers(1, 40))
    def grow(self, slot: int, length: int) -> None:
        append(self.manager, {slot: self._new(slot, length)})

    @rule(slot=slots, steps=st.integers(1, 12))
    def decode(self, slot: int, steps: int) -> None:
        for _ in range(steps):
            append(self.manager, {slot: self._new(slot, 1)})

    @rule(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=4), ones=st.booleans())
    def grow_together(self, lengths: list[int], ones: bool) -> None:
        chosen = dict(zip(sorted(self.model), lengths, strict=False))
        if chosen:
            append(self.manager, {slot: self._new(slot, 1 if ones else n) for slot, n in chosen.items()})

    @rule(target=slots, slot=slots)
    def fork(self, slot: int) -> int:
        twin = self.manager.fork(slot)
        self.model[twin] = self.model[slot]
        return twin

    @rule(slot=slots, fraction=st.floats(0, 1))
    def crop(self, slot: int, fraction: float) -> None:
        keep = int(len(self.model[slot]) * fraction)
        self.manager.crop(slot, keep)
        self.model[slot] = self.model[slot].first(keep)

    @rule(slot=slots, length=st.integers(1, 20), layers=st.integers(0, LAYERS))
    def fail(self, slot: int, length: int, layers: int) -> None:
        write(self.manager, {slot: random_tokens(length, self.generator)}, layers).abort()

    @rule(target=slots, slot=consumes(slots))
    def free(self, slot: int) -> object:
        self.manager.free(slot)
        del self.model[slot]
        return multiple()

    @invariant()
    def holds(self) -> None:
        if not hasattr(self, "manager"):
            return
        self.manager.check_integrity()
        for slot, tokens in self.model.items():
            assert_holds(self.manager, slot, tokens)

    def teardown(self) -> None:
        if hasattr(self, "manager"):
            for slot in list(self.model):
                self.manager.free(slot)
            assert not any(pages_in_use(self.manager))
            self.manager.check_integrity()


TestStore = StoreMachine.TestCase
TestStore.settings = QUICK
