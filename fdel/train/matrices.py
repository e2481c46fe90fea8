"""Directions for parameters that are matrices: Adafactor and Muon.

Our arrays hold more than one matrix (stacked layers, experts) or one in more than two axes ([heads head_dim embed]). What
the matrix is says the checkpoint: `params.hf_layout.matrix` reads it from the spec.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

from fdel.ops.contraction import widen
from fdel.params.hf_layout import matrix
from fdel.params.spec import Param, named_leaves, path_name, unstack

Axes = tuple[int, ...]


def declared(spec: Any) -> Callable[[tuple], Param | None]:
    """Find an array's declaration by its tree path, in a stacked or a listed tree; None if it has none (adapters)."""
    found = dict(named_leaves(spec)) | dict(named_leaves(unstack(spec)))
    return lambda path: found.get(path_name(path))


def sides(p: Param | None, x: Array) -> tuple[Axes, Axes]:
    """Give the axes of x that are its matrices' outputs and inputs; for anything else ((), all axes but stacked ones)."""
    m = matrix(p) if p else None
    if m is None:
        return (), tuple(range(len(p.stacked) if p else 0, x.ndim))
    return m.cut(range(x.ndim))[1:]


# ---- Adafactor -----------------------------------------------------------------------------------------------------


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class AdafactorState:
    """Steps taken, and the mean squared gradient over each matrix's outputs and over its inputs, whose product it is.

    What is no matrix has all of it in `rows`, and None in `columns`.
    """

    count: Int[Array, ""]
    rows: Any
    columns: Any


def scale_by_adafactor(
    spec: Any, *, decay: float = 0.8, eps: tuple[float, float] = (1e-30, 1e-3), threshold: float = 1.0
) -> optax.GradientTransformation:
    """Compute Adafactor's direction (arXiv:1804.04235), with the second moment's decay 1 - t^-decay and no momentum.

    The direction has at most the root mean square `threshold`, times that of the parameter or eps[1] if it is greater;
    each stacked layer's matrix on its own. `eps[0]` is added to squared gradients.
    """
    param = declared(spec)
    mean = lambda x, axes: x.mean(axes, keepdims=True) if axes else x

    def squares(tree: Any) -> tuple[Any, Any]:
        on_sides = lambda f: lambda path, g: f(g * g + eps[0], *sides(param(path), g))
        rows = on_sides(lambda g, outputs, inputs: g.mean(outputs) if outputs else g)
        columns = on_sides(lambda g, outputs, inputs: g.mean(inputs) if outputs else None)
        return jax.tree_util.tree_map_with_path(rows, tree), jax.tree_util.tree_map_with_path(columns, tree)

    def init(params: Any) -> AdafactorState:
        zero = jax.tree.map(jnp.zeros_like, squares(params))
        return AdafactorState(jnp.zeros((), jnp.int32), *zero)

    def direction(path: tuple, g: Array, rows: Array, columns: Array | None, p: Array) -> Array:
        outputs, inputs = sides(param(path), g)
        rms = lambda x: jnp.sqrt(mean(jnp.square(x), inputs + outputs))
        if columns is None:
            u = g * jax.lax.rsqrt(rows)
        else:  # one factor after the other: the product of two small means would underflow
            rows = jnp.expand_dims(rows, outputs)
            u = g * jax.lax.rsqrt(rows / mean(rows, inputs)) * jax.lax.rsqrt(jnp.expand_dims(columns, inputs))
        return u / jnp.maximum(1, rms(u) / threshold) * jnp.maximum(eps[1], rms(p.astype(u.dtype)))

    def update(grads: Any, state: AdafactorState, params: Any) -> tuple[Any, AdafactorState]:
        count = state.count + 1
        weight = count.astype(jnp.float32) ** -decay
        rows, columns = jax.tree.map(lambda a, b: a + weight * (b - a), (state.rows, state.columns), squares(grads))
        updates = jax.tree_util.tree_map_with_path(direction, grads, rows, columns, params)
        return updates, AdafactorState(count, rows, columns)

    return optax.GradientTransformation(init, update)


# ---- Muon ----------------------------------------------------------------------------------------------------------

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)


def orthogonalize(x: Float[Array, "... M N"], steps: int = 5, eps: float = 1e-7) -> Float[Array, "... M N"]:
    """Bring the singular values of matrices near 1, between 0.7 and 1.2, by Newton-Schulz iterations in x's dtype.

    A quintic chosen for its slope at zero (kellerjordan.github.io/posts/muon). float32 norm, then `steps` iterations.
    """
    a, b, c = NEWTON_SCHULZ
    if x.shape[-2] > x.shape[-1]:
        return orthogonalize(x.mT, steps, eps).mT
    norm = jnp.linalg.norm(widen(x), axis=(-2, -1), keepdims=True)
    x = (x / jnp.maximum(norm, eps)).astype(x.dtype)

    def step(_: Any, x: Array) -> Array:
        gram = x @ x.mT
        return a * x + (b * gram + c * gram @ gram) @ x

    return jax.lax.fori_loop(0, steps, step, x)


def is_hidden(p: Param | None) -> bool:
    """Whether Muon is for this array: a matrix that maps activations to activations, not a table or a head."""
    return p is not None and matrix(p) is not None and not {"vocab", "positions"} & set(p.axes.split())


def scale_by_muon(
    spec: Any, *, momentum: float = 0.95, nesterov: bool = True, steps: int = 5, rms: float | None = 0.2, dtype: Any
) -> optax.GradientTransformation:
    """Compute Muon's direction, the orthogonalised momentum, for matrices as `spec` declares them.

    `rms` is the root mean square of a direction, as Adam's is about 0.2: then both take one learning rate
    (arXiv:2502.16982). None is Keller Jordan's sqrt(max(1, outputs / inputs)). Iterations run in `dtype`.
    """
    param = declared(spec)

    def direction(path: tuple, g: Array, mu: Array) -> Array:
        outputs, inputs = sides(param(path), g)
        m, n = (math.prod(g.shape[i] for i in axes) for axes in (outputs, inputs))
        x = g + momentum * (mu - g) if nesterov else mu
        x = orthogonalize(x.reshape(*g.shape[: outputs[0]], m, n).astype(dtype), steps)
        scale = max(1, m / n) ** 0.5 if rms is None else rms * max(m, n) ** 0.5
        return scale * x.astype(g.dtype).reshape(g.shape)

    def update(grads: Any, mu: Any, params: Any = None) -> tuple[Any, Any]:
        mu = jax.tree.map(lambda g, m: m + (1 - momentum) * (g - m), grads, mu)
        return jax.tree_util.tree_map_with_path(direction, grads, mu), mu

    return optax.GradientTransformation(optax.tree.zeros_like, update)
