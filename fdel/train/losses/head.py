"""Token statistics and losses from hidden states, without ever building the logits [B, T, V]: a scan over token chunks.

`token_sum` takes a loss that is a sum over tokens, and computes its gradients together with its value; `logits_sum` is the
same for losses of the logits themselves. `token_stats` returns the statistics, for losses that combine them otherwise; its
backward pass computes the logits a second time.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from fdel.ops.contraction import wide
from fdel.ops.dispatch import operation
from fdel.ops.einsum import einsum
from fdel.ops.head import Head, cap, logits
from fdel.ops.platform import context
from fdel.ops.shard import by_rows, names, partition
from fdel.train.losses.stats import IGNORE, TokenStats, from_logits, logits_gradient
from fdel.train.steps import floating, forward_of_vjp

CHUNK = 512
SHARED = "fsdp"  # a mesh axis of rows, along which devices may share a vocabulary


def token_sum(
    loss: Callable[..., tuple[Array, Any]],
    hidden: Float[Array, "... T D"],
    head: Head,
    labels: Int[Array, "... T"],
    *data: Any,
    chunk: int = CHUNK,
) -> tuple[Array, Any]:
    """Compute `loss(token_stats(hidden, head, labels), *data)` for a loss that is a sum over tokens.

    `loss(stats, *data)` returns (scalar, tree of sums without gradient). It sees one chunk at a time: `chunk` tokens of
    all rows together, or one of each, which take 2 to 4 times chunk * V floats on each device. `data` are trees of arrays
    [... T ...], constant and filled up with zeros; `loss` closes over no arrays. The head's gradients add up in float32.
    """
    _check(hidden, labels, chunk)
    of_stats = lambda z, stats, *data: loss(stats, *data)
    return _over_rows(of_stats, hidden, head, labels, data, (), *_shared(labels, head, chunk))


def logits_sum(
    loss: Callable[..., tuple[Array, Any]],
    hidden: Float[Array, "... T D"],
    head: Head,
    labels: Int[Array, "... T"],
    *data: Any,
    fixed: tuple = (),
    chunk: int = CHUNK,
) -> tuple[Array, Any]:
    """Compute `loss(logits(hidden, head), statistics of them, *data, *fixed)` for a loss that is a sum over tokens.

    As `token_sum`, except that `loss` sees a chunk's logits too, ignored tokens' included, and is passed the trees `fixed`
    whole, without gradient: a teacher's head, whose hidden states are `data`.
    """
    _check(hidden, labels, chunk)
    return _over_rows(loss, hidden, head, labels, data, fixed, (), chunk)


def _over_rows(
    loss: Callable, hidden: jax.Array, head: Head, labels: jax.Array, data: tuple, fixed: tuple, over: tuple, chunk: int
) -> tuple[Array, Any]:
    def mine(rows: tuple, whole: tuple) -> tuple[Array, Any]:
        labels, hidden, data = rows
        split = _splitter(labels, chunk)
        return _sum(loss, over, split(hidden), whole[0], split(labels, IGNORE), jax.tree.map(split, data), whole[1])

    return by_rows(mine, (labels, hidden, data), (head, fixed), total=True, together=over)


@operation("(rows) each embed", "", "(rows) each", out="(rows) each")
def token_stats(
    hidden: Float[Array, "... T D"],
    head: Head,
    labels: Int[Array, "... T"],
    *,
    chunk: int = CHUNK,
    change: Callable[..., Array] | None = None,
    data: tuple = (),
    beside: tuple = (),
) -> TokenStats:
    """Compute the statistics of every token's distribution; `labels` are the tokens to predict, negative to skip.

    `chunk` is that of `token_sum`. `change(logits, *data, *beside)` gives other logits in a chunk's place: `data` are trees
    of arrays as `labels`, `beside` of arrays [B ...] of the rows of labels [B T]; it closes over no arrays, see
    `losses.penalties`. Gradients flow to hidden and head.
    >>> losses.token_stats(jnp.zeros((2, 8)), ops.Head(weights["embed"]), jnp.array([1, 3])).logp
    Array([-3.465736, -3.465736], dtype=float32)
    """

    def mine(rows: tuple, head: Head, *beside: Any) -> TokenStats:
        labels, hidden, data = rows
        split = _splitter(labels, tokens)
        y, data = split(labels, IGNORE), jax.tree.map(split, data)
        stats = _stats(change or _same, over, split(hidden), head, y, data, beside)
        join = lambda x: jnp.moveaxis(x, 0, 2).reshape(x.shape[1], -1)[:, : labels.shape[-1]].reshape(labels.shape)
        return jax.tree.map(join, stats)

    _check(hidden, labels, chunk)
    over, tokens = ((), chunk) if change else _shared(labels, head, chunk)
    return by_rows(mine, (labels, hidden, data), head, *beside, total=False, together=over)


def _shared(labels: jax.Array, head: Head, chunk: int) -> tuple[tuple[str, ...], int]:
    """Name the mesh axes that divide the vocabulary, if `fsdp` does so and not the rows, and give the tokens of a chunk.

    Else each device fetches the head [V D], and adds up its gradient, each whole. Here it has a part of them, and a chunk's
    hidden states and their gradient of all rows along `fsdp`: less is sent where these tokens are no more than V. It is
    for functions of statistics, which are sums over V; others of logits may sort them, or look some up.
    """
    sizes, v = context("tp", SHARED), head.weight.shape[0]
    by = names(*partition(labels, "rows tokens")) if labels.ndim == 2 else []
    if SHARED not in by or not isinstance(head.weight, jax.Array) or v % math.prod(sizes.values()):
        return (), chunk
    tokens = labels.size * sizes[SHARED] // math.prod(context(*by).values())
    return (tuple(sizes), chunk * sizes[SHARED]) if tokens <= v // sizes.get("tp", 1) else ((), chunk)


def _lay(x: Any, *axes: Any, over: tuple[str, ...]) -> Any:
    """Lay arrays out with leading axes as named, the rest whole, if devices share a vocabulary."""
    return jax.lax.with_sharding_constraint(x, jax.tree.map(lambda x: P(*axes), x)) if over else x


def _check(hidden: jax.Array, labels: jax.Array, chunk: int) -> None:
    if labels.shape != hidden.shape[:-1]:
        raise ValueError(f"labels {labels.shape} do not fit hidden states {hidden.shape}; expected {hidden.shape[:-1]}")
    if chunk < 1:
        raise ValueError(f"chunk={chunk}; expected a number of tokens, at least 1")


def _splitter(labels: jax.Array, chunk: int) -> Callable:
    n = max(1, min(labels.shape[-1], -(-labels.size // chunk)))

    def split(x: jax.Array, fill: int = 0) -> jax.Array:
        """[... T *] -> [n B T/n *], every n-th token, so that neither B nor T loses a sharding that it has."""
        x = x.reshape(-1, *x.shape[labels.ndim - 1 :])
        x = jnp.pad(x, ((0, 0), (0, -x.shape[1] % n), *((0, 0),) * (x.ndim - 2)), constant_values=fill)
        return jnp.moveaxis(x.reshape(x.shape[0], -1, n, *x.shape[2:]), 2, 0)

    return split


_statistics = jax.custom_vjp(from_logits)


def _statistics_forward(z: jax.Array, labels: jax.Array) -> tuple:
    stats = from_logits(z, labels)
    return stats, (z, labels, stats)


_statistics.defvjp(_statistics_forward, lambda saved, ct: (logits_gradient(saved[0], saved[1], saved[2], ct), None))


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _sum(
    loss: Callable, over: tuple, hidden: jax.Array, head: Head, labels: jax.Array, data: tuple, fixed: tuple
) -> tuple:
    def one(_: None, xs: tuple) -> tuple[None, tuple]:
        x, y, data = _lay(xs, over=over)
        z = logits(x, head)
        return None, loss(z, from_logits(z, y), *data, *fixed)

    head = _lay(head, over, over=over)
    return _total(jax.lax.scan(one, None, (hidden, labels, data))[1])


def _sum_forward(
    loss: Callable, over: tuple, hidden: jax.Array, head: Head, labels: jax.Array, data: tuple, fixed: tuple
) -> tuple:
    """The value and, in the same scan, its gradients in hidden and in the floating leaves of head."""

    def one(grads: list, xs: tuple) -> tuple[list, tuple[jax.Array, Any]]:
        x, y, data = _lay(xs, over=over)
        z, pull = _project(x, head, over)
        z, pull_cap = jax.vjp(lambda z, bias: cap(z, bias, head), z, head.bias)
        on_logits = lambda z: loss(z, _statistics(z, y), *data, *fixed)
        value, pull_loss, sums = jax.vjp(on_logits, z, has_aux=True)
        dz, dbias = pull_cap(*pull_loss(jnp.ones_like(value)))
        dx, dweight = pull(dz)
        new = floating((dweight, dbias))
        grads = [a + b.astype(a.dtype) for a, b in zip(grads, new, strict=True)]
        return _lay(grads, over, over=over), (_lay(dx, SHARED, over=over).astype(x.dtype), (value, sums))

    head = _lay(head, over, over=over)
    zero = _lay([jnp.zeros(x.shape, wide(x.dtype)) for x in floating(head)], over, over=over)
    grads, (dhidden, sums) = jax.lax.scan(one, zero, (hidden, labels, data))
    return _total(sums), (hidden, head, dhidden, grads)


def _sum_backward(loss: Callable, over: tuple, residuals: tuple, ct: tuple) -> tuple:
    hidden, head, dhidden, grads = residuals
    left = iter(grads)
    # The empty cotangent is what JAX wants for an integer leaf, here of a quantised weight.
    leaf = lambda x: (ct[0] * next(left)).astype(x.dtype) if floating(x) else np.zeros(x.shape, jax.dtypes.float0)
    return (ct[0] * dhidden).astype(hidden.dtype), jax.tree.map(leaf, head), None, None, None


_sum.defvjp(_sum_forward, _sum_backward)


def _same(z: jax.Array) -> jax.Array:
    return z


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _stats(
    change: Callable, over: tuple, hidden: jax.Array, head: Head, labels: jax.Array, data: tuple, beside: tuple
) -> TokenStats:
    def one(_: None, xs: tuple) -> tuple[None, TokenStats]:
        x, y, data = _lay(xs, over=over)
        z = forward_of_vjp(lambda x: logits(x, head), x)
        return None, from_logits(change(z, *data, *beside), y)

    head = _lay(head, over, over=over)
    return jax.lax.scan(one, None, (hidden, labels, data))[1]


def _stats_backward(change: Callable, over: tuple, args: tuple, ct: TokenStats) -> tuple:
    hidden, head, labels, data, beside = args

    # What `ct` pulls back through the statistics is the gradient of the sum of their products.
    def product(z: jax.Array, unchanged: TokenStats, labels: jax.Array, ct: TokenStats, *more: Any) -> tuple:
        stats = _statistics(change(z, *more), labels)
        return sum((s * c).sum() for s, c in zip(stats, ct, strict=True)), None

    _, residuals = _sum_forward(product, over, hidden, head, labels, (labels, ct, *data), beside)
    return *_sum_backward(product, over, residuals, (1.0, None))[:3], None, None


_stats.defvjp(lambda *args: (_stats.fun(*args), args[2:]), _stats_backward)


def _project(x: jax.Array, head: Head, over: tuple) -> tuple[jax.Array, Callable]:
    """Float32 product of x and the weight, and its pullback dz -> (dx, dweight)."""
    dtype = wide(x.dtype)
    product = partial(einsum, "...d,vd->...v", out_dtype=dtype)
    if not isinstance(head.weight, jax.Array) or x.dtype == head.weight.dtype == dtype:
        return jax.vjp(product, x, head.weight)

    def pull(dz: jax.Array) -> tuple[jax.Array, jax.Array]:
        # Autodiff would round each chunk's dweight to bfloat16, where x or the weight has it, which biases training.
        dz = dz.astype(x.dtype)
        dweight = jnp.einsum("btv,btd->vd", dz, x, preferred_element_type=dtype)
        # Nor are sums over parts of a vocabulary rounded before they are added up.
        return einsum("...v,vd->...d", dz, head.weight, out_dtype=dtype if over else None), dweight

    return product(x, head.weight), pull


def _total(chunks: Any) -> Any:
    return jax.tree.map(lambda x: x.sum(0), chunks)
