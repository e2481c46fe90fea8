"""Contract activations with a weight of any kind: array, `Quantized` or `LowRank`."""

import math
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from fdel.ops.weights import LowRank, Quantized, Weight, decode, dense, flat, merge, split

RANK, ROWS = "~", "+"  # axes added here: no letters, so that they clash with none
TILE = 512  # inputs of a quantised weight that are decoded at once on CPU


@dataclass(frozen=True)
class Plan:
    """An einsum with one character per axis and no ellipsis."""

    x: str
    w: str
    out: str

    @property
    def contracted(self) -> str:
        """The axes that are summed over, in the weight's order."""
        return "".join(c for c in self.w if c not in self.out)


def einsum(
    subscripts: str, x: Float[Array, "..."], w: Weight, *, out_dtype: jnp.dtype | None = None
) -> Float[Array, "..."]:
    """Contract x with a weight, as in `einsum("...d,dnh->...nh", x, q)`; only x and the result may have `...`.

    Products are of x's dtype, accumulated in float32 (float64 for float64); the result has x's dtype unless `out_dtype`
    is given. Quantized: x (scale * values + zero); no gradient reaches the weight. LowRank: x base + scale (x a) b;
    none reaches scale. Axes that do not fit are a ValueError.
    """
    return _contract(_plan(subscripts, x, w), x, w, jnp.dtype(out_dtype or x.dtype))


def _plan(subscripts: str, x: Array, w: Weight) -> Plan:
    ins, _, out = subscripts.replace(" ", "").partition("->")
    xs, _, ws = ins.partition(",")
    rest = "".join(chr(0xC0 + i) for i in range(x.ndim - len(xs.replace("...", ""))))
    plan = Plan(xs.replace("...", rest), ws, out.replace("...", rest))
    if len(plan.x) != x.ndim or len(ws) != w.ndim:
        raise ValueError(f"einsum {subscripts!r} does not fit x of shape {x.shape} and a weight of shape {w.shape}")
    for c in sorted({*plan.x, *ws, *plan.out}):
        counts = plan.x.count(c), ws.count(c), plan.out.count(c)
        if max(counts) > 1 or sum(counts) < 2:
            raise ValueError(f"einsum {subscripts!r}: axis {c!r} must be once in two or three of x, weight and result")
        sizes = [a.shape[axes.index(c)] for a, axes in ((x, plan.x), (w, ws)) if c in axes]
        if len(set(sizes)) > 1:
            raise ValueError(f"einsum {subscripts!r}: axis {c!r} of x {x.shape} and weight {w.shape} differs in size")
    return plan


def _wide(dtype: jnp.dtype) -> jnp.dtype:
    return jnp.promote_types(dtype, jnp.float32)


def _contract(plan: Plan, x: Array, w: Weight, dtype: jnp.dtype) -> Array:
    if isinstance(w, LowRank):
        return _low_rank(plan, x, w, dtype)
    if isinstance(w, Quantized):
        return _quantized(plan, x, jax.tree.map(lax.stop_gradient, w), dtype)
    return _dot(plan, x, w.astype(x.dtype), dtype)


def _dot(plan: Plan, x: Array, w: Array, dtype: jnp.dtype) -> Array:
    """Contract two arrays of one dtype with one dot product."""
    on_cpu = jax.default_backend() == "cpu"
    batch = "".join(c for c in plan.w if c in plan.x and c in plan.out)
    rows = "".join(c for c in plan.x if c not in plan.w)
    if on_cpu and x.dtype.itemsize < 4 and math.prod(x.shape[plan.x.index(c)] for c in rows) == 1:
        # XLA:CPU multiplies one row in half precision ten times slower than four.
        padded = jnp.pad(x[None], ((0, 3), *[(0, 0)] * x.ndim))
        return _dot(Plan(ROWS + plan.x, plan.w, ROWS + plan.out), padded, w, dtype)[0]
    at = lambda axes, names: tuple(axes.index(c) for c in names)
    dims = (at(plan.x, plan.contracted), at(plan.w, plan.contracted)), (at(plan.x, batch), at(plan.w, batch))
    # GPU and TPU accumulate in float32 whatever the result, and a float32 result has a float32 product as its gradient.
    wide = _wide(x.dtype) if on_cpu or dtype.itemsize > x.dtype.itemsize else None
    y = lax.dot_general(x, w, dims, preferred_element_type=wide)
    have = batch + rows + "".join(c for c in plan.w if c not in plan.x)
    return y.astype(dtype).transpose(at(have, plan.out))


def _low_rank(plan: Plan, x: Array, w: LowRank, dtype: jnp.dtype) -> Array:
    batch = plan.w[: w.a.ndim + w.b.ndim - 2 - w.ndim]
    leading, trailing = plan.w[len(batch) : w.a.ndim - 1], plan.w[w.a.ndim - 1 :]
    factors = [(w.a, batch + leading + RANK), (w.b, batch + RANK + trailing)]
    if plan.contracted == trailing:
        factors.reverse()
    elif plan.contracted != leading:
        return _dot(plan, x, dense(w, x.dtype), dtype)
    (first, first_axes), (second, second_axes) = factors
    scale = lax.stop_gradient(w.scale).astype(second.dtype)
    second = second * scale.reshape(*scale.shape, *[1] * (second.ndim - scale.ndim))
    kept = [c for c in plan.x if c not in plan.contracted] + [c for c in batch if c not in plan.x]
    middle = "".join(kept) + RANK
    low = _contract(Plan(plan.x, first_axes, middle), x, first, x.dtype)
    return _contract(plan, x, w.base, dtype) + _contract(Plan(middle, second_axes, plan.out), low, second, dtype)


def _quantized(plan: Plan, x: Array, w: Quantized, dtype: jnp.dtype) -> Array:
    n, end = len(w.inputs), w.ndim + w.axis + 1
    if plan.w[end - n : end] != plan.contracted or plan.contracted not in plan.x:
        return _dot(plan, x, dense(w, x.dtype), dtype)
    # From here on the inputs are one axis, in x as in the stored weight.
    name, axis = plan.contracted[0], plan.x.index(plan.contracted) + n - 1 - x.ndim
    plan = Plan(plan.x.replace(plan.contracted, name), plan.w.replace(plan.contracted, name), plan.out)
    x = merge(x, axis, n)
    padding = w.values.shape[w.axis] * (2 if w.format == "nf4" else 1) - x.shape[axis]
    x = jnp.pad(x, [(0, padding if i == x.ndim + axis else 0) for i in range(x.ndim)])
    if w.format not in ("int8", "fp8") or w.scale.shape[w.axis] > 1:
        w = replace(w, scale=dense(w.scale))
        return _decoded(plan, x, w, w.scale.shape[w.axis]).astype(dtype)
    # One scale per output: apply it to the result.
    absent: Any = None
    y = _decoded(plan, x, replace(w, scale=absent), x.shape[axis])
    axes = plan.w.replace(name, "")
    scale = dense(w.scale).squeeze(w.axis).transpose([axes.index(c) for c in plan.out if c in axes])
    return (y * jnp.expand_dims(scale, [i for i, c in enumerate(plan.out) if c not in axes])).astype(dtype)


def _tiles(units: int, size: int) -> int:
    """Into how many equal tiles to cut `units` units of `size` inputs: the least number that respects TILE."""
    n = next((n for n in range(1, units + 1) if units % n == 0 and units // n * size <= TILE), 1)
    return n if units // n * size >= TILE // 8 else 1  # a size without divisors would make tiles of single inputs


def _decoded(plan: Plan, x: Array, w: Quantized, units: int) -> Array:
    """Contract with a weight that is decoded on the way: on CPU a tile of inputs at a time, so that it stays in cache.

    Without checkpoint the backward pass would keep what is decoded, as much memory as the unquantised weight.
    """
    axis = plan.x.index(plan.contracted) - x.ndim
    on_cpu = jax.default_backend() == "cpu"
    tiles = _tiles(units, x.shape[axis] // units) if on_cpu else 1
    compute = _wide(x.dtype) if on_cpu else x.dtype
    dtype = _wide(x.dtype) if on_cpu or x.dtype == jnp.float16 else x.dtype  # unscaled sums may pass float16's range

    def part(x: Array, w: Quantized) -> Array:
        return _dot(plan, x.astype(compute), decode(w, compute) if w.scale is None else flat(w, compute), dtype)

    if tiles == 1:
        return jax.checkpoint(part)(x, w)

    def add(y: Array, tile: tuple[Array, Array]) -> tuple[Array, None]:
        xi, i = tile
        size = lambda c: c.shape[w.axis] // tiles
        cut = lambda c: lax.dynamic_slice_in_dim(c, i * size(c), size(c), c.ndim + w.axis)
        return y + part(xi, jax.tree.map(cut, w)), None

    sizes = dict(zip(plan.w + plan.x, w.values.shape + x.shape, strict=True))
    y = jnp.zeros([sizes[c] for c in plan.out], dtype)
    return lax.scan(jax.checkpoint(add), y, (jnp.moveaxis(split(x, axis, tiles), axis - 1, 0), jnp.arange(tiles)))[0]
