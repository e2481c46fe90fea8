"""Weights in few bits become bfloat16 in the registers of a GPU: a format is a row of `FORMATS`, and no copy in memory.

Integers and their differences from zero points are exact in bfloat16 (the bits 0x4300 + n are 128 + n). So are floating
point numbers of few bits: theirs are put below an exponent that has those bits empty, and where the exponent was 0 the 1
that bfloat16 puts before the mantissa is subtracted. Nothing is subnormal on the way, which some devices take for 0. Tables
are trees of choices, one level for each bit.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from fdel.ops.weights import FP4, NF4, PACKED


class Whole(NamedTuple):
    """Integers, and what is stored for zero."""

    middle: int = 0
    factor: float = 1.0


class Small(NamedTuple):
    """Floating point: bits of the exponent and of the mantissa, below the sign (OCP Microscaling Formats v1.0)."""

    exponent: int
    mantissa: int
    factor: float  # 2 to the power of 2^(exponent - 1)


class Table(NamedTuple):
    """The values of the 16 codes of four bits, rounded to bfloat16."""

    values: tuple[float, ...]
    factor: float = 1.0


FORMATS: dict[str, Any] = {  # each with a factor that its numbers lack
    "int8": Whole(), "uint8": Whole(), "uint4": Whole(), "int4": Whole(8),
    "fp8": Small(4, 3, 2.0**8), "e5m2": Small(5, 2, 2.0**16), "e2m1": Small(2, 1, 2.0**2),
    "nf4": Table(NF4), "fp4": Table(tuple(12 * x for x in FP4), 1 / 12),
}  # fmt: skip


def decoded(raw: Array, format: str, zero: Callable[[int], Array] | None) -> list[Array]:
    """Cut bytes into bfloat16 numbers, less their zero points: all, or if `PACKED` those in high bits, then in low ones.

    zero(n) gives n more than the zero points, of the shape of `raw` and in bfloat16.
    """
    how = FORMATS[format]
    if isinstance(how, Whole):
        return _integers(raw, format, how.middle, zero)
    wide = raw.astype(jnp.uint16)
    codes = [wide >> jnp.uint16(4), wide & jnp.uint16(15)] if format in PACKED else [wide]
    return [_small(code, how) if isinstance(how, Small) else _chosen(code, how.values) for code in codes]


def scale_of(stored: Array, kind: str, dtype: Any) -> Array:
    """Read scales: "float", "exponent" (2^(stored - 127); 0 of 0) or, less `FORMATS`' factor and in bfloat16, "fp8"."""
    if kind == "fp8":
        return _small(stored.astype(jnp.uint16), FORMATS["fp8"])
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


def _integers(raw: Array, format: str, middle: int, zero: Callable[[int], Array] | None) -> list[Array]:
    def less(x: Array, lower: int) -> Array:
        if zero is not None:
            return x - zero(lower)
        return x - jnp.bfloat16(lower) if lower else x

    if format not in PACKED:
        signed = raw if format == "int8" else raw ^ jnp.int8(-128)
        return [less(signed.astype(jnp.bfloat16), -128 * (format == "uint8"))]
    wide = raw.astype(jnp.uint16)
    number = lambda bits: _number(wide & jnp.uint16(bits) | jnp.uint16(0x4300))
    high = (number(0x70) + number(0x80)) * jnp.bfloat16(1 / 16)
    return [less(high, middle + 16), less(number(0x0F), middle + 128)]


def _small(code: Array, how: Small) -> Array:
    """Read numbers, 1 / how.factor of them: exact, but for NaN and infinities, which are numbers like others."""
    bits = how.exponent + how.mantissa
    base = 128 - 2**how.exponent  # the exponent of bfloat16 with those bits empty
    low = code & jnp.uint16(2**bits - 1)
    x = _number(low << jnp.uint16(7 - how.mantissa) | jnp.uint16(base << 7))
    x = x + jnp.minimum(x - jnp.bfloat16(2.0 ** (base - 126)), jnp.bfloat16(0))
    sign = (code & jnp.uint16(2**bits)) << jnp.uint16(15 - bits)
    return _number(jax.lax.bitcast_convert_type(x, jnp.uint16) | sign)


def _chosen(code: Array, values: tuple[float, ...]) -> Array:
    """Choose by the three high bits among pairs of values, each pair a number of 32 bits, then by the lowest bit."""
    bits = np.asarray(values, jnp.bfloat16).view(np.uint16).astype(int)
    code = code.astype(jnp.uint32)
    level: list[Any] = [
        jnp.full(code.shape, low | high << 16, jnp.uint32) for low, high in bits.reshape(-1, 2).tolist()
    ]
    for i in (2, 4, 8):
        one = (code & jnp.uint32(i)) != jnp.uint32(0)
        level = [jnp.where(one, b, a) for a, b in zip(level[::2], level[1::2], strict=True)]
    return _number((level[0] >> ((code & jnp.uint32(1)) << jnp.uint32(4))).astype(jnp.uint16))
