"""Versions against ours and the documents' minimums, and whether optional back ends really load."""

from __future__ import annotations

import platform
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata

from gsm.measure.doctor.record import Check, Findings

_IMPORT_TIMEOUT_S = 120


@dataclass(frozen=True)
class Requirement:
    """A package GSM needs: our range, and the minimum that the documents behind GSM name."""

    package: str
    minimum: str
    below: str | None
    documents_minimum: str

    @property
    def remedy(self) -> str:
        upper = f",<{self.below}" if self.below else ""
        return f"pip install --upgrade '{self.package}>={self.minimum}{upper}'"


@dataclass(frozen=True)
class BackEnd:
    """An optional package: what to import, and what one needs it for."""

    package: str
    module: str
    purpose: str
    install: str


PYTHON_MINIMUM = "3.10"
REQUIREMENTS = (
    Requirement("torch", "2.6", None, "2.1"),
    Requirement("transformers", "5.16", "6", "4.40"),
)
BACK_ENDS = (
    BackEnd("accelerate", "accelerate", "device maps, GGUF and quantised weights", "pip install accelerate"),
    BackEnd("gguf", "gguf", ".gguf files", "pip install 'gsm-infer[gguf]'"),
    BackEnd("numba", "numba", "fused decode attention and linear layers on CPU", "pip install 'gsm-infer[cpu]'"),
    BackEnd("bitsandbytes", "bitsandbytes", "8-bit and 4-bit weights", "pip install bitsandbytes"),
    BackEnd("gptqmodel", "gptqmodel", "GPTQ and AWQ weights (follows auto-gptq)", "pip install gptqmodel"),
    BackEnd("torchao", "torchao", "torchao weights", "pip install torchao"),
    BackEnd("llama-cpp-python", "llama_cpp", "llama.cpp as an engine", "pip install llama-cpp-python"),
)

VersionOf = Callable[[str], str | None]  # package -> version, None if it is not installed
ErrorOf = Callable[[str], str | None]  # module -> why it does not import, None if it does


def installed_version(package: str) -> str | None:
    """Version of an installed distribution, or None."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def import_error(module: str) -> str | None:
    """Why ``module`` does not import, or None. A process of its own: a broken native library may end the process."""
    command = [sys.executable, "-c", f"import {module}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_IMPORT_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return f"no answer within {_IMPORT_TIMEOUT_S} s"
    if done.returncode == 0:
        return None
    lines = done.stderr.strip().splitlines()
    return lines[-1][:200] if lines else f"the process ended with code {done.returncode}"


def check_software(
    version_of: VersionOf = installed_version,
    import_error_of: ErrorOf = import_error,
    python: str | None = None,
) -> list[Check]:
    """Python, the packages we need and the optional ones. The arguments stand in for the machine in tests."""
    findings = Findings("software")
    _check_python(findings, python or platform.python_version())
    for requirement in REQUIREMENTS:
        _check_requirement(findings, requirement, version_of(requirement.package), import_error_of)
    for back_end in BACK_ENDS:
        _check_back_end(findings, back_end, version_of(back_end.package), import_error_of)
    return findings.checks


def _check_python(findings: Findings, version: str) -> None:
    if not at_least(version, PYTHON_MINIMUM):
        findings.problem(
            "Python", f"{version} is older than {PYTHON_MINIMUM}", f"install Python {PYTHON_MINIMUM} or newer"
        )
    else:
        findings.ok("Python", version)


def _check_requirement(findings: Findings, needed: Requirement, version: str | None, import_error_of: ErrorOf) -> None:
    if version is None:
        findings.problem(needed.package, "not installed", needed.remedy)
    elif not at_least(version, needed.minimum):
        documents = "meets" if at_least(version, needed.documents_minimum) else "is below"
        found = f"{version}, but GSM needs {needed.minimum} (it {documents} the documents' {needed.documents_minimum})"
        findings.problem(needed.package, found, needed.remedy)
    elif needed.below is not None and at_least(version, needed.below):
        findings.problem(needed.package, f"{version}, but GSM is tested below {needed.below}", needed.remedy)
    elif error := import_error_of(needed.package):
        findings.problem(needed.package, f"{version} does not load: {error}", f"{needed.remedy} --force-reinstall")
    else:
        findings.ok(needed.package, f"{version}, loads")


def _check_back_end(findings: Findings, back_end: BackEnd, version: str | None, import_error_of: ErrorOf) -> None:
    if version is None:
        findings.ok(back_end.package, "not installed", f"only for {back_end.purpose}: {back_end.install}")
        return
    error = import_error_of(back_end.module)
    if error is None:
        findings.ok(back_end.package, f"{version}, loads")
    else:
        remedy = f"reinstall it ({back_end.install} --force-reinstall), or remove it"
        findings.warning(back_end.package, f"{version} is installed but does not load: {error}", remedy)


def at_least(version: str, minimum: str) -> bool:
    """Whether ``version`` is ``minimum`` or newer, comparing the leading numbers ("2.13.0+cpu" is 2.13.0)."""
    return _numbers(version) >= _numbers(minimum)


def _numbers(version: str) -> tuple[int, ...]:
    match = re.match(r"\d+(?:\.\d+)*", version)
    parts = [int(part) for part in match.group().split(".")] if match else [0]
    return (*parts, 0, 0, 0)[:3]
