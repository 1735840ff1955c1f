"""Several ways to decode, timed in turns of a second or less, so that a slow minute of the machine hits all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass

import torch

import gsm.integrations.transformers as hf
from gsm.measure.profile import Stepper
from gsm.quality import GsmArm, ModelSession, PlainArm
from gsm.stats import summary

ROUNDS = 6
_STEPS = 8  # of one turn
_WARM_UP_STEPS = 4
_NOISE_TOKEN = 1
LEVER_STEPS = _WARM_UP_STEPS + ROUNDS * _STEPS  # how far a contender decodes past its length


@dataclass(frozen=True)
class Contender:
    """An arm and what fills its cache: ``fill(session)`` returns the next token, int64 [batch, 1]."""

    arm: PlainArm | GsmArm
    fill: Callable[[ModelSession], torch.Tensor]


def with_noise(arm: PlainArm | GsmArm, num_tokens: int, batch_size: int = 1) -> Contender:
    """``arm`` on a cache of ``num_tokens`` random tokens per sequence."""
    kv = hf.observe_kv(arm.model, batch_size)

    def fill(session: ModelSession) -> torch.Tensor:
        hf.fill_with_noise(session.cache, kv, num_tokens)
        return torch.full((batch_size, 1), _NOISE_TOKEN, device=arm.model.device)

    return Contender(arm, fill)


def with_text(arm: PlainArm | GsmArm, prompt: torch.Tensor) -> Contender:
    """``arm`` after a prefill of ``prompt`` [batch, n]."""
    return Contender(arm, lambda session: session.prefill(prompt).argmax(-1, keepdim=True))


def take_turns(contenders: Sequence[Contender], rounds: int = ROUNDS) -> list[list[float]]:
    """Milliseconds per step of every contender, one figure (the turn's median step) per round."""
    turns: list[list[float]] = [[] for _ in contenders]
    with ExitStack() as stack:
        steppers = []
        for contender in contenders:
            session = stack.enter_context(closing(contender.arm.start()))
            with contender.arm.running():
                stepper = Stepper(session, contender.fill(session))
                stepper.plain_block(_WARM_UP_STEPS)
            steppers.append(stepper)
        for _ in range(rounds):
            for index, (contender, stepper) in enumerate(zip(contenders, steppers, strict=True)):
                with contender.arm.running():
                    turns[index].append(1e3 * _median(stepper.plain_block(_STEPS)))
    return turns


def gain(plain_ms: Sequence[float], other_ms: Sequence[float]) -> float:
    """How many times as fast the other is: the median over rounds of what neighbours in time say."""
    return _median([a / b for a, b in zip(plain_ms, other_ms, strict=True)])


def _median(values: Sequence[float]) -> float:
    median = summary(values)["median"]
    assert median is not None
    return median
