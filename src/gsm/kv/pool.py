"""Fixed-size units with reference counts; all bookkeeping is done by tensor operations.

Ownership, the one hard place of this package:

    stack   [0 .............. num_free)   ids nobody owns, the lowest on top
    refs    [capacity]                    owners per id; 0 exactly for the ids on the stack

`allocate` pops ids and sets their count to 1, `retain` adds an owner, `release` removes one and pushes the ids whose
count fell to 0. Fields are never cleared: whoever allocates a unit decides what must be in it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gsm.core.codec import Fields, FieldSpec
from gsm.core.memory import advise_huge_pages
from gsm.errors import KVIntegrityError, OutOfPages


class UnitPool:
    """`capacity` units, each a row of every field. Grows by half when it is empty, up to `max_units`."""

    def __init__(self, spec: FieldSpec, device: torch.device, capacity: int, max_units: int | None = None) -> None:
        self._spec = spec
        self._max_units = max_units
        self.device = device
        self.capacity = 0
        self.num_free = 0
        self.fields: Fields = {name: lasting((0, *s), t, device) for name, (s, t) in spec.items()}
        self.refs = lasting((0,), torch.int32, device)
        self._stack = lasting((0,), torch.int32, device)
        self._grow_to(min(capacity, max_units) if max_units is not None else capacity)

    @property
    def num_used(self) -> int:
        return self.capacity - self.num_free

    @property
    def unit_bytes(self) -> int:
        """Bytes of one unit's fields, with its reference count and its place on the stack."""
        fields = sum(math.prod(shape) * dtype.itemsize for shape, dtype in self._spec.values())
        return fields + self.refs.element_size() + self._stack.element_size()

    def can_allocate(self, num_units: int) -> bool:
        """Whether `num_units` fit under the limit; asking changes nothing."""
        return self._max_units is None or num_units <= self.num_free + self._max_units - self.capacity

    def limit(self, max_units: int | None) -> None:
        """Never grow beyond `max_units` from now on; what is in use stays."""
        self._max_units = max_units

    def reserve(self, num_units: int) -> None:
        """Make sure that `allocate(num_units)` cannot fail. Raises OutOfPages, in which case nothing changed."""
        if num_units > self.num_free:
            self._grow_by(num_units - self.num_free)

    def allocate(self, num_units: int) -> Tensor:
        """int64 ids `[num_units]`, each with one owner. Raises OutOfPages, in which case nothing changed."""
        self.reserve(num_units)
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
        try:
            self._grow_to(roomy if self._max_units is None else min(roomy, self._max_units))
        except (MemoryError, RuntimeError) as error:  # torch reports a failed allocation as RuntimeError
            raise OutOfPages(
                f"no memory on {self.device} for {num_units} more pages ({num_units * self.unit_bytes} bytes); shorten "
                "the context, or choose int4 or int8 warm pages, a smaller hot_size, or cold: drop"
            ) from error

    def _grow_to(self, capacity: int) -> None:
        """One field at a time, so that the peak exceeds the pool by its largest field only."""
        added = capacity - self.capacity
        for name in self._spec:
            self.fields[name] = _extended(self.fields[name], self.capacity, capacity)
        self.refs = _extended(self.refs, self.capacity, capacity)
        self.refs[self.capacity :] = 0
        new_ids = torch.arange(capacity - 1, self.capacity - 1, -1, dtype=torch.int32, device=self.device)
        stack = lasting((capacity,), torch.int32, self.device)
        stack[: self.num_free] = self._stack[: self.num_free]
        stack[self.num_free : self.num_free + added] = new_ids
        self._stack = stack
        self.num_free += added
        self.capacity = capacity


def _extended(old: Tensor, used: int, capacity: int) -> Tensor:
    new = lasting((capacity, *old.shape[1:]), old.dtype, old.device)
    new[:used] = old[:used]
    return new


def lasting(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """An uninitialised tensor that may be written outside `torch.inference_mode` too, wherever it was made."""
    with torch.inference_mode(False):
        tensor = torch.empty(shape, dtype=dtype, device=device)
    if device.type == "cpu":
        advise_huge_pages(tensor.data_ptr(), tensor.numel() * tensor.element_size())
    return tensor
