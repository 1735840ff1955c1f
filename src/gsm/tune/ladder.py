"""The variables, their order and the values worth measuring for a task and a length, mildest first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

from gsm.config import GsmConfig, load_config
from gsm.config.presets import PRESETS
from gsm.config.smoothing import MAX_WINDOW, MIN_WINDOW
from gsm.errors import InputError

Task = Literal["dialog", "document", "reasoning", "code"]
TASKS: tuple[str, ...] = get_args(Task)
CACHE_VARIABLES = ("hot_size", "threshold", "compression", "budget")
START_WINDOW = 8
_STRENGTHS = (0.05, 0.1, 0.2, 0.3)
_HOT_FRACTIONS = (8, 16, 32)  # of the length
_BUDGET_FRACTIONS = (0.5, 0.25, 0.125)


@dataclass(frozen=True)
class Value:
    """One value of a variable: its label, and what it changes in a config."""

    label: str
    changes: dict[str, Any]


@dataclass(frozen=True)
class Variable:
    """One thing to turn while everything else stays."""

    name: str
    question: str
    start: Callable[[GsmConfig], str]
    values: tuple[Value, ...]
    skipped: str | None = None


def start_config(task: str, length: int) -> GsmConfig:
    """Where tuning begins: recallable int8 tiers with the task's hot zone, at most a quarter of the length."""
    if task not in TASKS:
        raise InputError(f"task '{task}' is unknown; use one of {', '.join(TASKS)}")
    hot = min(int(PRESETS[task]["hot_size"]), max(128, length // 4))
    return load_config({"cache": {"hot_size": hot, "recent_tokens": min(128, hot)}})


def changed(config: GsmConfig, changes: dict[str, Any]) -> GsmConfig:
    """``config`` with some settings replaced, checked anew. Raises ConfigError for an impossible combination."""
    return load_config(_overlay(config.model_dump(mode="json"), changes))


def cache_variables(task: str, length: int, start: GsmConfig, most: int, allow_drop: bool) -> list[Variable]:
    """hot_size, threshold, compression, budget: at most ``most`` values each."""
    return [
        _hot_size(length, start, most),
        _threshold(task, most, allow_drop),
        Variable(
            "compression",
            "older pages in half the bytes of int8?",
            lambda config: config.cache.warm.codec,
            (Value("int4", {"cache": {"warm": {"codec": "int4"}}}),),
        ),
        _budget(length, start, most),
    ]


def strength_variable(most: int) -> Variable:
    """The first of the two smoothing variables, at a fixed window of 8."""
    return Variable(
        "smooth_strength",
        f"how strongly, with the window fixed at {START_WINDOW}?",
        lambda config: f"{config.smoothing.smooth_strength:g}" if config.smoothing.enable else "off",
        tuple(Value(f"{strength:g}", {"smoothing": _smoothing(START_WINDOW, strength)}) for strength in _STRENGTHS)[
            :most
        ],
    )


def window_variable(strength: float | None, most: int) -> Variable:
    """The second: the window, at the strength that was chosen."""
    if strength is None:
        return Variable("window_size", "which window?", lambda config: "off", (), "no strength was worth keeping")
    sizes = [size for size in (MIN_WINDOW, MAX_WINDOW) if size != START_WINDOW][:most]
    return Variable(
        "window_size",
        f"which window, at strength {strength:g}?",
        lambda config: str(START_WINDOW),
        tuple(Value(str(size), {"smoothing": _smoothing(size, strength)}) for size in sizes),
    )


def _hot_size(length: int, start: GsmConfig, most: int) -> Variable:
    page, smallest = start.cache.page_size, start.cache.recent_tokens
    sizes = {max(smallest, length // part // page * page) for part in _HOT_FRACTIONS}
    smaller = sorted((size for size in sizes if size < start.cache.hot_size), reverse=True)
    return Variable(
        "hot_size",
        "how many of the newest tokens must stay in full precision?",
        lambda config: str(config.cache.hot_size),
        tuple(Value(str(size), {"cache": {"hot_size": size}}) for size in smaller[:most]),
        None if smaller else f"the start, {start.cache.hot_size}, is already the smallest that makes sense",
    )


def _threshold(task: str, most: int, allow_drop: bool) -> Variable:
    highest = float(PRESETS[task]["threshold"])
    fate = "drop" if allow_drop else "int4"
    values = tuple(
        Value(
            f"{highest / part:g} ({fate})",
            {"cache": {"policy": "threshold", "threshold": highest / part, "cold": fate}},
        )
        for part in (4, 2, 1)
    )
    return Variable(
        "threshold",
        "may pages below this attention mass be "
        + ("forgotten for good?" if allow_drop else "kept in int4 only? (nothing is dropped without --allow-drop)"),
        lambda config: "none" if config.cache.threshold is None else f"{config.cache.threshold:g}",
        values[-most:],
    )


def _budget(length: int, start: GsmConfig, most: int) -> Variable:
    fractions = [part for part in _BUDGET_FRACTIONS if part * (length // 4) >= start.cache.smallest_budget_tokens]
    too_short = (
        f"at a quarter of the length, {length // 4} tokens, no budget is left beside sinks and recent tokens "
        f"({start.cache.smallest_budget_tokens})"
    )
    return Variable(
        "budget",
        "how many tokens must a step attend?",
        lambda config: "all",
        tuple(
            Value(f"{part:g} of the context", {"cache": {"sparse": {"enabled": True, "budget_fraction": part}}})
            for part in fractions[:most]
        ),
        None if fractions else too_short,
    )


def _smoothing(window: int, strength: float) -> dict[str, Any]:
    return {"enable": True, "method": "window", "window_size": window, "smooth_strength": strength}


def _overlay(base: dict[str, Any], top: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in top.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _overlay(merged[key], value) if both else value
    return merged
