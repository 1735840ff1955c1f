"""One file per subject: from a result's JSON to a section of the page. What is missing is left out."""

from __future__ import annotations

from collections.abc import Callable

from gsm.report.page import Section
from gsm.report.sections.bench import bench_section
from gsm.report.sections.cache import explain_section, plan_section
from gsm.report.sections.checks import diagnose_section, doctor_section, eval_section, generate_section
from gsm.report.sections.load import load_section
from gsm.report.sections.probe import probe_section
from gsm.report.sections.smoothing import calibrate_section, smooth_arms_section, smooth_section
from gsm.report.sections.tune import tune_section
from gsm.results.kinds import ResultFile

BUILDERS: dict[str, Callable[[ResultFile], Section]] = {
    "bench": bench_section,
    "eval": eval_section,
    "probe": probe_section,
    "tune": tune_section,
    "smooth": smooth_section,
    "smooth_arms": smooth_arms_section,
    "calibrate": calibrate_section,
    "load": load_section,
    "explain": explain_section,
    "plan": plan_section,
    "diagnose": diagnose_section,
    "generate": generate_section,
    "doctor": doctor_section,
}
