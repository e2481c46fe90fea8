"""Softmax attention with all scores in memory: the formula that `flash` computes in blocks, with an additive bias."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from fdel.ops.flash import scores
from fdel.ops.mask import NEG, Mask, Segments, sides, visible


def dense_attention(
    q: Float[Array, "B K G T H"],
    k: Float[Array, "B K T H"],
    v: Float[Array, "B K T Hv"],
    segments: Segments,
    *,
    mask: Mask,
    sinks: Float[Array, "K G"] | None = None,
    alibi: Float[Array, "K G"] | None = None,
    bias: Float[Array, "B K G T S"] | None = None,
) -> Float[Array, "B K G T Hv"]:
    """Compute softmax(softcap(scale q k^T) + bias) v over visible keys, with all scores in memory.

    A sink is one more score per head in the denominator only (arXiv:2309.17453). A row that sees nothing gives 0.
    """
    p = dense_weights(q, k, segments, mask=mask, sinks=sinks, alibi=alibi, bias=bias)
    return jnp.einsum("bkgqs,bksh->bkgqh", p.astype(v.dtype), v, preferred_element_type=jnp.float32).astype(q.dtype)


def dense_weights(
    q: Float[Array, "B K G T H"],
    k: Float[Array, "B K T H"],
    segments: Segments,
    *,
    mask: Mask,
    sinks: Float[Array, "K G"] | None = None,
    alibi: Float[Array, "K G"] | None = None,
    bias: Float[Array, "B K G T S"] | None = None,
) -> Float[Array, "B K G T S"]:
    """Compute the softmax of `dense_attention`, in float32: 0 where a query may not see a key."""
    index = jnp.arange(q.shape[3])
    s = scores(mask, q, k, alibi, index, index)
    if bias is not None:
        s = s + bias
    seen = visible(mask, index, index, *sides(segments))[:, None, None]
    s = jnp.where(seen, s, NEG)
    top = jnp.max(s, -1, keepdims=True)
    sink = jnp.full(top.shape[1:3], NEG) if sinks is None else sinks.astype(jnp.float32)
    top = jax.lax.stop_gradient(jnp.maximum(top, sink[..., None, None]))
    p = jnp.where(seen, jnp.exp(s - top), 0)
    total = p.sum(-1, keepdims=True) + jnp.exp(sink[..., None, None] - top)
    return p / jnp.where(total == 0, 1, total)
