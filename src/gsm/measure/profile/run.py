"""Profile one session: where a decode step's time goes.

Blocks of steps take turns: plain ones that say how long a step takes, timed ones that say where it goes, and, for
sparse attention, timed ones that read the same pages without choosing them: the fused kernel cannot be timed inside.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from gsm.integrations.transformers.timing import ATTENTION, HOST, Replay
from gsm.measure.profile.steps import BLOCK_STEPS, Stepper
from gsm.quality import ModelSession
from gsm.results import Profile, Spread
from gsm.stats import summary

PARTS = ("linear", "attention", "selection", "mass", "cache_writes", "smoothing", "host", "other")
MAX_SUM_ERROR, MAX_OTHER_SHARE = 0.05, 0.10  # beyond these a profile does not explain its step


@dataclass
class Blocks:
    """Seconds per step of plain blocks; seconds per step by label of timed ones and of those without choosing.

    Blocks of one kind are one round apart, those of different kinds in one round are neighbours in time.
    """

    plain_s: list[float] = field(default_factory=list)
    timed: list[dict[str, float]] = field(default_factory=list)
    replayed: list[dict[str, float]] = field(default_factory=list)

    def timed_to_plain(self) -> float:
        """How much longer a step takes with timers inside: the median ratio of neighbours, which drift together."""
        pairs = zip(self.timed, self.plain_s, strict=False)
        return _median([sum(timed.values()) / plain for timed, plain in pairs])

    def shares(self) -> dict[str, float]:
        """Share of a timed step by label, medians over blocks, made to sum to 1."""
        labels = {label for block in self.timed for label in block}
        shares = {
            label: _median([block.get(label, 0.0) / sum(block.values()) for block in self.timed]) for label in labels
        }
        total = sum(shares.values())
        return {label: share / total for label, share in shares.items()}

    def choosing_share(self) -> float:
        """Share of attention's time that goes into choosing pages: what a replay of the choice saves."""
        pairs = zip(self.timed, self.replayed, strict=False)
        saved = [1 - replayed.get(ATTENTION, 0.0) / timed[ATTENTION] for timed, replayed in pairs]
        return max(0.0, _median(saved)) if saved else 0.0


NUM_ROUNDS = 3
MAX_STEPS = BLOCK_STEPS * (2 + 3 * NUM_ROUNDS)  # how far past its prompt a profile decodes


def profile_session(session: ModelSession, token: torch.Tensor, num_rounds: int = NUM_ROUNDS) -> Profile:
    """Decode greedily from ``token`` [batch, 1] on a prefilled ``session`` and say where the time goes.

    Every round takes a plain and a timed block of 16 steps, with sparse attention one more; two blocks before them are
    thrown away.
    """
    context_tokens, stepper, replay, blocks = session.num_tokens, Stepper(session, token), Replay(), Blocks()
    stepper.plain_block()
    stepper.timed_block(replay)
    choosing = replay.is_ready
    for _ in range(num_rounds):
        seconds = stepper.plain_block()
        blocks.plain_s.append(sum(seconds) / len(seconds))
        blocks.timed.append(stepper.timed_block(replay))
        if choosing:
            replay.active = True
            blocks.replayed.append(stepper.timed_block(replay))
            replay.active = False
    return summarise(blocks, context_tokens)


def summarise(blocks: Blocks, context_tokens: int) -> Profile:
    """The record of some blocks, of which at least one is plain and one timed."""
    step_ms, ratio = 1e3 * _median(blocks.plain_s), blocks.timed_to_plain()
    by_label = {label: share * step_ms * ratio for label, share in blocks.shares().items()}
    host = {label.split(".", 1)[1]: ms for label, ms in by_label.items() if label.startswith(f"{HOST}.")}
    parts = {part: by_label.get(part, 0.0) for part in PARTS}
    parts[HOST] = sum(host.values())
    parts["selection"] = parts[ATTENTION] * blocks.choosing_share()
    parts[ATTENTION] -= parts["selection"]
    sum_error, other_share = ratio - 1, parts["other"] / step_ms
    return Profile(
        context_tokens=context_tokens,
        num_steps=BLOCK_STEPS * (len(blocks.plain_s) + len(blocks.timed) + len(blocks.replayed)),
        step_ms=Spread(**summary([1e3 * s for s in blocks.plain_s])),
        parts_ms=parts,
        host_parts_ms=dict(sorted(host.items(), key=lambda item: -item[1])),
        sum_ms=sum(parts.values()),
        sum_error=sum_error,
        other_share=other_share,
        explains_step=abs(sum_error) <= MAX_SUM_ERROR and other_share <= MAX_OTHER_SHARE,
    )


def _median(values: Sequence[float]) -> float:
    median = summary(values)["median"]
    assert median is not None
    return median
