"""A fold: changes of weights that cancel each other, so that the model computes the same function with other numbers.

`channel` and `rotate` only describe their folds; this file carries them out and checks that the function is the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from gsm.errors import ModelError
from gsm.smoothing.edits import Edits
from gsm.smoothing.int8 import RotatedLinear

Change = Callable[[Tensor], Tensor]

MAX_LOGIT_CHANGE = 1e-3  # float32
MAX_RELATIVE_CHANGE = 0.1  # lower precisions round every folded weight again: the norm of the difference may be 10 %


@dataclass
class Fold:
    """Per parameter, the changes to make in order (each takes and returns float64); ``online`` rotations per module.

    ``sites`` says which sites are smoothed by this fold, ``left_out`` why others are not.
    """

    changes: dict[str, list[Change]] = field(default_factory=dict)
    online: dict[str, int] = field(default_factory=dict)
    untie: bool = False
    sites: list[str] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)

    def change(self, parameter: str, function: Change) -> None:
        self.changes.setdefault(parameter, []).append(function)


@torch.no_grad()
def apply_fold(edits: Edits, model: nn.Module, fold: Fold) -> None:
    """Put folded weights in the place of the originals. Every change is journalled in ``edits``."""
    if fold.untie:
        edits.set_attribute(model.config, "tie_word_embeddings", False)
    for path, functions in fold.changes.items():
        old = model.get_parameter(path)
        new = old.detach().double()
        for function in functions:
            new = function(new)
        if not bool(torch.isfinite(new).all()):
            raise ModelError(f"folding gave a value in {path} that is not finite; leave its site out of target_layers")
        edits.set_parameter(path, new.to(old.dtype).contiguous())
    for path, block in fold.online.items():
        edits.set_module(path, RotatedLinear(model.get_submodule(path), block))


class FunctionCheck:
    """Remembers a model's logits on a few tokens and says how far they are off later."""

    def __init__(self, model: nn.Module, ids: Tensor) -> None:
        self.model, self.ids = model, ids
        self.expected = self._logits()

    def require_same(self, what: str) -> float:
        """The largest difference of a logit; raises ModelError when the function has changed."""
        difference, same = compare_logits(self._logits(), self.expected, self.model)
        if not same:
            raise ModelError(
                f"{what} changed the model's logits by up to {difference:.2g}, more than rounding explains; this "
                "architecture has a path that folding does not know, so use int8 without it"
            )
        return difference

    @torch.no_grad()
    def _logits(self) -> Tensor:
        logits: Tensor = self.model(input_ids=self.ids, use_cache=False).logits
        return logits.double()


def compare_logits(logits: Tensor, expected: Tensor, model: nn.Module) -> tuple[float, bool]:
    """(largest difference, whether it is no more than rounding in the model's precision explains)."""
    delta = logits.double() - expected.double()
    largest = float(delta.abs().max())
    if next(model.parameters()).dtype in (torch.float32, torch.float64):
        return largest, largest <= MAX_LOGIT_CHANGE
    return largest, float(delta.norm() / expected.double().norm()) <= MAX_RELATIVE_CHANGE
