"""A plan as tables for the terminal."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from gsm.measure.plan.record import PlanResult
from gsm.models.sizes import format_bytes


def render_plan(result: PlanResult, console: Console) -> None:
    """Print ``result``: what a token costs, where the memory goes, what fits, what a step reads, and the verdict."""
    count = f", {result.num_parameters / 1e9:.3g} B parameters" if result.num_parameters else ""
    window = f", trained for {result.max_position_embeddings:,} tokens" if result.max_position_embeddings else ""
    console.print(f"[bold]{result.model}[/bold] ({result.model_type}{count}{window}); KV in {result.dtype}")
    console.print(_kinds(result))
    console.print(_memory(result))
    console.print(_capacities(result))
    if result.steps:
        console.print(_steps(result))
    console.print(f"[bold]Verdict.[/bold] {result.verdict}")
    if result.recommended is not None:
        console.print(f"Start with: {_yaml(result)}", highlight=False)
    for note in result.notes:
        console.print(f"[dim]{note}[/dim]")


def _table(title: str, *columns: str) -> Table:
    """First column left, the others right."""
    table = Table(title=title, title_justify="left", title_style="bold")
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right")
    return table


def _kinds(result: PlanResult) -> Table:
    table = _table("Cache per sequence, plain transformers", "layers", "formula", "bytes per token", _at(result))
    for row in result.kinds:
        table.add_row(
            f"{row.num_layers} {row.kind}",
            row.formula,
            f"{row.bytes_per_token:,.0f}",
            format_bytes(row.bytes_at_context),
        )
    total = sum(row.bytes_at_context for row in result.kinds)
    table.add_section()
    table.add_row("all", "", f"{result.kv_bytes_per_token:,.0f}", format_bytes(total))
    return table


def _memory(result: PlanResult) -> Table:
    table = _table("Memory", "", "bytes", "from")
    table.add_row("memory", format_bytes(result.memory_bytes), result.memory_from)
    weights = format_bytes(result.weight_bytes) if result.weight_bytes is not None else "n/a"
    table.add_row("- weights", weights, result.weights_from)
    table.add_row("- reserve", format_bytes(result.reserve_bytes), result.reserve_from)
    if result.activation_bytes is not None:
        table.add_row("  of it activations", format_bytes(result.activation_bytes), "one prefill chunk, estimated")
    budget = result.kv_budget_bytes
    table.add_section()
    table.add_row("= for the cache", format_bytes(budget), f"{budget / 1e9:.2f} GB = {budget / 2**30:.2f} GiB")
    return table


def _capacities(result: PlanResult) -> Table:
    columns = ("cache", "bytes per token", _at(result), "of it summaries + tables", "tokens that fit", "sequences")
    table = _table(f"What fits in {format_bytes(result.kv_budget_bytes)}", *columns)
    for row in result.capacities:
        overhead = row.parts.summaries + row.parts.tables + row.parts.statistics
        share = f"{overhead / row.bytes_at_context:.1%}" if row.bytes_at_context else "n/a"
        table.add_row(
            row.name,
            f"{row.bytes_per_token:,.0f}",
            format_bytes(row.bytes_at_context),
            share,
            "no limit" if row.max_tokens is None else f"{row.max_tokens:,}",
            "n/a" if row.max_sequences is None else f"{row.max_sequences:,}",
        )
    return table


def _steps(result: PlanResult) -> Table:
    columns = ("context", "weights read", "KV read", "KV share", "sparse reads", "at most", "batched")
    table = _table("Bytes of one decode step, one sequence", *columns)
    for step in result.steps:
        table.add_row(
            f"{step.context_tokens:,}",
            format_bytes(step.weight_bytes),
            format_bytes(step.kv_bytes),
            f"{step.kv_share:.0%}",
            format_bytes(step.sparse_kv_bytes),
            f"{step.max_gain:.2f} x",
            "" if step.max_gain_batched is None else f"{step.max_gain_batched:.2f} x",
        )
    return table


def _at(result: PlanResult) -> str:
    return f"at {result.context_tokens:,}"


def _yaml(result: PlanResult) -> str:
    import yaml

    return str(yaml.safe_dump(result.recommended, default_flow_style=True, sort_keys=False)).strip()
