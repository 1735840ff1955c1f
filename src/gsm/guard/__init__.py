"""The guard: a paired quality test, lowering of strength, and roll-back of the modules that do the damage."""

from gsm.guard.guard import guarded, search
from gsm.guard.paired import PairedTest
from gsm.guard.records import Change, Outcome, Step, Verdict
from gsm.guard.rollback import find_culprits, smallest_retreat

__all__ = [
    "Change",
    "Outcome",
    "PairedTest",
    "Step",
    "Verdict",
    "find_culprits",
    "guarded",
    "search",
    "smallest_retreat",
]
