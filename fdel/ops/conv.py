"""Causal depthwise convolution over time, with its last inputs kept as state."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from fdel.ops.batch import Batch, Slots
from fdel.ops.recurrent import Cell, Layer, recur


def causal_conv(
    batch: Batch,
    slots: Slots | None,
    layer: Layer,
    x: Float[Array, "... T C"],
    weight: Float[Array, "C K"],
    bias: Float[Array, " C"] | None = None,
) -> tuple[Float[Array, "... T C"], Slots | None]:
    """Convolve each channel with its own kernel: y_t = sum_k weight[:, k] x_{t-K+1+k} + bias; no activation.

    Inputs before a sequence begins are zero. State `slots.conv` [layers slots C K-1] holds the last K - 1 inputs, the
    oldest first. The weight is a checkpoint's [C 1 K] without its middle axis.
    """
    k = weight.shape[1]
    taps = weight.astype(jnp.float32)

    def step(last: Float[Array, "C K-1"], inputs: tuple) -> tuple[Array, Array]:
        starts, valid, x = inputs
        t = len(x)
        past = jnp.concatenate([last.T, x])
        run = jnp.pad(jnp.cumsum(starts), (k - 1, 0))  # what came before the chunk belongs to run 0
        reads = lambda j: jnp.where((run[j : j + t] == run[k - 1 :])[:, None], past[j : j + t], 0)
        y: Array = sum((taps[:, j] * reads(j) for j in range(k)), start=jnp.zeros(()))
        return jax.lax.dynamic_slice_in_dim(past, valid.sum(), k - 1).T, y if bias is None else y + bias

    cell = Cell("conv", (x.shape[-1], k - 1), lambda inputs: inputs, step)
    return recur(batch, slots, layer, cell, (x,), x.shape[-2])
