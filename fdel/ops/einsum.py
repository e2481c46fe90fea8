"""Contract activations with a weight of any kind: array, `Quantized`, `LowRank` or `Adapters`."""

import itertools
import math
import operator
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from fdel.ops.shard import context
from fdel.ops.weights import Adapters, LowRank, Quantized, Weight, decode, dense, merge, scaled, split

RANK, ROWS, EVERY = "~", "+", "^"  # axes added here: no letters, so that they clash with none
TILE = 1 << 18  # most elements of a quantised weight that are decoded at once on CPU, so that they stay in cache
FEW = range(2, 64)  # numbers of float32 rows that XLA:CPU multiplies up to three times faster as w x than as x w
MANY = 256  # rows from which the gradient of a matrix is worth an order of its own on CPU


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

    @property
    def outputs(self) -> str:
        """The axes that the weight adds."""
        return "".join(c for c in self.w if c not in self.x)

    @property
    def batch(self) -> str:
        """The axes that x, weight and result have."""
        return "".join(c for c in self.w if c in self.x and c in self.out)


def einsum(
    subscripts: str, x: Float[Array, "..."], w: Weight, *, out_dtype: jnp.dtype | None = None
) -> Float[Array, "..."]:
    """Contract x with a weight, as in `einsum("...d,nhd->...nh", x, q)`; only x and the result may have `...`.

    Weights have their outputs first and their inputs last; an array may have another order, which is slower on CPU.
    Products are of x's dtype, accumulated in float32 (float64 for float64); the result has x's dtype unless `out_dtype`
    is given. Quantized: x (scale * values + zero); no gradient reaches the weight. LowRank: x base + scale b (a x);
    none reaches scale. Adapters: as LowRank, with the update that each token chose. Axes that do not fit are a
    ValueError.
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
    if isinstance(w, Adapters):
        return _chosen(plan, x, w, dtype)
    if isinstance(w, Quantized):
        return _quantized(plan, x, jax.tree.map(lax.stop_gradient, w), dtype)
    return _dot(plan, x, w.astype(x.dtype), dtype)


def _inputs_last(plan: Plan, x: Array) -> tuple[Plan, Array]:
    """Make the contracted axes, which are neighbours in the weight, one axis; it is the last one of x."""
    inputs, kept = plan.contracted, "".join(c for c in plan.x if c not in plan.contracted)
    x = merge(x.transpose([plan.x.index(c) for c in kept + inputs]), len(inputs))
    return Plan(kept + inputs[0], plan.w.replace(inputs, inputs[0]), plan.out), x


def _dot(plan: Plan, x: Array, w: Array, dtype: jnp.dtype) -> Array:
    """Contract two arrays of one dtype with one dot product."""
    batch, inputs, outputs = plan.batch, plan.contracted, plan.outputs
    sizes = dict(zip(plan.w, w.shape, strict=True))
    parts = next((p for p in ((batch, outputs, inputs), (batch, inputs, outputs)) if "".join(p) == plan.w), None)
    if jax.default_backend() != "cpu" or parts is None or len(plan.w) < 3 or not outputs:
        return _product(plan, x, w, dtype)
    # XLA:CPU would copy a weight of three axes before each product: make it a matrix.
    w = w.reshape(*(sizes[c] for c in batch), *(math.prod(sizes[c] for c in part) for part in parts[1:]))
    plan, x = _inputs_last(plan, x)
    rest = "".join(c for c in plan.out if c not in outputs)
    y = _product(Plan(plan.x, plan.w.replace(outputs, outputs[0]), rest + outputs[0]), x, w, dtype)
    y = y.reshape(*y.shape[:-1], *(sizes[c] for c in outputs))
    return y.transpose([(rest + outputs).index(c) for c in plan.out])


def _product(plan: Plan, x: Array, w: Array, dtype: jnp.dtype) -> Array:
    on_cpu = jax.default_backend() == "cpu"
    batch, outputs = plan.batch, plan.outputs
    rows = "".join(c for c in plan.x if c not in plan.w)
    count = math.prod(x.shape[plan.x.index(c)] for c in rows)
    if on_cpu and x.dtype.itemsize < 4 and count == 1:
        # XLA:CPU multiplies one row in half precision ten times slower than four.
        padded = jnp.pad(x[None], ((0, 3), *[(0, 0)] * x.ndim))
        return _product(Plan(ROWS + plan.x, plan.w, ROWS + plan.out), padded, w, dtype)[0]
    at = lambda axes, names: tuple(axes.index(c) for c in names)
    left, right = [(a, at(axes, plan.contracted), at(axes, batch)) for a, axes in ((x, plan.x), (w, plan.w))]
    swap = on_cpu and x.dtype == jnp.float32 and count in FEW and plan.w.endswith(plan.contracted)
    left, right = (right, left) if swap else (left, right)
    dims = (left[1], right[1]), (left[2], right[2])
    # GPU and TPU accumulate in float32 whatever the result, and a float32 result has a float32 product as its gradient.
    wide = _wide(x.dtype) if on_cpu or dtype.itemsize > x.dtype.itemsize else None
    matrix = x.dtype.itemsize >= 4 and dims == (((x.ndim - 1,), (1,)), ((), ())) and w.shape[0] >= w.shape[1]
    if on_cpu and matrix and count >= MANY and not context("dp", "fsdp", "ep", "tp", "sp"):
        y = _many_rows(x, w)
    else:
        y = lax.dot_general(left[0], right[0], dims, preferred_element_type=wide)
    y = lax.optimization_barrier(y) if swap else y  # else XLA swaps the operands back
    have = batch + (outputs + rows if swap else rows + outputs)
    return y.astype(dtype).transpose(at(have, plan.out))


@jax.custom_vjp
def _many_rows(x: Array, w: Array) -> Array:
    """Multiply x [... D] with w [F D], of which F is not the smaller one; [... F].

    Only the gradient in w differs from JAX's own, dy^T x. XLA:CPU turns the left matrix of such a product round while it
    computes its elements, and so walks in strides through all that dy is made from, often the end of an activation's
    gradient. Here x, the smaller one, is left, and the result is turned round.
    """
    return lax.dot_general(x, w, (((x.ndim - 1,), (1,)), ((), ())))


def _many_rows_backward(saved: tuple[Array, Array], dy: Array) -> tuple[Array, Array]:
    x, w = saved
    flat = lambda a: a.reshape(-1, a.shape[-1])
    dw = lax.dot_general(flat(x), flat(dy), (((0,), (0,)), ((), ())))
    return lax.dot_general(dy, w, (((x.ndim - 1,), (0,)), ((), ()))), dw.T


_many_rows.defvjp(lambda x, w: (_many_rows.fun(x, w), (x, w)), _many_rows_backward)


def _low_rank(plan: Plan, x: Array, w: LowRank, dtype: jnp.dtype) -> Array:
    batch, rest = plan.w[: w.batch], plan.w[w.b.ndim - 1 :]
    if plan.contracted != rest:
        return _dot(plan, x, dense(w, x.dtype), dtype)
    kept = [c for c in plan.x if c not in rest] + [c for c in batch if c not in plan.x]
    middle = "".join(kept) + RANK
    low = _contract(Plan(plan.x, batch + RANK + rest, middle), x, w.a, x.dtype)
    scale = lax.stop_gradient(w.scale).astype(w.b.dtype)
    b = w.b * scale.reshape(*scale.shape, *[1] * (w.b.ndim - scale.ndim))
    outputs = plan.w.removesuffix(rest)
    return _contract(plan, x, w.base, dtype) + _contract(Plan(middle, outputs + RANK, plan.out), low, b, dtype)


def _chosen(plan: Plan, x: Array, w: Adapters, dtype: jnp.dtype) -> Array:
    """Multiply with the factors of all adapters and keep each token's: up to rank 64, no gather of factors is faster.

    A token without adapter gets the base's result and an update of exactly zero.
    """
    outputs, inputs = plan.w[: w.b.ndim - 2], plan.w[w.b.ndim - 2 :]
    if w.chosen is None or not set(plan.x[: w.chosen.ndim]) <= set(plan.out) - set(plan.w):
        raise ValueError("a weight with several adapters needs each token's choice, tokens first; see lora.choose")
    factors = [(EVERY + RANK + inputs, w.a), (outputs + EVERY + RANK, w.b)]
    if not set(plan.contracted) <= set(inputs):  # latents (MLA) are multiplied from the other side
        factors.reverse()
    (first, f), (second, g) = factors
    if not set(plan.contracted) <= set(first):
        raise ValueError(f"einsum sums over {plan.contracted!r}, outputs and inputs of a weight with several adapters")
    kept = "".join(c for c in plan.x if c not in plan.contracted)
    middle = kept + "".join(c for c in first if c not in kept + plan.contracted + EVERY + RANK) + EVERY + RANK
    low = _contract(Plan(plan.x, first, middle), x, f, x.dtype)
    mine = w.chosen[..., None] == jnp.arange(w.a.shape[0])
    mine = jnp.expand_dims(mine, (*range(w.chosen.ndim, len(middle) - 2), -1))
    update = _contract(Plan(middle, second, plan.out), jnp.where(mine, low, 0), g, dtype)
    return _contract(plan, x, w.base, dtype) + update


def _quantized(plan: Plan, x: Array, w: Quantized, dtype: jnp.dtype) -> Array:
    inputs = plan.w[-len(w.inputs) :]
    if inputs != plan.contracted:
        return _dot(plan, x, dense(w, x.dtype), dtype)
    # From here on the inputs are one axis, the last one, in x as in the stored weight.
    plan, x = _inputs_last(plan, x)
    padding = w.values.shape[-1] * (2 if w.format == "nf4" else 1) - x.shape[-1]
    x = jnp.pad(x, [*[(0, 0)] * (x.ndim - 1), (0, padding)])
    if w.format not in ("int8", "fp8") or w.scale.shape[-1] > 1:
        return _decoded(plan, x, replace(w, scale=dense(w.scale))).astype(dtype)
    # One scale per output: apply it to the result.
    absent: Any = None
    axes = plan.w[:-1]
    scale = dense(w.scale).squeeze(-1).transpose([axes.index(c) for c in plan.out if c in axes])
    y = _decoded(plan, x, replace(w, scale=absent))
    return (y * jnp.expand_dims(scale, [i for i, c in enumerate(plan.out) if c not in axes])).astype(dtype)


def _decoded(plan: Plan, x: Array, w: Quantized) -> Array:
    """Contract with a weight that is decoded on the way: on CPU a tile of outputs at a time.

    Without checkpoint the backward pass would keep what is decoded, as much memory as the unquantised weight.
    """
    on_cpu = jax.default_backend() == "cpu"
    compute = _wide(x.dtype) if on_cpu else x.dtype
    dtype = _wide(x.dtype) if on_cpu or x.dtype == jnp.float16 else x.dtype  # unscaled sums may pass float16's range

    def part(plan: Plan, x: Array, w: Quantized) -> Array:
        weights = decode(w, compute) if w.scale is None else scaled(w, compute)
        xs = [x]
        if w.format == "nf4":  # the halves of all groups, as in the weight
            halves = split(x, 2 * w.scale.shape[-1])
            xs = [merge(halves[..., i::2, :]) for i in (0, 1)]
        return reduce(operator.add, (_dot(plan, x, w, dtype) for x, w in zip(xs, weights, strict=True)))

    part, x = jax.checkpoint(part, static_argnums=0), x.astype(compute)
    # Tiles are cut from the leading axes that x lacks; or from the first, if x has it.
    lead = "".join(itertools.takewhile(lambda c: c not in plan.x, plan.w)) or plan.w[0]
    sizes, size = w.values.shape[: len(lead)], math.prod(w.values.shape[: len(lead)])
    tiles = _tiles(size, w.values.size // size) if on_cpu else 1
    if tiles == 1:
        return part(plan, x, w)
    cut = lambda c, n: c.reshape(tiles, size // tiles, *c.shape[n:])
    rest = "".join(c for c in plan.out if c not in lead)
    tile = Plan(plan.x, lead[0] + plan.w[len(lead) :], lead[0] + rest)
    w = jax.tree.map(lambda c: cut(c, len(lead)), w)
    if lead in plan.x:
        x = cut(jnp.moveaxis(x, plan.x.index(lead), 0), 1)
        tile = replace(tile, x=lead + plan.x.replace(lead, ""))
        y = lax.map(lambda xw: part(tile, *xw), (x, w))
    else:
        y = lax.map(lambda w: part(tile, x, w), w)
    return y.reshape(*sizes, *y.shape[2:]).transpose([(lead + rest).index(c) for c in plan.out])


def _tiles(size: int, width: int) -> int:
    """Into how many equal tiles to cut `size` rows of `width` elements: the least number that respects TILE."""
    n = next((n for n in range(1, size + 1) if size % n == 0 and size // n * width <= TILE), size)
    return n if size // n * width >= TILE // 16 else 1  # a size without divisors would make tiles of single rows
