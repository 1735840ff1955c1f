"""`gsm serve`: the engine behind OpenAI's HTTP API."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gsm.cli.common import engine_option, model_options

if TYPE_CHECKING:
    from gsm.config import GsmConfig
    from gsm.serve.settings import ServeSettings


@click.command(short_help="Serve a model through OpenAI's HTTP API.")
@model_options
@click.option("--host", default="127.0.0.1", show_default=True)
@click.option("--port", type=click.IntRange(0, 65535), default=8000, show_default=True)
@click.option("--config", metavar="FILE", help="Config file (watched), or a preset such as sparse.  [default: tiers]")
@click.option("--model-name", help="Name that clients use.  [default: the model's own]")
@click.option("--kv-memory-mib", type=float, help="Most KV memory.  [default: half of what is free]")
@click.option("--max-running", type=click.IntRange(min=1), help="Choices that run at a time.  [default: 32]")
@click.option("--max-waiting", type=click.IntRange(min=0), help="Requests that may wait; more get 429.  [default: 256]")
@click.option("--draft-tokens", type=click.IntRange(0, 15), help="Guesses of prompt lookup per step.  [default: 0]")
@click.option("--prefix-dir", metavar="DIR", help="Keep prefix pages here across restarts.")
@click.option("--api-key-env", metavar="VARIABLE", help="Environment variable with API keys, separated by commas.")
@click.option("--api-key-file", type=click.Path(path_type=Path), help="File with one API key a line.")
@click.option(
    "--admin-key-env", metavar="VARIABLE", help="The same with admin keys: opens /admin and the page's buttons."
)
@click.option("--admin-key-file", type=click.Path(path_type=Path), help="File with one admin key a line.")
@click.option("--state-file", type=click.Path(path_type=Path), help="Last good config.  [default: beside --config]")
@click.option("--max-body-mib", default=8.0, show_default=True)
@click.option("--max-prompt-tokens", type=click.IntRange(min=1), help="Longest prompt.  [default: the model's window]")
@click.option("--max-request-s", default=600.0, show_default=True, help="Longest time of one request.")
@engine_option
@click.argument("engine_arguments", nargs=-1, type=click.UNPROCESSED)
def command(
    model: str,
    dtype: str,
    threads: int | None,
    device: str,
    host: str,
    port: int,
    config: str | None,
    model_name: str | None,
    prefix_dir: str | None,
    api_key_env: str | None,
    api_key_file: Path | None,
    admin_key_env: str | None,
    admin_key_file: Path | None,
    state_file: Path | None,
    max_body_mib: float,
    max_prompt_tokens: int | None,
    max_request_s: float,
    kv_memory_mib: float | None,
    max_running: int | None,
    max_waiting: int | None,
    draft_tokens: int | None,
    engine: str,
    engine_arguments: tuple[str, ...],
) -> None:
    """Serve MODEL through OpenAI's HTTP API, with continuous batching and prefix reuse.

    \b
    gsm serve demo
    gsm serve demo --config sparse --prefix-dir ~/.cache/gsm/prefix
    gsm serve demo --config sparse --engine vllm -- --tensor-parallel-size 3
    """
    limits = {
        "kv_memory_mib": kv_memory_mib,
        "max_running": max_running,
        "max_waiting": max_waiting,
        "draft_tokens": draft_tokens,
    }
    keys = _keys(api_key_env, api_key_file, "--api-key-env")
    admin_keys = _keys(admin_key_env, admin_key_file, "--admin-key-env")
    if engine == "vllm":
        same = {"host": host, "port": port, "dtype": dtype, "device": device, "threads": threads, "api_keys": keys}
        return _serve_vllm(model, config, engine_arguments, limits, model_name=model_name, **same)
    if engine_arguments:
        raise click.UsageError(f"unexpected argument {engine_arguments[0]!r}; only --engine vllm takes more arguments")
    from gsm.config.presets import PRESETS
    from gsm.models import load_model
    from gsm.serve.run import serve
    from gsm.serve.settings import ServeSettings

    path = Path(config) if config is not None and config not in PRESETS else None
    state_path = state_file or (path.with_name(f"{path.name}.state.json") if path is not None else None)

    def read() -> GsmConfig:
        return _config(config, {name: value for name, value in limits.items() if value is not None})

    if state_path is None or not state_path.exists():
        read()  # what is wrong is told before the model is loaded
    click.echo(f"loading {model} ...", err=True)
    loaded = load_model(model, dtype=dtype, threads=threads, device=device)
    told = ServeSettings(
        model_name or loaded.name,
        keys,
        int(max_body_mib * 2**20),
        max_prompt_tokens,
        max_request_s,
        admin_keys=admin_keys,
    )
    _announce(told, host, port)
    serve(loaded, read, told, host=host, port=port, prefix_dir=prefix_dir, config_path=path, state_path=state_path)


def _serve_vllm(model: str, config: str | None, extra: tuple[str, ...], limits: dict[str, Any], **told: Any) -> None:
    """Become vLLM's server. What rules our own engine alone is refused rather than ignored."""
    from gsm.errors import ConfigError
    from gsm.integrations.vllm.launch import ServeOptions, serve
    from gsm.models.sources import resolve_source

    ours = [name for name in ("max_waiting", "draft_tokens") if limits[name] is not None]
    if ours:
        raise ConfigError(f"--{ours[0].replace('_', '-')} rules GSM's own engine; give vLLM's own options after --")
    name = told.pop("model_name") or Path(model).name
    memory, running = limits["kv_memory_mib"], limits["max_running"]
    options = ServeOptions(model_name=name, kv_memory_mib=memory, max_running=running, extra=extra, **told)
    serve(str(resolve_source(model)), _config(config, {}), options)


def _keys(variable: str | None, file: Path | None, option: str) -> tuple[str, ...]:
    from gsm.errors import ConfigError
    from gsm.serve.settings import read_keys

    keys: tuple[str, ...] = ()
    if variable is not None:
        if not os.environ.get(variable):
            raise ConfigError(f"{option} names {variable}, which is not set; export it first")
        keys += read_keys(os.environ[variable].split(","))
    if file is not None:
        try:
            keys += read_keys(file.read_text(encoding="utf-8").splitlines())
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"the key file {file} cannot be read: {error}") from None
        if not keys:
            raise ConfigError(f"the key file {file} holds no key; write one a line, or leave the option out")
    return keys


def _config(source: str | None, limits: dict[str, float]) -> GsmConfig:
    """The config file or preset, with the limits of the command line laid over its engine section."""
    from gsm.config import load_config
    from gsm.config.presets import PRESETS

    base = load_config({"cache": {"preset": source}} if source in PRESETS else source)
    if not limits:
        return base
    values = base.model_dump(exclude_unset=True)
    return load_config({**values, "engine": {**values.get("engine", {}), **limits}})


def _announce(told: ServeSettings, host: str, port: int) -> None:
    """Where it listens, and what everybody should know who opened it to a network."""
    keys = f"{len(told.api_keys)} API keys" if told.api_keys else "no API key"
    admin = f", {len(told.admin_keys)} admin keys" if told.admin_keys else ""
    click.echo(f"serving {told.model_name} on http://{host}:{port} ({keys}{admin})", err=True)
    if not told.api_keys and host not in ("127.0.0.1", "::1", "localhost"):
        click.echo("warning: anybody who reaches this address may use it; set --api-key-env", err=True)
