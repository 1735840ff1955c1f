"""How far an arm's next-token distribution is from the full cache's, on the same tokens.

After a prefill of N tokens the next tokens of the text are fed one per step, each on the decode path, whatever the
model would have said. The full cache gets a window in one pass: its logits are the same up to rounding, and half of the
time is saved. Every window of 128 such steps gives one mean KL(full || arm), one difference in negative
log-likelihood and one share of equal best tokens. One prefill serves several consecutive windows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from gsm.errors import InputError
from gsm.quality.sessions import Arm, Progress, Session, no_progress


@dataclass(frozen=True)
class WindowPlan:
    """Windows of teacher-forced tokens after a prefill of ``prompt_tokens``."""

    prompt_tokens: int
    num_windows: int = 16
    window_tokens: int = 128
    windows_per_prefill: int = 2

    @property
    def num_prefills(self) -> int:
        return -(-self.num_windows // self.windows_per_prefill)

    @property
    def fed_tokens(self) -> int:
        """Positions a prefill with its windows takes in the model's context."""
        return self.prompt_tokens + self.windows_per_prefill * self.window_tokens


@dataclass(frozen=True)
class WindowScore:
    """Means over one window's tokens; ``kl`` and ``nll_delta`` in nats."""

    kl: float
    nll_delta: float
    top1: float


def teacher_forced(
    reference: Arm, arms: Sequence[Arm], text_ids: torch.Tensor, plan: WindowPlan, progress: Progress = no_progress
) -> Iterator[tuple[str, list[WindowScore]]]:
    """Yield ``(arm name, scores of one prefill's windows)``, prefill by prefill, so that a caller may stop early.

    ``text_ids`` [num_tokens] is the evaluation text; prefills start at evenly spaced places, no token is scored twice.
    Only one prefill's reference logits are held: windows_per_prefill x window_tokens x vocab x 4 bytes.
    Raises InputError when the text is too short.
    """
    starts = _starts(len(text_ids), plan)
    total, done = len(starts) * (1 + len(arms)), 0
    for index, start in enumerate(starts):
        num_windows = min(plan.windows_per_prefill, plan.num_windows - index * plan.windows_per_prefill)
        num_steps = num_windows * plan.window_tokens
        tokens = text_ids[start : start + plan.prompt_tokens + num_steps + 1]
        prompt, forced = tokens[: plan.prompt_tokens], tokens[plan.prompt_tokens :]
        with reference.open() as session:
            expected = torch.stack([logits.cpu() for logits in _forced_logits(session, prompt, forced[:-1])])
        progress("quality: full cache", done := done + 1, total)
        for arm in arms:
            with arm.open() as session:
                rows = [
                    _compare(want, got.cpu(), target)
                    for want, got, target in zip(
                        expected, _forced_logits(session, prompt, forced[:-1]), forced[1:].tolist(), strict=True
                    )
                ]
            windows = torch.tensor(rows).unflatten(0, (num_windows, plan.window_tokens)).mean(1)
            yield arm.name, [WindowScore(*window) for window in windows.tolist()]
            progress(f"quality: {arm.name}", done := done + 1, total)


def _starts(num_text_tokens: int, plan: WindowPlan) -> list[int]:
    """Evenly spaced first tokens. Prompts may overlap; what is scored may not."""
    needed, scored = plan.fed_tokens + 1, plan.fed_tokens - plan.prompt_tokens
    room, count = num_text_tokens - needed, plan.num_prefills
    if room < 0 or (count > 1 and room // (count - 1) < scored):
        at_least = needed + (count - 1) * scored
        raise InputError(
            f"the evaluation text has {num_text_tokens} tokens, but {plan.num_windows} windows after "
            f"{plan.prompt_tokens} need {at_least}; give a longer text with --text, or fewer windows"
        )
    return [index * room // max(1, count - 1) for index in range(count)]


def _forced_logits(session: Session, prompt: torch.Tensor, forced: torch.Tensor) -> Iterator[torch.Tensor]:
    """The logits [vocab] after each forced token."""
    session.prefill(prompt[None])
    for token in forced:
        yield session.step(token.view(1, 1))[0]


def _compare(expected: torch.Tensor, got: torch.Tensor, target: int) -> tuple[float, float, float]:
    """(KL(expected || got), NLL difference, 1.0 if the best token is the same) of one position, in float64."""
    p, q = (torch.log_softmax(logits.double(), dim=-1) for logits in (expected, got))
    kl = (p.exp() * (p - q)).sum()
    return float(kl), float(p[target] - q[target]), float(p.argmax() == q.argmax())
