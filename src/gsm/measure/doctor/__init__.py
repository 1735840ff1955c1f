"""Is this machine, this software and this model ready? Every finding comes with its remedy."""

from gsm.measure.doctor.checkup import examine
from gsm.measure.doctor.record import Check, DoctorResult
from gsm.measure.doctor.render import render_doctor

__all__ = ["Check", "DoctorResult", "examine", "render_doctor"]
