"""An arm whose model is smoothed and runs in int8 while its sessions are open."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from gsm.config.smoothing import SmoothingConfig
from gsm.models import LoadedModel
from gsm.quality.sessions import Arm, Session
from gsm.quality.texts import TextThirds, encode, load_thirds
from gsm.smoothing import Calibration, apply, calibrate, cut_samples

_SAMPLES = 128  # calibration samples at most: a benchmark repeats, `gsm smooth` is thorough


class SmoothedArm:
    """``arm`` on its model as ``config`` smooths it; the model is the original again between sessions.

    Calibration, where the method needs it, reads the calibration third of ``text`` and happens once.
    """

    def __init__(self, arm: Arm, loaded: LoadedModel, config: SmoothingConfig, text: TextThirds):
        self.arm, self.loaded, self.config = arm, loaded, config
        self._text = text
        self._samples: torch.Tensor | None = None
        self._calibration: Calibration | None = None
        self._held = False

    @property
    def name(self) -> str:
        return self.arm.name

    @contextmanager
    def open(self) -> Iterator[Session]:
        with self.hold(), self.arm.open() as session:
            yield session

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Keep the model smoothed across sessions, for a process that runs nothing else."""
        if self._held:
            yield
            return
        self._calibrate()
        with apply(self.loaded.model, self.config, samples=self._samples, calibration=self._calibration):
            self._held = True
            try:
                yield
            finally:
                self._held = False

    def _calibrate(self) -> None:
        if self._samples is None:
            self._samples = calibration_samples(self.loaded, self.config, self._text, _SAMPLES)
            if self._samples is not None and _is_observed(self.config):
                self._calibration = calibrate(self.loaded.model, self._samples)


def calibration_samples(
    loaded: LoadedModel, config: SmoothingConfig, text: TextThirds | None = None, at_most: int | None = None
) -> torch.Tensor | None:
    """Token ids [n, tokens] of the calibration third for a section that learns from text; None for one that does not.

    ``text`` is our own by default; ``at_most`` bounds n below what the section asks for.
    """
    if not (_is_observed(config) or config.int8 == "static"):
        return None
    ids = encode(loaded.tokenizer, (text or load_thirds()).calibration)
    wanted = config.calibration_samples if at_most is None else min(config.calibration_samples, at_most)
    return cut_samples(ids, wanted, config.sample_tokens)


def _is_observed(config: SmoothingConfig) -> bool:
    return config.enable and config.method != "rotate"
