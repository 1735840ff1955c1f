"""The smoothing section: which method tames heavy-tailed activations, how strongly, and what turns it into speed.

`enable` switches a smoothing method on; `int8` chooses the arithmetic and stands on its own, so that plain int8 can be
compared with smoothed int8. Caps follow the source document: strength at most 0.3, window 4 to 16.
"""

from __future__ import annotations

import difflib
from typing import Literal, get_args

from pydantic import Field, ValidationInfo, field_validator, model_validator

from gsm.config.section import Section

MethodName = Literal["window", "channel", "rotate"]
Int8Mode = Literal["off", "weight_only", "dynamic", "static"]
LayerChoice = Literal["auto", "high_kurtosis", "sensitivity", "all"]
PrecisionName = Literal["fp32", "bf16", "fp16"]

_WORDS = {"target_layers": get_args(LayerChoice), "window_size": ("auto",), "alpha": ("search",)}

MAX_STRENGTH, MIN_WINDOW, MAX_WINDOW = 0.3, 4, 16
UNSAFE_MAX_WINDOW = 512  # what `allow_unsafe` allows: every request keeps this many rows per smoothed module


class ShortRequest(Section):
    """Requests whose prompt and answer together stay within ``max_tokens`` are exempt, or get their own parameters.

    The window is empty at the start of a request, so short requests are changed most and gain least.
    """

    max_tokens: int = Field(default=64, ge=0)
    action: Literal["off", "own"] = "off"
    window_size: int = Field(default=MIN_WINDOW, ge=1)
    smooth_strength: float = Field(default=0.05, ge=0.0, le=1.0)


class GuardConfig(Section):
    """When a smoothed model counts as good enough, measured on the same tokens before and after."""

    tolerance: float = Field(default=0.01, gt=0.0, description="largest accepted relative rise of the perplexity")
    short_tolerance: float = Field(default=0.03, gt=0.0, description="the same on sequences of at most 32 tokens")
    max_kl: float | None = Field(default=None, gt=0.0, description="largest accepted mean KL, nats per token")
    search_tokens: int = Field(default=4096, ge=256, description="evaluation tokens while searching for culprits")
    final_tokens: int = Field(default=16384, ge=256, description="evaluation tokens of the verdict")
    strength_steps: int = Field(default=2, ge=0, description="how often the strength is halved before roll-back")


class SmoothingConfig(Section):
    """Smoothing of activations and low-precision execution (SPEC S)."""

    enable: bool = False
    method: MethodName = "rotate"
    window_size: int | Literal["auto"] = 8
    smooth_strength: float = Field(default=0.1, ge=0.0, le=1.0)
    target_layers: LayerChoice | tuple[str, ...] = "auto"  # auto: high_kurtosis for window, all sites otherwise
    precision: PrecisionName = "bf16"
    calibration_samples: int = Field(default=512, ge=1)
    sample_tokens: int = Field(default=256, ge=2)
    skip_sink: bool = True
    warmup: Literal["skip", "partial"] = "skip"
    short_request: ShortRequest = ShortRequest()
    allow_unsafe: bool = False
    alpha: float | Literal["search"] = "search"
    online_rotation: bool = True
    int8: Int8Mode = "off"
    int8_lm_head: bool = True
    keep_precision: tuple[str, ...] = ()
    guard: GuardConfig = GuardConfig()

    @field_validator("target_layers", "window_size", "alpha", mode="before")
    @classmethod
    def _known_word(cls, value: object, info: ValidationInfo) -> object:
        """Answer a misspelt word with one sentence instead of one per member of the union."""
        words = _WORDS[str(info.field_name)]
        if not isinstance(value, str) or value in words:
            return value
        if info.field_name == "target_layers" and any(sign in value for sign in "*."):
            return (value,)  # a single pattern may be written without the list
        near = difflib.get_close_matches(value, words, n=1)
        hint = f"did you mean '{near[0]}'?" if near else f"known words: {', '.join(words)}"
        raise ValueError(f"'{value}' is unknown; {hint}")

    @model_validator(mode="after")
    def _caps(self) -> SmoothingConfig:
        if isinstance(self.alpha, float) and not 0.0 <= self.alpha <= 1.0:
            raise ValueError(f"alpha is {self.alpha}; it lies between 0 and 1, or is 'search'")
        self._check_window(self.window_size, self.smooth_strength, "")
        if self.short_request.action == "own":
            short = self.short_request
            self._check_window(short.window_size, short.smooth_strength, "short_request.")
        if isinstance(self.target_layers, tuple) and not self.target_layers:
            raise ValueError("target_layers is an empty list; name at least one module, or set enable: false")
        return self

    def _check_window(self, window: int | str, strength: float, where: str) -> None:
        if isinstance(window, int) and not 1 <= window <= UNSAFE_MAX_WINDOW:
            raise ValueError(f"{where}window_size is {window}; a window holds 1 to {UNSAFE_MAX_WINDOW} tokens")
        if self.allow_unsafe:
            return
        if strength > MAX_STRENGTH:
            raise ValueError(
                f"{where}smooth_strength is {strength}, above {MAX_STRENGTH}, where answers are known to go wrong "
                "without any error; lower it, or set allow_unsafe: true"
            )
        if isinstance(window, int) and not MIN_WINDOW <= window <= MAX_WINDOW:
            raise ValueError(
                f"{where}window_size is {window}; it lies between {MIN_WINDOW} and {MAX_WINDOW}, or is 'auto'; "
                "set allow_unsafe: true for any other"
            )

    @property
    def active(self) -> bool:
        """Whether this section changes a model at all."""
        return self.enable or self.int8 != "off"

    @property
    def is_windowed(self) -> bool:
        """Whether it acts at run time, on the past of each request."""
        return self.enable and self.method == "window"

    @property
    def is_folded(self) -> bool:
        """Whether it changes weights before the first token."""
        return self.enable and self.method != "window"

    def window_for(self, num_tokens: int) -> int:
        """The window of a request expected to reach ``num_tokens``: length / 16, at least 4, capped unless unsafe."""
        if isinstance(self.window_size, int):
            return self.window_size
        return min(max(MIN_WINDOW, num_tokens // 16), UNSAFE_MAX_WINDOW if self.allow_unsafe else MAX_WINDOW)
