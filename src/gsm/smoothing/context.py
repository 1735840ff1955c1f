"""`apply`: smoothing and int8 on a loaded model inside a `with`; the model is always given back as it was."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor

from gsm.config import load_config
from gsm.config.schema import GsmConfig
from gsm.config.smoothing import SmoothingConfig
from gsm.errors import AttachError, ConfigError
from gsm.smoothing.calibration import Calibration, calibrate
from gsm.smoothing.channel import channel_fold
from gsm.smoothing.edits import Edits
from gsm.smoothing.fold import Fold, FunctionCheck, apply_fold
from gsm.smoothing.inject import install_int8, int8_candidates, refuse_quantised
from gsm.smoothing.int8 import Mode, int8_modules
from gsm.smoothing.rotate import rotate_fold
from gsm.smoothing.select import Choice, choose_sites, matches, window_sites
from gsm.smoothing.sites import Sites, find_sites
from gsm.smoothing.window import WindowSmoothing, is_window_smoothed, window_hooks

_CHECK_TOKENS = 24
_STATIC_SAMPLES = 32
_MARK = "_gsm_smoothing_contexts"  # attribute of a model: how many contexts it is inside of


@dataclass
class Applied:
    """What is in force inside the `with`: the choice per site, the modules in int8, and how exact the fold was."""

    config: SmoothingConfig
    choices: list[Choice] = field(default_factory=list)
    smoothed: list[str] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)
    int8: list[str] = field(default_factory=list)
    max_logit_change: float | None = None
    window: WindowSmoothing | None = None

    @property
    def units(self) -> list[str]:
        """Every module that can be rolled back on its own. The rotation of the residual stream is one whole."""
        rotated = self.config.method == "rotate"
        sites = [choice.name for choice in self.choices if choice.chosen] if rotated else self.smoothed
        return list(dict.fromkeys([*sites, *self.int8]))


def smoothing_config(config: Any) -> SmoothingConfig:
    """The smoothing section of whatever describes a config: the section, a `GsmConfig`, a mapping or a path."""
    if isinstance(config, SmoothingConfig):
        return config
    if isinstance(config, Mapping) and "smoothing" not in config and "cache" not in config:
        config = {"smoothing": dict(config)}
    return cast(GsmConfig, load_config(config)).smoothing


@contextlib.contextmanager
def apply(
    model: Any,
    config: Any,
    *,
    samples: Tensor | None = None,
    calibration: Calibration | None = None,
    exclude: Collection[str] = (),
) -> Iterator[Applied]:
    """Smooth ``model`` and run it in int8 as ``config`` says, until the `with` ends, whatever ends it.

    ``samples`` [n, tokens] int64 are calibration text: needed by `channel`, by `window` unless it names its layers, and
    by static int8, unless a ``calibration`` made earlier is enough. ``exclude`` names modules to leave alone (the
    guard's roll-back). Combine with `gsm.attach` in either order. Raises ConfigError, UnsupportedModel, AttachError.
    """
    section = smoothing_config(config)
    applied = Applied(section)
    edits = Edits(model)
    try:
        _choose(model, section, applied, samples, calibration, exclude)
        if section.is_folded:
            _fold(edits, model, section, applied, samples, calibration, set(exclude))
        if section.int8 != "off":
            _quantise(edits, model, section, applied, samples, set(exclude))
        with contextlib.ExitStack() as hooks:
            hooks.enter_context(_marked(model))
            if section.is_windowed:
                applied.window = hooks.enter_context(window_hooks(model, applied.smoothed, section))
            yield applied
    finally:
        edits.undo()


def is_applied(model: Any) -> bool:
    """Whether ``model`` is inside an `apply`."""
    return bool(getattr(model, _MARK, 0))


@contextlib.contextmanager
def _marked(model: Any) -> Iterator[None]:
    """Contexts may nest (int8 outside, `window` inside), so they are counted."""
    setattr(model, _MARK, getattr(model, _MARK, 0) + 1)
    try:
        yield
    finally:
        setattr(model, _MARK, getattr(model, _MARK) - 1)
        if not getattr(model, _MARK):
            delattr(model, _MARK)


def _choose(
    model: Any,
    section: SmoothingConfig,
    applied: Applied,
    samples: Tensor | None,
    calibration: Calibration | None,
    exclude: Collection[str],
) -> None:
    """Decide which sites `window` acts on, before int8 decides what may be fused."""
    if not section.is_windowed:
        return
    if calibration is None and samples is None:
        applied.choices = window_sites(model, section)
    else:
        applied.choices = choose_sites(require_calibration(model, section, samples, calibration), section)
    applied.smoothed = [choice.name for choice in applied.choices if choice.chosen and choice.name not in exclude]


def check_ids(model: Any, num_tokens: int = _CHECK_TOKENS) -> Tensor:
    """[1, num_tokens] arbitrary token ids that are the same on every call."""
    size = model.get_input_embeddings().weight.shape[0]
    ids = torch.randint(0, size, (1, num_tokens), generator=torch.Generator().manual_seed(0))
    return ids.to(next(model.parameters()).device)


def _fold(
    edits: Edits,
    model: Any,
    section: SmoothingConfig,
    applied: Applied,
    samples: Tensor | None,
    calibration: Calibration | None,
    exclude: set[str],
) -> None:
    refuse_quantised(model, f"method {section.method}")
    sites = find_sites(model)
    check = FunctionCheck(model, check_ids(model))
    if section.method == "channel":
        fold = _channel(model, sites, section, applied, samples, calibration, exclude)
    else:
        fold = _rotation(model, sites, section, applied, exclude)
    apply_fold(edits, model, fold)
    applied.max_logit_change = check.require_same(f"method {section.method}")
    applied.smoothed = fold.sites
    applied.left_out |= fold.left_out


def _channel(
    model: Any,
    sites: Sites,
    section: SmoothingConfig,
    applied: Applied,
    samples: Tensor | None,
    calibration: Calibration | None,
    exclude: set[str],
) -> Fold:
    calibration = require_calibration(model, section, samples, calibration)
    applied.choices = choose_sites(calibration, section)
    chosen = [choice.name for choice in applied.choices if choice.chosen and choice.name not in exclude]
    return channel_fold(model, sites, calibration, chosen, section.alpha, samples, section.skip_sink)


def _rotation(model: Any, sites: Sites, section: SmoothingConfig, applied: Applied, exclude: set[str]) -> Fold:
    outputs = [
        block.path(part)
        for block in sites
        for part in block.layout.mlp_out
        if isinstance(block.part(part), torch.nn.Module)  # stacked experts are one parameter, and stay unrotated
    ]
    online = [name for name in outputs if section.online_rotation and name not in exclude]
    if isinstance(section.target_layers, tuple):
        online = [name for name in online if matches(name, section.target_layers)]
    applied.choices = [
        Choice(name, name in online, "run-time rotation of the MLP's inner activation") for name in outputs
    ]
    return rotate_fold(model, sites, online)


def require_calibration(
    model: Any, section: SmoothingConfig, samples: Tensor | None, calibration: Calibration | None
) -> Calibration:
    """The given calibration, or one taken on ``samples`` now; raises ConfigError without either."""
    if calibration is not None:
        calibration.require_model(model)
        return calibration
    if samples is None:
        raise ConfigError(
            f"method {section.method} needs calibration; pass samples of text, or a calibration made by `gsm calibrate`"
        )
    return calibrate(model, samples, num_sink_tokens=1)


def _quantise(
    edits: Edits, model: Any, section: SmoothingConfig, applied: Applied, samples: Tensor | None, exclude: set[str]
) -> None:
    if not section.is_folded:
        refuse_quantised(model, f"int8: {section.int8}")
    if is_window_smoothed(model):
        raise AttachError(
            "int8 after window smoothing is the wrong order: quantise first, then smooth (one config does)"
        )
    _require_known_patterns(model, section)
    leave = _leave(section, exclude)
    windowed = applied.smoothed if section.method == "window" else ()
    applied.int8 = install_int8(
        edits, model, cast(Mode, section.int8), leave, head=section.int8_lm_head, separate=windowed
    )
    if section.int8 == "static":
        if samples is None:
            raise ConfigError("int8: static takes its scales from text; pass samples of calibration text")
        _take_static_scales(model, samples[:_STATIC_SAMPLES], num_exempt=1 if section.skip_sink else 0)


def _require_known_patterns(model: Any, section: SmoothingConfig) -> None:
    names = int8_candidates(model)
    for pattern in section.keep_precision:
        if not any(matches(name, (pattern,)) for name in names):
            raise ConfigError(f"keep_precision: '{pattern}' matches no linear layer; they are named like {names[0]}")


def _leave(section: SmoothingConfig, exclude: set[str]) -> Callable[[str], bool]:
    return lambda name: name in exclude or matches(name, section.keep_precision)


@torch.no_grad()
def _take_static_scales(model: Any, samples: Tensor, num_exempt: int) -> None:
    """Run the int8 model itself on text and keep the largest input of every product: quantise first, then observe."""
    scales = [module.input_scale for module in int8_modules(model)]
    for scale in scales:
        scale.recording, scale.num_exempt, scale.seen = True, num_exempt, []
    device = next(model.parameters()).device
    for sample in samples:
        model(input_ids=sample[None].to(device), use_cache=False)
    for scale in scales:
        scale.freeze()
