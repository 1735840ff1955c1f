"""Counters of the ranks as Prometheus text."""

from __future__ import annotations

from typing import Any

_HELP = {
    "steps": ("counter", "Forward passes of layers that see their whole past."),
    "sparse_steps": ("counter", "Of these, passes in which some request read a selection of pages."),
    "context_tokens": ("counter", "Context of the requests that read a selection, summed over steps."),
    "read_tokens": ("counter", "Tokens that one kv head of one layer read of it."),
    "summarised_blocks": ("counter", "Blocks whose keys were summarised."),
    "summary_bytes": ("gauge", "Memory of page summaries."),
}


def render(ranks: list[dict[str, Any]]) -> str:
    """`gsm:` metrics of all ranks, labelled by rank and data-parallel engine."""
    lines: list[str] = []
    for name, (kind, text) in _HELP.items():
        full = f"gsm:{name}" + ("_total" if kind == "counter" else "")
        lines += [f"# HELP {full} {text}", f"# TYPE {full} {kind}"]
        lines += [f"{full}{_labels(rank)} {rank['counters'][name]}" for rank in ranks]
    lines += ["# HELP gsm:config_epoch Configs this rank has worked by.", "# TYPE gsm:config_epoch gauge"]
    lines += [f"gsm:config_epoch{_labels(rank)} {rank['epoch']}" for rank in ranks]
    return "\n".join(lines) + "\n"


def _labels(rank: dict[str, Any]) -> str:
    return f'{{engine="{rank["data_parallel_rank"]}",rank="{rank["rank"]}"}}'
