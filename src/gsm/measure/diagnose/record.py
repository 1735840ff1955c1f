"""What a diagnosis says: causes by name, with the evidence and the remedy, and everything that was checked."""

from __future__ import annotations

from typing import Any

from gsm.results import Environment, Record


class Finding(Record):
    """One cause. ``advice``: nothing is broken, but something else would help more."""

    cause: str
    symptom: str
    evidence: str
    remedy: str
    advice: bool = False


class Checked(Record):
    """One question that was asked, and the answer, whether or not something was wrong."""

    what: str
    found: str


class DiagnoseResult(Record):
    """`gsm diagnose`: the findings, the strongest first."""

    environment: Environment | None = None
    config: dict[str, Any] | None = None
    sources: tuple[str, ...] = ()
    findings: tuple[Finding, ...] = ()
    checked: tuple[Checked, ...] = ()
    notes: tuple[str, ...] = ()


# The rows of the two source documents' trouble tables, and what belongs beside them: cause -> (symptom, remedy).
CAUSES: dict[str, tuple[str, str]] = {
    "key-tokens-evicted": (
        "repetition, or answers that lost something",
        "lower the threshold (or raise warm_size, hot_size), or keep everything with cold: keep",
    ),
    "budget-too-small": ("answers that lost something", "raise sparse.budget_tokens, or attend everything"),
    "positions-misaligned": (
        "broken output, sudden changes of subject",
        "let the cache count: pass no position_ids of your own, and report get_seq_length as the logical length",
    ),
    "statistics-too-large": (
        "memory rises",
        "lower observation_window, use mass_decay, or a page_size of 16 instead of single tokens",
    ),
    "tables-too-large": ("memory rises", "raise page_size: tables and summaries are paid per page"),
    "hot-zone-too-large": ("memory does not fall", "lower hot_size: what is hot is not compressed"),
    "double-compression": (
        "inf, NaN or wrong answers",
        "compress once: set warm.codec: none and keep eviction only, or turn the framework's own KV compression off",
    ),
    "codec-too-coarse": ("wrong answers", "use warm.codec: int8 (or none) instead of int4"),
    "codec-overflow": ("inf or NaN", "set warm.codec: none; the values leave the codec's range"),
    "model-not-finite": ("inf or NaN", "the model itself does it: load it in float32 or bfloat16"),
    "smoothing-precision": ("inf or NaN", "raise smoothing.precision to fp32"),
    "over-smoothing": ("fluent but wrong answers", "lower smooth_strength, or leave the named modules out"),
    "smoothing-overhead": (
        "throughput does not rise",
        "smooth fewer layers or none: it costs what it gains",
    ),
    "window-too-large": ("latency rises", "lower window_size"),
    "window-not-relative": ("quality varies with batch size", "set window_size: auto (length / 16), or short_request"),
    "batch-leak": ("quality varies with batch size", "please report it: a request must not depend on its neighbours"),
    "bottleneck-elsewhere": ("no gain", "the cache is not what a step waits for: see `gsm probe` for what is"),
    "budget-covers-everything": ("no gain", "lower sparse.budget_tokens, or use a longer context"),
    "working-memory": ("memory rises", "at this length plain transformers needs less; use tiers for longer contexts"),
    "repetition": ("the model says the same again and again", "compare with `gsm eval`; try the full cache first"),
    "not-explained": ("something is wrong that no rule explains", "run `gsm explain` and compare with the full cache"),
    "noisy-measurement": ("figures that cannot be trusted", "measure again on a quiet machine"),
    "requests-failed": ("requests fail", "see the failures in the result; fix those before reading latencies"),
}


def finding(cause: str, evidence: str, advice: bool = False, remedy: str | None = None) -> Finding:
    """A finding with the table's symptom and, unless a better one is known, its remedy."""
    symptom, usual = CAUSES[cause]
    return Finding(cause=cause, symptom=symptom, evidence=evidence, remedy=remedy or usual, advice=advice)
