"""Smoothing: find heavy-tailed activations, tame them without changing the function, and run in int8."""

from gsm.smoothing.calibration import Calibration, SiteStats, calibrate, cut_samples
from gsm.smoothing.context import Applied, apply
from gsm.smoothing.select import Choice, choose_sites

__all__ = ["Applied", "Calibration", "Choice", "SiteStats", "apply", "calibrate", "choose_sites", "cut_samples"]
