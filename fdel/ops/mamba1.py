"""Mamba's selective scan: a linear recurrence with its own decay for every channel and state."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from fdel.ops.batch import Batch, Slots
from fdel.ops.recurrent import Cell, Layer, recur


def selective_scan(
    batch: Batch,
    slots: Slots | None,
    layer: Layer,
    x: Float[Array, "... T C"],
    dt: Float[Array, "... T C"],
    a: Float[Array, "C S"],
    b: Float[Array, "... T S"],
    c: Float[Array, "... T S"],
    *,
    d: Float[Array, " C"] | None = None,
    chunk: int = 16,
) -> tuple[Float[Array, "... T C"], Slots | None]:
    """Apply h <- exp(dt a) h + dt x b^T; y = h c + d x, with state h in `slots.ssm` [layers slots C S].

    a < 0; dt >= 0 comes after softplus (arXiv:2312.00752, eq. 2, with b discretised as dt b as in the authors' code). A
    chunk is an associative scan. Its states [chunk C S] live one chunk at a time, also in the backward pass, which
    computes them again.
    """

    @jax.checkpoint
    def step(state: Float[Array, "C S"], inputs: tuple) -> tuple[Array, Array]:
        starts, _, x, dt, b, c = inputs
        decay = jnp.where(starts[:, None, None], 0, jnp.exp(dt[..., None] * a.astype(jnp.float32)))
        add = (dt * x)[..., None] * b[:, None, :]
        add = add.at[0].add(decay[0] * state)
        join = lambda left, right: (left[0] * right[0], right[0] * left[1] + right[1])
        states = jax.lax.associative_scan(join, (decay, add))[1]
        y = jnp.einsum("tcs,ts->tc", states, c)
        return states[-1], y if d is None else y + d * x

    cell = Cell("ssm", a.shape, lambda inputs: inputs, step)
    return recur(batch, slots, layer, cell, (x, dt, b, c), chunk)
