"""Mamba-2's state space duality: a linear recurrence with one decay per head, computed by matmuls over chunks."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from fdel.ops.batch import Batch, Slots
from fdel.ops.recurrent import Cell, Layer, decays, recur, visible


def ssd(
    batch: Batch,
    slots: Slots | None,
    layer: Layer,
    x: Float[Array, "... T N H"],
    dt: Float[Array, "... T N"],
    a: Float[Array, " N"],
    b: Float[Array, "... T G S"],
    c: Float[Array, "... T G S"],
    *,
    d: Float[Array, " N"] | None = None,
    chunk: int = 128,
) -> tuple[Float[Array, "... T N H"], Slots | None]:
    """Apply h <- exp(dt a) h + dt x b^T; y = h c + d x, with state h in `slots.ssm` [layers slots N H S].

    a < 0; dt >= 0 comes after softplus and clamp. Each of the G groups serves N / G consecutive heads. A chunk is
    causal attention with scores c_i^T b_j times decays, no softmax, plus what its first state adds (arXiv:2405.21060).
    """
    (n, h), (groups, s) = x.shape[-2:], b.shape[-2:]
    if n % groups:
        raise ValueError(f"ssd: {n} heads do not divide into {groups} groups of b and c; check the config's n_groups")
    heads = (groups, n // groups)

    def prepare(chunk: tuple) -> tuple[Array, ...]:
        starts, _, x, dt, b, c = chunk
        decay = jnp.where(visible(starts), decays((dt * a.astype(jnp.float32)).T), 0)
        decay = decay.reshape(*heads, *decay.shape[1:])
        new = (dt[..., None] * x).reshape(-1, *heads, h)
        scores = jnp.einsum("igs,jgs->gij", c, b)[:, None] * decay[..., 1:]
        y = jnp.einsum("grij,jgrh->igrh", scores, new)
        add = jnp.einsum("grj,jgrh,jgs->grhs", decay[:, :, -1, 1:], new, b)
        skip = 0 if d is None else (d[:, None] * x).reshape(y.shape)
        return y + skip, c, decay[..., 0], add

    def step(state: Float[Array, "N H S"], prepared: tuple[Array, ...]) -> tuple[Array, Array]:
        y, c, decay, add = prepared
        state = state.reshape(add.shape)
        y += jnp.einsum("igs,grhs->igrh", c, state) * jnp.moveaxis(decay, -1, 0)[..., None]
        state = decay[..., -1, None, None] * state + add
        return state.reshape(n, h, s), y.reshape(-1, n, h)

    return recur(batch, slots, layer, Cell("ssm", (n, h, s), prepare, step), (x, dt, b, c), chunk)
