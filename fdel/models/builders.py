"""What many families share: specs of attention projections, feed-forwards and caches; `hidden`, `head` and `forward`."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from fdel import ops
from fdel.ops import Pages, Slots, State
from fdel.ops.carry import begin
from fdel.ops.paged import heads_per_row, row_width
from fdel.params.spec import Param, layers, normal, ones, parts, stack, zeros

STD = 0.02  # initial standard deviation of weight matrices, GPT-2's


def norm(name: str, size: int, axis: str = "embed") -> Param:
    """A scale per channel, initially one."""
    return Param(axis, (size,), ones, name)


def bias(name: str, size: int, axis: str = "embed") -> Param:
    """A bias per channel, initially zero (also the scale of norms that add one to it)."""
    return Param(axis, (size,), zeros, name)


def prenorm(name: str, embed: int) -> dict[str, Param]:
    """Scales of the norms before attention and before the feed-forward, where they are called as Llama's."""
    parts = {"attn_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
    return {part: norm(f"{name}{file}.weight", embed) for part, file in parts.items()}


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


def gqa(
    name: str, cfg: Any, *, biased: bool = False, o_biased: bool | None = None,
    names: tuple[str, str, str, str] = ("q_proj", "k_proj", "v_proj", "o_proj"),
) -> dict[str, Param]:  # fmt: skip
    """Projections q, k, v and o of grouped-query attention, named {name}{names}.weight, and where they have them biases.

    `cfg` has embed, heads, kv_heads and head_dim. `biased` is of q, k and v, and of o unless `o_biased` says otherwise.
    """
    embed, heads, kv_heads, head_dim = cfg.embed, cfg.heads, cfg.kv_heads, cfg.head_dim
    tree = {"o": heads_in(f"{name}{names[3]}.weight", heads, head_dim, embed)}
    tree |= {"o_bias": bias(f"{name}{names[3]}.bias", embed)} if (biased if o_biased is None else o_biased) else {}
    sides = (("q", "heads", heads), ("k", "kv_heads", kv_heads), ("v", "kv_heads", kv_heads))
    for (part, axis, n), called in zip(sides, names, strict=False):
        file = f"{name}{called}."
        tree[part] = heads_out(file + "weight", (axis, n), head_dim, ("embed", embed))
        if biased:
            tree[part + "_bias"] = Param(f"{axis} head_dim", (n, head_dim), zeros, file + "bias", f"({axis} head_dim)")
    return tree


def qk_norm(name: str, cfg: Any, norm: Callable[[str, int, str], Param] = norm) -> dict[str, Param]:
    """Scales of the norms of each head's queries and keys, {name}q_norm.weight and {name}k_norm.weight."""
    return {f"{i}_norm": norm(f"{name}{i}_norm.weight", cfg.head_dim, "head_dim") for i in "qk"}


def glu(
    name: str, embed: int, ffn: int, names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
    *, biased: bool = False,
) -> dict[str, Param]:  # fmt: skip
    """Gated feed-forward: gate, up [ffn embed], down [embed ffn], named {name}{names}.weight, and their biases."""
    d, f, tree = ("embed", embed), ("ffn", ffn), {}
    for part, called, a, b in ("gate", names[0], d, f), ("up", names[1], d, f), ("down", names[2], f, d):
        tree[part] = matrix(f"{name}{called}.weight", a, b)
        tree |= {f"{part}_bias": bias(f"{name}{called}.bias", b[1], b[0])} if biased else {}
    return tree


def layer_norm(part: str, name: str, size: int, axis: str = "embed") -> dict[str, Param]:
    """Scale and bias of a LayerNorm, {name}.weight and {name}.bias, under `part` and `part`_bias."""
    return {part: norm(f"{name}.weight", size, axis), f"{part}_bias": bias(f"{name}.bias", size, axis)}


def fused(name: str, a: tuple[str, int], **sides: tuple[str, tuple[int, ...]]) -> dict[str, Param]:
    """Linear maps from axis a that lie one below the other in one tensor: name, ("embed", d), gate=("ffn", (f,)), ...

    Without inputs, a = ("", 0), their biases.
    """
    cuts = parts(**{part: math.prod(shape) for part, (_, shape) in sides.items()})
    inputs = (a[1],) if a[0] else ()
    return {
        part: Param(f"{axes} {a[0]}".strip(), (*shape, *inputs), normal(STD) if inputs else zeros, name,
                    f"[{axes}] {a[0]}".strip(), cuts[part])
        for part, (axes, shape) in sides.items()
    }  # fmt: skip


def fused_qkv(name: str, o: str, cfg: Any) -> dict[str, Param]:
    """Projections q, k and v one below the other in the tensor {name}.weight, and o."""
    heads, kv = (cfg.heads, cfg.head_dim), ("kv_heads head_dim", (cfg.kv_heads, cfg.head_dim))
    tree = fused(f"{name}.weight", ("embed", cfg.embed), q=("heads head_dim", heads), k=kv, v=kv)
    return tree | {"o": heads_in(f"{o}.weight", *heads, cfg.embed)}


def grouped_qkv(name: str, o: str, cfg: Any, *, biased: bool = False) -> dict[str, Param]:
    """Projections q, k and v in one tensor, and o: for each head of keys its queries, it and its values side by side."""
    group, h = cfg.heads // cfg.kv_heads, cfg.head_dim
    tree = {"o": heads_in(f"{o}.weight", cfg.heads, h, cfg.embed)}
    tree |= {"o_bias": bias(f"{o}.bias", cfg.embed)} if biased else {}
    for part, cut in parts(q=group * h, k=h, v=h).items():
        axis, n = ("heads", cfg.heads) if part == "q" else ("kv_heads", cfg.kv_heads)
        layout = f"(heads//{group} [heads%{group} head_dim])" if part == "q" else "(kv_heads [head_dim])"
        axes, shape = f"{axis} head_dim", (n, h)
        tree[part] = Param(f"{axes} embed", (*shape, cfg.embed), normal(STD), f"{name}.weight", f"{layout} embed", cut)
        if biased:
            tree[f"{part}_bias"] = Param(axes, shape, zeros, f"{name}.bias", layout, cut)
    return tree


def mlp(name: str, embed: int, ffn: int, names: tuple[str, str], *, biased: bool = True) -> dict[str, Param]:
    """Plain feed-forward: up [ffn embed] and down [embed ffn], named {name}{names}.weight, and their biases."""
    d, f = ("embed", embed), ("ffn", ffn)
    tree = {"up": matrix(f"{name}{names[0]}.weight", d, f), "down": matrix(f"{name}{names[1]}.weight", f, d)}
    if biased:
        tree["up_bias"] = bias(f"{name}{names[0]}.bias", ffn, "ffn")
        tree["down_bias"] = bias(f"{name}{names[1]}.bias", embed)
    return tree


def gate_up(name: str, embed: int, ffn: int, down: str) -> dict[str, Param]:
    """Gated feed-forward whose gate and up lie one below the other in the tensor `name`."""
    tree = fused(name, ("embed", embed), gate=("ffn", (ffn,)), up=("ffn", (ffn,)))
    return tree | {"down": matrix(down, ("ffn", ffn), ("embed", embed))}


def decoder(
    cfg: Any, layer: Any, embed: str = "model.embed_tokens", last: str = "model.norm",
    *, norm: Callable[[str, int], Param] = norm, head: str = "lm_head", norm_bias: bool = False, head_bias: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """Declare every array: the layers, and what stands around them.

    `layer` is the spec of one layer, or a function of its kind where `cfg.kinds` differ. Around them are embed and (unless
    tied) head, [vocab embed], and the scale of the last norm: {embed}.weight, {head}.weight, {last}.weight, and biases.
    """
    kinds = getattr(cfg, "kinds", ()) or (None,) * cfg.layers
    table = Param("vocab embed", (cfg.vocab, cfg.embed), normal(STD), f"{embed}.weight")
    tree = {"embed": table, "layers": layers(layer if callable(layer) else lambda kind: layer, kinds)}
    tree["norm"] = norm(f"{last}.weight", cfg.embed)
    tree |= {} if cfg.tied else {"head": replace(table, hf=f"{head}.weight")}
    tree |= {"norm_bias": bias(f"{last}.bias", cfg.embed)} if norm_bias else {}
    return tree | ({"head_bias": bias(f"{head}.bias", cfg.vocab, "vocab")} if head_bias else {})


def without_mask(name: str, cfg: Any) -> str | None:
    """Leave out the causal mask that older files carry: `rename` of a family."""
    return None if name.endswith((".bias", ".masked_bias")) and name.split(".")[-2] in ("attn", "attention") else name


def conv(name: str, kernel: int, axes: str, shape: tuple[int, ...]) -> Param:
    """Causal convolution of each channel of these axes, stored [channels 1 kernel] as torch does."""
    return Param(f"{axes} kernel", (*shape, kernel), normal(0.2), name, f"({axes}) 1 kernel")


def fused_conv(name: str, kernel: int, **sides: tuple[str, tuple[int, ...]]) -> dict[str, Param]:
    """Such convolutions that lie one below the other in one tensor: see `fused`."""
    as_conv = lambda p: replace(p, init=normal(0.2), hf_axes=p.hf_axes.replace("]", "] 1"))
    return jax.tree.map(as_conv, fused(name, ("kernel", kernel), **sides))


def kv_pages(layers: int, kv_heads: int, head_dim: int, *, pages: int, page: int) -> Pages:
    """Spec of a paged key/value cache; a head's tokens lie together, as CPU dots and GPU tile copies want.

    On TPUs short heads lie side by side, `ops.paged.heads_per_row` of them, in rows of `ops.paged.row_width`.
    """
    side = heads_per_row(kv_heads, head_dim)
    shape = (layers, pages, kv_heads // side, page, row_width(head_dim * side))
    p = Param("layers pages kv_heads page head_dim", shape, zeros)
    return Pages(p, p)


def kv_state(cfg: Any, *, pages: int, page: int = 64, rows: int = 0) -> State:
    """`state_spec` of a family whose layers all attend: keys and values of `pages` pages of `page` tokens."""
    return State(kv_pages(cfg.layers, cfg.kv_heads, cfg.head_dim, pages=pages, page=page))


def slots(layers: int, rows: int, ssm: tuple[int, ...], axes: str = "heads head_dim state", conv: Any = None) -> Slots:
    """Spec of recurrent state of `rows` sequences: a layer's `ssm` along these axes, and inputs of its Params `conv`."""
    past = lambda axes, *shape, kernel: Param(f"layers slots kernel {axes}", (layers, rows, kernel - 1, *shape), zeros)
    kept = jax.tree.map(lambda p: past(p.axes.removesuffix(" kernel"), *p.shape[:-1], kernel=p.shape[-1]), conv)
    return Slots(kept, Param(f"layers slots {axes}", (layers, rows, *ssm), zeros, dtype="float32"))


def decay_init(key, shape, dtype):
    """Initialise log decay rates: head i of a layer forgets at rate i + 1."""
    return jnp.broadcast_to(jnp.log(jnp.arange(1.0, shape[-1] + 1)), shape).astype(dtype)


def step_init(key, shape, dtype):
    """Initialise time steps log-uniformly in [0.001, 0.1], as the bias whose softplus they are."""
    dt = jnp.exp(jax.random.uniform(key, shape, minval=math.log(1e-3), maxval=math.log(1e-1)))
    return (dt + jnp.log(-jnp.expm1(-dt))).astype(dtype)


def moe(
    name: str, embed: int, ffn: int, experts: int, names: tuple[str, str, str] | None = None, *, fused: bool = False
) -> dict[str, Any]:
    """Router [experts embed], named {name}gate.weight, and gated feed-forwards stacked along an axis `experts`.

    transformers' modules have them as `fused_experts` does, and the file, if `fused`.
    """
    router = matrix(name + "gate.weight", ("embed", embed), ("experts", experts))
    held = fused_experts(name + "experts.", embed, ffn, experts)
    file = stack(glu(name + "experts.{experts}.", embed, ffn, *([names] if names else [])), "experts", range(experts))
    return {"router": router, "experts": held if fused else {k: replace(p, module=held[k]) for k, p in file.items()}}


def fused_experts(name: str, embed: int, ffn: int, experts: int, *, inputs_first: bool = False) -> dict[str, Param]:
    """Gated feed-forwards of all experts in {name}gate_up_proj, gate before up, and {name}down_proj.

    The file has matrices [out in], or [in out] with `inputs_first`.
    """
    axes = "experts embed [ffn]", "experts ffn embed"
    both, down = axes if inputs_first else (axes[1].replace("ffn", "[ffn]"), "")
    up = lambda cut: Param(axes[1], (experts, ffn, embed), normal(STD), name + "gate_up_proj", both, cut)
    tree = {part: up(cut) for part, cut in parts(gate=ffn, up=ffn).items()}
    shape = (experts, embed, ffn)
    return tree | {"down": Param("experts embed ffn", shape, normal(STD), name + "down_proj", down)}


def latent_pages(layers: int, latent: int, *, pages: int, page: int) -> Pages:
    """Spec of a paged cache of `ops.mla`: latents and rotary keys, common to all heads; values are a part of them."""
    axes = "layers pages groups page latent"
    return Pages(Param(axes, (layers, pages, 1, page, row_width(latent)), zeros), None)


def hidden(
    *taps: str, encode: Callable[[Any, Any, Any], Array] | None = None, rotary: bool = False,
    ahead: Callable[[Any], bool] = lambda cfg: False,
) -> Callable[[Callable[..., tuple[Array, ops.Carry]]], Callable[..., tuple]]:  # fmt: skip
    """Decorate a family's walk(params, tokens, cfg, batch, carry, remat) -> (x, carry), which becomes its `hidden`.

    `taps` names what can be watched in it beside hidden states: "attention", "router". A family with `encode` (see
    `protocol.Family`) takes media: `carry.media` then has their values; `rotary` says that tokens are turned by
    `batch.rotary` where it is there, ahead(cfg) whether tokens of an image see each other. It keeps the walk, as `walk`.
    """

    def decorate(walk: Callable[..., tuple[Array, ops.Carry]]) -> Callable[..., tuple]:
        def hidden(params, tokens, cfg, batch=None, state=None, taps=None, *, remat=None):
            batch, carry = begin(tokens, batch, state, taps, has, takes)
            if encode and (media := carry.media) is not None and media.values is None:
                with ops.rematerialising(remat):
                    carry = replace(carry, media=replace(media, values=encode(params, media.inputs, cfg), inputs=None))
            if ahead(cfg) and batch.ahead is None:
                batch = replace(batch, ahead=ops.look_ahead(batch))
            x, carry = walk(params, tokens, cfg, batch, carry, remat)
            return x, carry.state, carry.taps

        hidden.__doc__, hidden.__module__ = walk.__doc__, walk.__module__
        hidden.taps, hidden.walk, hidden.rotary, hidden.ahead = has, walk, rotary, ahead  # type: ignore[attr-defined]
        return hidden

    has, takes = ("hidden", *taps), ("media",) * (encode is not None) + ("rotary",) * rotary
    return decorate


def head(params: Any, cfg: Any) -> ops.Head:
    """Give the output projection, for `ops.logits` and the chunked losses; that of a tied model is its embedding.

    A Config may have `logit_scale`, the factor on its results, and `softcap`, their bound.
    """
    weight, scale = params["head"] if "head" in params else params["embed"], getattr(cfg, "logit_scale", 1.0)
    return ops.Head(weight, getattr(cfg, "softcap", None), scale, params.get("head_bias"))


def forward(hidden: Callable[..., tuple], head: Callable[[Any, Any], ops.Head] = head) -> Callable[..., tuple]:
    """Make a family's `forward` of its `hidden` and its `head`.
    >>> logits, _ = llama.forward(weights, tokens, cfg)
    >>> logits.shape
    (4, 6, 32)
    """

    def forward(params, tokens, cfg, batch=None, state=None):
        """Compute logits; see `protocol.Family`."""
        x, state, _ = hidden(params, tokens, cfg, batch, state)
        return ops.logits(x, head(params, cfg)), state

    return forward
