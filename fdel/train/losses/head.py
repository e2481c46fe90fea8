"""Token statistics from hidden states without ever building the logits [B, T, V]: walk over chunks of tokens.

`token_stats` returns the statistics; its backward pass computes the logits a second time. `token_sum` takes the loss as
well, if it is a sum over tokens, and computes the gradients together with the value: one product of three less.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from fdel.ops.einsum import einsum
from fdel.ops.head import Head, cap, logits
from fdel.train.losses.stats import IGNORE, TokenStats, from_logits, logits_gradient

CHUNK = 512


def token_stats(
    hidden: Float[Array, "... T D"], head: Head, labels: Int[Array, "... T"], *, chunk: int = CHUNK
) -> TokenStats:
    """Compute the statistics of every token's output distribution; `labels` are the tokens to predict, < 0 to skip.

    `chunk` tokens of every row are taken at once: about 3 * rows * chunk * V floats of memory. Gradients flow to hidden
    and head; those of the head add up in float32.
    """
    n, hidden, flat = _chunking(hidden, labels, chunk)
    return jax.tree.map(lambda x: x.reshape(labels.shape), _stats(n, hidden, head, flat))


def token_sum(
    loss: Callable[..., tuple[Array, Any]],
    hidden: Float[Array, "... T D"],
    head: Head,
    labels: Int[Array, "... T"],
    *data: Any,
    chunk: int = CHUNK,
) -> tuple[Array, Any]:
    """Compute `loss(token_stats(hidden, head, labels), *data)` for a loss that is a sum over tokens.

    `loss(stats, *data)` returns (scalar, tree of sums without gradient). It is called with the tokens of one chunk, so
    `data` are trees of [... T] arrays; they are constants, and `loss` closes over no arrays.
    """
    n, hidden, flat = _chunking(hidden, labels, chunk)
    data = jax.tree.map(lambda x: x.reshape(*flat.shape, *x.shape[labels.ndim :]), data)
    return _sum(loss, n, hidden, head, flat, data)


def _chunking(hidden: jax.Array, labels: jax.Array, chunk: int) -> tuple[int, jax.Array, jax.Array]:
    if labels.shape != hidden.shape[:-1]:
        raise ValueError(f"labels {labels.shape} do not fit hidden states {hidden.shape}; expected {hidden.shape[:-1]}")
    if chunk < 1:
        raise ValueError(f"chunk={chunk}; expected a number of tokens, at least 1")
    t, d = hidden.shape[-2:]
    return max(1, -(-t // chunk)), hidden.reshape(-1, t, d), labels.reshape(-1, t)


def _split(x: jax.Array, n: int, fill: int = 0) -> jax.Array:
    """[B T ...] -> [n B T/n ...], every n-th token, so that neither B nor T loses a sharding that it has."""
    x = jnp.pad(x, ((0, 0), (0, -x.shape[1] % n), *((0, 0),) * (x.ndim - 2)), constant_values=fill)
    return jnp.moveaxis(x.reshape(x.shape[0], -1, n, *x.shape[2:]), 2, 0)


def _join(x: jax.Array, length: int) -> jax.Array:
    x = jnp.moveaxis(x, 0, 2)
    return x.reshape(x.shape[0], -1, *x.shape[3:])[:, :length]


def _walk(use: Callable, n: int, hidden: jax.Array, head: Head, labels: jax.Array, data: Any) -> Any:
    """Stack `use(stats, *data)` of all chunks."""
    one = lambda _, xs: (None, use(from_logits(logits(xs[0], head), xs[1]), *xs[2]))
    data = jax.tree.map(lambda x: _split(x, n), data)
    return jax.lax.scan(one, None, (_split(hidden, n), _split(labels, n, IGNORE), data))[1]


def _walk_back(cotangents: Callable, n: int, hidden: jax.Array, head: Head, labels: jax.Array, data: Any) -> tuple:
    """Gradients in hidden and, in float32, in the head's floating leaves; and the stacked `out` of all chunks.

    `cotangents(logits, labels, *data)` gives (stats, the loss's gradients in stats, out) of a chunk.
    """

    def one(total: list, xs: tuple) -> tuple:
        x, y, data = xs
        z, pull = _project(x, head)
        z, pull_cap = jax.vjp(lambda z, bias: cap(z, bias, head), z, head.bias)
        stats, ct, out = cotangents(z, y, *data)
        dz, dbias = pull_cap(logits_gradient(z, y, stats, ct))
        dx, dweight = pull(dz)
        return [t + g.astype(t.dtype) for t, g in zip(total, _floating((dweight, dbias)), strict=True)], (dx, out)

    data = jax.tree.map(lambda x: _split(x, n), data)
    zero = [jnp.zeros(x.shape, jnp.promote_types(x.dtype, jnp.float32)) for x in _floating(head)]
    total, (dx, out) = jax.lax.scan(one, zero, (_split(hidden, n), _split(labels, n, IGNORE), data))
    return _join(dx, hidden.shape[1]), total, out


def _project(x: jax.Array, head: Head) -> tuple[jax.Array, Callable]:
    """Float32 product of x and the weight, and its pullback dz -> (dx, dweight)."""
    product = partial(einsum, head.subscripts, out_dtype=jnp.promote_types(x.dtype, jnp.float32))
    if not isinstance(head.weight, jax.Array):
        return jax.vjp(product, x, head.weight)
    dims = "vd" if head.vocab_axis == 0 else "dv"

    def pull(dz: jax.Array) -> tuple[jax.Array, jax.Array]:
        # Autodiff would round each chunk's dweight to the weight's dtype, which biases training in bfloat16.
        dz = dz.astype(x.dtype)
        dweight = jnp.einsum(f"btv,btd->{dims}", dz, x, preferred_element_type=jnp.float32)
        return einsum(f"...v,{dims}->...d", dz, head.weight), dweight

    return product(x, head.weight), pull


def _floating(tree: Any) -> list[jax.Array]:
    return [x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.inexact)]


def _like(dhidden: jax.Array, total: list, hidden: jax.Array, head: Head) -> tuple[jax.Array, Head]:
    """Give gradients the dtypes and the structure of hidden and head; an integer leaf gets JAX's empty cotangent."""
    left = iter(total)
    leaf = lambda x: next(left).astype(x.dtype) if _floating(x) else np.zeros(x.shape, jax.dtypes.float0)
    return dhidden.astype(hidden.dtype), jax.tree.map(leaf, head)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _stats(n: int, hidden: jax.Array, head: Head, labels: jax.Array) -> TokenStats:
    stats = _walk(lambda stats: stats, n, hidden, head, labels, ())
    return jax.tree.map(lambda x: _join(x, labels.shape[1]), stats)


def _stats_forward(n: int, *args: Any) -> tuple:
    stats = _stats(n, *args)
    return stats, (*args, stats)


def _stats_backward(n: int, residuals: tuple, ct: TokenStats) -> tuple:
    hidden, head, labels, stats = residuals
    given = lambda z, y, stats, ct: (stats, ct, None)
    dhidden, total, _ = _walk_back(given, n, hidden, head, labels, (stats, ct))
    return *_like(dhidden, total, hidden, head), None


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _sum(loss: Callable, n: int, hidden: jax.Array, head: Head, labels: jax.Array, data: tuple) -> tuple:
    return jax.tree.map(lambda x: x.sum(0), _walk(loss, n, hidden, head, labels, data))


def _sum_forward(loss: Callable, n: int, hidden: jax.Array, head: Head, labels: jax.Array, data: tuple) -> tuple:
    def cotangents(z: jax.Array, y: jax.Array, *data: Any) -> tuple:
        stats = from_logits(z, y)
        value, pull, sums = jax.vjp(lambda stats: loss(stats, *data), stats, has_aux=True)
        return stats, *pull(jnp.ones_like(value)), (value, sums)

    dhidden, total, out = _walk_back(cotangents, n, hidden, head, labels, data)
    return jax.tree.map(lambda x: x.sum(0), out), (hidden, head, dhidden, total)


def _sum_backward(loss: Callable, n: int, residuals: tuple, ct: tuple) -> tuple:
    hidden, head, dhidden, total = residuals
    return *_like(ct[0] * dhidden, [ct[0] * t for t in total], hidden, head), None, None


_stats.defvjp(_stats_forward, _stats_backward)
_sum.defvjp(_sum_forward, _sum_backward)
