"""Where a decode step's time goes (`gsm bench --profile`, docs/probe.md)."""

from gsm.measure.profile.run import MAX_OTHER_SHARE, MAX_STEPS, MAX_SUM_ERROR, PARTS, Blocks, profile_session, summarise
from gsm.measure.profile.steps import BLOCK_STEPS, Stepper, synchroniser
from gsm.measure.profile.timer import SelfTimer

__all__ = [
    "BLOCK_STEPS",
    "MAX_OTHER_SHARE",
    "MAX_STEPS",
    "MAX_SUM_ERROR",
    "PARTS",
    "Blocks",
    "SelfTimer",
    "Stepper",
    "profile_session",
    "summarise",
    "synchroniser",
]
