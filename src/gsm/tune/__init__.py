"""`gsm tune`: a config proven on the user's own text, one variable at a time (docs/tune.md)."""

from gsm.tune.bout import BoutPlan
from gsm.tune.ladder import TASKS
from gsm.tune.records import TuneResult
from gsm.tune.run import TuneSpec, tune
from gsm.tune.write import write_proposal

__all__ = ["TASKS", "BoutPlan", "TuneResult", "TuneSpec", "tune", "write_proposal"]
