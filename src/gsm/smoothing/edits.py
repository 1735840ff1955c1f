"""A journal of every change made to a model, so that each of them can be taken back exactly.

Nothing is ever modified in place: a changed weight is a new tensor put in the place of the old one, and the old object
is kept until the journal ends. Undoing therefore restores the very same objects, whatever happened in between.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class Edits:
    """Records changes before making them. `undo` takes all of them back, last first; it may be called twice."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._log: list[tuple[Any, str, Any]] = []

    def __len__(self) -> int:
        return len(self._log)

    def set_parameter(self, path: str, tensor: torch.Tensor) -> None:
        """Put ``tensor`` in the place of the parameter at ``path`` of the model."""
        owner, name = self._locate(path)
        old = owner._parameters[name]
        new = nn.Parameter(tensor, requires_grad=False)
        self._swap(owner._parameters, name, old, new)

    def set_module(self, path: str, module: nn.Module) -> None:
        """Put ``module`` in the place of the sub-module at ``path`` of the model."""
        owner, name = self._locate(path)
        self._swap(owner._modules, name, owner._modules[name], module)

    def set_attribute(self, owner: Any, name: str, value: Any) -> None:
        """Set a plain attribute, for example of the model's config."""
        self._log.append((owner, name, getattr(owner, name)))
        setattr(owner, name, value)

    def undo(self) -> None:
        interrupt: KeyboardInterrupt | None = None
        while self._log:
            try:
                self._undo_last()
            except KeyboardInterrupt as error:  # finish first: a half-restored model is worse than a late answer
                interrupt = error
        if interrupt is not None:
            raise interrupt

    def _undo_last(self) -> None:
        """Restore the last entry; it leaves the log only afterwards, so that an interrupt cannot lose it."""
        owner, name, old = self._log[-1]
        if isinstance(owner, dict):
            owner[name] = old
        else:
            setattr(owner, name, old)
        self._log.pop()

    def commit(self) -> None:
        """Forget the old objects: the changes stay."""
        self._log.clear()

    def _swap(self, table: dict[str, Any], name: str, old: Any, new: Any) -> None:
        self._log.append((table, name, old))
        table[name] = new

    def _locate(self, path: str) -> tuple[nn.Module, str]:
        parent, _, name = path.rpartition(".")
        return self.model.get_submodule(parent), name
