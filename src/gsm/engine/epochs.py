"""Configs that requests are admitted with: immutable, numbered, resolved completely before anybody sees them.

Several may be in force at once. They share the model, its batches, the KV store and, where the content of pages does
not depend on what differs, cached prefixes. A request keeps the epoch it was admitted with.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gsm.config import EngineConfig, GsmConfig, needs_restart
from gsm.engine.prefixes import content_fingerprint, why_not
from gsm.errors import ConfigError
from gsm.kv.prefix import PrefixIndex
from gsm.kv.rules import Rules, make_rules
from gsm.smoothing.window import WindowSmoothing

if TYPE_CHECKING:
    from gsm.engine.engine import Engine


@dataclass(frozen=True, slots=True, eq=False)
class Epoch:
    """What a request is served with. `fingerprint` names its prefix pages; None where it shares none."""

    number: int
    config: GsmConfig
    rules: Rules
    fingerprint: str | None = None
    window: WindowSmoothing | None = None


class Epochs:
    """The epochs of one engine by number. `current` is the one of requests that name none."""

    def __init__(self, engine: Engine, config: GsmConfig, window: WindowSmoothing | None) -> None:
        self._engine = engine
        self._started_with = config
        self._by_number: dict[int, Epoch] = {}
        self.current = Epoch(0, config, make_rules(config.cache), None, window)
        self._by_number[0] = self.current

    def __getitem__(self, number: int | None) -> Epoch:
        """None is the current one. Raises ConfigError for a number that is not in force."""
        if number is None:
            return self.current
        try:
            return self._by_number[number]
        except KeyError:
            raise ConfigError(f"epoch {number} is not in force; publish its config first") from None

    @property
    def numbers(self) -> list[int]:
        return sorted(self._by_number)

    def check(self, config: GsmConfig) -> None:
        """Raises ConfigError when this engine cannot serve `config` without a restart; changes nothing."""
        reasons = needs_restart(self._started_with, config)
        if make_rules(config.cache).needs_mass and not self._engine.manager.needs_mass:
            reasons.append("cache.policy or cache.sink_mass: pages keep no attention mass, which they need")
        if reasons:
            raise ConfigError(f"this change needs a restart: {'; '.join(reasons)}")

    def touches_model(self, config: GsmConfig) -> bool:
        """Whether publishing it puts hooks on the model, which must happen between two steps."""
        return self._engine.windows.is_new(config.smoothing)

    def publish(self, number: int, config: GsmConfig) -> Epoch:
        """Put a config in force beside the others. Raises ConfigError, and then nothing has changed."""
        if number in self._by_number:
            raise ConfigError(f"epoch {number} is in force already; use a number of its own")
        self.check(config)
        window = self._engine.windows.install(config.smoothing)
        self._by_number[number] = epoch = self._resolve(number, config, window)
        self._fit_room()
        return epoch

    def start(self) -> None:
        """Complete epoch 0, once the engine knows how its pages are laid out."""
        boot = self.current
        self._by_number[boot.number] = self.current = self._resolve(boot.number, boot.config, boot.window)

    def renumber(self, number: int) -> None:
        """The config the engine was started with gets another number, before it serves anybody."""
        boot = self.current
        del self._by_number[boot.number]
        self._by_number[number] = self.current = self._resolve(number, boot.config, boot.window)

    def use(self, number: int) -> None:
        """Requests that name no epoch get this one, and its limits bound the engine from now on."""
        self.current = self[number]
        self._engine.scheduler.limits = self.limits
        self._engine.room.limit(self.limits.kv_memory_mib)

    @property
    def limits(self) -> EngineConfig:
        return self.current.config.engine

    def retire(self, number: int) -> None:
        """No new request gets this epoch; running ones keep what they have. Unknown numbers are ignored."""
        if number != self.current.number:
            self._by_number.pop(number, None)
            self._fit_room()

    def _resolve(self, number: int, config: GsmConfig, window: WindowSmoothing | None) -> Epoch:
        engine = self._engine
        fingerprint = None
        if config.engine.prefix_cache and why_not(engine, config, window is not None) is None:
            fingerprint = content_fingerprint(engine.weights, config)
            if engine.prefix is None:
                engine.prefix = PrefixIndex(engine.manager, fingerprint)
        return Epoch(number, config, make_rules(config.cache), fingerprint, window)

    def _fit_room(self) -> None:
        """Memory is foreseen for the most that any epoch in force may hold in full precision."""
        configs: Iterable[GsmConfig] = [epoch.config for epoch in list(self._by_number.values())]
        room = self._engine.room
        room.chunk_tokens = max(config.engine.chunk_tokens for config in configs)
        room.num_hot_pages = max(config.cache.num_hot_pages for config in configs)
