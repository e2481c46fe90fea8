"""The gated delta rule: linear attention that corrects what its state predicts (Gated DeltaNet, KDA)."""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from fdel.ops.batch import Batch, Slots
from fdel.ops.recurrent import Cell, Layer, decays, recur, visible


def l2norm(x: Float[Array, "... H"], eps: float = 1e-6) -> Float[Array, "... H"]:
    """Scale to length one, in float32: x / sqrt(sum(x^2) + eps)."""
    y = x.astype(jnp.float32)
    return (y * jax.lax.rsqrt(jnp.sum(y * y, -1, keepdims=True) + eps)).astype(x.dtype)


def gated_delta_rule(
    batch: Batch,
    slots: Slots | None,
    layer: Layer,
    q: Float[Array, "... T N Hk"],
    k: Float[Array, "... T N Hk"],
    v: Float[Array, "... T N Hv"],
    g: Float[Array, "... T N"] | Float[Array, "... T N Hk"],
    beta: Float[Array, "... T N"],
    *,
    chunk: int = 64,
) -> tuple[Float[Array, "... T N Hv"], Slots | None]:
    """Apply S <- exp(g) S; S <- S + k (beta (v - k^T S))^T; o = q^T S.

    State S is `slots.ssm` [layers slots N Hk Hv]. g <= 0 is a log decay, per head (Gated DeltaNet, arXiv:2412.06464) or
    per key channel (KDA, arXiv:2510.26692). Queries and keys come normalised and scaled. A chunk of C tokens is solved
    at once (the WY form of arXiv:2406.06484): with S_0 the state before the chunk, P_ij the decay from token j to token
    i and G_i the decay from the chunk's start to token i,
      delta_i = beta_i (v_i - (k_i G_i)^T S_0 - sum_{j<i} (k_i^T P_ij k_j) delta_j)     a unit triangular system
      o_i = (q_i G_i)^T S_0 + sum_{j<=i} (q_i^T P_ij k_j) delta_j
      S_C = G_C S_0 + sum_j P_Cj k_j delta_j^T
    """
    cell = Cell("ssm", (*k.shape[-2:], v.shape[-1]), _prepare, _step)
    return recur(batch, slots, layer, cell, (q, k, v, g, beta), chunk)


def _prepare(chunk: tuple) -> tuple[Array, ...]:
    starts, _, *inputs = chunk
    q, k, v, g, beta = (jnp.swapaxes(x, 0, 1) for x in inputs)  # [N C ...]
    sees, beta = visible(starts), beta[..., None]
    if g.ndim == 2:
        decay = decays(g)
        begin, end = decay[..., :1], decay[:, -1, 1:, None]
        kk, qk = (jnp.einsum("nih,njh->nij", x, k) * decay[..., 1:] for x in (k, q))
    else:
        begin, end = jnp.exp(jnp.cumsum(g, 1)), jnp.exp(_later(g))
        kk, qk = _channel_pairs(q, k, g)
    begin, end = begin * sees[:, :1], end * sees[-1, 1:, None]
    kk, qk = (jnp.where(sees[:, 1:], x, 0) for x in (kk, qk))
    known = beta * jnp.concatenate([v, k * begin], -1)
    if len(starts) > 1:  # one token has nothing to solve
        known = jax.lax.linalg.triangular_solve(beta * kk, known, left_side=True, lower=True, unit_diagonal=True)
    new, reads = jnp.split(known, [v.shape[-1]], -1)
    return new, reads, q * begin, qk, k * end, begin[:, -1]


def _step(state: Float[Array, "N Hk Hv"], prepared: tuple[Array, ...]) -> tuple[Array, Array]:
    new, reads, q, qk, k, decay = prepared
    delta = new - reads @ state
    out = q @ state + qk @ delta
    return decay[..., None] * state + jnp.einsum("njk,njv->nkv", k, delta), out.swapaxes(0, 1)


def _later(g: Float[Array, "... C H"]) -> Float[Array, "... C H"]:
    """Sum g over the tokens after each."""
    sums = jax.lax.cumsum(g, g.ndim - 2, reverse=True)[..., 1:, :]
    return jnp.concatenate([sums, jnp.zeros_like(g[..., :1, :])], -2)


def _channel_pairs(
    q: Float[Array, "N C H"], k: Float[Array, "N C H"], g: Float[Array, "N C H"]
) -> tuple[Float[Array, "N C C"], Float[Array, "N C C"]]:
    """Compute sum_h x_i k_j exp(g_{j+1} + ... + g_i), j <= i, for x = k and x = q; other entries mean nothing.

    As exp(G_i) times exp(-G_j) the second factor would overflow. So a chunk is cut into blocks of 16 (arXiv:2312.06635,
    section 4.3). Between blocks the decay is a product of three factors <= 1: from j to its block's end, over the
    blocks between, from the start of i's block; hence matmuls. Within a block, columns come one by one: [C C H] never
    exists.
    """
    size = math.gcd(k.shape[1], 16)
    q, k, g = (x.reshape(x.shape[0], -1, size, x.shape[-1]) for x in (q, k, g))  # [N blocks size H]
    since = jnp.cumsum(g, 2)
    x, to_row = jnp.concatenate([k, q], 2), jnp.concatenate([since, since], 2)  # r: rows of k, then of q
    between = decays(jnp.moveaxis(since[:, :, -1], 1, 2))[..., :-1, 1:]
    between = jnp.pad(between, ((0, 0), (0, 0), (1, 0), (0, 0)))
    far = jnp.einsum("nhij,njqh->nijqh", between, k * jnp.exp(_later(g)))
    pairs = jnp.einsum("nirh,nijqh->nirjq", x * jnp.exp(to_row), far)

    @jax.checkpoint
    def column(key: Float[Array, "N blocks H"], since: Float[Array, "N blocks H"]) -> Float[Array, "N blocks r"]:
        decay = jnp.exp(jnp.minimum(to_row - since[:, :, None], 0))
        return jnp.einsum("nirh,nih,nirh->nir", x, key, decay)

    near = jax.lax.map(lambda args: column(*args), (jnp.moveaxis(k, 2, 0), jnp.moveaxis(since, 2, 0)))
    pairs += jnp.einsum("qnir,ij->nirjq", near, jnp.eye(k.shape[1]))
    kk, qk = (x.reshape(len(k), k.shape[1] * size, -1) for x in jnp.split(pairs, 2, 2))
    return kk, qk
