"""Weights in few bits become bfloat16 in the registers of a GPU: a format is a row of `FORMATS`, and no copy in memory.

Integers and their differences from zero points are exact in bfloat16 (the bits 0x4300 + n are 128 + n). Floating point of
8 bits goes through float16, which devices make of two numbers at once, and float32: exact, too. Numbers of four bits lie
eight in a word (`words_gpu`). Integers get their high byte by a permutation of bytes; others are looked up by one, which
takes four bits to choose each of four bytes: the high bytes of four positive values, of four negative ones, those with the
right sign, and the low bytes alike. Nothing is subnormal on the way, which some devices take for 0.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, UInt32

from fdel.kernels.words_gpu import chosen, halves, joined
from fdel.ops.weights import E2M1, FP4, NF4, PACKED


class Whole(NamedTuple):
    """Integers, and what is stored for zero."""

    middle: int = 0
    factor: float = 1.0


class Small(NamedTuple):
    """Floating point of 8 bits, and its type (OCP 8-bit Floating Point Specification)."""

    dtype: Any
    factor: float = 1.0


class Table(NamedTuple):
    """The values of the 16 codes of four bits, rounded to bfloat16."""

    values: tuple[float, ...]
    factor: float = 1.0


FORMATS: dict[str, Any] = {  # each with a factor that its numbers lack
    "int8": Whole(), "uint8": Whole(), "uint4": Whole(), "int4": Whole(8),
    "fp8": Small(jnp.float8_e4m3fn), "e5m2": Small(jnp.float8_e5m2), "e2m1": Table(E2M1),
    "nf4": Table(NF4), "fp4": Table(tuple(12 * x for x in FP4), 1 / 12),
}  # fmt: skip


def codes_of(format: str) -> UInt32[np.ndarray, "8"] | None:
    """Give what `decoded` chooses bytes from, or None.

    Of a table: words of the low bytes of values, then of the high ones, each of codes from 0 on.
    """
    if not isinstance(how := FORMATS[format], Table):
        return np.asarray([0x43], np.uint32) if format in PACKED else None
    low, high = np.asarray(how.values, jnp.bfloat16).view(np.uint8).reshape(-1, 2).T
    return np.concatenate([low, high]).view("<u4").astype(np.uint32)


def decoded(
    raw: Array, format: str, zero: Callable[[int], Array] | None, codes: Sequence[Any], plain: bool
) -> list[Array]:
    """Cut bytes into bfloat16 numbers, less their zero points: all, or if `PACKED` those in high bits, then in low ones.

    zero(n) gives n more than the zero points, of the shape of `raw` and in bfloat16. `codes` are those of `codes_of`, read
    from memory: of constants ptxas makes copies for each permutation. `plain` is that of `words_gpu`.
    """
    how = FORMATS[format]
    if isinstance(how, Small):
        return [_small(raw, how)]
    if format not in PACKED:
        signed = raw if format == "int8" else raw ^ jnp.int8(-128)
        return [_less(signed.astype(jnp.bfloat16), zero, -128 * (format == "uint8"))]
    words = joined(raw, plain)
    if isinstance(how, Table):
        even = [bytes(part[:2]) == bytes(part[2:]) for part in np.asarray(codes_of(format)).reshape(2, 4)]
        return _looked_up(words, codes, even, plain)
    digits = (words >> jnp.uint32(4)) & jnp.uint32(0x0F0F0F0F), words & jnp.uint32(0x0F0F0F0F)
    above = [[chosen(x, codes[0], choice, plain) for choice in (0x4140, 0x4342)] for x in digits]
    return [_less(halves(first, second, plain), zero, how.middle + 128) for first, second in above]


def scale_of(stored: Array, kind: str, dtype: Any) -> Array:
    """Read scales: "float", "exponent" (2^(stored - 127); 0 of 0) or, in bfloat16, "fp8"."""
    if kind == "fp8":
        return _small(stored, FORMATS["fp8"])
    if kind == "float":
        return stored.astype(dtype)
    if dtype == jnp.bfloat16:
        return _number(stored.astype(jnp.uint16) << jnp.uint16(7))
    return jax.lax.bitcast_convert_type(stored.astype(jnp.uint32) << jnp.uint32(23), jnp.float32)


def spread(parts: list[Array], shape: tuple[int, ...]) -> Array:
    """Give each of several equal parts of the columns numbers of their own, one for each row."""
    from jax.experimental.pallas import mosaic_gpu as gpu

    wide = [jax.lax.broadcast_in_dim(x, shape, [0]) for x in parts]
    if len(wide) == 1:
        return wide[0]
    column, found = gpu.broadcasted_iota(jnp.int32, shape, 1, layout=gpu.Layout.WGMMA), wide[-1]
    for i in range(len(wide) - 2, -1, -1):  # chosen by the compiler: a register has columns of one part
        found = jnp.where(column < (i + 1) * (shape[1] // len(wide)), wide[i], found)
    return found


def _number(bits: Array) -> Array:
    return jax.lax.bitcast_convert_type(bits, jnp.bfloat16)


def _less(x: Array, zero: Callable[[int], Array] | None, lower: int) -> Array:
    if zero is not None:
        return x - zero(lower)
    return x - jnp.bfloat16(lower) if lower else x


def _small(code: Array, how: Small) -> Array:
    x = jax.lax.bitcast_convert_type(code, how.dtype)
    return x.astype(jnp.float16).astype(jnp.float32).astype(jnp.bfloat16)


def _looked_up(words: Array, codes: Sequence[Any], even: list[bool], plain: bool) -> list[Array]:
    """Look up numbers of four bits, whose highest bit chooses between two tables of eight values; equal ones, if `even`."""
    number, pairs = jnp.uint32, []
    signs, digits = (words >> number(1)) & number(0x44444444) | number(0x32103210), words & number(0x77777777)
    for shift in (0, 16):  # of four numbers
        digit, sign = (x >> number(shift) if shift else x for x in (digits, signs))

        def find(table: Sequence[Any], even: bool, digit: Array = digit, sign: Array = sign) -> Array:
            first = chosen(table[0], table[1], digit, plain)
            return first if even else chosen(first, chosen(table[2], table[3], digit, plain), sign, plain)

        low, high = find(codes[:4], even[0]), find(codes[4:], even[1])
        pairs.append([chosen(low, high, choice, plain) for choice in (0x7351, 0x6240)])
    return [halves(first, second, plain) for first, second in zip(*pairs, strict=True)]
