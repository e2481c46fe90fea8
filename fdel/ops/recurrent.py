"""The plumbing that recurrent token mixers share: chunks of tokens, segments, padding, and state in slots.

A mixer is a recurrence over chunks of C tokens of one sequence, in float32; C is 1 in decode. `field` is the array of
`Slots` that it keeps and `shape` the state of one sequence. `prepare((starts, valid, *inputs))` is the part that needs
no state: it runs for all chunks at once. `step(state, prepared) -> (state, out[C ...])` runs chunk after chunk. starts[C]
marks the tokens before which the state is zero. Padding (valid[C] False) has zeros in every input, which must leave the
state as it is.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from fdel.ops.batch import Batch, Packed
from fdel.ops.carry import Carry

Layer = int | Int[Array, ""]
# How inputs, outputs and the carry may be divided: see `dispatch.Table`. Channels of their own decays are heads, too.
TOKENS, HEADS, SLOTS = "(rows) tokens", "(rows) tokens heads", {"ssm": "layers slots heads"}
GROUPS = "(rows) tokens groups"  # of heads
FROM_FRONT: Any = {"wrap_negative_indices": False}  # no row that is negative is a slot counted from the end


def recur(
    batch: Batch, carry: Carry | None, layer: Layer, field: str, shape: tuple[int, ...], prepare: Callable[[tuple], Any],
    step: Callable[[Array, Any], tuple[Array, Array]], inputs: tuple[Array, ...], chunk: int,
) -> tuple[Array, Carry]:  # fmt: skip
    """Run a recurrence over inputs [... T ...]: outputs [... T ...] in the first input's dtype, and the new carry.

    Packed rows start from zero state, restart at every segment, and leave state alone. Paged blocks load the state of
    their row and store it: all at once in decode, in order (a scan that carries the whole array) in prefill.
    Products follow jax's default matmul precision. ValueError for Paged without fitting slots, and for hidden keys.
    """
    carry = carry or Carry()
    if isinstance(batch, Packed):
        no_keys(batch)
        change = batch.segment_ids[:, 1:] != batch.segment_ids[:, :-1]
        starts = jnp.pad(change, ((0, 0), (1, 0)), constant_values=True)
        valid = batch.segment_ids >= 0
        (b, t), zero = valid.shape, jnp.zeros(shape, jnp.float32)
        prepared = jax.vmap(prepare)(_split((starts, valid, *inputs), valid, chunk))
        rows = jax.tree.map(lambda x: x.reshape(b, -1, *x.shape[1:]), prepared)
        out = jax.vmap(lambda row: jax.lax.scan(step, zero, row)[1])(rows)
        return out.reshape(b, -1, *out.shape[3:])[:, :t].astype(inputs[0].dtype), carry

    state = fitting(getattr(carry.slots, field, None), field, shape)
    chunk = batch.block if batch.block <= chunk else math.gcd(batch.block, chunk)
    starts, valid = batch.positions == 0, batch.positions >= 0
    chunks = _split((starts, valid, *inputs), valid, chunk)
    fresh, rows = chunks[0][:, 0], jnp.repeat(batch.rows, batch.block // chunk)
    prepared = jax.vmap(prepare)(chunks)

    def load(state: Array, row: Array, fresh: Array) -> Array:
        old = state.at[layer, row].get(mode="fill", fill_value=0, **FROM_FRONT).astype(jnp.float32)
        # A new sequence must not see what its slot held before, not even times zero: that may be NaN.
        return jnp.where(fresh.reshape(fresh.shape + (1,) * len(shape)), 0, old)

    def store(state: Array, row: Array, new: Array) -> Array:
        return state.at[layer, row].set(new.astype(state.dtype), mode="drop", **FROM_FRONT)

    def block(carry: tuple, xs: tuple) -> tuple[tuple, Array]:
        # Store what the last block left, then load: a load fused with the store of its result copies the whole state.
        state, (row, fresh, prepared) = store(*carry), xs
        new, out = step(load(state, row, fresh), prepared)
        return (state, row, new), out

    if batch.block == 1:
        new, out = jax.vmap(step)(load(state, rows, fresh), prepared)
        state = store(state, rows, new)
    else:
        nothing = jnp.asarray(jnp.iinfo(rows.dtype).max, rows.dtype), jnp.zeros(shape, jnp.float32)
        last, out = jax.lax.scan(block, (state, *nothing), (rows, fresh, prepared))
        state = store(*last)
    out = out.reshape(-1, *out.shape[2:]).astype(inputs[0].dtype)
    return out, carry.remember(slots=dataclasses.replace(carry.slots, **{field: state}))


def no_keys(batch: Packed) -> None:
    """Refuse what hides keys, which a recurrent layer has none of."""
    if batch.key_segment_ids is not None or batch.prefix_ids is not None:
        why = "say what attention sees; a recurrent layer has no keys, leave them out"
        raise ValueError(f"Packed.key_segment_ids and prefix_ids {why}")


def fitting(state: Array | None, field: str, shape: tuple[int, ...]) -> Array:
    """Give `slots.field` if it keeps arrays of this shape for each sequence, else a ValueError."""
    if state is None or state.shape[2:] != shape:
        needs = f"slots.{field} of shape (layers, slots, {str(shape)[1:-1]})"
        found = f"found {None if state is None else state.shape}"
        fix = "make the state with params.init(family.state_spec(cfg, ...))"
        raise ValueError(f"Paged needs {needs}, {found}; {fix}")
    return state


def _split(arrays: tuple[Array, ...], valid: Bool[Array, "... T"], chunk: int) -> tuple[Array, ...]:
    """Zero the padding, go to float32, and cut T into chunks, the last one padded: [... T ...] -> [chunks chunk ...].

    The chunks of all rows share one axis: a reduction over more than 6 axes crashes XLA:CPU (jax 0.10.2).
    """
    axis = valid.ndim - 1

    def split(x: Array) -> Array:
        if x.dtype != jnp.bool_:
            x = jnp.where(valid.reshape(valid.shape + (1,) * (x.ndim - valid.ndim)), x.astype(jnp.float32), 0)
        x = jnp.pad(x, [(0, -x.shape[i] % chunk if i == axis else 0) for i in range(x.ndim)])
        return x.reshape(-1, chunk, *x.shape[axis + 1 :])

    return tuple(map(split, arrays))


def visible(starts: Bool[Array, " C"]) -> Bool[Array, "C C+1"]:
    """Tell what token i reads inside a chunk: column 0 is the state before the chunk, column j + 1 is token j."""
    run = jnp.cumsum(starts)
    run_from = jnp.pad(run, (1, 0))
    return jnp.tril(jnp.ones((run.size, run.size + 1), bool), 1) & (run[:, None] == run_from)


def decays(g: Float[Array, "... C"]) -> Float[Array, "... C C+1"]:
    """Compute exp(g_j + ... + g_i): column 0 is the decay of the state up to token i, column j + 1 that of token j.

    Sums are taken per column, not as differences of one running sum: those lose all digits after a strong decay.
    Entries that are not causal are 0.
    """
    causal = jnp.tril(jnp.ones((g.shape[-1], g.shape[-1] + 1), bool), 1)
    since = jnp.tril(jnp.ones_like(causal))
    sums = jnp.cumsum(jnp.where(since, g[..., None], 0), -2)
    return jnp.where(causal, jnp.exp(sums), 0)
