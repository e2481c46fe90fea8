"""The gated delta rule: linear attention that corrects what its state predicts (Gated DeltaNet, KDA)."""

import math
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from fdel.ops.batch import Batch
from fdel.ops.carry import Carry
from fdel.ops.dispatch import kernel, operation
from fdel.ops.recurrent import HEADS, SLOTS, TOKENS, Layer, decays, recur, visible


def l2norm(x: Float[Array, "... H"], eps: float = 1e-6) -> Float[Array, "... H"]:
    """Scale to length one, in float32: x / sqrt(sum(x^2) + eps).
    >>> ops.l2norm(jnp.array([3.0, 4.0]))
    Array([0.59999996, 0.79999995], dtype=float32)
    """
    y = x.astype(jnp.float32)
    return (y * jax.lax.rsqrt(jnp.sum(y * y, -1, keepdims=True) + eps)).astype(x.dtype)


@operation(
    TOKENS,
    SLOTS,
    "",
    *[HEADS] * 5,
    out=(HEADS, SLOTS),
    mosaic=kernel("gated_delta_rule_tpu"),
    hopper=kernel("gated_delta_rule_gpu", unproven=True),
)
def gated_delta_rule(
    batch: Batch, carry: Carry | None, layer: Layer,
    q: Float[Array, "... T N Hk"], k: Float[Array, "... T N Hk"], v: Float[Array, "... T N Hv"],
    g: Float[Array, "... T N"] | Float[Array, "... T N Hk"], beta: Float[Array, "... T N"], *, chunk: int = 64,
) -> tuple[Float[Array, "... T N Hv"], Carry]:  # fmt: skip
    """Apply S <- exp(g) S; S <- S + k (beta (v - k^T S))^T; o = q^T S.

    State S is `slots.ssm` [layers slots N Hk Hv]. g <= 0 is a log decay, per head (Gated DeltaNet, arXiv:2412.06464) or
    per key channel (KDA, arXiv:2510.26692). Queries and keys come normalised and scaled. A chunk of C tokens is solved
    at once (the WY form of arXiv:2406.06484): with S_0 the state before the chunk, P_ij the decay from token j to token
    i and G_i the decay from the chunk's start to token i,
      delta_i = beta_i (v_i - (k_i G_i)^T S_0 - sum_{j<i} (k_i^T P_ij k_j) delta_j)     a unit triangular system
      o_i = (q_i G_i)^T S_0 + sum_{j<=i} (q_i^T P_ij k_j) delta_j
      S_C = G_C S_0 + sum_j P_Cj k_j delta_j^T
    >>> k = jnp.eye(4)[None, :, None]  # keys that are orthogonal, and the values: each is found again
    >>> o, _ = ops.gated_delta_rule(ops.packed(tokens[:1, :4]), None, 0, k, k, k, 0 * k[..., 0], jnp.ones((1, 4, 1)))
    >>> bool(jnp.allclose(o, k))
    True
    """
    return recur(batch, carry, layer, "ssm", (*k.shape[-2:], v.shape[-1]), _prepare, _step, (q, k, v, g, beta), chunk)


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
    new, reads = beta * v, beta * k * begin
    if v.shape[1] > 1:
        solved = _solve(jnp.tril(beta * kk, -1), jnp.concatenate([new, reads], -1))
        new, reads = jnp.split(solved, [v.shape[-1]], -1)
    return new, reads, q * begin, qk, k * end, begin[:, -1]


def _step(state: Float[Array, "N Hk Hv"], prepared: tuple[Array, ...]) -> tuple[Array, Array]:
    new, reads, q, qk, k, decay = prepared
    delta = new - reads @ state
    out = q @ state + qk @ delta
    return decay[..., None] * state + jnp.einsum("njk,njv->nkv", k, delta), out.swapaxes(0, 1)


def _solve(a: Float[Array, "N C C"], b: Float[Array, "N C R"]) -> Float[Array, "N C R"]:
    """Solve (I + a) x = b for a strictly lower triangular, by the inverse; gradients come from the solution itself.

    Not by `triangular_solve`: two of them at once can block each other for ever on XLA:CPU (jax 0.10.2).
    """
    c = a.shape[-1]
    pad = (1 << (c - 1).bit_length()) - c
    inverse = _unit_inverse(jnp.pad(jax.lax.stop_gradient(a), ((0, 0), (0, pad), (0, pad))))[:, :c, :c]
    forward, transposed = lambda _, b: inverse @ b, lambda _, b: inverse.mT @ b
    return jax.lax.custom_linear_solve(lambda x: x + a @ x, b, forward, transposed)


def _unit_inverse(a: Float[Array, "N C C"]) -> Float[Array, "N C C"]:
    """Invert I + a, C a power of two: the two diagonal halves at once, then what joins them.

    Up to C = 8 the inverse is a product, since a^8 = 0. Not beyond: powers of a would grow and cancel (choose(63, 31)).
    """
    matmul, half = partial(jnp.matmul, precision="highest"), a.shape[-1] // 2
    if half <= 4:
        eye, square = jnp.eye(2 * half), matmul(a, a)
        return matmul(matmul(eye - a, eye + square), eye + matmul(square, square))
    upper, lower = jnp.split(_unit_inverse(jnp.concatenate([a[:, :half, :half], a[:, half:, half:]])), 2)
    join = -matmul(matmul(lower, a[:, half:, :half]), upper)
    return jnp.block([[upper, jnp.zeros_like(upper)], [join, lower]])


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
    both = jnp.concatenate([k, q], 2)  # r: the rows of k, then those of q
    between = decays(jnp.moveaxis(since[:, :, -1], 1, 2))[..., :-1, 1:]
    between = jnp.moveaxis(jnp.pad(between, ((0, 0), (0, 0), (1, 0), (0, 0))), 1, 3)
    far = between[:, :, :, None] * (k * jnp.exp(_later(g)))[:, None]
    pairs = jnp.einsum("nirh,nijqh->nirjq", both * jnp.exp(jnp.concatenate([since, since], 2)), far)

    @jax.checkpoint
    def column(key: Float[Array, "N blocks H"], until: Float[Array, "N blocks H"]) -> Float[Array, "N blocks r"]:
        key = key[:, :, None] * jnp.exp(jnp.minimum(since - until[:, :, None], 0))
        return jnp.concatenate([jnp.sum(k * key, -1), jnp.sum(q * key, -1)], 2)

    near = jax.lax.map(lambda args: column(*args), (jnp.moveaxis(k, 2, 0), jnp.moveaxis(since, 2, 0)))
    pairs += jnp.einsum("qnir,ij->nirjq", near, jnp.eye(k.shape[1]))
    kk, qk = (x.reshape(len(k), k.shape[1] * size, -1) for x in jnp.split(pairs, 2, 2))
    return kk, qk
