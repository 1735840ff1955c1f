"""Write a smoothed model as an ordinary checkpoint: the folds are in the weights, so any engine loads it as it is."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gsm.errors import ConfigError, InputError, ModelError
from gsm.smoothing.fold import compare_logits
from gsm.smoothing.int8 import RotatedLinear, int8_modules

NOTES_FILE = "gsm_smoothing.json"


def check_target(directory: str | Path) -> Path:
    """Raise InputError now, rather than after a long run, if ``directory`` cannot become a checkpoint."""
    target = Path(directory)
    if target.is_file():
        raise InputError(f"{target} is a file; name a folder for the checkpoint")
    if target.is_dir() and any(target.iterdir()):
        raise InputError(f"folder {target} is not empty; name a new one, nothing is overwritten")
    if not target.absolute().parent.is_dir():
        raise InputError(f"folder {target.absolute().parent} does not exist; create it first")
    return target


@torch.no_grad()
def export_checkpoint(model: Any, tokenizer: Any, directory: str | Path, notes: dict[str, Any], ids: Tensor) -> float:
    """Save ``model``, folded by `apply` and not in int8, to ``directory``; returns the largest difference of a logit.

    The checkpoint is loaded back with plain transformers and must give the same logits on ``ids`` [1, n] before it
    appears under its name. Raises ConfigError for a model that has parts a checkpoint cannot hold.
    """
    target = check_target(directory)
    if int8_modules(model) or any(isinstance(module, RotatedLinear) for module in model.modules()):
        raise ConfigError(
            "a checkpoint holds plain weights only: export with int8: off and online_rotation: false, and let the "
            "engine that loads it quantise"
        )
    partial = target.absolute().with_name(f".{target.name}.{os.getpid()}.part")
    try:
        model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        (partial / NOTES_FILE).write_text(json.dumps(notes, indent=2) + "\n", encoding="utf-8")
        difference = _difference(model, partial, ids)
        if target.is_dir():
            target.rmdir()  # known to be empty; os.replace needs it gone on some systems
        os.replace(partial, target)
    except OSError as error:
        raise InputError(f"the checkpoint cannot be written to {target}: {error}") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return difference


def _difference(model: Any, directory: Path, ids: Tensor) -> float:
    again = type(model).from_pretrained(directory, dtype=model.dtype).eval().to(model.device)
    expected = model(input_ids=ids, use_cache=False).logits
    difference, same = compare_logits(again(input_ids=ids, use_cache=False).logits, expected, model)
    if not same:
        raise ModelError(
            f"the exported checkpoint answers differently (by {difference:.2g} in a logit); nothing is kept"
        )
    return difference
