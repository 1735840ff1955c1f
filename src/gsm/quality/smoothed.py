"""An arm whose model is smoothed and runs in int8 while its sessions are open."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from gsm.config.smoothing import SmoothingConfig
from gsm.models import LoadedModel
from gsm.quality.sessions import Arm, Session
from gsm.quality.texts import TextThirds, encode
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
        config = self.config
        observed = config.enable and config.method != "rotate"
        if self._samples is not None or not (observed or config.int8 == "static"):
            return
        ids = encode(self.loaded.tokenizer, self._text.calibration)
        self._samples = cut_samples(ids, min(config.calibration_samples, _SAMPLES), config.sample_tokens)
        if observed:
            self._calibration = calibrate(self.loaded.model, self._samples)
