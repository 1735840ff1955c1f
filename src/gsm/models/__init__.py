"""Find and load a model: a directory, a hub id, a .gguf file, or the word "demo"."""

from gsm.models.config import ModelConfig, read_model_config
from gsm.models.load import LoadedModel, load_model, load_tokenizer
from gsm.models.parameters import count_parameters
from gsm.models.sources import cache_directory, demo_gguf_path, resolve_source

__all__ = [
    "LoadedModel",
    "ModelConfig",
    "cache_directory",
    "count_parameters",
    "demo_gguf_path",
    "load_model",
    "load_tokenizer",
    "read_model_config",
    "resolve_source",
]
