"""Read a model's config without its weights."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gsm.errors import ModelError
from gsm.models.checkpoint import WEIGHT_INDEXES, read_checkpoint, read_config_json
from gsm.models.gguf import converted_directory
from gsm.models.quiet import quiet_transformers
from gsm.models.sources import DEMO, cache_directory, demo_gguf_path, is_hub_id, unknown_source


@dataclass(frozen=True)
class ModelConfig:
    """A config and what the files beside it say. The counts are None where there are no weights to look at."""

    name: str
    config: dict[str, Any]
    num_parameters: int | None = None
    num_file_bytes: int | None = None

    @property
    def quantised(self) -> bool:
        return bool(self.config.get("quantization_config"))


def read_model_config(source: str | Path) -> ModelConfig:
    """The config of a directory, a config.json, a .gguf file, "demo" or a hub id (of which config.json is fetched).

    Nothing is converted and no weights are needed. Raises ModelError.
    """
    text = str(source)
    path = demo_gguf_path() if text == DEMO else Path(text).expanduser()
    if path.suffix == ".gguf" and path.is_file():
        return _from_gguf(path)
    if path.is_dir():
        return _from_directory(path)
    if path.is_file():
        return ModelConfig(path.resolve().parent.name, read_config_json(path))
    if is_hub_id(text):
        return ModelConfig(text, _from_hub(text))
    raise ModelError(unknown_source(text))


def _from_directory(path: Path) -> ModelConfig:
    name = path.resolve().name
    has_weights = any(path.glob("*.safetensors")) or any((path / index).is_file() for index in WEIGHT_INDEXES)
    if not has_weights:
        return ModelConfig(name, read_config_json(path))
    checkpoint = read_checkpoint(path)
    quantised = bool(checkpoint.config.get("quantization_config"))  # packed elements are not parameters
    count = None if quantised else checkpoint.num_elements or None
    return ModelConfig(name, checkpoint.config, count, checkpoint.num_bytes)


def _from_gguf(path: Path) -> ModelConfig:
    converted = converted_directory(path, cache_directory())
    if converted.is_dir():
        checkpoint = read_checkpoint(converted)
        return ModelConfig(path.stem, checkpoint.config, checkpoint.num_elements)
    from transformers import PretrainedConfig

    try:
        with quiet_transformers():
            config, _ = PretrainedConfig.get_config_dict(path.parent, gguf_file=path.name, local_files_only=True)
    except Exception as error:  # transformers and gguf raise many kinds for a file they cannot read
        raise ModelError(f"the metadata of {path} cannot be read ({error}); is it complete?") from None
    return ModelConfig(path.stem, config)


def _from_hub(name: str) -> dict[str, Any]:
    from huggingface_hub import hf_hub_download

    try:
        file = hf_hub_download(name, "config.json")
        config: dict[str, Any] = json.loads(Path(file).read_text(encoding="utf-8"))
    except Exception as error:  # offline, not found, gated: huggingface_hub has an error class for each
        reason = str(error).strip().splitlines()[0][:160] if str(error).strip() else type(error).__name__
        raise ModelError(f"the config of {name} cannot be fetched ({reason}); give a local config.json") from None
    return config
