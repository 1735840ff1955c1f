"""Result records and their JSON: what a measurement found, where, and on which machine. No torch."""

from gsm.results.environment import collect_environment, load_average
from gsm.results.files import check_writable, read_result, read_text, write_result
from gsm.results.records import (
    ArmResult,
    BenchResult,
    Bound,
    Environment,
    EvalResult,
    GenerateResult,
    NeedlePair,
    Profile,
    Quality,
    Record,
    Samples,
    Spread,
    Tolerance,
    Workload,
)

__all__ = [
    "ArmResult",
    "BenchResult",
    "Bound",
    "Environment",
    "EvalResult",
    "GenerateResult",
    "NeedlePair",
    "Profile",
    "Quality",
    "Record",
    "Samples",
    "Spread",
    "Tolerance",
    "Workload",
    "check_writable",
    "collect_environment",
    "load_average",
    "read_result",
    "read_text",
    "write_result",
]
