"""What the bits of a quantized weight stand for, read in the fast memory of a TPU: `quantized_matmul_tpu`'s formats.

Integers stay integers. Floats of 8 bits are unpacked by the TPU, whose e4m3 has another bias, and no zero but 0; those
of 4 bits are written as such first. Other values of 4 bits are looked up in a table.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

LANES = 128
DIGITS = 3  # of x, times integers
INTEGERS = {"int8": 0, "uint8": 0, "uint4": 0, "int4": 8}  # and what is stored for zero
B11 = jnp.float8_e4m3b11fnuz  # what a TPU unpacks in one instruction: e4m3 with a bias of 11, and no zero but 0
E5M2 = jnp.float8_e5m2
FLOATS = {"fp8": (B11, 2.0**4), "e2m1": (E5M2, 2.0**14), "e5m2": (E5M2, 1.0)}  # as what they are read, and times what
INDICES = ("nf4", "fp4")  # into a table that lies along lanes
PLAIN = ("int8", *FLOATS, *INDICES)  # formats that are numbers of x's dtype before they are scaled


class Tiling(NamedTuple):
    """How a call is cut: see `quantized_matmul_tpu`."""

    few: bool
    rows: int  # of x in a block
    outputs: int  # in a block
    each: int  # bytes of a group
    beside: int  # groups in a product
    groups: int  # of a row
    chunk: int  # bytes of a product
    halves: int  # numbers in a byte
    format: str
    scale: str  # how scales are stored: "float", "exponent", or as "uint8" or "fp8" with numbers for each output
    across: bool  # whether scales lie as [outputs groups]
    dtype: Any  # of the result

    @property
    def digits(self) -> int:
        """How many rows of the product a row of x becomes."""
        return DIGITS if self.format in INTEGERS else 1

    @property
    def held(self) -> int:
        """How many groups are read: so many that they fill rows of lanes."""
        return -(-self.groups // self.beside) * self.beside

    @property
    def lanes(self) -> int:
        """How many bytes of an output are read."""
        return self.held * self.each

    @property
    def unit(self) -> float:
        """What a number that is read from stored bits is a multiple of."""
        return FLOATS[self.format][1] if self.format in FLOATS else 1.0


def read_scales(about: Tiling, r: Any) -> Float[Array, "groups outputs"]:
    """Read scales that are stored in 8 bits as numbers; 0 past the last group, where memory may hold anything."""
    scale = _read_scales(about, r)
    if len(scale) == about.groups:
        return scale
    return jnp.where(jax.lax.broadcasted_iota(jnp.int32, scale.shape, 0) < about.groups, scale, 0)


def _read_scales(about: Tiling, r: Any) -> Float[Array, "groups outputs"]:
    from jax.experimental.pallas import tpu as pltpu

    bits = r.scale[...]
    turned = lambda x: x.T if about.across else x
    if about.scale == "fp8":
        kind, unit = FLOATS["fp8"]
        number = pltpu.bitcast(bits, kind).astype(jnp.float32)
        number = jnp.where(jnp.isnan(number), 0, number * unit)  # bits of -0
    else:
        number = bits.astype(jnp.int32)
        if about.scale == "exponent":
            return turned(jax.lax.bitcast_convert_type(number << 23, jnp.float32))
        number = number.astype(jnp.float32)
    return turned(number) * r.step[...] + (r.low[...] if hasattr(r, "low") else 0)


def _floats(words: Int[Array, "rows lanes"], about: Tiling) -> list[Array]:
    """Read bytes as floats that TPUs unpack, less a power of two; `B11` has no -0, which becomes 0."""
    from jax.experimental.pallas import tpu as pltpu

    each = lambda byte: jnp.int32(np.uint32(byte * 0x01010101).view(np.int32))
    found = [words]
    if about.format == "e2m1":  # the sign stays; the bits below it become the lowest of the exponent and a half
        found = [x & each(0x80) | x >> 3 & each(0x0E) for x in (words, words << 4)]
    elif about.format == "fp8":
        found = [words & ((words & each(0x7F)) + each(0x7F) | each(0x7F))]
    return [pltpu.bitcast(x, FLOATS[about.format][0]) for x in found]


def _look_up(row: Float[Array, "1 128"], index: Int[Array, "rows lanes"]) -> Float[Array, "rows lanes"]:
    """Gather numbers from a table that lies along lanes."""
    table = jnp.broadcast_to(row, (len(index), LANES))
    find = functools.partial(jnp.take_along_axis, table, axis=1, mode="promise_in_bounds")
    return jnp.concatenate([find(index[:, i : i + LANES]) for i in range(0, index.shape[1], LANES)], 1)


def read_values(r: Any, about: Tiling, index: Any, dtype: Any, *, turned: bool = False) -> list[Array]:
    """Read a chunk of the weight's bytes as what dtype then holds: [outputs, chunk], or `turned`; high nibbles, low ones.

    Unsigned bytes are lowered by 128 where they become int8.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    raw = r.values[:, pl.ds(pl.multiple_of(index * about.chunk, LANES), about.chunk)]
    raw = raw.T if turned else raw
    if about.halves == 1 and about.format == "int8":
        return [raw]
    if about.format in INDICES:
        codes = raw.astype(jnp.int32)
        return [_look_up(r.table[...], x).astype(dtype) for x in (codes >> 4, codes & 15)]
    words = pltpu.bitcast(raw, jnp.int32)
    if about.format in FLOATS:
        return _floats(words, about)
    if about.halves == 1:
        if dtype == jnp.int8:
            return [pltpu.bitcast(words ^ jnp.int32(-0x7F7F7F80), jnp.int8)]
        return [raw.astype(jnp.int32)]
    nibbles = (x & jnp.int32(0x0F0F0F0F) for x in (jax.lax.shift_right_logical(words, jnp.int32(4)), words))
    return [pltpu.bitcast(x, jnp.int8) for x in nibbles]
