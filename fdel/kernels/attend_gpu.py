"""Packed attention by cuDNN, as jax ships it (`jax.nn.dot_product_attention`), on NVIDIA GPUs."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from fdel.ops.mask import Keys, Mask, Queries, Where
from fdel.ops.platform import target


def unsupported(
    q: Array, k: Array, v: Array, where: Where, *, mask: Mask, sinks: Any, alibi: Any, bias: Any
) -> str | None:
    """Say why cuDNN cannot serve this call, or None. It knows lengths, no segments; the causal mask, no score's change."""
    if target() != "gpu":
        return f"it is written for NVIDIA GPUs; the target is {target()}"
    if not q.dtype == k.dtype == v.dtype or q.dtype not in (jnp.bfloat16, jnp.float16):
        return f"cuDNN attends in bfloat16 and float16; found {q.dtype}, {k.dtype}, {v.dtype}"
    if q.shape[3] != v.shape[3] or q.shape[3] > 128 or q.shape[3] % 8:
        return f"heads of {q.shape[3]} and {v.shape[3]} channels; expected equal multiples of 8, at most 128"
    if not where.single or where.k_segments is not None or where.q_start is not None:
        return "rows may hold several sequences or hidden keys, and cuDNN takes lengths alone (Packed.single)"
    if where.ahead is not None:
        return "tokens that see later ones (Packed.ahead)"
    if mask.window is not None and not mask.causal:
        return "a window that is not causal"
    for name, value in (("a softcap", mask.softcap), ("sinks", sinks), ("alibi slopes", alibi), ("a bias", bias)):
        if value is not None:
            return f"{name}, which cuDNN's attention does not have"
    return None


def call(
    q: Queries, k: Keys, v: Keys, where: Where, *, mask: Mask, sinks: None, alibi: None, bias: None
) -> tuple[Float[Array, "B T N H"], None]:
    """Attend by cuDNN; the output of padding is 0. See `unsupported` for what it can serve.

    Its backward pass wants an even number of tokens, so there may be one of padding more.
    """
    length = q.shape[1]
    q, k, v = (jnp.pad(x, ((0, 0), (0, length % 2), (0, 0), (0, 0))) for x in (q, k, v))
    lengths = jnp.sum(where.q_segments == where.q_segments[:, :1], 1, dtype=jnp.int32)
    window = None if mask.window is None else (mask.window - 1, 0)
    out = jax.nn.dot_product_attention(
        q, k, v, scale=mask.scale, is_causal=mask.causal, query_seq_lengths=lengths, key_value_seq_lengths=lengths,
        local_window_size=window, implementation="cudnn",
    )  # fmt: skip
    return out[:, :length], None
