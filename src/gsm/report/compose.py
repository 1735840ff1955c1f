"""From result files to a page: a section per file, curves over several of a kind, and the verdicts that open it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

from gsm.errors import InputError
from gsm.report.page import Page, Verdict
from gsm.report.sections import BUILDERS
from gsm.report.sections.bench import bench_verdicts, lengths_section
from gsm.report.sections.cache import explain_verdicts, plan_verdicts
from gsm.report.sections.checks import diagnose_verdicts, doctor_verdicts, eval_verdicts, no_verdicts
from gsm.report.sections.load import load_verdicts
from gsm.report.sections.probe import probe_verdicts
from gsm.report.sections.smoothing import calibrate_verdicts, smooth_arms_verdicts, smooth_verdicts
from gsm.report.sections.tune import tune_verdicts
from gsm.results.kinds import ResultFile, read_known

T = TypeVar("T")

_VERDICTS: dict[str, Callable[[ResultFile], list[Verdict]]] = {
    "bench": bench_verdicts,
    "eval": eval_verdicts,
    "probe": probe_verdicts,
    "tune": tune_verdicts,
    "smooth": smooth_verdicts,
    "calibrate": calibrate_verdicts,
    "load": load_verdicts,
    "explain": explain_verdicts,
    "plan": plan_verdicts,
    "diagnose": diagnose_verdicts,
    "smooth_arms": smooth_arms_verdicts,
    "generate": no_verdicts,
    "doctor": doctor_verdicts,
}
_ORDER = tuple(BUILDERS)


def compose(paths: Iterable[str | Path], title: str | None = None, made_by: str = "") -> Page:
    """The page of all ``paths``; a JSON file of another kind is named and left out.

    Raises InputError for a file that cannot be read or is damaged, and when none is a result.
    """
    results, unknown = _read(list(paths))
    models = dict.fromkeys(_model(result) for result in results)
    subject = ", ".join(filter(None, models)) or "results"
    page = Page(title or subject, made_by=made_by)
    benches = [result for result in results if result.kind == "bench"]
    ordered = sorted(results, key=lambda result: (_ORDER.index(result.kind), _length(result)))
    together = _checked(benches[0], lambda _: lengths_section(benches)) if benches else None
    if together is not None:
        page.sections.append(together)
    for result in ordered:
        page.verdicts += _checked(result, _VERDICTS[result.kind])
        page.sections.append(_checked(result, BUILDERS[result.kind]))
    for name in unknown:
        page.verdicts.append(Verdict("warn", f"Left out: {name} is no result that a report knows.", name))
    titles = Counter(section.title for section in page.sections)
    for section in page.sections:
        if titles[section.title] > 1:
            section.title += f" · {Path(section.sources[0]).stem}"
    for section in page.sections:  # a verdict is said once, at the top
        section.blocks = [block for block in section.blocks if not isinstance(block, Verdict)]
    return page


def _read(paths: list[str | Path]) -> tuple[list[ResultFile], list[str]]:
    results: list[ResultFile] = []
    unknown: list[str] = []
    for path in paths:
        known, others = read_known(Path(path), strict=len(paths) == 1)
        results += known
        unknown += others
    if not results:
        raise InputError("no result was given; name result files, for example benchmarks/results/*.json")
    return results, unknown


def _checked(result: ResultFile, read: Callable[[ResultFile], T]) -> T:
    """``read(result)``; what a damaged file makes it raise becomes one sentence."""
    try:
        return read(result)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, ZeroDivisionError) as error:
        what = f"{type(error).__name__}: {error}"
        raise InputError(f"{result.name} looks like a result of gsm {result.kind} but is damaged ({what})") from None


def _model(result: ResultFile) -> str:
    environment = result.data.get("environment") or {}
    return str(environment.get("model") or result.data.get("model") or "")


def _length(result: ResultFile) -> int:
    return int((result.data.get("workload") or {}).get("prompt_tokens") or 0)
