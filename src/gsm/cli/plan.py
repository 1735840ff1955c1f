"""`gsm plan`: what fits and how fast it can get, from a config or a few numbers."""

from __future__ import annotations

import click


@click.command(short_help="What fits in memory and what tiers can gain, from a config alone.")
@click.argument("model", required=False)
@click.option("--layers", type=int, help="Instead of MODEL: decoder layers.")
@click.option("--kv-heads", type=int, help="Key/value heads per layer.")
@click.option("--head-dim", type=int, help="Channels per head.")
@click.option("--query-heads", type=int, help="Query heads per layer (default: as many as kv heads).")
@click.option("--sliding-layers", type=int, default=0, help="Layers that see only --window tokens.")
@click.option("--window", type=int, help="Window of the sliding layers.")
@click.option("--dtype", help="Precision of keys and values (default: the config's, or float16).")
@click.option("--memory", help="Memory to plan for, such as 24GB or 24GiB (default: what is free here).")
@click.option("--weights", help="Size of the weights (default: counted from the files or the config).")
@click.option("--reserve", help="Memory kept for everything else (default: 20 % of the weights).")
@click.option("--context", type=click.IntRange(min=1), help="Context to plan for (default: the window, at most 32768).")
@click.option("--config", "config_file", help="A GSM config to plan for, instead of int8 and int4 tiers.")
@click.option("--json", "json_file", metavar="FILE", help="Write the plan to FILE.")
def command(
    model: str | None,
    layers: int | None,
    kv_heads: int | None,
    head_dim: int | None,
    query_heads: int | None,
    sliding_layers: int,
    window: int | None,
    dtype: str | None,
    memory: str | None,
    weights: str | None,
    reserve: str | None,
    context: int | None,
    config_file: str | None,
    json_file: str | None,
) -> None:
    """What fits in memory and what tiers can gain, from a config alone.

    MODEL is a config.json, a model directory, a .gguf file, a hub id or the word demo. No weights are read.
    """
    from rich.console import Console

    from gsm.config import load_config
    from gsm.errors import InputError
    from gsm.measure.plan import PlannedModel, arch_from_numbers, make_plan, parse_bytes, plan_model, render_plan
    from gsm.models.memory import default_memory
    from gsm.models.sizes import parse_dtype
    from gsm.results import check_writable, write_result

    if json_file:
        check_writable(json_file)
    dtype = parse_dtype(dtype) if dtype else None
    settings = load_config(config_file) if config_file else None
    if model is not None and layers is None:
        with Console(stderr=True).status(f"reading the config of {model}"):
            planned = plan_model(model, dtype)
    elif model is None and layers is not None and kv_heads is not None and head_dim is not None:
        arch = arch_from_numbers(
            layers=layers,
            kv_heads=kv_heads,
            head_dim=head_dim,
            query_heads=query_heads,
            sliding_layers=sliding_layers,
            window=window,
        )
        planned = PlannedModel(
            "A decoder of these numbers", arch, dtype or "float16", None, None, "not known; give --weights"
        )
    else:
        raise InputError("gsm plan needs either MODEL or all of --layers, --kv-heads and --head-dim")
    if weights is not None:
        planned = planned.with_weights(parse_bytes(weights))
    memory_bytes, memory_from = (parse_bytes(memory), "as given") if memory else default_memory()
    result = make_plan(
        planned,
        memory_bytes=memory_bytes,
        memory_from=memory_from,
        reserve_bytes=parse_bytes(reserve) if reserve is not None else None,
        context_tokens=context,
        config=settings,
    )
    render_plan(result, Console())
    if json_file:
        write_result(json_file, result)
