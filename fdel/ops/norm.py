"""Normalisation over the last axis, computed in float32."""

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from fdel.ops.dispatch import operation


@operation("rows", out="rows")
def rms_norm(
    x: Float[Array, "... D"], weight: Float[Array, "... D"] | None, eps: float, *, offset: float = 0.0
) -> Float[Array, "... D"]:
    """Normalise by the root mean square: x / sqrt(mean(x^2) + eps) * (offset + weight) (arXiv:1910.07467).

    `offset` is 1 for families that store the weight around zero (gemma, qwen3_next). weight None is a weight of ones.
    >>> ops.rms_norm(jnp.array([3.0, 4.0]), None, 0.0)
    Array([0.84852815, 1.1313709 ], dtype=float32)
    """
    y = x.astype(jnp.float32)
    y = y * jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + eps)
    if weight is not None:
        y = y * (offset + weight.astype(jnp.float32))
    return checkpoint_name(y.astype(x.dtype), "normed_input")


@operation("rows", out="rows")
def layer_norm(
    x: Float[Array, "... D"], weight: Float[Array, "... D"] | None, bias: Float[Array, " D"] | None, eps: float
) -> Float[Array, "... D"]:
    """Normalise mean and variance: (x - mean) / sqrt(var + eps) * weight + bias (arXiv:1607.06450).
    >>> ops.layer_norm(jnp.array([1.0, 3.0]), None, None, 0.0)
    Array([-1.,  1.], dtype=float32)
    """
    y = x.astype(jnp.float32)
    y = y - jnp.mean(y, -1, keepdims=True)
    y = y * jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + eps)
    if weight is not None:
        y = y * weight.astype(jnp.float32)
    if bias is not None:
        y = y + bias.astype(jnp.float32)
    return checkpoint_name(y.astype(x.dtype), "normed_input")
