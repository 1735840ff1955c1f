"""A page to a file, complete or not at all; the name's ending decides the format."""

from __future__ import annotations

import os
from pathlib import Path

from gsm.errors import InputError
from gsm.report.html import render_html
from gsm.report.markdown import render_markdown
from gsm.report.page import Page

FORMATS = {".html": render_html, ".htm": render_html, ".md": render_markdown}


def write_report(path: str | Path, page: Page) -> None:
    """Write ``page``. Raises InputError for an unknown ending or a place that cannot be written to."""
    target = Path(path)
    render = FORMATS.get(target.suffix.lower())
    if render is None:
        raise InputError(f"a report ends in {', '.join(FORMATS)}, not '{target.suffix}'; choose one of them")
    write_text(target, render(page))


def write_text(path: str | Path, text: str) -> None:
    """Write a text file, complete or not at all. Raises InputError."""
    target = Path(path)
    partial = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, target)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise InputError(f"the report cannot be written to {target}: {error.strerror}; choose another place") from None
