"""What compiled kernels call: functions whose instructions are emitted."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Annotated, Any, get_type_hints

import numba
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from skinny_kernels.vectors import BYTES, F32, I8, I64, LINE, Emitter, processor

# Types of arguments and results of such a function (see ``emits``). ``Word``: int64.
Word = Annotated[Any, types.int64]
Single = Annotated[Any, types.float32]
Truth = Annotated[Any, types.boolean]
Pointer = Annotated[Any, types.voidptr]
Known = Annotated[int, types.Literal]  # a whole number that is known at compile time


def emits(emit: Callable[..., Any]) -> Any:
    """Return an intrinsic of numba that ``emit(emitter, *values)`` emits, returning its result.

    Annotations of ``emit`` are the types above, or a ``NamedTuple``, whose fields are int64: that
    is what a compiled function passes. ``emit`` gets values of LLVM, and numbers for ``Known``.
    The intrinsic has the names of ``emit``.
    """
    hints = get_type_hints(emit, include_extras=True)
    result = hints.pop("return")
    _, *wanted = hints.values()

    @wraps(emit)
    def define(typing: Any, *given: Any) -> Any:
        arguments = [_type_of(one, kind) for one, kind in zip(wanted, given)]

        def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            emitter = Emitter(builder.module, processor().lanes, builder)
            all_of = zip(wanted, arguments, values)
            found = emit(emitter, *(_value_of(builder, *one) for one in all_of))
            return context.get_dummy_value() if found is None else found

        return _type_of(result)(*arguments), generate

    return intrinsic(prefer_literal=Known in wanted)(define)


def _type_of(wanted: Any, given: Any = None) -> Any:
    """Return numba's type of an argument that was annotated so, or of a result."""
    if wanted is type(None):
        return types.void
    if hasattr(wanted, "_fields"):
        return types.NamedUniTuple(types.int64, len(wanted._fields), wanted)
    if wanted is not Known:
        return wanted.__metadata__[0]
    if not isinstance(given, types.Literal):
        raise numba.errors.RequireLiteralValue("this argument must be a constant")
    return given


def _value_of(builder: Any, wanted: Any, kind: Any, value: Any) -> Any:
    """Return an argument as the function that emits an intrinsic gets it."""
    if wanted is Known:
        return kind.literal_value
    if hasattr(wanted, "_fields"):
        return wanted(*(builder.extract_value(value, n) for n in range(len(wanted._fields))))
    return value


def known(compute: Callable[[int], int]) -> Any:
    """Return an intrinsic of a number that is known, of another one, when a kernel is compiled."""

    @emits
    def number(emitter: Emitter, of: Known) -> Word:
        return I64(compute(of))

    return number


def pointer_to(emitter: Emitter, address: Any) -> Any:
    """Emit: the pointer to the int64 at an address."""
    return emitter.b.inttoptr(address, I64.as_pointer())


@emits
def lanes(emitter: Emitter) -> Word:
    """Return the float32 numbers in a vector."""
    return I64(emitter.lanes)


@emits
def address_of(emitter: Emitter, pointer: Pointer) -> Word:
    """Return a pointer as a number."""
    return emitter.b.ptrtoint(pointer, I64)


@emits
def get(emitter: Emitter, pointer: Pointer, index: Word) -> Word:
    """Return an int64 of an array."""
    begin = emitter.b.ptrtoint(pointer, I64)
    return emitter.b.load(pointer_to(emitter, emitter.at(begin, index, I64(8))))


@emits
def word_at(emitter: Emitter, address: Word) -> Word:
    """Return the int64 at an address."""
    return emitter.b.load(pointer_to(emitter, address))


@emits
def read_float(emitter: Emitter, address: Word) -> Single:
    """Return the float32 number at an address."""
    return emitter.load(address, F32)


@emits
def write_number(emitter: Emitter, dtype: Known, address: Word, value: Single) -> None:
    """Write a float32 number to an address, in a dtype."""
    emitter.write(value, address, dtype)


@emits
def copy_bytes(emitter: Emitter, source: Word, target: Word, count: Word) -> None:
    """Copy ``count`` bytes."""
    from_pointer, to = (emitter.b.inttoptr(one, I8.as_pointer()) for one in (source, target))
    cgutils.raw_memcpy(emitter.b, to, from_pointer, count, 1)


@emits
def convert(
    emitter: Emitter, dtype: Known, to_dtype: Known, source: Word, target: Word, count: Word
) -> None:
    """Write ``count`` numbers of one dtype in another, or in the same."""

    def body(k: Any, mask: Any, values: list[Any]) -> list[Any]:
        x = emitter.numbers(emitter.at(source, k, I64(BYTES[dtype])), dtype, mask)
        emitter.write(x, emitter.at(target, k, I64(BYTES[to_dtype])), to_dtype, mask)
        return values

    emitter.vectors(count, [], body)


@emits
def buffer_of(emitter: Emitter, count: Known) -> Word:
    """Return the address of ``count`` float32 numbers of this call's own."""
    with emitter.b.goto_entry_block():
        buffer = emitter.b.alloca(ir.ArrayType(F32, count))
    buffer.align = LINE
    return emitter.b.ptrtoint(buffer, I64)
