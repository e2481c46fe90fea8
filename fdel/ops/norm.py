"""Normalisation over the last axis, computed in float32."""

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float


def rms_norm(
    x: Float[Array, "... D"], weight: Float[Array, " D"] | None, eps: float, *, offset: float = 0.0
) -> Float[Array, "... D"]:
    """Normalise by the root mean square: x / sqrt(mean(x^2) + eps) * (offset + weight) (arXiv:1910.07467).

    `offset` is 1 for families that store the weight around zero (gemma, qwen3_next). weight None is a weight of ones.
    """
    y = x.astype(jnp.float32)
    y = y * jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + eps)
    if weight is not None:
        y = y * (offset + weight.astype(jnp.float32))
    return checkpoint_name(y.astype(x.dtype), "normed_input")


def layer_norm(
    x: Float[Array, "... D"], weight: Float[Array, " D"] | None, bias: Float[Array, " D"] | None, eps: float
) -> Float[Array, "... D"]:
    """Normalise mean and variance: (x - mean) / sqrt(var + eps) * weight + bias (arXiv:1607.06450)."""
    y = x.astype(jnp.float32)
    y = y - jnp.mean(y, -1, keepdims=True)
    y = y * jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + eps)
    if weight is not None:
        y = y * weight.astype(jnp.float32)
    if bias is not None:
        y = y + bias.astype(jnp.float32)
    return checkpoint_name(y.astype(x.dtype), "normed_input")
