"""Weights in few bits become bfloat16 in the registers of a GPU: a format is a row of `FORMATS`, and no copy in memory.

Integers and their differences from zero points are exact in bfloat16 (the bits 0x4300 + n are 128 + n). Floating point of
8 bits goes through float16, which devices make of two numbers at once, and float32: exact, too. Numbers of four bits lie
eight in a word (`words_gpu`), and one instruction permutes bytes. It puts 0x43 above integers. With four numbers as what it
chooses by it is a table of eight bytes: values are looked up as low bytes and high ones, which it then joins. Nothing is
subnormal on the way, which some devices take for 0.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, UInt32

from fdel.kernels.words_gpu import chosen, floats, halves, joined
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


def codes_of(format: str) -> UInt32[np.ndarray, "codes"] | None:
    """Give what `decoded` chooses bytes from, or None.

    Of a table: words of its values' low bytes and of their high ones, from code 0 on. Where halves differ in signs only,
    the first half's; else also a word that chooses the bytes of another as they are.
    """
    if format not in PACKED:
        return None
    if isinstance(how := FORMATS[format], Whole):
        return np.asarray([0x43], np.uint32)
    low, high = np.asarray(how.values[: 8 if _even(how) else 16], jnp.bfloat16).view(np.uint8).reshape(-1, 2).T
    words = np.concatenate([low, high]).view("<u4").astype(np.uint32)
    return words if _even(how) else np.append(words, np.uint32(0x32103210))


def decoded(raw: Array, format: str, zero: Callable[[int], Array] | None, codes: Sequence[Any], plain: bool) -> Array:
    """Cut bytes into bfloat16 numbers, less their zero points: all, or if `PACKED` those in high bits, then in low ones.

    zero(n) gives n more than the zero points, of the shape of the result and in bfloat16. `codes` are those of `codes_of`,
    read from memory: of constants ptxas makes copies for each permutation. `plain` is that of `words_gpu`.
    """
    how = FORMATS[format]
    if isinstance(how, Small):
        return _small(raw, how)
    if format not in PACKED:
        signed = raw if format == "int8" else raw ^ jnp.int8(-128)
        return _less(signed.astype(jnp.bfloat16), zero, -128 * (format == "uint8"))
    words = joined(raw, plain)
    if isinstance(how, Table):
        return _looked_up(words, codes, _even(how), plain)
    digits = (words >> jnp.uint32(4)) & jnp.uint32(0x0F0F0F0F), words & jnp.uint32(0x0F0F0F0F)
    above = [[chosen(x, codes[0], choice, plain) for choice in (0x4140, 0x4342)] for x in digits]
    return _less(halves(above, plain), zero, how.middle + 128)


def scale_of(stored: Array, kind: str) -> Array:
    """Read float32 scales: "float", or "exponent" (2^(stored - 127); 0 of 0)."""
    if kind == "float":
        return stored.astype(jnp.float32)
    return jax.lax.bitcast_convert_type(stored.astype(jnp.uint32) << jnp.uint32(23), jnp.float32)


def scales_of(stored: list[Array], kind: str, plain: bool) -> list[Array]:
    """Read scales of narrow groups, in bfloat16: "float", or several in each word: "exponent" or "fp8"."""
    if kind == "float":
        return [x.astype(jnp.bfloat16) for x in stored]
    if kind == "fp8":
        return [number for words in stored for number in floats(words, plain)]
    number, found = jnp.uint32, []
    for words in stored:
        x = words.astype(number)
        pairs = [(x << number(7)) & number(0x7F807F80), (x >> number(1)) & number(0x7F807F80)]  # two at once
        found += [_number((pairs[i % 2] >> number(i // 2 * 16)).astype(jnp.uint16)) for i in range(words.itemsize)]
    return found


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


def _even(table: Table) -> bool:
    bits = np.asarray(table.values, jnp.bfloat16).view(np.uint16)
    return bool((bits[8:] == bits[:8] | 0x8000).all())


def _looked_up(words: Array, codes: Sequence[Any], even: bool, plain: bool) -> Array:
    """Look up numbers of four bits, whose highest bit is the sign, if `even`, or chooses between two tables of eight."""
    number, pairs = jnp.uint32, []
    digits = words & number(0x77777777)
    more = words << number(4) if even else (words >> number(1)) & number(0x44444444) | codes[8]
    for i in (0, 1):  # a word's halves, of four numbers
        digit, sign = (x >> number(16) if i else x for x in (digits, more))
        find = lambda at, digit=digit: chosen(codes[at], codes[at + 1], digit, plain)
        if even:
            signs = chosen(more, words, 0x7362 if i else 0x5140, plain)
            low, high = find(0), find(2) | signs & number(0x80808080)
        else:
            low, high = (chosen(find(at), find(at + 2), sign, plain) for at in (0, 4))
        pairs.append([chosen(low, high, choice, plain) for choice in (0x7351, 0x6240)])
    return halves(list(zip(*pairs, strict=True)), plain)
