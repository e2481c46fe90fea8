"""Attention over what a batch may see: segments of the same call (`Packed`) or a paged cache (`Paged`).

The reference, `dense_attention`, holds all scores in memory: the formula that `flash` computes in blocks, and a bias.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from fdel.ops import dispatch, paged, ring
from fdel.ops import mask as M
from fdel.ops.batch import Batch, Packed, Place
from fdel.ops.carry import Carry, watch_attention
from fdel.ops.dispatch import Implementation
from fdel.ops.flash import Schedule, flash_attention
from fdel.ops.mask import NEG, Keys, Mask, PerHead, Queries, Values, Where
from fdel.ops.paged import paged_attention, write_pages
from fdel.ops.platform import target

SHORT = 1024  # tokens of the rows that a CPU attends to without loops
Bias = Float[Array, "... N T S"] | None


def dense_attention(
    q: Queries, k: Keys, v: Values, where: Where, *, mask: Mask, sinks: PerHead, alibi: PerHead, bias: Bias
) -> tuple[Float[Array, "B T N Hv"], None]:
    """Compute softmax(softcap(scale q k^T) + bias) v over visible keys, with all scores in memory.

    A sink is one more score per head in the denominator only (arXiv:2309.17453). A row that sees nothing gives 0.
    """
    p = dense_weights(q, k, where, mask=mask, sinks=sinks, alibi=alibi, bias=bias)
    p = p.reshape(p.shape[0], k.shape[2], -1, *p.shape[2:]).astype(v.dtype)
    out = jnp.einsum("bkgqs,bskh->bkgqh", p, v, preferred_element_type=jnp.float32)
    return checkpoint_name(M.ungrouped(out.astype(q.dtype)), "attn_output"), None


def dense_weights(
    q: Queries, k: Keys, where: Where, *, mask: Mask, sinks: PerHead, alibi: PerHead, bias: Bias
) -> Float[Array, "B N T S"]:
    """Compute the softmax of `dense_attention`, in float32: 0 where a query may not see a key."""
    kv_heads = k.shape[2]
    qi, ki = (start + jnp.arange(x.shape[1]) for start, x in zip(where.starts, (q, k), strict=True))
    s = M.scores(mask, M.grouped(q, kv_heads), k.swapaxes(1, 2), M.grouped(alibi, kv_heads), qi, ki)
    s = s.reshape(s.shape[0], -1, *s.shape[3:])
    s = s if bias is None else s + bias
    (qs, ks), look = where.sides, where.ahead
    seen = M.visible(mask, qi, ki, qs, ks, look)[:, None]
    s = jnp.where(seen, s, NEG)
    sink = jnp.float32(NEG) if sinks is None else sinks.astype(jnp.float32)[:, None, None]
    top = jax.lax.stop_gradient(jnp.maximum(jnp.max(s, -1, keepdims=True), sink))
    p = jnp.where(seen, jnp.exp(s - top), 0)
    total = p.sum(-1, keepdims=True) + jnp.exp(sink - top)
    return p / jnp.where(total == 0, 1, total)


# Its backward pass begins with q and k: a scan, or a policy that saves dots, would keep [N T S] of layers nobody watches.
def _softmax(mask: Mask, q: Array, k: Array, where: Where, given: dict[str, Any]) -> Array:
    return dense_weights(q, k, where, mask=mask, **given)


_weights = jax.custom_vjp(_softmax, nondiff_argnums=(0,))


def _weights_bwd(mask: Mask, saved: tuple, cotangent: Array) -> tuple:
    q, k, where, given = saved
    dq, dk, dgiven = jax.vjp(lambda q, k, given: _softmax(mask, q, k, where, given), q, k, given)[1](cotangent)
    return dq, dk, M.no_gradient(where), dgiven


_weights.defvjp(lambda mask, *args: (_softmax(mask, *args), args), _weights_bwd)


def _short(q: Array, *_: Any, bias: Any, **__: Any) -> str | None:
    """Say why rows cannot be attended to without loops here, or None."""
    if why := ring.no_bias(bias=bias):
        return why
    if target() != "cpu":
        return "it is written for CPU"
    return None if q.shape[1] <= SHORT else f"rows of {q.shape[1]} tokens are longer than {SHORT}"


def _blocks(schedule: Schedule | None = None) -> Callable:
    return lambda *args, bias, **kwargs: flash_attention(*args, schedule=schedule, **kwargs)


_Q = "rows tokens heads head_dim"


def _axes(q: Array, k: Array, *_: Any, **__: Any) -> tuple[tuple[str, ...], tuple[str, str]]:
    """Divide heads, each with its keys; a key head that all share is whole everywhere."""
    kv = "rows tokens one head_dim" if k.shape[2] == 1 else "rows tokens kv_heads head_dim"
    return (_Q, kv, kv, "rows tokens"), (_Q, "rows tokens heads")


ATTEND = dispatch.Table(  # each takes (q, k, v, Where, mask=, sinks=, alibi=, bias=) and returns (out, lse or None)
    "attend",
    {
        "ring": Implementation(ring.ring_attention, ring.unsupported),
        "cudnn": dispatch.kernel("attend_gpu"),
        "hopper": dispatch.kernel("flash_attention_gpu", unproven=True),
        "hopper_ordered": dispatch.kernel("flash_ordered_gpu", unproven=True),
        "splash": dispatch.kernel("attend_tpu"),
        "mosaic": dispatch.kernel("flash_attention_tpu"),
        "short": Implementation(_blocks(Schedule(loop=False)), _short),
        "flash": Implementation(_blocks(), ring.no_bias),
        "dense": Implementation(dense_attention),
    },
    _axes,
    named={"sinks": "heads", "alibi": "heads", "bias": "(rows) heads tokens keys"},
    also={  # EasyDeL's names
        "vanilla": "dense", "flash_attn2": "flash", "blockwise": "flash", "blocksparse": "splash", "sdpa": "cudnn",
        "cuda_flash_attn2": "cudnn", "scan_ring_attention": "ring", "auto": paged.AUTO,
        **dict.fromkeys(paged.ALSO, "pages are attended to by another operation, as in paged_attention=xla"),
    },
)  # fmt: skip


def _in_chunks(batch: Packed, size: int) -> Packed:
    """Make a segment of each chunk of `size` positions, so that every implementation serves it."""
    count = -(-batch.positions.shape[1] // size) + 1
    part = lambda ids: jnp.where(ids < 0, ids, ids * count + batch.positions // size)
    keys = None if batch.key_segment_ids is None else part(batch.key_segment_ids)
    return Packed(batch.positions, part(batch.segment_ids), keys)


def alibi_slopes(heads: int) -> np.ndarray:
    """Give each head's slope, float32: 2^(-8 i / n) for i from 1 to n heads (arXiv:2108.12409, section 3).

    For a number that is no power of two: of the next one, every other slope from the second on, then the others.
    >>> ops.alibi_slopes(3).tolist()
    [0.0625, 0.00390625, 0.25]
    """
    n = 2 ** math.ceil(math.log2(heads))
    slopes = 2.0 ** (-8 * np.arange(1, n + 1) / n)
    slopes = slopes if n == heads else np.concatenate([slopes[1::2], slopes[::2]])[:heads]
    return slopes.astype(np.float32)


def attend(
    batch: Batch, carry: Carry | None, layer: Any, q: Float[Array, "... T N H"], k: Float[Array, "... T K H"] | None,
    v: Float[Array, "... T K Hv"] | None, *, mask: Mask, sinks: PerHead = None, alibi: PerHead = None,
    bias: Bias = None, impl: str | None = None,
) -> tuple[Float[Array, "... T N Hv"], Carry]:  # fmt: skip
    """Attend and remember: softmax(softcap(scale q k^T) + bias) v over the keys that `batch` and `mask` let q see.

    Packed: q, k, v are [B T heads H] and tokens see their own segment. Paged: [T heads H], keys and values are written to
    the pages of layer `layer` first. Head n of N uses key head n // (N / K). Scores and sums are float32. `sinks` adds one
    score per head to the denominator; `alibi` holds slopes (arXiv:2108.12409); `bias` (Packed only) is added to scores.
    With a Packed batch, a tap may ask for the softmax itself (`ops.attention_weights`). `layer` may be a `Place` in several
    pools of pages. In a Paged call, k and v None write none: the layer attends to what another one has written there.
    Returns the output in q's dtype and the new carry. What a batch cannot honour is a ValueError: with Paged causal=False,
    bias, impl and taps, with Packed state.
    >>> q = jnp.ones((4, 6, 2, 4))  # 2 heads, and 1 of keys and values
    >>> ops.attend(ops.packed(tokens), None, 0, q, q[:, :, :1], q[:, :, :1], mask=ops.Mask(0.5))[0].shape
    (4, 6, 2, 4)
    """
    carry = carry or Carry()
    if isinstance(batch, Packed):
        if carry.pages is not None:
            raise ValueError("a Packed batch leaves no keys and values in Pages; use a Paged batch, or state None")
        if batch.prefix_ids is not None and (why := _no_prefix(mask, alibi, bias)):
            raise ValueError(f"Packed.prefix_ids: {why}")
        if batch.ahead is not None and mask.chunk is not None:
            raise ValueError("Packed.ahead with Mask.chunk: tokens see no others outside of their chunk; leave one out")
        batch = batch if mask.chunk is None else _in_chunks(batch, mask.chunk)
        kwargs: dict[str, Any] = {"sinks": sinks, "alibi": alibi, "bias": bias}
        q, k, v = (checkpoint_name(x, f"attn_{n}") for x, n in ((q, "query"), (k, "key"), (v, "value")))
        layer = layer.layer if isinstance(layer, Place) else layer
        carry = watch_attention(carry, layer, lambda: _weights(mask, q, k, batch.where, kwargs))
        return dispatch.run(ATTEND, impl, q, k, v, batch.where, mask=mask, **kwargs)[0], carry
    if bias is not None:
        raise ValueError("an additive bias is not supported with a Paged batch; express it as alibi slopes")
    if impl is not None:
        raise ValueError(f"impl={impl!r} names a way to attend in a Packed batch; with a Paged batch leave it out")
    if not mask.causal:
        why = "tokens to come are not in its pages; use a Packed batch"
        raise ValueError(f"Mask.causal=False with a Paged batch: {why}")
    if carry.taps and carry.taps.attention:
        raise ValueError("taps.attention with a Paged batch: weights are watched in Packed calls; leave it out")
    if carry.pages is None:
        raise ValueError("a Paged batch needs state, Pages of params.init(family.state_spec(cfg, ...)); found none")
    _, pool, layer, kv_heads = layer if isinstance(layer, Place) else (None, None, layer, None)
    pages = carry.pages if pool is None else carry.pages[pool]
    if k is not None and v is not None:
        pages = write_pages(batch, pages, layer, k, v)
    about = dict(kv_heads=kv_heads) if k is None or v is None else dict(v_dim=v.shape[-1], kv_heads=k.shape[1])
    out = paged_attention(batch, pages, layer, q, mask=mask, sinks=sinks, alibi=alibi, **about)
    if pool is not None:
        pages = (*carry.pages[:pool], pages, *carry.pages[pool + 1 :])
    return out, carry.remember(pages=pages)


def _no_prefix(mask: Mask, alibi: PerHead, bias: Bias) -> str | None:
    """Say why `Packed.prefix_ids` cannot be served, or None."""
    whys = {
        "this attention sees later tokens": not mask.causal,
        "this attention has a window or chunks, counted in places of the row": mask.window or mask.chunk,
        "alibi or another bias counts places of the row": alibi is not None or bias is not None,
    }
    found = next((why for why, so in whys.items() if so), None)
    return found and f"{found}; leave prefix_ids out, so that each sample has its own prompt"


def attend_slot(batch: Batch, q: Queries, k: Keys, v: Values, slot: tuple[Array, Array], *, mask: Mask) -> Array:
    """Attend as `attend` does, and to one more key and value of each head, `slot` [K H], which every query sees.

    [B T N Hv] in q's dtype; a Paged batch is a ValueError.
    """
    if not isinstance(batch, Packed):
        raise ValueError("a learned key of each head with a Paged batch: it is of whole sequences; use a Packed batch")
    out, lse = dispatch.run(ATTEND, None, q, k, v, batch.where, mask=mask, sinks=None, alibi=None, bias=None)
    if lse is None:  # then that output is not computed
        out, lse = flash_attention(q, k, v, batch.where, mask=mask, sinks=None, alibi=None)
    key, value = (jnp.repeat(x, q.shape[2] // x.shape[0], 0) for x in slot)
    s = jnp.einsum("btnh,nh->btn", q, key, preferred_element_type=jnp.float32) * mask.scale
    s = s if mask.softcap is None else mask.softcap * jnp.tanh(s / mask.softcap)
    share = jax.nn.sigmoid(s - lse)[..., None]
    return ((1 - share) * out + share * value).astype(q.dtype)
