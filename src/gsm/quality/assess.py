"""One quality record per arm: teacher-forced windows and needles, paired with the full cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch

from gsm.errors import InputError
from gsm.quality.needles import CASES, NeedleOutcome, NeedlePlan, needles
from gsm.quality.sessions import Arm, Progress, no_progress
from gsm.quality.teacher_forced import WindowPlan, WindowScore, teacher_forced
from gsm.results import NeedlePair, Quality
from gsm.stats import bootstrap_mean_ci, mean

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MIN_WINDOWS = 16  # fewer are an impression, not a bar
MIN_REFERENCE_SHARE = 0.8  # a needle test that the full cache fails says nothing about an arm


@dataclass(frozen=True)
class QualityPlan:
    """How much to measure. ``windows`` or ``needles`` may be None: not measured, reported as such."""

    windows: WindowPlan | None
    needles: NeedlePlan | None

    @classmethod
    def make(
        cls,
        prompt_tokens: int,
        *,
        num_windows: int = MIN_WINDOWS,
        window_tokens: int = 128,
        windows_per_prefill: int = 2,
        needles_per_depth: int = 10,
        max_positions: int = 0,
        seed: int = 0,
    ) -> QualityPlan:
        """Windows and needles after ``prompt_tokens``; 0 of either leaves it out.

        ``max_positions`` is the model's trained window (0: unknown). Fewer windows share a prefill where they would
        leave it; InputError when not even one fits.
        """
        windows = WindowPlan(prompt_tokens, num_windows, window_tokens)
        if max_positions:
            windows_per_prefill = min(windows_per_prefill, (max_positions - prompt_tokens) // window_tokens)
        windows = replace(windows, windows_per_prefill=max(1, windows_per_prefill))
        hidden = NeedlePlan(prompt_tokens, needles_per_depth, seed=seed)
        plan = cls(windows if num_windows else None, hidden if needles_per_depth else None)
        if 0 < max_positions < plan.fed_tokens:
            longest = max_positions - (plan.fed_tokens - prompt_tokens)
            raise InputError(
                f"measuring quality after {prompt_tokens} tokens takes {plan.fed_tokens} positions, but the model was "
                f"trained for {max_positions}; use a prompt of at most {longest}"
            )
        return plan

    @property
    def fed_tokens(self) -> int:
        """The most positions that any part of the plan takes in the model's context."""
        return max((part.fed_tokens for part in (self.windows, self.needles) if part), default=0)


@dataclass
class Assessment:
    """Runs a plan; `results` can be asked at any time and uses what is complete, so an interrupt loses nothing."""

    reference: Arm
    arms: Sequence[Arm]
    tokenizer: PreTrainedTokenizerBase
    text_ids: torch.Tensor
    plan: QualityPlan
    progress: Progress = no_progress
    _windows: dict[str, list[WindowScore]] = field(default_factory=dict)
    _needles: list[dict[str, NeedleOutcome]] = field(default_factory=list)

    def run(self) -> None:
        if self.plan.windows and self.arms:
            scores = teacher_forced(self.reference, self.arms, self.text_ids, self.plan.windows, self.progress)
            for name, windows in scores:
                self._windows.setdefault(name, []).extend(windows)
        if self.plan.needles:
            everyone = [self.reference, *self.arms]
            for outcome in needles(everyone, self.tokenizer, self.text_ids, self.plan.needles, self.progress):
                self._needles.append(outcome)

    @property
    def has_results(self) -> bool:
        """Whether a window or a needle of every arm is complete."""
        return bool(self._needles) or (bool(self._windows) and len(self._windows) == len(self.arms))

    def results(self) -> dict[str, Quality]:
        """Quality by arm name, the reference included: by definition it is 0 away from itself."""
        window_tokens = self.plan.windows.window_tokens if self.plan.windows else None
        by_arm = {arm.name: self._windows.get(arm.name, []) for arm in self.arms}
        records = {name: self._record(name, scores, window_tokens) for name, scores in by_arm.items()}
        zero = WindowScore(kl=0.0, nll_delta=0.0, top1=1.0)
        longest = max((len(scores) for scores in by_arm.values()), default=0)
        itself = self._record(self.reference.name, [zero] * longest, window_tokens)
        return {self.reference.name: itself, **records}

    def _record(self, name: str, scores: list[WindowScore], window_tokens: int | None) -> Quality:
        pairs = {case: self._pair(name, case) for case in CASES}
        asked = max((pair.asked for pair in pairs.values() if pair), default=0)
        interval = bootstrap_mean_ci([s.kl for s in scores]) if len(scores) > 1 else None
        return Quality(
            nll_delta=mean(s.nll_delta for s in scores),
            kl=mean(s.kl for s in scores),
            kl_ci95=(interval.low, interval.high) if interval else None,
            top1_agreement=mean(s.top1 for s in scores),
            needle_prefill=_share(pairs["prefill"]),
            needle_late=_share(pairs["late"]),
            n_windows=len(scores),
            n_needles=asked,
            window_tokens=window_tokens,
            prefill_pair=pairs["prefill"],
            late_pair=pairs["late"],
            notes=tuple(_notes(scores, pairs)),
        )

    def _pair(self, name: str, case: str) -> NeedlePair | None:
        full = [found for outcome in self._needles for found in outcome[self.reference.name].found[case]]
        own = [found for outcome in self._needles for found in outcome[name].found[case]]
        return NeedlePair.of(full, own) if full else None


def _share(pair: NeedlePair | None) -> float | None:
    return pair.found / pair.asked if pair else None


def _notes(scores: list[WindowScore], pairs: dict[str, NeedlePair | None]) -> list[str]:
    notes = []
    if 0 < len(scores) < MIN_WINDOWS:
        notes.append(f"few windows ({len(scores)}): an impression, not a bar ({MIN_WINDOWS} are needed)")
    for case, pair in pairs.items():
        if pair and pair.reference_found < MIN_REFERENCE_SHARE * pair.asked:
            notes.append(
                f"the full cache itself finds only {pair.reference_found} of {pair.asked} needles ({case}): "
                "they say little about this arm"
            )
    return notes
