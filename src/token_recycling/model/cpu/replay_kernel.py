"""Runs recorded launches one after another, without returning to Python between them."""

from __future__ import annotations

from typing import Any

import numba
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from token_recycling.model.cpu.vectors import I8, I32, I64, get, store

# All int64: the number of launches, the address of ``GOMP_parallel``, then for each launch the
# addresses of kernel and fields, the threads, and the first counter and how many there are.
LAUNCHES, PARALLEL = range(2)
KERNEL, ITS_FIELDS, THREADS, COUNTER, COUNTERS = range(5)
FIELDS, LAUNCH_FIELDS = 2, 5


@intrinsic
def _run(typing: Any, parallel: Any, kernel: Any, fields: Any, threads: Any) -> Any:
    """Call a kernel, in one thread or by ``GOMP_parallel``."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        parallel, kernel, fields, threads = arguments
        pointer = I8.as_pointer()
        alone = ir.FunctionType(ir.VoidType(), [pointer])
        team = ir.FunctionType(ir.VoidType(), [pointer, pointer, I32, I32])
        data = builder.inttoptr(fields, pointer)
        with builder.if_else(builder.icmp_signed("==", threads, I64(1))) as (single, several):
            with single:
                builder.call(builder.inttoptr(kernel, alone.as_pointer()), [data])
            with several:
                code = builder.inttoptr(kernel, pointer)
                count = builder.trunc(threads, I32)
                start = builder.inttoptr(parallel, team.as_pointer())
                builder.call(start, [code, data, count, I32(0)])
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), generate


@numba.njit(error_model="numpy")
def replay(fields: Any, _: Any) -> None:
    """Run the launches (see ``LAUNCHES`` and so on); the second argument has no meaning."""
    for i in range(get(fields, LAUNCHES)):
        offset = FIELDS + LAUNCH_FIELDS * i
        counters = get(fields, offset + ITS_FIELDS) + 8 * get(fields, offset + COUNTER)
        for n in range(get(fields, offset + COUNTERS)):
            store(counters + 8 * n, 0)
        _run(
            get(fields, PARALLEL),
            get(fields, offset + KERNEL),
            get(fields, offset + ITS_FIELDS),
            get(fields, offset + THREADS),
        )
