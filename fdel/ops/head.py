"""From hidden states to logits: what the last lines of every causal language model do."""

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from fdel.ops.einsum import einsum


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Head:
    """Output projection of a model: logits = cap(scale * x weight + bias) / temperature.

    `weight` [V D] is an array or any weight leaf that `ops.einsum` takes, often the embedding itself.
    cap(z) = softcap * tanh(z / softcap), or the identity when `softcap` is None. Learning from samples that were drawn
    with a `temperature` sets it, so that both sides speak of one distribution.
    """

    weight: Any
    softcap: float | None = field(default=None, metadata={"static": True})
    scale: float = field(default=1.0, metadata={"static": True})
    bias: Float[Array, " V"] | None = None
    temperature: float = field(default=1.0, metadata={"static": True})


def cap(z: Float[Array, "... V"], bias: Float[Array, " V"] | None, head: Head) -> Float[Array, "... V"]:
    """Scale, shift and soft-cap projected values: softcap * tanh((scale * z + bias) / softcap) / temperature."""
    z = z if head.scale == 1.0 else head.scale * z
    z = z if bias is None else z + bias.astype(z.dtype)
    z = z if head.softcap is None else head.softcap * jnp.tanh(z / head.softcap)
    return z if head.temperature == 1.0 else z / head.temperature


def logits(x: Float[Array, "... D"], head: Head) -> Float[Array, "... V"]:
    """Compute float32 logits of hidden states. For losses over many tokens use `train.losses.token_stats`.
    >>> ops.logits(jnp.array([1.0, 2.0]), ops.Head(jnp.eye(2), softcap=1.0))
    Array([0.7615942, 0.9640276], dtype=float32)
    """
    dtype = jnp.promote_types(x.dtype, jnp.float32)
    return cap(einsum("...d,vd->...v", x, head.weight, out_dtype=dtype), head.bias, head)
