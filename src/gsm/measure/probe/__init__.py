"""`gsm probe`: is it the cache? What bounds a request on this machine, and what would help (docs/probe.md)."""

from gsm.measure.probe.picture import draw, sparkline
from gsm.measure.probe.record import Growth, Lever, ProbeResult, Shares, Verdict
from gsm.measure.probe.run import probe
from gsm.measure.probe.spec import DEFAULT_LEVERS, ProbeSpec
from gsm.measure.probe.verdict import Evidence, judge, request_shares, step_parts

__all__ = [
    "DEFAULT_LEVERS",
    "Evidence",
    "Growth",
    "Lever",
    "ProbeResult",
    "ProbeSpec",
    "Shares",
    "Verdict",
    "draw",
    "judge",
    "probe",
    "request_shares",
    "sparkline",
    "step_parts",
]
