"""Building blocks of the kernels in LLVM's code.

LLVM lowers its vectors to those of the processor (AVX2, AVX-512, NEON). Numbers are float32, or
held as their bits: bfloat16 as uint16, float16 as int16.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.registry import cpu_target
from numba.extending import intrinsic

# Those that numba compiles for; its settings may leave some of the processor's out.
_FEATURES = cpu_target.target_context.codegen().magic_tuple()[2].split(",")

LANES = 16 if "+avx512f" in _FEATURES else 8  # Float32 numbers of a vector

HAS_PAIRS = LANES == 16 and "+avx512bf16" in _FEATURES
"""Whether the processor adds up products of pairs of bfloat16 numbers."""

HAS_TILES = HAS_PAIRS and {"+amx-tile", "+amx-bf16"} <= {*_FEATURES}
"""Whether the processor multiplies tiles of bfloat16 numbers (AMX)."""

LINE = 64  # Size of a cache line in bytes

LOG2_E = 1.44269502  # float32, rounded
_MAGIC = 12582912.0  # The last bits of a sum with it are those of the nearest whole number

HAS_FLOAT16 = bool({"+f16c", "+neon"} & {*_FEATURES})
"""Whether the processor turns float16 numbers into float32; LLVM would call a function for each."""

BFLOAT16, FLOAT16, FLOAT32 = types.uint16, types.int16, types.float32  # The kinds of numbers

F16, F32 = ir.HalfType(), ir.FloatType()
I16, I32, I64 = ir.IntType(16), ir.IntType(32), ir.IntType(64)


def emits(function: Callable[..., Any], result: Any = types.void) -> Any:
    """Make an intrinsic of a function that emits its code, and returns a `result` if there is one.

    The function takes numba's context, LLVM's builder and the arguments: addresses and whole
    numbers as int64, others as float32; of a `kind` and of `tiles`, it takes the type.
    """
    names = list(inspect.signature(function).parameters)[2:]

    def given(name: str, kind: Any, value: Any) -> Any:
        return kind if name in ("kind", "tiles") else value

    def define(typing: Any, *kinds: Any) -> Any:
        numbers = [types.float32 if isinstance(k, types.Float) else types.int64 for k in kinds]

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            made = function(context, builder, *map(given, names, kinds, arguments))
            return context.get_dummy_value() if made is None else made

        return result(*map(given, names, kinds, numbers)), generate

    kept = [
        inspect.Parameter(name, inspect.Parameter.POSITIONAL_ONLY) for name in ("typing", *names)
    ]
    vars(define).update(__signature__=inspect.Signature(kept))
    define.__name__ = function.__name__
    return intrinsic(define)


emits_int64, emits_float32 = (partial(emits, result=each) for each in (types.int64, types.float32))


class BFloat(ir.types.Type):
    """LLVM's bfloat, which llvmlite lacks and the instruction's signature needs."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BFloat)

    def __hash__(self) -> int:
        return hash("bfloat")


def bytes_of(kind: Any) -> int:
    """Return the bytes of a number."""
    return 4 if kind == FLOAT32 else 2


def int64(number: int) -> Any:
    """Return an int64 constant of LLVM."""
    return ir.Constant(I64, number)


def pointer_at(builder: Any, address: Any, offset: Any, size: int, kind: Any) -> Any:
    """Return a pointer to the number at `address + offset * size`."""
    whole = builder.add(address, builder.mul(offset, int64(size)))
    return builder.inttoptr(whole, kind.as_pointer())


def vector_of(kind: Any, lanes: int = LANES) -> Any:
    """Return the type of vectors in LLVM."""
    return ir.VectorType(kind, lanes)


def declared(builder: Any, result: Any, arguments: list[Any], name: str) -> Any:
    """Return a function of another library or of LLVM, declared if it is new."""
    return cgutils.get_or_insert_function(builder.module, ir.FunctionType(result, arguments), name)


def load_bits(builder: Any, address: Any, offset: Any, width: int, lanes: int, rest: Any) -> Any:
    """Load the bits of a vector, or of its first `rest` numbers and zeros behind them."""
    bits = I16 if width == 2 else I32
    kind = vector_of(bits, lanes)
    pointer = pointer_at(builder, address, offset, width, kind)
    if rest is None:
        return builder.load(pointer, align=width)
    flags = vector_of(ir.IntType(1), lanes)
    name = f"llvm.masked.load.v{lanes}i{8 * width}.p0"
    load = declared(builder, kind, [kind.as_pointer(), I32, flags, kind], name)
    mask = first_lanes(builder, rest, lanes)
    return builder.call(load, (pointer, I32(width), mask, ir.Constant(kind, [0] * lanes)))


def first_lanes(builder: Any, count: Any, lanes: int) -> Any:
    """Return a mask of the first `count` lanes."""
    kind = vector_of(I64, lanes)
    places = ir.Constant(kind, list(range(lanes)))
    return builder.icmp_unsigned("<", places, spread(builder, count, kind))


def spread(builder: Any, number: Any, kind: Any) -> Any:
    """Return a vector with a number in every lane."""
    one = builder.insert_element(ir.Constant(kind, ir.Undefined), number, I32(0))
    return shuffle(builder, one, one, [0] * kind.count)


def load_wide(builder: Any, address: Any, offset: Any, kind: Any, rest: Any = None) -> Any:
    """Load a vector of numbers as float32."""
    bits = load_bits(builder, address, offset, bytes_of(kind), LANES, rest)
    return widened(builder, bits, kind)


def widened(builder: Any, bits: Any, kind: Any) -> Any:
    """Return a vector of numbers, held as their bits, as float32."""
    lanes = bits.type.count
    if kind == BFLOAT16:
        words = vector_of(I32, lanes)
        bits = builder.shl(builder.zext(bits, words), all_of(words, 16))
    if kind == FLOAT16:
        return builder.fpext(builder.bitcast(bits, vector_of(F16, lanes)), vector_of(F32, lanes))
    return builder.bitcast(bits, vector_of(F32, lanes))


def narrowed(builder: Any, numbers: Any, kind: Any) -> Any:
    """Round a vector of float32 numbers to those of a kind, ties to even; return their bits.

    Denormal bfloat16 numbers become zero, as they do where a processor has an instruction for it.
    """
    lanes = numbers.type.count
    words, halves = vector_of(I32, lanes), vector_of(I16, lanes)
    if kind == FLOAT32:
        return builder.bitcast(numbers, words)
    if kind == FLOAT16:
        return builder.bitcast(builder.fptrunc(numbers, vector_of(F16, lanes)), halves)
    if HAS_PAIRS and lanes == LANES:
        kinds = vector_of(BFloat(), lanes), [numbers.type]
        name = "llvm.x86.avx512bf16.cvtneps2bf16.512"
        return builder.bitcast(builder.call(declared(builder, *kinds, name), (numbers,)), halves)

    bits = builder.bitcast(numbers, words)
    odd = builder.and_(builder.lshr(bits, all_of(words, 16)), all_of(words, 1))
    near = builder.add(builder.add(bits, all_of(words, 0x7FFF)), odd)
    exponent = builder.and_(bits, all_of(words, 0x7F800000))
    is_tiny = builder.icmp_unsigned("==", exponent, all_of(words, 0))
    near = builder.select(is_tiny, builder.and_(bits, all_of(words, 0x80000000)), near)
    is_nan = builder.fcmp_unordered("uno", numbers, numbers)
    near = builder.select(is_nan, builder.or_(bits, all_of(words, 0x400000)), near)
    return builder.trunc(builder.lshr(near, all_of(words, 16)), halves)


def load_pairs(builder: Any, address: Any, offset: Any, kind: Any, rest: Any = None) -> Any:
    """Load pairs of bfloat16 numbers."""
    bits = load_bits(builder, address, offset, bytes_of(kind), 2 * LANES, rest)
    return builder.bitcast(bits, vector_of(BFloat(), 2 * LANES))


def fma(builder: Any, a: Any, b: Any, total: Any) -> Any:
    """Return `a * b + total` in every lane, rounded once."""
    name = f"llvm.fma.v{total.type.count}f32"
    function = declared(builder, total.type, [total.type] * 3, name)
    return builder.call(function, (a, b, total))


def add_pairs(builder: Any, a: Any, b: Any, total: Any) -> Any:
    """Add to each lane of `total` the two products of a pair of lanes."""
    kinds, name = [total.type, a.type, b.type], "llvm.x86.avx512bf16.dpbf16ps.512"
    return builder.call(declared(builder, total.type, kinds, name), (total, a, b))


def all_of(kind: Any, number: float) -> Any:
    """Return a constant vector with a number in every lane."""
    return ir.Constant(kind, [number] * kind.count)


def exp_of(builder: Any, x: Any) -> Any:
    """Return e**x of a vector within three units of the last place; x counts as -87 to 88."""
    for sign, limit in (("<", -87.0), (">", 88.0)):
        is_beyond = builder.fcmp_ordered(sign, x, all_of(x.type, limit))
        x = builder.select(is_beyond, all_of(x.type, limit), x)
    log = all_of(x.type, LOG2_E)
    t = fma(builder, x, log, all_of(x.type, _MAGIC))
    rest = fma(builder, x, log, builder.fsub(all_of(x.type, _MAGIC), t))
    rest = fma(builder, x, all_of(x.type, 1.92596299e-8), rest)  # what LOG2_E lacks
    return _power_of_two(builder, t, rest)


def exp2_of(builder: Any, x: Any) -> Any:
    """Return 2**x of a vector of numbers up to 127, and 0 below -126.5."""
    least = all_of(x.type, -127.0)
    x = builder.select(builder.fcmp_ordered("<", x, least), least, x)
    t = builder.fadd(x, all_of(x.type, _MAGIC))
    return _power_of_two(builder, t, builder.fadd(x, builder.fsub(all_of(x.type, _MAGIC), t)))


def _power_of_two(builder: Any, t: Any, rest: Any) -> Any:
    """Return 2**(n + rest) of the whole number n in the sum t, and a rest of up to a half."""
    words, p = vector_of(I32, t.type.count), all_of(t.type, 1.326472725e-3)
    for term in (9.671512786e-3, 5.550733744e-2, 0.2402224208, 0.6931469776, 1.0):
        p = fma(builder, p, rest, all_of(t.type, term))
    exponent = builder.shl(builder.bitcast(t, words), all_of(words, 23))
    power = builder.add(exponent, all_of(words, 127 << 23))
    return builder.fmul(p, builder.bitcast(power, t.type))


def tanh_of(builder: Any, x: Any) -> Any:
    """Return the hyperbolic tangents of a vector."""
    one, two = all_of(x.type, 1.0), all_of(x.type, 2.0)
    divisor = builder.fadd(exp_of(builder, builder.fmul(two, x)), one)
    return builder.fsub(one, builder.fdiv(two, divisor))


def folded(builder: Any, vector: Any, fold: Callable[[Any, Any], Any]) -> Any:
    """Return the result of folding a vector in halves."""
    size = vector.type.count
    while size > 1:
        size //= 2
        low = shuffle(builder, vector, vector, list(range(size)))
        vector = fold(low, shuffle(builder, vector, vector, list(range(size, 2 * size))))
    return builder.extract_element(vector, I32(0))


def shuffle(builder: Any, a: Any, b: Any, places: list[int]) -> Any:
    """Return the lanes of two vectors, counted one after the other, at these places."""
    return builder.shuffle_vector(a, b, ir.Constant(vector_of(I32, len(places)), places))


def fold_totals(builder: Any, sums: list[Any]) -> Any:
    """Return a vector with the total of each vector; their number is a power of two.

    Two vectors are folded into one until a single one is left, so that 16 totals take 15 additions.
    """
    width = LANES  # lanes that belong to one total
    while len(sums) > 1:
        half, folded = width // 2, []
        lows = [i for i in range(2 * LANES) if i % width < half]
        highs = [i + half for i in lows]
        for a, b in zip(sums[::2], sums[1::2], strict=True):
            low, high = shuffle(builder, a, b, lows), shuffle(builder, a, b, highs)
            folded.append(builder.fadd(low, high))
        sums, width = folded, half
    total = sums[0]
    while width > 1:
        half, size = width // 2, total.type.count
        lows = [i for i in range(size) if i % width < half]
        low = shuffle(builder, total, total, lows)
        high = shuffle(builder, total, total, [i + half for i in lows])
        total, width = builder.fadd(low, high), half
    return total


def in_pieces(builder: Any, size: Any, piece: int, body: Callable[[Any, Any], None]) -> None:
    """Emit `body(index, rest)` for each whole piece of `size` numbers, and for what is left.

    `rest` is None for a whole piece, else how many numbers are left.
    """
    count, rest = builder.udiv(size, int64(piece)), builder.urem(size, int64(piece))
    with cgutils.for_range(builder, count, intp=I64) as loop:
        body(loop.index, None)
    with builder.if_then(builder.icmp_unsigned("!=", rest, int64(0)), likely=False):
        body(count, rest)


def prefetch(builder: Any, address: Any) -> None:
    """Prefetch a line into the second cache; the first has no room for it."""
    byte = ir.IntType(8).as_pointer()
    ask = declared(builder, ir.VoidType(), [byte, I32, I32, I32], "llvm.prefetch.p0")
    builder.call(ask, (builder.inttoptr(address, byte), I32(0), I32(2), I32(1)))


def store_vector(builder: Any, numbers: Any, pointer: Any, rest: Any) -> None:
    """Store a vector of numbers, or the first `rest` of them."""
    lanes, kind = numbers.type.count, numbers.type.element
    width = 2 if kind == I16 else 4
    if rest is None:
        builder.store(numbers, pointer, align=width)
        return
    kinds = [numbers.type, pointer.type, I32, vector_of(ir.IntType(1), lanes)]
    name = f"llvm.masked.store.v{lanes}{'f32' if kind == F32 else f'i{8 * width}'}.p0"
    store = declared(builder, ir.VoidType(), kinds, name)
    builder.call(store, (numbers, pointer, I32(width), first_lanes(builder, rest, lanes)))


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


@emits_int64
def width_of(context, builder, kind):
    """Return the bytes of a number of a kind."""
    return int64(bytes_of(kind))


@intrinsic
def wide(typing, number):
    """Return a number as float32."""

    def generate(context, builder, signature, arguments):
        bits = arguments[0]
        if number == BFLOAT16:
            return builder.bitcast(builder.shl(builder.zext(bits, I32), I32(16)), F32)
        return builder.fpext(builder.bitcast(bits, F16), F32) if number == FLOAT16 else bits

    return types.float32(number), generate


@emits_int64
def take(context, builder, address):
    """Add one to an int64 that threads share, and return its old value."""
    pointer = builder.inttoptr(address, I64.as_pointer())
    return builder.atomic_rmw("add", pointer, int64(1), "acq_rel")


@emits_int64
def look(context, builder, address):
    """Load an int64 that threads share, with acquire ordering."""
    pointer = builder.inttoptr(address, I64.as_pointer())
    return builder.load_atomic(pointer, "acquire", 8)


@emits
def yield_core(context, builder):
    """Yield the core to another thread."""
    builder.call(declared(builder, I32, [], "sched_yield"), ())


@emits_float32
def float_of(context, builder, bits):
    """Return the float32 number whose bits an int64 holds."""
    return builder.bitcast(builder.trunc(bits, I32), F32)


@emits_float32
def flushed_fma(context, builder, a, b, total):
    """Return a * b + total of float32 numbers, rounded once; denormal numbers count as zero."""

    def flushed(number):
        bits = builder.bitcast(number, I32)
        is_tiny = builder.icmp_unsigned("==", builder.and_(bits, I32(0x7F800000)), I32(0))
        sign = builder.and_(bits, I32(0x80000000))
        return builder.bitcast(builder.select(is_tiny, sign, bits), F32)

    fma = declared(builder, F32, [F32] * 3, "llvm.fma.f32")
    return flushed(builder.call(fma, [flushed(each) for each in (a, b, total)]))
