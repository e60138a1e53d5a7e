"""Single numbers in memory, and counters that threads share."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from numba import types
from numba.extending import intrinsic

from lookahead_hf.engines.cpu.kernels.llvm import (
    BFLOAT16,
    F16,
    F32,
    FLOAT16,
    I16,
    I32,
    I64,
    bytes_of,
    declared,
    int64,
)


@intrinsic
def numbers(typing, address, kind):
    """Turn an address into a pointer to numbers."""

    def generate(context, builder, signature, arguments):
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    return types.CPointer(kind)(types.int64, kind), generate


@intrinsic
def longs(typing, address):
    """Turn an address into a pointer to int64 numbers."""

    def generate(context, builder, signature, arguments):
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    return types.CPointer(types.int64)(types.int64), generate


@intrinsic
def width_of(typing, kind):
    """Return the bytes of a number of a kind."""

    def generate(context, builder, signature, arguments):
        return int64(bytes_of(kind))

    return types.int64(kind), generate


@intrinsic
def wide(typing, number):
    """Return a number as float32."""

    def generate(context, builder, signature, arguments):
        bits = arguments[0]
        if number == BFLOAT16:
            return builder.bitcast(builder.shl(builder.zext(bits, I32), I32(16)), F32)
        return builder.fpext(builder.bitcast(bits, F16), F32) if number == FLOAT16 else bits

    return types.float32(number), generate


@intrinsic
def narrow(typing, number, kind):
    """Round a float32 number to the nearest one of a kind, ties to even."""

    def generate(context, builder, signature, arguments):
        number = arguments[0]
        if kind == FLOAT16:
            return builder.bitcast(builder.fptrunc(number, F16), I16)
        if kind != BFLOAT16:
            return number
        bits = builder.bitcast(number, I32)
        odd = builder.and_(builder.lshr(bits, I32(16)), I32(1))
        near = builder.lshr(builder.add(builder.add(bits, I32(0x7FFF)), odd), I32(16))
        is_nan = builder.fcmp_unordered("uno", number, number)
        return builder.trunc(builder.select(is_nan, I32(0x7FC0), near), I16)

    return kind(types.float32, kind), generate


@intrinsic
def take(typing, address):
    """Add one to an int64 that threads share, and return its old value."""

    def generate(context, builder, signature, arguments):
        pointer = builder.inttoptr(arguments[0], I64.as_pointer())
        return builder.atomic_rmw("add", pointer, int64(1), "acq_rel")

    return types.int64(types.int64), generate


@intrinsic
def look(typing, address):
    """Load an int64 that threads share, with acquire ordering."""

    def generate(context, builder, signature, arguments):
        pointer = builder.inttoptr(arguments[0], I64.as_pointer())
        return builder.load_atomic(pointer, "acquire", 8)

    return types.int64(types.int64), generate


@intrinsic
def yield_core(typing):
    """Yield the core to another thread."""

    def generate(context, builder, signature, arguments):
        builder.call(declared(builder, I32, [], "sched_yield"), ())
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def float_of(typing, bits):
    """Return the float32 number whose bits an int64 holds."""

    def generate(context, builder, signature, arguments):
        return builder.bitcast(builder.trunc(arguments[0], I32), F32)

    return types.float32(types.int64), generate


@intrinsic
def power_of_two(typing, exponent):
    """Return 2**n for a whole float32 number n from -126 to 127."""

    def generate(context, builder, signature, arguments):
        whole = builder.fptosi(arguments[0], I32)
        return builder.bitcast(builder.shl(builder.add(whole, I32(127)), I32(23)), F32)

    return types.float32(types.float32), generate


@intrinsic
def flushed_fma(typing, a, b, total):
    """Return a * b + total of float32 numbers, rounded once; denormal numbers count as zero."""

    def generate(context, builder, signature, arguments):
        def flushed(number):
            bits = builder.bitcast(number, I32)
            is_tiny = builder.icmp_unsigned("==", builder.and_(bits, I32(0x7F800000)), I32(0))
            sign = builder.and_(bits, I32(0x80000000))
            return builder.bitcast(builder.select(is_tiny, sign, bits), F32)

        fma = declared(builder, F32, [F32] * 3, "llvm.fma.f32")
        return flushed(builder.call(fma, [flushed(each) for each in arguments]))

    return types.float32(*[types.float32] * 3), generate
