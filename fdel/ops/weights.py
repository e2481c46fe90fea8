"""Weight leaves that `einsum` takes like the arrays that they stand for: `Quantized`, `LowRank`, `Adapters`, `Observed`.

A weight's axes are batch axes (layers, experts), then its outputs, then its inputs, as torch stores a Linear. Every
child array keeps the batch axes in front, and static fields describe trailing axes only. So `lax.scan`, and `x[i]`
through `jax.tree.map`, give valid leaves.
"""

import math
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, Integer, Num

from fdel.ops.platform import target

register = jax.tree_util.register_dataclass

# The 16 values of 4-bit NormalFloat: QLoRA (Dettmers et al. 2023, arXiv 2305.14314), appendix E.
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
# Four bits of floating point, e2m1 (OCP Microscaling Formats v1.0, section 5.3.3).
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
# bitsandbytes' four bits of floating point, twelfths: `get_4bit_type("fp4")`.
FP4 = tuple(s * x / 12 for s in (1, -1) for x in (0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0))
# The 256 values of bitsandbytes' dynamic tree (arXiv 2110.02861, section 1.3): midpoints of 2^i parts of [0.1, 1] 10^(i-6).
_POSITIVE = [10.0 ** (i - 6) * (0.1 + 0.9 * (j + 0.5) / 2**i) for i in range(7) for j in range(2**i)]
DYNAMIC = (*sorted(-x for x in _POSITIVE), 0.0, *sorted(_POSITIVE), 1.0)
TABLES = {"nf4": NF4, "fp4": FP4, "e2m1": E2M1, "dynamic": DYNAMIC}  # formats whose values are indices
PACKED = ("nf4", "fp4", "e2m1", "uint4", "int4")  # formats of two values in a byte


@register
@dataclass(frozen=True)
class Quantized:
    """A weight in few bits: `values * scale + zero`, with one scale per output and per group of inputs.

    The input axes, of sizes `inputs`, are flattened into one, the last of every child. There `scale` and `zero` have
    one entry per group, and `values` one per input, padded to whole groups. A scale of uint8 is an exponent, 2^(scale -
    127), and a zero of integers is a zero point: `(values - zero) * scale`. With an `order`, the flattened input order[i]
    is stored as the i-th one, for all outputs alike. Where `activations` is a number of bits, products round what they
    multiply with it to integers of so many bits, row by row.

    Formats: "int8"; "uint8"; "fp8": float8_e4m3fn, kept as its bits in uint8, which XLA:CPU decodes ten times faster than
    the type itself; "e5m2": float8_e5m2, kept alike; "dynamic": indices into `DYNAMIC`; and with two values per byte
    "uint4", "int4" (stored with 8 added), and indices into `NF4`, `FP4` and `E2M1`, "nf4", "fp4" and "e2m1". There byte r
    of a group of n holds element r in its high and element r + n/2 in its low bits.
    """

    values: Integer[Array, "*outputs inputs"]
    scale: "Float[Array, '*outputs groups'] | Quantized"
    zero: "Float[Array, '*outputs groups'] | Integer[Array, '*outputs groups'] | Quantized | None"
    format: str = field(metadata={"static": True})
    inputs: tuple[int, ...] = field(metadata={"static": True})
    dtype: np.dtype = field(metadata={"static": True})  # of the weight before it was quantised
    order: "Integer[Array, '*batch inputs'] | None" = None
    activations: int = field(default=0, metadata={"static": True})

    # Of the weight before it was quantised.
    shape = property(lambda self: (*self.values.shape[:-1], *self.inputs))
    ndim = property(lambda self: len(self.shape))


@register
@dataclass(frozen=True)
class LowRank:
    """A base weight plus `scale * b a` (LoRA, arXiv 2106.09685): `a` covers its inputs, `b` its outputs, as in PEFT."""

    base: Array | Quantized
    a: Float[Array, "*batch rank inputs"]
    b: Float[Array, "*batch outputs rank"]
    scale: Float[Array, "*batch"]  # alpha / rank; alpha / sqrt(rank) is rsLoRA (arXiv 2312.03732)

    shape = property(lambda self: self.base.shape)
    ndim = property(lambda self: self.base.ndim)
    dtype = property(lambda self: self.base.dtype)
    batch = property(lambda self: self.a.ndim + self.b.ndim - 2 - self.base.ndim)  # number of batch axes


@register
@dataclass(frozen=True)
class Adapters:
    """A base weight and n low-rank updates (LoRA), of which each token chooses one, or none with an index below zero.

    Their scales are in `b` already; ranks below the common one are filled with zeros. It has no batch axes.
    `chosen` covers the leading axes of the activations, or is of size one there; `params.lora.choose` sets it.
    """

    base: Array | Quantized
    a: Float[Array, "n rank inputs"]
    b: Float[Array, "*outputs n rank"]
    chosen: Int[Array, " T"] | None = None

    shape = property(lambda self: self.base.shape)
    ndim = property(lambda self: self.base.ndim)
    dtype = property(lambda self: self.base.dtype)


@register
@dataclass(frozen=True)
class Observed:
    """A weight that tells what it is multiplied with: the gradient in `gram` is the sum of x^T x over the rows x.

    That holds for any loss that depends on the product; gradients in the weight and its rows are as they were.
    """

    base: Array
    gram: Float[Array, "*batch inputs inputs"]

    shape = property(lambda self: self.base.shape)
    ndim = property(lambda self: self.base.ndim)
    dtype = property(lambda self: self.base.dtype)


Weight = Array | Quantized | LowRank | Adapters | Observed


def of_part(w: Quantized, inputs: tuple[int, ...]) -> Quantized:
    """Give a weight whose arrays are a part of another's, along its outputs or its inputs, the sizes of its own inputs."""
    own = lambda c: replace(c, inputs=c.values.shape[-1:]) if isinstance(c, Quantized) else c
    return replace(w, inputs=inputs, scale=own(w.scale), zero=own(w.zero))


def device_rows(rows: int, devices: int) -> int:
    """Say how many of a cache's rows of heads a device along `tp` has, where neither number divides the other; else 0.

    So many as the query heads of any device need, which are divided evenly: 2 of 10 on 8 devices, from row i * 10 // 8 on.
    """
    if rows % devices == 0 or devices % rows == 0:
        return 0
    return max(-(-(i + 1) * rows // devices) - i * rows // devices for i in range(devices))


def cuts_inputs(w: Quantized, n: int) -> bool:
    """Tell whether n equal parts of what is stored are parts of the inputs: of whole groups, or there is one scale.

    Not with an order, or where padding fills a group; nor where one group of packed values is all: its bytes hold inputs
    that are half of all apart. `params.mesh.of_parts` lays such a weight by its outputs instead.
    """
    packed = w.format in PACKED
    full = w.values.shape[-1] * (2 if packed else 1) == math.prod(w.inputs)
    whole = all(c.shape[-1] % n == 0 for c in jax.tree.leaves(w) if c.shape[-1] > 1)
    return w.order is None and full and whole and not (packed and w.scale.shape[-1] == 1)


def is_weight(x: object) -> bool:
    """Tell whether x is a weight leaf with children of its own: `is_leaf` for tree functions."""
    return isinstance(x, Quantized | LowRank | Adapters | Observed)


def split(x: Array, n: int) -> Array:
    """Split the last axis into two, of size n and of what remains."""
    return x.reshape(*x.shape[:-1], n, x.shape[-1] // n)


def merge(x: Array, n: int = 2) -> Array:
    """Merge the last n axes into one."""
    return x.reshape(*x.shape[:-n], math.prod(x.shape[-n:]))


def from_e4m3(bits: Integer[Array, "..."], dtype: jnp.dtype) -> Float[Array, "..."]:
    """Read the bits of float8_e4m3fn as numbers; NaN, which nothing here writes, becomes 480."""
    # float16 has the same layout with more mantissa and an exponent bias greater by 8.
    wide = bits.astype(jnp.uint16)
    half = lax.bitcast_convert_type((wide & 0x80) << 8 | (wide & 0x7F) << 7, jnp.float16)
    return half.astype(dtype) * 256


def decode(w: Quantized, dtype: jnp.dtype) -> list[Num[Array, "*outputs inputs"]]:
    """Read the stored values as numbers, unscaled and padded: all inputs, or if `PACKED` the halves of all groups."""
    if w.format == "fp8":
        return [from_e4m3(w.values, dtype)]
    if w.format == "e5m2":  # the upper half of a float16
        return [lax.bitcast_convert_type(w.values.astype(jnp.uint16) << 8, jnp.float16).astype(dtype)]
    parts = [w.values >> shift & 15 for shift in (4, 0)] if w.format in PACKED else [w.values]
    table = TABLES.get(w.format)
    if w.format == "int4":
        return [x.astype(dtype) - jnp.array(8, dtype) for x in parts]
    return [x.astype(dtype) if table is None else _looked_up(table, x, dtype) for x in parts]


def _looked_up(table: tuple[float, ...], x: Integer[Array, "..."], dtype: jnp.dtype) -> Num[Array, "..."]:
    """Give the numbers that indices stand for: on TPUs each bit chooses, of 16; a gather wants indices of 32 bits there."""
    found: list[Any] = [jnp.array(number, dtype) for number in table]
    if target() != "tpu" or len(found) != 16:
        return jnp.array(table, dtype)[x]
    for bit in range(4):
        found = [jnp.where(x >> bit & 1 == 1, high, low) for low, high in zip(found[::2], found[1::2], strict=True)]
    return found[0]


def scales(w: Quantized) -> Float[Array, "*outputs groups"]:
    """Give the scales of a weight as numbers."""
    if isinstance(w.scale, Quantized):
        return dequantize(w.scale, jnp.float32)
    return exponents(w.scale) if w.scale.dtype == jnp.uint8 else w.scale


def exponents(bits: Integer[Array, "..."]) -> Float[Array, "..."]:
    """Read exponents (e8m0) as numbers: 2^(bits - 127)."""
    return jnp.ldexp(jnp.float32(1), bits.astype(jnp.int32) - 127)


def scaled(w: Quantized, dtype: jnp.dtype) -> list[Float[Array, "*outputs inputs"]]:
    """Decode and scale in float32, in the parts of `decode`."""
    scale = scales(w)[..., None]
    zero = dequantize(w.zero, jnp.float32) if isinstance(w.zero, Quantized) else w.zero
    parts = [split(x, scale.shape[-2]) for x in decode(w, jnp.float32)]
    if zero is None:
        parts = [x * scale for x in parts]
    elif jnp.issubdtype(zero.dtype, jnp.integer):
        parts = [(x - zero[..., None]) * scale for x in parts]
    else:
        parts = [x * scale + zero[..., None] for x in parts]
    return [merge(x).astype(dtype) for x in parts]


def dequantize(w: Quantized, dtype: jnp.dtype | None = None) -> Float[Array, "..."]:
    """Give the array, of shape `w.shape`, that a quantised weight stands for; in `w.dtype` unless told."""
    parts = [split(x, w.scale.shape[-1]) for x in scaled(w, dtype or w.dtype)]
    full = merge(jnp.concatenate(parts, -1))[..., : math.prod(w.inputs)]
    if w.order is not None:
        back = jnp.argsort(w.order, -1)
        back = jnp.expand_dims(back, [*range(back.ndim - 1, full.ndim - 1)])  # for all outputs
        full = jnp.take_along_axis(full, back, -1)
    return full.reshape(w.shape)


def dense(w: Weight, dtype: jnp.dtype | None = None) -> Float[Array, "..."]:
    """Give the array that a weight of any kind stands for, low-rank update included; in its own dtype unless told."""
    if isinstance(w, Quantized):
        return dequantize(w, dtype)
    if isinstance(w, Adapters):
        raise TypeError("a weight with several adapters is another one for each token; use it in ops.einsum alone")
    if isinstance(w, Observed):
        return dense(w.base, dtype)
    if not isinstance(w, LowRank):
        return w if dtype is None else w.astype(dtype)
    a = w.a.reshape(*w.a.shape[: w.batch + 1], -1).astype(jnp.float32)
    b = w.b.reshape(*w.b.shape[: w.batch], -1, w.b.shape[-1]).astype(jnp.float32)
    update = (b @ a) * w.scale[..., None, None]
    return (dense(w.base, jnp.float32) + update.reshape(w.shape)).astype(dtype or w.dtype)
