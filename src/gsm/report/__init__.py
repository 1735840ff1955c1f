"""`gsm report`: one self-contained page from result files (docs/report.md)."""

from gsm.report.compose import compose
from gsm.report.files import KINDS
from gsm.report.page import Page
from gsm.report.write import FORMATS, write_report

__all__ = ["FORMATS", "KINDS", "Page", "compose", "write_report"]
