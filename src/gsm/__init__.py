"""GSM: long-context generation made faster and smaller, with quality measured beside it."""

from __future__ import annotations

import importlib
from typing import Any

from gsm.errors import GsmError

__version__ = "0.1.0"

# Public names and where they live. They are imported on first use, so that `import gsm` is instant and touches
# neither torch nor transformers.
_PUBLIC = {
    "Cache": "gsm.integrations.transformers",
    "GsmConfig": "gsm.config",
    "attach": "gsm.integrations.transformers.levers",
    "load_config": "gsm.config",
    "load_model": "gsm.models",
}

__all__ = ["Cache", "GsmConfig", "GsmError", "attach", "load_config", "load_model"]


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(importlib.import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module 'gsm' has no attribute {name!r}")
