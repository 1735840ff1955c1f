"""Smoothing: find heavy-tailed activations, tame them without changing the function, and run in int8.

An engine that packs requests drives `WindowSmoothing` (in `Applied.window`) step by step: see docs/smoothing.md.
"""

from gsm.smoothing.calibration import Calibration, SiteStats, calibrate, cut_samples
from gsm.smoothing.context import Applied, apply, is_applied
from gsm.smoothing.select import Choice, choose_sites
from gsm.smoothing.window import Parameters, Span, StepContext, WindowSmoothing, parameters_for

__all__ = [
    "Applied",
    "Calibration",
    "Choice",
    "Parameters",
    "SiteStats",
    "Span",
    "StepContext",
    "WindowSmoothing",
    "apply",
    "calibrate",
    "choose_sites",
    "cut_samples",
    "is_applied",
    "parameters_for",
]
