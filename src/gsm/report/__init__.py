"""`gsm report`: one self-contained page from result files (docs/report.md)."""

from gsm.report.compose import compose
from gsm.report.page import Page
from gsm.report.write import FORMATS, write_report
from gsm.results.kinds import KINDS

__all__ = ["FORMATS", "KINDS", "Page", "compose", "write_report"]
