"""Causal convolution of each channel with a kernel of its own, over rows and over pages; no loop over tokens.

A token needs the K - 1 before it. A block of a Paged batch finds those at its edge in the blocks before it that are of its
sequence, or in its slot: they are gathered for all blocks at once.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from fdel.ops.batch import Batch, Packed, Paged
from fdel.ops.carry import Carry
from fdel.ops.recurrent import FROM_FRONT, Layer, fitting, no_keys

# edges(x [T *C], kept [layers slots K-1 *C]): what is before each block, [blocks K-1 *C], and what is kept after the call.
Edges = Callable[[Array, Array], tuple[Array, Array]]


def causal_conv(
    batch: Batch, carry: Carry | None, layer: Layer, x: Any, weight: Any, bias: Any = None
) -> tuple[Any, Carry]:
    """Convolve each channel with its own kernel: y_t = sum_k weight[:, k] x_{t-K+1+k} + bias; no activation.

    x is [... T *C], its channels C along any axes, the weight [*C K] (a checkpoint's [C 1 K] without its middle axis) and
    the bias [*C]; or each is a tree of such, where devices divide some channels otherwise than others. Inputs before a
    sequence begins are zero. State `slots.conv`, an array or a tree as x, is [layers slots K-1 *C]: the last K - 1 inputs,
    the oldest first. ValueError for Paged without fitting slots, and for hidden keys.
    >>> x = jnp.array([[[1.0], [2.0], [3.0]]])
    >>> ops.causal_conv(ops.packed(tokens[:1, :3]), None, 0, x, jnp.ones((1, 2)))[0].ravel()
    Array([1., 3., 5.], dtype=float32)
    """
    tree: Any
    valid = (batch.segment_ids if isinstance(batch, Packed) else batch.positions) >= 0
    xs, tree = jax.tree.flatten(jax.tree.map(lambda x: jnp.where(_wide(valid, x), x, 0), x))  # padding may hold NaN
    weights, carry = tree.flatten_up_to(weight), carry or Carry()
    biases = [None] * len(xs) if bias is None else tree.flatten_up_to(bias)
    past = weights[0].shape[-1] - 1
    if isinstance(batch, Packed):
        no_keys(batch)
        run = jnp.pad(jnp.cumsum(batch.segment_ids[:, 1:] != batch.segment_ids[:, :-1], 1), ((0, 0), (1, 0)))
        same = [run == jnp.pad(run, ((0, 0), (n, 0)))[:, : run.shape[1]] for n in range(past, 0, -1)]
        ys = [
            _sum(jnp.pad(x, [(past if i == 1 else 0, 0) for i in range(x.ndim)]), w, b, same)
            for x, w, b in zip(xs, weights, biases, strict=True)
        ]
        return tree.unflatten(ys), carry
    kept, edges, ys, kepts = getattr(carry.slots, "conv", None), _edges(batch, layer, past), [], []
    olds = jax.tree.leaves(kept) if jax.tree.structure(kept) == tree else [None] * len(xs)
    for x, w, b, old in zip(xs, weights, biases, olds, strict=True):
        before, new = edges(x, fitting(old, "conv", (past, *w.shape[:-1])))
        blocks = x.reshape(-1, batch.block, *x.shape[1:])
        ys.append(_sum(jnp.concatenate([before, blocks], 1), w, b).reshape(x.shape))
        kepts.append(new)
    slots = replace(carry.slots, conv=tree.unflatten(kepts))
    return tree.unflatten(ys), carry.remember(slots=slots)


def _wide(chosen: Array, x: Array) -> Array:
    return chosen.reshape(chosen.shape + (1,) * (x.ndim - chosen.ndim))


def _sum(
    window: Float[Array, "B past_T *C"], weight: Float[Array, "*C K"], bias: Float[Array, "*C"] | None,
    same: list[Array] | None = None,
) -> Float[Array, "B T *C"]:  # fmt: skip
    """Add up each token's K inputs, of those before it the ones of the same segment."""
    k = weight.shape[-1]
    taps, t = weight.astype(jnp.float32), window.shape[1] - k + 1
    y = jnp.zeros(())
    for j in range(k):
        read = window[:, j : j + t]
        if same is not None and j < k - 1:
            read = jnp.where(_wide(same[j], read), read, 0)
        y = y + taps[..., j] * read
    return (y if bias is None else y + bias).astype(window.dtype)


def _edges(batch: Paged, layer: Layer, past: int) -> Edges:
    """Find the inputs before each block: of its sequence in this call, or in its slot, or none where that begins."""
    size, back = batch.block, jnp.arange(past) - past
    positions = batch.positions.reshape(-1, size)
    here, count, rows = jnp.arange(len(positions)), (positions >= 0).sum(1), batch.rows
    begins, last = positions[:, 0] == 0, count > 0
    if size == 1:  # a sequence has one token at most
        done = 0 * count
        index = lambda at: jnp.broadcast_to(here[:, None], at.shape)
    else:
        slot, earlier = (rows[:, None] == rows) & last, here < here[:, None]
        last &= ~(slot & (here > here[:, None])).any(1)  # one write a slot: on GPUs several have no order
        number = (slot & begins & (here <= here[:, None])).sum(1)  # of the sequence, among those of its slot
        same = slot & (number[:, None] == number)
        begins = (same & begins).any(1)
        done = jnp.where(same & earlier, count, 0).sum(1)  # tokens of the sequence in earlier blocks

        def index(at: Int[Array, "blocks past"]) -> Int[Array, "blocks past"]:
            """Give where the sequence's token `at` lies in the call; any place if it is in none."""
            holds = same[:, None] & (done <= at[..., None]) & (at[..., None] < done + count)
            block = jnp.argmax(holds, -1)
            return block * size + at - done[block]

    def edges(x: Float[Array, "T *C"], kept: Float[Array, "layers slots past *C"]) -> tuple[Array, Array]:
        old = kept.at[layer, rows].get(mode="fill", fill_value=0, **FROM_FRONT).astype(x.dtype)
        # A new sequence must not see what its slot held before, not even times zero: that may be NaN.
        old = jnp.where(_wide(begins, old), 0, old)

        def before(at: Int[Array, "blocks past"]) -> Float[Array, "blocks past *C"]:
            kept = jnp.take_along_axis(old, _wide(jnp.clip(past + at, 0, past - 1), old), 1)
            return jnp.where(_wide(at >= 0, old), x[index(at)], kept)

        first = done[:, None] + back
        new = before(first + count[:, None]).astype(kept.dtype)
        nowhere = jnp.asarray(kept.shape[1], rows.dtype)
        return before(first), kept.at[layer, jnp.where(last, rows, nowhere)].set(new, mode="drop", **FROM_FRONT)

    return edges
