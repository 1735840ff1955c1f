"""Answer quality of any way to run a model, against its full cache: KL, log-likelihood, best tokens, needles."""

from gsm.quality.assess import MIN_WINDOWS, Assessment, QualityPlan
from gsm.quality.needles import NeedleOutcome, NeedlePlan, needles
from gsm.quality.sessions import (
    Arm,
    GsmArm,
    ModelSession,
    PlainArm,
    Progress,
    Session,
    SessionStats,
    no_progress,
    score_by_steps,
)
from gsm.quality.smoothed import SmoothedArm, calibration_samples
from gsm.quality.teacher_forced import WindowPlan, WindowScore, teacher_forced
from gsm.quality.texts import TextThirds, encode, load_thirds

__all__ = [
    "MIN_WINDOWS",
    "Arm",
    "Assessment",
    "GsmArm",
    "ModelSession",
    "NeedleOutcome",
    "NeedlePlan",
    "PlainArm",
    "Progress",
    "QualityPlan",
    "Session",
    "SessionStats",
    "SmoothedArm",
    "TextThirds",
    "WindowPlan",
    "WindowScore",
    "calibration_samples",
    "encode",
    "load_thirds",
    "needles",
    "no_progress",
    "score_by_steps",
    "teacher_forced",
]
