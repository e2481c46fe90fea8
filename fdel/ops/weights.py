"""Weight leaves that are not plain arrays: `Quantized` and `LowRank`. `einsum` and `embed` take all three kinds.

Every child array keeps the axes over which layers are walked and experts picked (layers, experts) in front, and static
fields describe trailing axes only. So `lax.scan`, and `x[i]` through `jax.tree.map`, give valid leaves.
"""

import math
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

register = jax.tree_util.register_dataclass

# The 16 values of 4-bit NormalFloat: QLoRA (Dettmers et al. 2023, arXiv 2305.14314), appendix E.
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip


@register
@dataclass(frozen=True)
class Quantized:
    """A weight in few bits: `values * scale + zero`, with one scale per output and per group of inputs.

    The input (contracted) axes, of sizes `inputs`, are flattened into one, at negative index `axis` of every child.
    There `scale` and `zero` have one entry per group, and `values` one per input, padded to whole groups. Formats:
    "int8"; "uint8" (the scales of a doubly quantised nf4 weight); "fp8": float8_e4m3fn, kept as its bits in uint8,
    which XLA:CPU decodes ten times faster than the type itself; "nf4": two indices into `NF4` per byte, where byte r of
    a group of n holds element r in its high and element r + n/2 in its low bits.
    """

    values: Int[Array, "*batch inputs outputs"]
    scale: "Float[Array, '*batch groups outputs'] | Quantized"
    zero: Float[Array, "*batch groups outputs"] | None
    format: str = field(metadata={"static": True})
    axis: int = field(metadata={"static": True})
    inputs: tuple[int, ...] = field(metadata={"static": True})
    dtype: np.dtype = field(metadata={"static": True})  # of the weight before it was quantised

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the weight before it was quantised."""
        i = self.values.ndim + self.axis
        return (*self.values.shape[:i], *self.inputs, *self.values.shape[i + 1 :])

    @property
    def ndim(self) -> int:
        """Number of axes of the weight before it was quantised."""
        return self.values.ndim - 1 + len(self.inputs)


@register
@dataclass(frozen=True)
class LowRank:
    """A base weight plus `scale * a b`; `a` covers its leading axes, `b` its trailing ones (LoRA, arXiv 2106.09685)."""

    base: Array | Quantized
    a: Float[Array, "*batch leading rank"]
    b: Float[Array, "*batch rank trailing"]
    scale: Float[Array, "*batch"]  # alpha / rank; alpha / sqrt(rank) is rsLoRA (arXiv 2312.03732)

    shape = property(lambda self: self.base.shape)
    ndim = property(lambda self: self.base.ndim)
    dtype = property(lambda self: self.base.dtype)


Weight = Array | Quantized | LowRank


def is_weight(x: object) -> bool:
    """Tell whether x is a weight leaf with children of its own: `is_leaf` for tree functions."""
    return isinstance(x, Quantized | LowRank)


def split(x: Array, axis: int, n: int) -> Array:
    """Split the axis at negative index `axis` into two, of size n and of what remains."""
    i = x.ndim + axis
    return x.reshape(*x.shape[:i], n, x.shape[i] // n, *x.shape[i + 1 :])


def merge(x: Array, axis: int, n: int) -> Array:
    """Merge the n axes that end at negative index `axis` into one."""
    i = x.ndim + axis + 1
    return x.reshape(*x.shape[: i - n], math.prod(x.shape[i - n : i]), *x.shape[i:])


def decode(w: Quantized, dtype: jnp.dtype) -> Float[Array, "*batch inputs outputs"]:
    """Read the stored values as numbers, unscaled; the input axis stays flattened and padded."""
    if w.format == "fp8":  # float16 has the same layout with more mantissa and an exponent bias greater by 8
        bits = w.values.astype(jnp.uint16)
        half = lax.bitcast_convert_type((bits & 0x80) << 8 | (bits & 0x7F) << 7, jnp.float16)
        return half.astype(dtype) * 256
    if w.format == "nf4":
        pairs = jnp.expand_dims(split(w.values, w.axis, w.scale.shape[w.axis]), w.axis - 1)
        shift = jnp.array([4, 0], jnp.uint8).reshape(2, *[1] * -w.axis)
        return merge(jnp.array(NF4, dtype)[pairs >> shift & 15], w.axis, 3)
    return w.values.astype(dtype)


def flat(w: Quantized, dtype: jnp.dtype) -> Float[Array, "*batch inputs outputs"]:
    """Decode and scale in float32; the input axis stays flattened and padded."""
    scale = dequantize(w.scale, jnp.float32) if isinstance(w.scale, Quantized) else w.scale
    grouped = split(decode(w, jnp.float32), w.axis, scale.shape[w.axis]) * jnp.expand_dims(scale, w.axis)
    if w.zero is not None:
        grouped = grouped + jnp.expand_dims(w.zero, w.axis)
    return merge(grouped, w.axis, 2).astype(dtype)


def dequantize(w: Quantized, dtype: jnp.dtype | None = None) -> Float[Array, "..."]:
    """Give the array, of shape `w.shape`, that a quantised weight stands for; in `w.dtype` unless told."""
    full = flat(w, dtype or w.dtype)
    return lax.slice_in_dim(full, 0, math.prod(w.inputs), axis=full.ndim + w.axis).reshape(w.shape)


def dense(w: Weight, dtype: jnp.dtype | None = None) -> Float[Array, "..."]:
    """Give the array that a weight of any kind stands for, low-rank update included; in its own dtype unless told."""
    if isinstance(w, Quantized):
        return dequantize(w, dtype)
    if not isinstance(w, LowRank):
        return w if dtype is None else w.astype(dtype)
    batch = w.a.ndim + w.b.ndim - 2 - w.ndim
    a = w.a.reshape(*w.a.shape[:batch], -1, w.a.shape[-1]).astype(jnp.float32)
    b = w.b.reshape(*w.b.shape[: batch + 1], -1).astype(jnp.float32)
    update = (a @ b) * w.scale[..., None, None]
    return (dense(w.base, jnp.float32) + update.reshape(w.shape)).astype(dtype or w.dtype)
