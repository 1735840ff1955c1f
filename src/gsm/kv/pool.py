"""Fixed-size units with reference counts; all bookkeeping is done by tensor operations.

Ownership, the one hard place of this package:

    stack   [0 .............. num_free)   ids nobody owns, the lowest on top
    refs    [capacity]                    owners per id; 0 exactly for the ids on the stack

`allocate` pops ids and sets their count to 1, `retain` adds an owner, `release` removes one and pushes the ids whose
count fell to 0. Fields are never cleared: whoever allocates a unit decides what must be in it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gsm.core.codec import Fields, FieldSpec
from gsm.errors import KVIntegrityError, OutOfPages


class UnitPool:
    """`capacity` units, each a row of every field. Grows by half when it is empty, up to `max_units`."""

    def __init__(self, spec: FieldSpec, device: torch.device, capacity: int, max_units: int | None = None) -> None:
        self._spec = spec
        self._max_units = max_units
        self.device = device
        self.capacity = 0
        self.num_free = 0
        self.fields: Fields = {name: torch.empty((0, *s), dtype=t, device=device) for name, (s, t) in spec.items()}
        self.refs = torch.empty(0, dtype=torch.int32, device=device)
        self._stack = torch.empty(0, dtype=torch.int32, device=device)
        self._grow_to(min(capacity, max_units) if max_units is not None else capacity)

    @property
    def num_used(self) -> int:
        return self.capacity - self.num_free

    @property
    def unit_bytes(self) -> int:
        """Bytes of one unit's fields, with its reference count and its place on the stack."""
        fields = sum(field[0].nbytes if len(field) else 0 for field in self.fields.values())
        return fields + self.refs.element_size() + self._stack.element_size()

    def can_allocate(self, num_units: int) -> bool:
        return self._max_units is None or num_units <= self.num_free + self._max_units - self.capacity

    def allocate(self, num_units: int) -> Tensor:
        """int64 ids `[num_units]`, each with one owner. Raises OutOfPages, in which case nothing changed."""
        if num_units > self.num_free:
            self._grow_by(num_units - self.num_free)
        ids = self._stack[self.num_free - num_units : self.num_free].flip(0).long()
        self.num_free -= num_units
        self.refs[ids] = 1
        return ids

    def retain(self, ids: Tensor) -> None:
        """Add one owner per occurrence in `ids` (int64)."""
        self.refs.index_add_(0, ids, torch.ones_like(ids, dtype=torch.int32))

    def release(self, ids: Tensor) -> Tensor:
        """Remove one owner per occurrence in `ids`; returns the distinct ids that are free now."""
        self.refs.index_add_(0, ids, torch.full_like(ids, -1, dtype=torch.int32))
        freed = ids[self.refs[ids] == 0].unique()
        self._stack[self.num_free : self.num_free + len(freed)] = freed.flip(0).int()
        self.num_free += len(freed)
        return freed

    def check(self, owners: Tensor, what: str) -> None:
        """Prove that unit i is owned `owners[i]` times (int64 `[capacity]`) and that the rest is free exactly once."""
        wrong = (owners != self.refs).nonzero().flatten()
        if len(wrong):
            unit = int(wrong[0])
            raise KVIntegrityError(
                f"{what} {unit} has {int(owners[unit])} owners but a count of {int(self.refs[unit])}; please report it"
            )
        on_stack = self._stack[: self.num_free].long()
        expected = (self.refs == 0).nonzero().flatten()
        if not torch.equal(on_stack.sort().values, expected):
            raise KVIntegrityError(
                f"the free list of {what} units does not hold exactly the free ones; please report it"
            )

    def _grow_by(self, num_units: int) -> None:
        wanted = self.capacity + num_units
        if self._max_units is not None and wanted > self._max_units:
            raise OutOfPages(
                f"{num_units} more pages are needed but the pool is limited to {self._max_units}; "
                "finish a request first, shorten the context, or raise the limit"
            )
        roomy = max(wanted, self.capacity + self.capacity // 2)
        self._grow_to(roomy if self._max_units is None else min(roomy, self._max_units))

    def _grow_to(self, capacity: int) -> None:
        """One field at a time, so that the peak exceeds the pool by its largest field only."""
        added = capacity - self.capacity
        for name in self._spec:
            self.fields[name] = _extended(self.fields[name], added)
        self.refs = _extended(self.refs, added)
        self.refs[self.capacity :] = 0
        new_ids = torch.arange(capacity - 1, self.capacity - 1, -1, dtype=torch.int32, device=self.device)
        stack = torch.empty(capacity, dtype=torch.int32, device=self.device)
        stack[: self.num_free] = self._stack[: self.num_free]
        stack[self.num_free : self.num_free + added] = new_ids
        self._stack = stack
        self.num_free += added
        self.capacity = capacity


def _extended(old: Tensor, added: int) -> Tensor:
    new = torch.empty((len(old) + added, *old.shape[1:]), dtype=old.dtype, device=old.device)
    new[: len(old)] = old
    return new
