"""`examine`: the sections in order. A later section runs even if an earlier one found problems."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from gsm.measure.doctor.devices import check_devices
from gsm.measure.doctor.record import Check, DoctorResult, Findings
from gsm.measure.doctor.software import check_software


def examine(
    model: str | Path | None = None, *, dtype: str | None = None, progress: Callable[[str], None] = lambda _: None
) -> DoctorResult:
    """Check software and devices, and ``model`` (any source of `gsm.models`) if one is given. Loads no weights.

    ``dtype`` is the precision the model will be loaded in (default: its own). ``progress`` is told what is looked at.
    """
    checks: list[Check] = []
    progress("software")
    checks += check_software()
    progress("devices")
    checks += check_devices()
    if model is not None:
        progress(f"model {model}")
        checks += _check_model(model, dtype)
    passed = all(check.status != "problem" for check in checks)
    return DoctorResult(model=str(model) if model is not None else None, checks=tuple(checks), passed=passed)


def _check_model(model: str | Path, dtype: str | None) -> list[Check]:
    """The model section, which needs torch and transformers; without them, the reason why it is missing."""
    try:
        from gsm.measure.doctor.model import check_model
    except ImportError as error:
        findings = Findings("model")
        findings.problem("files", f"not looked at, because {error}", "mend the software first")
        return findings.checks
    return check_model(model, dtype)
