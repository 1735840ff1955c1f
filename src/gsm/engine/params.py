"""How one request is sampled: frozen and checked, so that an engine never meets an impossible one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from gsm.errors import InputError

MAX_LOGPROBS = 20
MAX_CHOICES = 16
_LARGEST_SEED = 2**63 - 1


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Names follow OpenAI's API and vLLM. `temperature` 0 is greedy; `top_k` 0 and `min_p` 0 are off.

    `logprobs` is the number of alternatives reported beside each token (0: only the token's own; None: nothing).
    Raises InputError for a value outside its range.
    """

    max_tokens: int = 128
    min_tokens: int = 0
    n: int = 1
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None

    def __post_init__(self) -> None:
        _check("max_tokens", self.max_tokens, 1, None)
        _check("min_tokens", self.min_tokens, 0, self.max_tokens)
        _check("n", self.n, 1, MAX_CHOICES)
        _check("temperature", self.temperature, 0.0, 10.0)
        _check("top_p", self.top_p, 1e-6, 1.0)
        _check("top_k", self.top_k, 0, None)
        _check("min_p", self.min_p, 0.0, 1.0)
        _check("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _check("repetition_penalty", self.repetition_penalty, 0.01, 100.0)
        if self.logprobs is not None:
            _check("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        if self.seed is not None:
            _check("seed", self.seed, -_LARGEST_SEED, _LARGEST_SEED)
        if any(not text for text in self.stop):
            raise InputError("stop holds an empty text, which would stop everything at once; leave it out")

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def changes_logits(self) -> bool:
        """Whether anything but the temperature acts on the logits before a token is picked."""
        penalties = self.presence_penalty, self.frequency_penalty, self.repetition_penalty - 1.0
        return any(penalties) or bool(self.logit_bias) or self.min_tokens > 0


def _check(name: str, value: float, low: float, high: float | None) -> None:
    if not (value >= low and (high is None or value <= high)):  # a NaN fails too
        bounds = f"between {low:g} and {high:g}" if high is not None else f"at least {low:g}"
        raise InputError(f"{name} is {value}; it must be {bounds}")
