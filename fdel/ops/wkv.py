"""RWKV-4's token mixing: a weighted mean of past values, with a decay for each channel, kept as logarithms."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from fdel.ops.batch import Batch
from fdel.ops.carry import Carry
from fdel.ops.conv import causal_conv
from fdel.ops.recurrent import Layer, recur

NEVER = -1e30  # the logarithm of no weight at all; finite, so that differences of two are numbers


def token_shift(
    batch: Batch, carry: Carry | None, layer: Layer, x: Float[Array, "... T D"]
) -> tuple[Float[Array, "... T D"], Carry]:
    """Give each token the one before it in its sequence, or zero. State is `slots.conv` [layers slots D 1].
    >>> x = jnp.array([[[1.0], [2.0], [3.0]]])
    >>> ops.token_shift(ops.packed(tokens[:1, :3]), None, 0, x)[0].ravel()
    Array([0., 1., 2.], dtype=float32)
    """
    return causal_conv(batch, carry, layer, x, jnp.broadcast_to(jnp.array([1.0, 0.0]), (x.shape[-1], 2)))


def wkv(
    batch: Batch, carry: Carry | None, layer: Layer, k: Float[Array, "... T C"], v: Float[Array, "... T C"],
    decay: Float[Array, " C"], first: Float[Array, " C"], *, chunk: int = 16,
) -> tuple[Float[Array, "... T C"], Carry]:  # fmt: skip
    """Average values: y_t = (sum_{i<t} e^(k_i + (t-1-i) decay) v_i + e^(k_t + first) v_t) / (the same sum without v).

    decay < 0 (arXiv:2305.13048, eq. 16 to 18). State `slots.ssm` [layers slots C 3] holds both sums divided by e^top, and
    top, the greatest exponent so far: no exponential overflows. An empty state has no exponent; it is known by its second
    sum, 0. A chunk is an associative scan over such triples.
    >>> k = jnp.zeros((1, 3, 1))  # equal weights, without decay: the mean so far
    >>> v = jnp.array([[[1.0], [3.0], [8.0]]])
    >>> ops.wkv(ops.packed(tokens[:1, :3]), None, 0, k, v, jnp.zeros(1), jnp.zeros(1))[0].ravel()
    Array([1., 2., 4.], dtype=float32)
    """
    decay, first = decay.astype(jnp.float32), first.astype(jnp.float32)

    def join(left: tuple, right: tuple) -> tuple:
        (w0, top0, sum0, total0), (w1, top1, sum1, total1) = left, right
        top = jnp.maximum(top0 + w1, top1)
        old, new = jnp.exp(top0 + w1 - top), jnp.exp(top1 - top)
        return w0 + w1, top, old * sum0 + new * sum1, old * total0 + new * total1

    @jax.checkpoint
    def step(state: Float[Array, "C 3"], inputs: tuple) -> tuple[Array, Array]:
        starts, valid, k, v = inputs
        starts, valid = starts[:, None], valid[:, None]
        w = jnp.where(valid, decay, 0) + jnp.where(starts, NEVER, 0)
        tokens = w, jnp.where(valid, k, NEVER), v, jnp.broadcast_to(valid.astype(jnp.float32), k.shape)
        sums, weight, top = state.T
        begin = jnp.zeros_like(decay), jnp.where(weight == 0, NEVER, top), sums, weight
        both = jax.tree.map(lambda a, b: jnp.concatenate([a[None], b]), begin, tokens)
        _, top, sums, weight = jax.lax.associative_scan(join, both)
        past = jnp.where(starts, NEVER, top[:-1])
        most = jnp.maximum(past, k + first)
        old, new = jnp.exp(past - most), jnp.exp(k + first - most)
        y = (old * sums[:-1] + new * v) / (old * weight[:-1] + new)
        return jnp.stack([sums[-1], weight[-1], top[-1]], -1), y

    return recur(batch, carry, layer, "ssm", (k.shape[-1], 3), lambda inputs: inputs, step, (k, v), chunk)
