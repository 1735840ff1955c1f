"""Findings. `ok`: nothing to do; `warning`: works, but slower or narrower; `problem`: will not work."""

from __future__ import annotations

from typing import Literal

from gsm.results import Record

Status = Literal["ok", "warning", "problem"]


class Check(Record):
    """One finding; ``remedy`` is empty only where there is nothing to do."""

    section: str
    name: str
    status: Status
    found: str
    remedy: str = ""


class DoctorResult(Record):
    """`gsm doctor`: all findings. ``passed`` is False as soon as one is a problem."""

    model: str | None
    checks: tuple[Check, ...]
    passed: bool


class Findings:
    """Collects the checks of one section."""

    def __init__(self, section: str) -> None:
        self.section = section
        self.checks: list[Check] = []

    def ok(self, name: str, found: str, remedy: str = "") -> None:
        self._add(name, "ok", found, remedy)

    def warning(self, name: str, found: str, remedy: str) -> None:
        self._add(name, "warning", found, remedy)

    def problem(self, name: str, found: str, remedy: str) -> None:
        self._add(name, "problem", found, remedy)

    def _add(self, name: str, status: Status, found: str, remedy: str) -> None:
        self.checks.append(Check(section=self.section, name=name, status=status, found=found, remedy=remedy))
