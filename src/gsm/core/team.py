"""Run compiled CPU code on the threads that torch already has.

A second pool of OpenMP threads (numba's own) fights with torch's for the cores: after each of its operations torch's
threads go on spinning for a while. With another program on one of two cores a kernel was seen to take eighty times as
long. So a kernel is entered through the very OpenMP library that torch has loaded. Where that is not GNU's or Intel's
(both offer `GOMP_parallel`), it runs on the calling thread.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic


def run_team(function: int, argument: int) -> None:
    """Call the C function at address `function` with the address `argument`, at once on every thread torch may use.

    Returns when all have returned. The function itself divides the work, for instance with `add_to`.
    """
    threads = torch.get_num_threads()
    fork = _fork_function() if threads > 1 else None
    if fork is None:
        run_alone(function, argument)
    else:
        fork(function, argument, threads, 0)


def run_alone(function: int, argument: int) -> None:
    """The same on the calling thread only."""
    _single(function)(argument)


@lru_cache(maxsize=64)
def _single(function: int) -> Callable[[int], None]:
    return ctypes.CFUNCTYPE(None, ctypes.c_void_p)(function)


@lru_cache(maxsize=1)
def _fork_function() -> Callable[[int, int, int, int], None] | None:
    """`GOMP_parallel(function, argument, threads, flags)` of torch's own OpenMP library."""
    for name in ("libgomp", "libiomp5"):
        for path in _loaded_libraries(name):
            fork = getattr(ctypes.CDLL(path), "GOMP_parallel", None)
            if fork is not None:
                fork.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
                fork.restype = None
                return fork
    return None


def _loaded_libraries(name: str) -> list[str]:
    """Paths of loaded libraries of that name, those that came with torch first."""
    maps = Path("/proc/self/maps")
    if not maps.exists():  # not Linux
        return []
    paths = {line.split()[-1] for line in maps.read_text().splitlines() if f"/{name}" in line}
    home = str(Path(torch.__file__).parent)
    return sorted(paths, key=lambda path: (not path.startswith(home), path))


@intrinsic
def pointer(typingctx, address):
    """An int64 address as a pointer, for `numba.carray`."""

    def codegen(context, builder, signature, args):
        return builder.inttoptr(args[0], context.get_value_type(types.voidptr))

    return types.voidptr(types.int64), codegen


@intrinsic
def add_to(typingctx, address, amount):
    """Add `amount` to the int64 at `address` and return what was there, in one indivisible step."""

    def codegen(context, builder, signature, args):
        place = builder.inttoptr(args[0], ir.IntType(64).as_pointer())
        return builder.atomic_rmw("add", place, args[1], "seq_cst")

    return types.int64(types.int64, types.int64), codegen


@intrinsic
def prefetch(typingctx, address):
    """Ask for the cache line at `address`, to be read soon."""

    def codegen(context, builder, signature, args):
        byte, number = ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [byte, number, number, number])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8")
        read, keep, data = (ir.Constant(number, value) for value in (0, 3, 1))
        builder.call(function, [builder.inttoptr(args[0], byte), read, keep, data])
        return context.get_dummy_value()

    return types.void(types.int64), codegen
