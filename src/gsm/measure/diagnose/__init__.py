"""`gsm diagnose`: the source documents' trouble tables as a program (docs/diagnose.md)."""

from gsm.measure.diagnose.files import diagnose_files
from gsm.measure.diagnose.live import Diagnosis
from gsm.measure.diagnose.observe import Observation, Subject, observe
from gsm.measure.diagnose.record import CAUSES, Checked, DiagnoseResult, Finding
from gsm.measure.diagnose.run import DiagnoseSpec, diagnose_run

__all__ = [
    "CAUSES",
    "Checked",
    "DiagnoseResult",
    "DiagnoseSpec",
    "Diagnosis",
    "Finding",
    "Observation",
    "Subject",
    "diagnose_files",
    "diagnose_run",
    "observe",
]
