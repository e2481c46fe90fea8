"""Contract activations with a weight of any kind: array, `Quantized`, `LowRank`, `Adapters` or `Observed`."""

import math
import operator
import string
from dataclasses import replace
from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from fdel.ops.contraction import Plan, inputs_last, ordered, wide
from fdel.ops.cpu import dot, in_tiles
from fdel.ops.dispatch import Implementation, kernel, operation
from fdel.ops.platform import context
from fdel.ops.weights import (
    PACKED,
    Adapters,
    LowRank,
    Observed,
    Quantized,
    Weight,
    cuts_inputs,
    decode,
    dense,
    merge,
    of_part,
    scaled,
    scales,
    split,
)

RANK, EVERY = "~", "^"  # axes added here: no letters, so that they clash with none


def einsum(
    subscripts: str, x: Float[Array, "..."], w: Weight, *, out_dtype: jnp.dtype | None = None
) -> Float[Array, "..."]:
    """Contract x with a weight, as in `einsum("...d,nhd->...nh", x, q)`; only x and the result may have `...`.

    Weights have their outputs first and their inputs last; an array may have another order, which is slower on CPU.
    Products are of x's dtype, accumulated in float32 (float64 for float64); the result has x's dtype unless `out_dtype`
    is given. Quantized: x (scale * values + zero); no gradient reaches the weight. LowRank: x base + scale b (a x);
    none reaches scale. Adapters: as LowRank, with the update that each token chose. Axes that do not fit are a
    ValueError.
    >>> ops.einsum("...d,nhd->...nh", jnp.ones((2, 4)), jnp.ones((3, 5, 4))).shape
    (2, 3, 5)
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


def _contract(plan: Plan, x: Array, w: Weight, dtype: jnp.dtype) -> Array:
    if isinstance(w, LowRank):
        return _low_rank(plan, x, w, dtype)
    if isinstance(w, Adapters):
        return _chosen(plan, x, w, dtype)
    if isinstance(w, Quantized):
        contract = _quantized_matmul if w.order is None else _in_order
        return contract(plan, x, jax.tree.map(lax.stop_gradient, w), dtype)
    if isinstance(w, Observed):
        return _observed(plan, x, w, dtype)
    return dot(plan, x, w.astype(x.dtype), dtype)


def _observed(plan: Plan, x: Array, w: Observed, dtype: jnp.dtype) -> Array:
    """Contract, and leave x where the gradient in `gram` is made; not of a product from the weight's other side."""
    y, inputs = _contract(plan, x, w.base, dtype), plan.contracted
    size = math.prod(x.shape[plan.x.index(c)] for c in inputs)
    if not plan.w.endswith(inputs) or w.gram.ndim != len(plan.batch) + 2 or w.gram.shape[-1] != size:
        return y
    batch = plan.batch
    plan, x = inputs_last(plan, x)
    return _watched(f"{plan.x},{plan.x[:-1]}{EVERY}->{batch}{plan.x[-1]}{EVERY}", y, x, w.gram)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _watched(subscripts: str, y: Array, x: Array, gram: Array) -> Array:
    return y


def _watched_backward(subscripts: str, x: Array, dy: Array) -> tuple[Array, Array, Array]:
    letters = dict(zip(dict.fromkeys(c for c in subscripts if c not in ",->"), string.ascii_letters, strict=False))
    x32 = x.astype(jnp.float32)
    gram = jnp.einsum("".join(letters.get(c, c) for c in subscripts), x32, x32, precision=lax.Precision.HIGHEST)
    return dy, jnp.zeros_like(x), gram


_watched.defvjp(lambda subscripts, y, x, gram: (y, x), _watched_backward)


def _low_rank(plan: Plan, x: Array, w: LowRank, dtype: jnp.dtype) -> Array:
    batch, rest = plan.w[: w.batch], plan.w[w.b.ndim - 1 :]
    if plan.contracted != rest:
        return dot(plan, x, dense(w, x.dtype), dtype)
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


def _in_order(plan: Plan, x: Array, w: Quantized, dtype: jnp.dtype) -> Array:
    """Bring x into the order in which the weight's inputs are stored."""
    if w.order is None or w.order.ndim > 1 or plan.w[-len(w.inputs) :] != plan.contracted:
        return dot(plan, x, dense(w, x.dtype), dtype)
    plan, x = inputs_last(plan, x)
    x = jnp.take(x, w.order, -1, unique_indices=True, mode="clip")
    return _quantized_matmul(plan, x, replace(w, order=None, inputs=x.shape[-1:]), dtype)


def _axes(plan: Plan, x: Array, w: Quantized, dtype: jnp.dtype) -> tuple[tuple, str] | str:
    """Name the axes that may be divided: the first two of those that the weight lacks, and of its inputs or its outputs.

    Or say why each device along mesh axis `tp` would fetch the whole weight. See `params.mesh.of_parts` for how it lies.
    """
    n = context("tp").get("tp", 1)
    summed = plan.summed and cuts_inputs(w, n)  # else outputs are divided in the place of such inputs
    cut = plan.contracted[:1] if summed else plan.outputs[:1]
    if n > 1 and cut and not summed:
        sizes = [c.shape[plan.w.index(cut)] for c in jax.tree.leaves(w)]
        if any(size % n for size in sizes):
            return f"outputs whose values, scales and zeros are {', '.join(map(str, sizes))}, not multiples of tp={n}"
    names = {plan.rows[1:2]: "each", plan.rows[:1]: "rows"} | ({cut: "summed"} if summed else {cut: "outputs"})
    x_axes, w_axes, out = (" ".join(names.get(c, "-") for c in axes) for axes in (plan.x, plan.w, plan.out))
    return ("", x_axes, w_axes, ""), out


def _of_parts(way: Implementation) -> Implementation:
    """Ask and call a kernel with the weight's own sizes of inputs: a device's part has fewer."""
    own = lambda plan, x, w: of_part(w, tuple(x.shape[plan.x.index(c)] for c in plan.contracted))

    def unsupported(plan: Plan, x: Array, w: Quantized, dtype: jnp.dtype) -> str | None:
        if plan.batch or plan.w[-len(w.inputs) :] != plan.contracted:
            return "a weight with batch axes, or one that is multiplied from its outputs' side"
        return way.unsupported(plan, x, own(plan, x, w), dtype)

    def call(plan: Plan, x: Array, w: Quantized, dtype: jnp.dtype) -> Array:
        return way.call(plan, x, own(plan, x, w), dtype)

    return replace(way, call=call, unsupported=unsupported)


_MOSAIC, _HOPPER = kernel("quantized_matmul_tpu"), kernel("quantized_matmul_gpu", unproven=True)


@operation(_axes, mosaic=_of_parts(_MOSAIC), hopper=_of_parts(_HOPPER))
def _quantized_matmul(plan: Plan, x: Array, w: Quantized, dtype: jnp.dtype) -> Array:
    inputs = plan.w[-len(w.inputs) :]
    if inputs != plan.contracted:
        return dot(plan, x, dense(w, x.dtype), dtype)
    # From here on the inputs are one axis, the last one, in x as in the stored weight.
    plan, x = inputs_last(plan, x)
    padding = w.values.shape[-1] * (2 if w.format in PACKED else 1) - x.shape[-1]
    x = jnp.pad(x, [*[(0, 0)] * (x.ndim - 1), (0, padding)])
    w = replace(w, scale=scales(w))
    return _of_integers(plan, dtype, x, w) if w.activations else _with_scales(plan, x, w, dtype)


def _with_scales(plan: Plan, x: Array, w: Quantized, dtype: jnp.dtype) -> Array:
    scale: Any = w.scale
    if w.format not in ("int8", "fp8", "e5m2") or w.zero is not None or scale.shape[-1] > 1:
        return _decoded(plan, x, w, dtype).astype(dtype)
    # One scale per output: apply it to the result.
    absent: Any = None
    y = _decoded(plan, x, replace(w, scale=absent), dtype)
    return (y * _of_outputs(plan, scale.squeeze(-1))).astype(dtype)


def _of_outputs(plan: Plan, scale: Array) -> Array:
    """Give scales [outputs] the axes of the result."""
    axes = plan.w[:-1]
    scale = ordered(scale, axes, "".join(c for c in plan.out if c in axes))
    return jnp.expand_dims(scale, [i for i, c in enumerate(plan.out) if c not in axes])


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _of_integers(plan: Plan, dtype: jnp.dtype, x: Array, w: Quantized) -> Array:
    """Round each row of x to integers, with its greatest magnitude at the greatest of them, and multiply integers.

    Sums are exact, int32, for each group of inputs. Rounding counts as no change to gradients (straight-through, arXiv
    1308.3432). Where devices along `tp` hold parts of rows by hand (`ops.moe`), the magnitude is that of the whole row.
    """
    rows = x.astype(jnp.float32)
    most = jnp.max(jnp.abs(rows), -1, keepdims=True)
    if "tp" in jax.sharding.get_abstract_mesh().manual_axes:
        most = lax.pmax(most, "tp")
    step = most / (2 ** (w.activations - 1) - 1)
    rows = jnp.round(rows / jnp.where(step == 0, 1, step)).astype(jnp.int8)
    scale: Any = w.scale
    groups, parts = scale.shape[-1], [rows]
    if w.format in PACKED:
        halves = split(rows, 2 * groups)
        parts = [merge(halves[..., i::2, :]) for i in (0, 1)]
    pairs = list(zip(parts, decode(w, jnp.dtype(jnp.int8)), strict=True))
    if groups == 1:
        y = reduce(operator.add, (dot(plan, q, v, jnp.dtype(jnp.int32)) for q, v in pairs)).astype(jnp.float32)
        y = y * _of_outputs(plan, scale.squeeze(-1))
    else:
        apart = Plan(plan.x[:-1] + EVERY + plan.x[-1], plan.w[:-1] + EVERY + plan.w[-1], plan.out + EVERY)
        each = (dot(apart, split(q, groups), split(v, groups), jnp.dtype(jnp.int32)) for q, v in pairs)
        whole = Plan(apart.x[:-1], apart.w, apart.out)  # its weight without the last axis has the axes of the scales
        y = (reduce(operator.add, each).astype(jnp.float32) * _of_outputs(whole, scale)).sum(-1)
    kept = plan.x[:-1]
    step = ordered(step.squeeze(-1), kept, "".join(c for c in plan.out if c in kept))
    return (y * jnp.expand_dims(step, [i for i, c in enumerate(plan.out) if c not in kept])).astype(dtype)


def _integers_backward(plan: Plan, dtype: jnp.dtype, saved: tuple[Array, Quantized], dy: Array) -> tuple[Array, None]:
    x, w = saved
    return jax.vjp(lambda x: _with_scales(plan, x, w, dtype), x)[1](dy)[0], None


_of_integers.defvjp(lambda plan, dtype, x, w: (_of_integers(plan, dtype, x, w), (x, w)), _integers_backward)


def _decoded(plan: Plan, x: Array, w: Quantized, dtype: jnp.dtype) -> Array:
    """Contract with a weight that is decoded on the way, for a result that becomes `dtype`.

    Without checkpoint the backward pass would keep what is decoded, as much memory as the unquantised weight.
    """

    @partial(jax.checkpoint, static_argnums=0)
    def part(plan: Plan, x: Array, w: Quantized) -> Array:
        full = x.dtype == jnp.float16 or dtype.itemsize > x.dtype.itemsize  # unscaled sums may pass float16's range
        sums = wide(x.dtype) if full else x.dtype
        weights = decode(w, x.dtype) if w.scale is None else scaled(w, x.dtype)
        xs = [x]
        if w.format in PACKED:  # the halves of all groups, as in the weight
            halves = split(x, 2 * w.scale.shape[-1])
            xs = [merge(halves[..., i::2, :]) for i in (0, 1)]
        return reduce(operator.add, (dot(plan, x, w, sums) for x, w in zip(xs, weights, strict=True)))

    return in_tiles(part, plan, x, w)
