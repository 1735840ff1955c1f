"""The arms of a benchmark: names for ways to run a model. A path to a config file is an arm too."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gsm.config import GsmConfig, load_config
from gsm.config.linear import LinearBackend
from gsm.errors import InputError
from gsm.models import LoadedModel
from gsm.quality import Arm, GsmArm, PlainArm, load_thirds
from gsm.quality.smoothed import SmoothedArm

PLAIN, LINEAR = "transformers", "linear"
DEFAULT_ARMS = ("transformers", "full", "tiers", "sparse")

_INT8 = {"enable": True, "method": "rotate", "int8": "dynamic"}

# None is transformers with its own DynamicCache and sdpa, as it is or with GSM's linear layers only. Everything else is
# a GSM config, which includes those linear layers.
ARMS: dict[str, dict[str, Any] | None] = {
    PLAIN: None,
    LINEAR: None,
    "full": {"cache": {"warm": {"codec": "none"}}},
    "tiers": {},
    "sparse": {"cache": {"sparse": {"enabled": True}}},
    "sparse-int4": {"cache": {"preset": "sparse-int4"}},
    "int8": {"cache": {"warm": {"codec": "none"}}, "smoothing": _INT8},
    "int8+sparse": {"cache": {"sparse": {"enabled": True}}, "smoothing": _INT8},
    "evict": {"cache": {"preset": "evict"}},
    "evict-literal": {"cache": {"preset": "evict-literal"}},
    "evict+sparse": {"cache": {"preset": "evict+sparse"}},
}


@dataclass(frozen=True)
class ArmSpec:
    """A name and its config; ``config`` None means transformers with its own cache."""

    name: str
    config: GsmConfig | None

    @property
    def linear(self) -> LinearBackend:
        """How linear layers multiply."""
        if self.config is not None:
            return self.config.linear.backend
        return "auto" if self.name == LINEAR else "torch"

    def config_dict(self) -> dict[str, Any] | None:
        return None if self.config is None else self.config.model_dump(mode="json")


def make_arm(spec: ArmSpec, loaded: LoadedModel, chunk_tokens: int, text: str | None = None) -> Arm:
    """The way to run ``loaded`` that ``spec`` names, with prefill chunks of ``chunk_tokens``.

    A config whose smoothing section is active smooths the model too, calibrated on a third of ``text``.
    """
    if spec.config is None:
        return PlainArm(loaded.model, name=spec.name, chunk_tokens=chunk_tokens, linear=spec.linear)
    arm = GsmArm(loaded.model, spec.config, name=spec.name, chunk_tokens=chunk_tokens)
    if not spec.config.smoothing.active:
        return arm
    return SmoothedArm(arm, loaded, spec.config.smoothing, load_thirds(text))


def resolve_arm(name: str) -> ArmSpec:
    """The arm called ``name``, or the config file at that path. Raises InputError or ConfigError."""
    if name in ARMS:
        settings = ARMS[name]
        return ArmSpec(name, None if settings is None else load_config(settings))
    if Path(name).suffix in {".yaml", ".yml", ".json"} or Path(name).exists():
        return ArmSpec(name, load_config(name))
    near = difflib.get_close_matches(name, ARMS, n=1)
    hint = f"did you mean '{near[0]}'?" if near else f"use {', '.join(ARMS)} or the path of a config file"
    raise InputError(f"arm '{name}' is unknown; {hint}")


def resolve_arms(names: Sequence[str]) -> tuple[ArmSpec, ...]:
    """Several arms, in order. Raises InputError for an empty list or a name given twice."""
    if not names:
        raise InputError(f"no arm was given; use some of {', '.join(ARMS)}")
    twice = next((name for name in names if list(names).count(name) > 1), None)
    if twice is not None:
        raise InputError(f"arm '{twice}' is given twice; name each arm once")
    return tuple(resolve_arm(name) for name in names)
