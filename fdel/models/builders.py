"""Spec builders for sub-trees that many families share: attention projections, feed-forwards, embeddings, caches."""

import math
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from fdel.ops import quantized_pages
from fdel.ops.batch import Pages, Slots
from fdel.params.spec import Param, normal, ones, stack, zeros

STD = 0.02  # initial standard deviation of weight matrices, GPT-2's


def norm(name: str, size: int, axis: str = "embed") -> Param:
    """A scale per channel, initially one."""
    return Param(axis, (size,), ones, name)


def bias(name: str, size: int, axis: str = "embed") -> Param:
    """A bias per channel, initially zero (also the scale of norms that add one to it)."""
    return Param(axis, (size,), zeros, name)


def matrix(name: str, a: tuple[str, int], b: tuple[str, int]) -> Param:
    """A linear map from axis a to axis b, stored [b a]: outputs first, as torch does."""
    return Param(f"{b[0]} {a[0]}", (b[1], a[1]), normal(STD), name)


def heads_out(name: str, heads: tuple[str, int], head_dim: int, a: tuple[str, int]) -> Param:
    """A linear map from axis a to heads, [heads head_dim a]."""
    axes, shape = f"{heads[0]} head_dim {a[0]}", (heads[1], head_dim, a[1])
    return Param(axes, shape, normal(STD), name, f"({heads[0]} head_dim) {a[0]}")


def heads_in(name: str, heads: int, head_dim: int, embed: int) -> Param:
    """A linear map from heads to the residual stream, [embed heads head_dim]."""
    shape = (embed, heads, head_dim)
    return Param("embed heads head_dim", shape, normal(STD), name, "embed (heads head_dim)")


def gqa(name: str, embed: int, heads: int, kv_heads: int, head_dim: int) -> dict[str, Param]:
    """Projections q, k, v and o of grouped-query attention, named {name}q_proj.weight etc."""
    out = lambda part, axis, n: heads_out(f"{name}{part}_proj.weight", (axis, n), head_dim, ("embed", embed))
    return {"q": out("q", "heads", heads), "k": out("k", "kv_heads", kv_heads), "v": out("v", "kv_heads", kv_heads),
            "o": heads_in(name + "o_proj.weight", heads, head_dim, embed)}  # fmt: skip


def gqa_bias(name: str, heads: int, kv_heads: int, head_dim: int) -> dict[str, Param]:
    """Biases of q, k and v, [heads head_dim]."""
    heads_bias = lambda axis, n, part: Param(
        f"{axis} head_dim", (n, head_dim), zeros, f"{name}{part}_proj.bias", f"({axis} head_dim)"
    )
    return {"q_bias": heads_bias("heads", heads, "q"), "k_bias": heads_bias("kv_heads", kv_heads, "k"),
            "v_bias": heads_bias("kv_heads", kv_heads, "v")}  # fmt: skip


def glu(name: str, embed: int, ffn: int, names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")) -> dict:
    """Gated feed-forward: gate, up [ffn embed], down [embed ffn]."""
    d, f = ("embed", embed), ("ffn", ffn)
    gate, up, down = (f"{name}{n}.weight" for n in names)
    return {"gate": matrix(gate, d, f), "up": matrix(up, d, f), "down": matrix(down, f, d)}


def embedding(name: str, vocab: int, embed: int) -> Param:
    """Token embedding, [vocab embed]."""
    return Param("vocab embed", (vocab, embed), normal(STD), name)


def head(name: str, vocab: int, embed: int) -> Param:
    """Untied output projection, [vocab embed]."""
    return matrix(name, ("embed", embed), ("vocab", vocab))


def conv(name: str, channels: int, kernel: int) -> Param:
    """Causal depthwise convolution, stored [channels 1 kernel] as torch does."""
    return Param("channels kernel", (channels, kernel), normal(0.2), name, "channels 1 kernel")


def kv_pages(layers: int, kv_heads: int, head_dim: int, *, pages: int, page: int) -> Pages:
    """Spec of a paged key/value cache; a head's tokens lie together, as CPU dots and GPU tile copies want."""
    p = Param("layers pages kv_heads page head_dim", (layers, pages, kv_heads, page, head_dim), zeros)
    return Pages(p, p)


def quantized(state_spec: Any, format: str | None) -> Any:
    """Turn the spec of any family's state into one whose pages are in 8 bits, "int8" or "fp8"; None changes nothing.

    Recurrent state stays as it is: it is read and written whole at each step, so that errors would add up.
    """
    if format is None:
        return state_spec

    def values(p: Param | None) -> Param | None:
        return None if p is None else replace(p, dtype=quantized_pages.FORMATS[format][0])

    def scales(p: Param | None) -> Param | None:
        if p is None:
            return None
        layers, pages, heads, page, _ = p.axes.split()
        shape = (*p.shape[:3], quantized_pages.scales(p.shape[-1]), p.shape[3])
        return Param(f"{layers} {pages} {heads} scales {page}", shape, zeros, dtype="float32")

    def one(x: Any) -> Any:
        return Pages(values(x.k), values(x.v), scales(x.k), scales(x.v)) if isinstance(x, Pages) else x

    return jax.tree.map(one, state_spec, is_leaf=lambda x: isinstance(x, Pages))


def slots(layers: int, conv: tuple[int, int], ssm: tuple[int, int, int], *, rows: int) -> Slots:
    """Spec of recurrent state for `rows` sequences: conv is (channels, kernel - 1), ssm the shape of one layer's state."""
    return Slots(
        Param("layers slots channels kernel", (layers, rows, *conv), zeros),
        Param("layers slots heads head_dim state", (layers, rows, *ssm), zeros, dtype="float32"),
    )


def decay_init(key, shape, dtype):
    """Initialise log decay rates: head i of a layer forgets at rate i + 1."""
    return jnp.broadcast_to(jnp.log(jnp.arange(1.0, shape[-1] + 1)), shape).astype(dtype)


def step_init(key, shape, dtype):
    """Initialise time steps log-uniformly in [0.001, 0.1], as the bias whose softplus they are."""
    dt = jnp.exp(jax.random.uniform(key, shape, minval=math.log(1e-3), maxval=math.log(1e-1)))
    return (dt + jnp.log(-jnp.expm1(-dt))).astype(dtype)


def moe(name: str, embed: int, ffn: int, experts: int, names: tuple[str, str, str] | None = None) -> dict:
    """Router [experts embed], named {name}gate.weight, and gated feed-forwards stacked along an axis `experts`."""
    parts = glu(name + "experts.{experts}.", embed, ffn, *([names] if names else []))
    router = matrix(name + "gate.weight", ("embed", embed), ("experts", experts))
    return {"router": router, "experts": stack(parts, "experts", range(experts))}


def latent_pages(layers: int, latent: int, *, pages: int, page: int) -> Pages:
    """Spec of a paged cache of `ops.mla`: latents and rotary keys, common to all heads; values are a part of them."""
    axes = "layers pages groups page latent"
    return Pages(Param(axes, (layers, pages, 1, page, latent), zeros), None)
