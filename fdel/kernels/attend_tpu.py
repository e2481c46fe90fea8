"""Packed attention by splash attention, the Pallas kernel that jax ships for TPUs; with its own backward pass."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from fdel.ops.mask import Keys, Mask, PerHead, Queries, Values, Where
from fdel.ops.platform import target

LANES = 128  # rows are whole blocks of so many tokens
BLOCKS = (512, 256, 128)  # tokens of a block: the first that divides the row


def unsupported(
    q: Array, k: Array, v: Array, where: Where, *, mask: Mask, sinks: Any, alibi: Any, bias: Any
) -> str | None:
    """Say why splash attention cannot serve this call, or None."""
    if target() != "tpu":
        return f"it is written for TPUs; the target is {target()}"
    if not q.dtype == k.dtype == v.dtype or q.dtype not in (jnp.bfloat16, jnp.float32):
        return f"it attends in bfloat16 and float32; found {q.dtype}, {k.dtype}, {v.dtype}"
    if q.shape[1] % LANES or k.shape[1] % LANES:
        return f"rows of {q.shape[1]} and {k.shape[1]} tokens; expected multiples of {LANES}"
    if where.k_segments is not None:
        return (
            "keys with segments of their own, hidden or of a prompt that samples share: it has one number for a token"
        )
    if where.q_start is not None:
        return "parts of a row whose place is computed; its masks are static"
    ahead = ("tokens that see later ones (Packed.ahead)", where.ahead)
    given = (name for name, x in (ahead, ("alibi slopes", alibi), ("a bias", bias)) if x is not None)
    return next((f"{name}, which it does not have" for name in given), None)


def call(
    q: Queries, k: Keys, v: Values, where: Where, *, mask: Mask, sinks: PerHead, alibi: None, bias: None
) -> tuple[Float[Array, "B T N Hv"], None]:
    """Attend by splash attention; scores are float32, the scale is folded into the queries."""
    from jax.experimental.pallas.ops.tpu import splash_attention  # takes a while to import

    splash: Any = splash_attention
    (t, heads), s = q.shape[1:3], k.shape[1]
    back, ahead = mask.reach
    if mask.causal and back is None:
        one = splash.CausalMask((t, s))
    else:
        one = splash.FullMask((t, s)) if back is None else splash.LocalMask((t, s), (back, ahead), 0)
    size = next(b for b in BLOCKS if t % b == 0 and s % b == 0)
    attention = splash.make_splash_mha_single_device(
        splash.MultiHeadMask([one] * heads),
        block_sizes=splash.BlockSizes(*[size] * 8),
        attn_logits_soft_cap=mask.softcap,
    )
    row: Any = lambda q, k, v, segments: attention(q, k, v, splash.SegmentIds(segments, segments), sinks)
    q = (q.astype(jnp.float32) * mask.scale).astype(q.dtype)
    out = jax.vmap(row)(*(x.swapaxes(1, 2) for x in (q, k, v)), where.q_segments)
    return out.swapaxes(1, 2), None
