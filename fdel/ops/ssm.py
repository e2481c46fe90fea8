"""State-space mixers: Mamba's selective scan, and Mamba-2's SSD."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from fdel.ops.batch import Batch
from fdel.ops.carry import Carry
from fdel.ops.dispatch import kernel, operation
from fdel.ops.recurrent import GROUPS, HEADS, SLOTS, TOKENS, Layer, decays, recur, visible


@operation(
    TOKENS, SLOTS, "", HEADS, HEADS, "heads", TOKENS, TOKENS, out=(HEADS, SLOTS), named={"d": "heads"},
    hopper=kernel("selective_scan_gpu", unproven=True), mosaic=kernel("selective_scan_tpu"),
)  # fmt: skip
def selective_scan(
    batch: Batch, carry: Carry | None, layer: Layer,
    x: Float[Array, "... T C"], dt: Float[Array, "... T C"], a: Float[Array, "C S"],
    b: Float[Array, "... T S"], c: Float[Array, "... T S"], *, d: Float[Array, " C"] | None = None, chunk: int = 16,
) -> tuple[Float[Array, "... T C"], Carry]:  # fmt: skip
    """Apply h <- exp(dt a) h + dt x b^T; y = h c + d x, with state h in `slots.ssm` [layers slots C S].

    a < 0; dt >= 0 comes after softplus (arXiv:2312.00752, eq. 2, with b discretised as dt b as in the authors' code). A
    chunk is an associative scan. Its states [chunk C S] live one chunk at a time, also in the backward pass, which
    computes them again.
    >>> x = jnp.ones((1, 3, 1))
    >>> ops.selective_scan(ops.packed(tokens[:1, :3]), None, 0, x, x, jnp.array([[-0.693]]), x, x)[0].ravel()
    Array([1.       , 1.5000737, 1.7501472], dtype=float32)
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

    return recur(batch, carry, layer, "ssm", a.shape, lambda inputs: inputs, step, (x, dt, b, c), chunk)


@operation(
    TOKENS, SLOTS, "", HEADS, HEADS, "heads", GROUPS, GROUPS, out=(HEADS, SLOTS), named={"d": "heads"},
    mosaic=kernel("ssd_tpu"), hopper=kernel("ssd_gpu", unproven=True),
)  # fmt: skip
def ssd(
    batch: Batch, carry: Carry | None, layer: Layer,
    x: Float[Array, "... T N H"], dt: Float[Array, "... T N"], a: Float[Array, " N"],
    b: Float[Array, "... T G S"], c: Float[Array, "... T G S"], *, d: Float[Array, " N"] | None = None, chunk: int = 128,
) -> tuple[Float[Array, "... T N H"], Carry]:  # fmt: skip
    """Apply h <- exp(dt a) h + dt x b^T; y = h c + d x, with state h in `slots.ssm` [layers slots N H S].

    a < 0; dt >= 0 comes after softplus and clamp. Each of the G groups serves N / G consecutive heads. A chunk is
    causal attention with scores c_i^T b_j times decays, no softmax, plus what its first state adds (arXiv:2405.21060).
    >>> x = jnp.ones((1, 3, 1, 1))
    >>> ops.ssd(ops.packed(tokens[:1, :3]), None, 0, x, x[..., 0], jnp.array([-0.693]), x, x)[0].ravel()
    Array([1.       , 1.5000737, 1.7501472], dtype=float32)
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

    return recur(batch, carry, layer, "ssm", (n, h, s), prepare, step, (x, dt, b, c), chunk)
