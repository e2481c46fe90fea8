"""The halves of a layer that many families have, as functions: (h, carry, p, ...) -> (y, carry), without norm and residual.

A family writes its block itself: where its norms stand, what is added to what, and which of these it calls.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from fdel import ops
from fdel.ops import Carry

Layer = Any  # an index, traced where layers are stacked


def walk(
    params: Any, tokens: Array, cfg: Any, block: Any, carry: Carry, remat: str | None,
    norm: Callable[[Array], Array] | None = None, *, scale: float | None = None, dtype: Any = None,
) -> tuple[Float[Array, "... D"], Carry]:  # fmt: skip
    """Embed tokens, apply every layer (`ops.layers`: one block, or one of each of `cfg.kinds`), and normalise at the end.

    `norm(x)` is the last norm; by default the root mean square, with the scale params["norm"]. `scale` multiplies the
    embeddings, rounded to their dtype as the references do; `dtype` is that of the residual stream, if it is another.
    Media of the carry stand in their places, not multiplied.
    """
    norm = norm or (lambda x: ops.rms_norm(x, params["norm"], cfg.norm_eps))
    x, kinds = ops.embed(params["embed"], tokens), getattr(cfg, "kinds", ())
    x = x if scale is None else x * jnp.asarray(scale, x.dtype)
    x = ops.place(x if dtype is None else x.astype(dtype), carry.media)
    x, carry = ops.layers(block, x, carry, params["layers"], kinds, remat=remat)
    return norm(x), carry


def layer_norm(x: Float[Array, "... D"], p: Mapping[str, Any], part: str, eps: float) -> Float[Array, "... D"]:
    """Normalise with the scale and the bias that `builders.layer_norm` declares under `part`; without absent ones."""
    return ops.layer_norm(x, p.get(part), p.get(f"{part}_bias"), eps)


def attention(
    h: Float[Array, "... D"], carry: Carry, p: Mapping[str, Any], layer: Layer, batch: ops.Batch, mask: ops.Mask,
    change: Callable[[Array, Array], tuple[Array, Array]] | None = None, *, alibi: Array | None = None,
    clip: float | None = None,
) -> tuple[Float[Array, "... D"], Carry]:  # fmt: skip
    """Attend with the projections q, k, v and o of `p`, and where it has them their biases and `sinks`.

    `change(q, k)` is what happens to queries [... heads head_dim] and keys before: norms, rotation. `alibi` holds slopes;
    projected queries, keys and values are cut off at -clip and clip.
    """
    q = ops.linear("...d,nhd->...nh", h, p["q"], p.get("q_bias"))
    k, v = (ops.linear("...d,khd->...kh", h, p[i], p.get(f"{i}_bias")) for i in "kv")
    q, k, v = (x if clip is None else jnp.clip(x, -clip, clip) for x in (q, k, v))
    q, k = change(q, k) if change else (q, k)
    a, carry = ops.attend(batch, carry, layer, q, k, v, mask=mask, sinks=p.get("sinks"), alibi=alibi)
    return ops.linear("...nh,dnh->...d", a, p["o"], p.get("o_bias")), carry


def rotate(rot: tuple[Array, Array], interleaved: bool = False) -> Callable[[Array, Array], tuple[Array, Array]]:
    """Give the `change` of `attention` that turns queries and keys by `ops.rotation(...)`."""
    rope = ops.rope_interleaved if interleaved else ops.rope
    return lambda q, k: (rope(q, rot), rope(k, rot))


def normed(
    norm: Callable[[Array, Any], Array], p: Mapping[str, Any], rot: tuple[Array, Array] | None = None,
    interleaved: bool = False,
) -> Callable[[Array, Array], tuple[Array, Array]]:  # fmt: skip
    """Give the `change` that applies norm(x, scale) with p["q_norm"] and p["k_norm"], then turns by `rot`, if given."""
    turn = (lambda q, k: (q, k)) if rot is None else rotate(rot, interleaved)
    return (lambda q, k: turn(norm(q, p["q_norm"]), norm(k, p["k_norm"]))) if "q_norm" in p else turn


def softmax_experts(
    h: Float[Array, "... D"], carry: Carry, p: Mapping[str, Any], cfg: Any, batch: ops.Batch, *,
    gated: Callable[[Array, Array], Array] | None = None, route: Callable[..., tuple[Array, Array]] = ops.route_softmax,
    **options: Any,
) -> tuple[Float[Array, "... D"], Carry]:  # fmt: skip
    """Route to `cfg.top_k` experts by softmax (`builders.moe`); beside them a shared one, gated where p has a gate.

    `gated` is given to `ops.moe`, `options` to `route`: normalize, groups, topk_groups. The router may have a bias.
    Where p has no router, of a dense layer, this is its gated feed-forward. Noise of a training step (`ops.jittered`) is
    the router's alone, but in families whose config.json may ask for it (`jitter`): there experts read it too, as in
    transformers, where it is multiplied in place.
    """
    act = ops.ACTIVATIONS[cfg.act]
    if "router" not in p:
        return ops.glu(h, p, act), carry
    seen, carry = ops.jittered(h, carry)
    logits = ops.einsum("...d,ed->...e", seen, p["router"], out_dtype=jnp.float32)
    logits = logits + p["router_bias"].astype(jnp.float32) if "router_bias" in p else logits
    weights, experts = route(logits, cfg.top_k, **options)
    carry = ops.watch_router(batch, carry, logits, jax.nn.softmax(logits), experts)
    experts, carry = ops.limited(batch, carry, experts, logits.shape[-1])
    x = seen if hasattr(cfg, "jitter") else h
    y = ops.moe(x, p["experts"], weights * getattr(cfg, "route_scale", 1.0), experts, act, gated=gated)
    if "shared" not in p:
        return y, carry
    shared = ops.glu(h, p["shared"], act)
    if "shared_gate" in p:
        shared = jax.nn.sigmoid(ops.einsum("...d,d->...", h, p["shared_gate"]))[..., None] * shared
    return y + shared, carry


def sigmoid_experts(
    h: Float[Array, "... D"], carry: Carry, p: Mapping[str, Any], cfg: Any, batch: ops.Batch
) -> tuple[Float[Array, "... D"], Carry]:
    """Route by sigmoid within groups, with a bias of selection, beside shared experts (arXiv:2412.19437, section 2.1.2).

    Where p has no router, of a dense layer, this is its gated feed-forward.
    """
    act = ops.ACTIVATIONS[cfg.act]
    if "router" not in p:
        return ops.glu(h, p, act), carry
    seen, carry = ops.jittered(h.astype(jnp.float32), carry)
    logits = ops.einsum("...d,ed->...e", seen, p["router"])
    bias = p["router_bias"]
    plain = bias.bias if isinstance(bias, ops.Tallied) else bias
    weights, experts = ops.route_sigmoid(
        logits, cfg.top_k, bias=plain, groups=cfg.groups, topk_groups=cfg.topk_groups,
        scale=cfg.route_scale, normalize=cfg.normalize,
    )  # fmt: skip
    weights, scores = ops.tally(batch, weights, experts, bias), jax.nn.sigmoid(logits)
    carry = ops.watch_router(batch, carry, logits, scores / scores.sum(-1, keepdims=True), experts)
    experts, carry = ops.limited(batch, carry, experts, logits.shape[-1])
    return ops.moe(h, p["experts"], weights, experts, act) + ops.glu(h, p["shared"], act), carry
