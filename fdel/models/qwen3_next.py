"""Qwen3-Next: three gated delta-rule layers (arXiv:2412.06464) to one gated softmax-attention layer, and a sparse MoE."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from fdel import ops
from fdel.models import builders, config, sublayers
from fdel.params.spec import Param, normal, ones, parts

MODEL_TYPE, ARCHITECTURE = "qwen3_next", "Qwen3NextForCausalLM"
LINEAR, FULL = "linear_attention", config.FULL


def kinds(d: dict) -> tuple[tuple[str, str], ...]:
    """Read (mixer, feed-forward) of each layer; every fourth mixer is full attention unless layer_types says otherwise."""
    n, every = d["num_hidden_layers"], d.get("full_attention_interval", 4)
    mixers = config.layer_types(d, [FULL if (i + 1) % every == 0 else LINEAR for i in range(n)], (LINEAR, FULL))
    step, dense = d.get("decoder_sparse_step", 1), d.get("mlp_only_layers") or []
    sparse = [i not in dense and d.get("num_experts", 512) > 0 and (i + 1) % step == 0 for i in range(n)]
    return tuple((m, "moe" if s else "dense") for m, s in zip(mixers, sparse, strict=True))


def kinds_to_hf(kinds: tuple) -> dict:
    """Write layer_types and mlp_only_layers."""
    dense = [i for i, (_, f) in enumerate(kinds) if f == "dense"]
    return {"layer_types": [m for m, _ in kinds], "mlp_only_layers": dense, "decoder_sparse_step": 1}


@config.config
class Hybrid(config.Decoder):
    """Sizes and constants of the mixers: heads of the delta rule are key_heads and value_heads."""

    key_heads: int = config.hf("linear_num_key_heads", 16)
    value_heads: int = config.hf("linear_num_value_heads", 32)
    key_dim: int = config.hf("linear_key_head_dim", 128)
    value_dim: int = config.hf("linear_value_head_dim", 128)
    kernel: int = config.hf("linear_conv_kernel_dim", 4)
    attn_bias: bool = config.hf("attention_bias", False)

    normalize = True  # the weights of the experts that are chosen sum to one
    rep = property(lambda self: self.value_heads // self.key_heads)  # value heads per key head


@config.config
class Config(Hybrid):
    """Sizes and constants."""

    DEFAULTS = dict(
        vocab=151936, embed=2048, ffn=5632, layers=48, heads=16, kv_heads=2, head_dim=256, max_positions=32768,
        partial_rotary_factor=0.25,
    )  # fmt: skip
    experts: int = config.hf("num_experts", 512)
    top_k: int = config.hf("num_experts_per_tok", 10)
    moe_ffn: int = config.hf("moe_intermediate_size", 512)
    shared_ffn: int = config.hf("shared_expert_intermediate_size", 512)
    normalize: bool = config.hf("norm_topk_prob", True)
    kinds: tuple[tuple[str, str], ...] = config.computed(kinds, kinds_to_hf)


def linear_spec(cfg: Config, name: str) -> dict:
    """Declare a gated delta-rule mixer; the file interleaves q, k, v, z (and b, a) per key head."""
    d, g, r, k, v = cfg.embed, cfg.key_heads, cfg.rep, cfg.key_dim, cfg.value_dim
    qkvz, ba = parts(q=k, k=k, v=r * v, z=r * v), parts(beta=r, decay=r)

    def heads(axes: str, shape: tuple, file: str, part: tuple) -> Param:
        return Param(f"heads {axes} embed", (g, *shape, d), normal(0.02), name + file, f"(heads [{axes}]) embed", part)

    narrow = lambda part: heads("head_dim", (k,), "in_proj_qkvz.weight", qkvz[part])
    wide = lambda part: heads("rep head_dim", (r, v), "in_proj_qkvz.weight", qkvz[part])
    gate = lambda part: heads("rep", (r,), "in_proj_ba.weight", ba[part])
    inputs = {"q": narrow("q"), "k": narrow("k"), "v": wide("v"), "z": wide("z")}
    return inputs | {"beta": gate("beta"), "decay": gate("decay")} | delta_spec(cfg, name)


def convolutions(cfg: Any, name: str) -> dict[str, Param]:
    """Declare the convolutions of q, k and v, which lie one below the other in the file."""
    narrow = "heads head_dim", (cfg.key_heads, cfg.key_dim)
    wide = "heads rep head_dim", (cfg.key_heads, cfg.rep, cfg.value_dim)
    return builders.fused_conv(name + "conv1d.weight", cfg.kernel, q=narrow, k=narrow, v=wide)


def delta_spec(cfg: Any, name: str) -> dict:
    """Declare what a delta-rule mixer has beside its input projections."""
    d, g, r, v = cfg.embed, cfg.key_heads, cfg.rep, cfg.value_dim
    per_head = lambda part, init: Param("heads rep", (g, r), init, name + part, "(heads rep)", dtype="float32")
    return {
        "conv": convolutions(cfg, name),
        "rate": per_head("A_log", builders.decay_init), "step": per_head("dt_bias", ones),
        "mixer_norm": builders.norm(name + "norm.weight", v, "head_dim"),
        "o": Param("embed heads rep head_dim", (d, g, r, v), normal(0.02), name + "out_proj.weight",
                   "embed (heads rep head_dim)"),
    }  # fmt: skip


def full_spec(cfg: Any, name: str) -> dict:
    """Declare gated attention; the file holds query and gate of each head side by side."""
    query = parts(q=cfg.head_dim, gate=cfg.head_dim)
    spec = builders.gqa(name, cfg, biased=cfg.attn_bias)
    for side in ("q", "q_bias") if cfg.attn_bias else ("q",):
        axes = spec[side].hf_axes.replace("head_dim", "[head_dim]")
        spec |= {
            key: replace(spec[side], hf_axes=axes, part=part)
            for key, part in ((side, query["q"]), (side.replace("q", "q_gate"), query["gate"]))
        }
    return spec | builders.qk_norm(name, cfg, builders.bias)


def ffn_spec(cfg, kind: str, name: str) -> dict:
    """Declare a dense feed-forward, or routed experts beside a gated shared one."""
    if kind == "dense":
        return {"ffn": builders.glu(name, cfg.embed, cfg.ffn)}
    return {
        **builders.moe(name, cfg.embed, cfg.moe_ffn, cfg.experts, fused=cfg.fused),
        "shared": builders.glu(name + "shared_expert.", cfg.embed, cfg.shared_ffn),
        "shared_gate": Param("embed", (cfg.embed,), normal(0.02), name + "shared_expert_gate.weight", "1 embed"),
    }


def spec(cfg: Any, linear: Callable[[Any, str], dict] = linear_spec) -> dict:
    """Declare every array, with `linear` for the delta mixers; norm scales are stored around zero, except theirs."""
    name = "model.layers.{layers}."
    mixers = {LINEAR: linear(cfg, name + "linear_attn."), FULL: full_spec(cfg, name + "self_attn.")}

    layer = lambda kind: {
        "mixer_in_norm": builders.bias(name + "input_layernorm.weight", cfg.embed),
        **mixers[kind[0]],
        "ffn_norm": builders.bias(name + "post_attention_layernorm.weight", cfg.embed),
        **ffn_spec(cfg, kind[1], name + "mlp."),
    }

    return builders.decoder(cfg, layer, norm=builders.bias)


def rename(name: str, cfg: Any) -> str | None:
    """Map file names to spec names: multi-token-prediction weights are not part of the model."""
    return None if name.startswith("mtp.") else name


def state_spec(cfg: Any, *, pages: int, page: int = 64, rows: int) -> ops.State:
    """Declare what serving must remember: pages of the full layers, recurrent slots of the linear ones."""
    full = sum(mixer == FULL for mixer, _ in cfg.kinds)
    ssm = cfg.value_heads, cfg.key_dim, cfg.value_dim
    kv = builders.kv_pages(full, cfg.kv_heads, cfg.head_dim, pages=pages, page=page)
    return ops.State(kv, builders.slots(cfg.layers - full, rows, ssm, conv=convolutions(cfg, "")))


def delta(h, carry, p, layer, cfg, batch):
    """Mix by the gated delta rule: short convolution, unit-length q and k, decay and write strength from the input."""
    mixed = {i: ops.einsum("...d,ghd->...gh", h, p[i]) for i in "qk"}
    mixed["v"], z = (ops.einsum("...d,grhd->...grh", h, p[i]) for i in "vz")
    b, a = (ops.einsum("...d,grd->...gr", h, p[i]) for i in ("beta", "decay"))
    flat = lambda x: x.reshape(*h.shape[:-1], -1)
    mixed, carry = ops.causal_conv(batch, carry, layer, mixed, p["conv"])
    q, k, v = (ops.ACTIVATIONS[cfg.act](mixed[i]) for i in "qkv")
    q, k = (jnp.repeat(ops.l2norm(x), cfg.rep, -2) for x in (q, k))
    g = -jnp.exp(p["rate"].astype(jnp.float32)) * jax.nn.softplus(a.astype(jnp.float32) + p["step"].astype(jnp.float32))
    o, carry = ops.gated_delta_rule(
        batch, carry, layer, q * cfg.key_dim**-0.5, k, v.reshape(*q.shape[:-1], -1), flat(g), jax.nn.sigmoid(flat(b))
    )
    o = ops.rms_norm(o.reshape(z.shape), p["mixer_norm"], cfg.norm_eps)
    o = (o.astype(jnp.float32) * jax.nn.silu(z.astype(jnp.float32))).astype(h.dtype)
    return ops.einsum("...grh,dgrh->...d", o, p["o"]), carry


def gated_attention(h, carry, p, layer, batch, mask, change):
    """Attend, and weigh each channel of each head by a sigmoid of the input."""
    project = lambda i: ops.linear("...d,nhd->...nh", h, p[i], p.get(i + "_bias"))
    q, k = change(project("q"), project("k"))
    a, carry = ops.attend(batch, carry, layer, q, k, project("v"), mask=mask)
    a = a * jax.nn.sigmoid(project("q_gate"))
    return ops.linear("...nh,dnh->...d", a, p["o"], p.get("o_bias")), carry


@builders.hidden("attention", "router")
def hidden(params, tokens, cfg, batch: ops.Batch, carry: ops.Carry, remat: str | None):
    """Compute the final normalised hidden states, [... T embed]; called as `protocol.Family` says."""
    rot, mask = ops.rotation(cfg.rope, batch), ops.Mask(cfg.head_dim**-0.5)
    norm = lambda x, w: ops.rms_norm(x, w, cfg.norm_eps, offset=1.0)
    index = lambda mixer, layer: ops.pool_index(tuple(m for m, _ in cfg.kinds), {mixer}, layer)

    def linear(h, carry, p, layer):
        return delta(h, carry, p, index(LINEAR, layer), cfg, batch)

    def full(h, carry, p, layer):
        return gated_attention(h, carry, p, index(FULL, layer), batch, mask, sublayers.normed(norm, p, rot))

    def block(mixer):
        def apply(x, carry, p, layer):
            y, carry = mixer(norm(x, p["mixer_in_norm"]), carry, p, layer)
            x = x + y
            h, p = norm(x, p["ffn_norm"]), p.get("ffn", p)
            y, carry = sublayers.softmax_experts(h, carry, p, cfg, batch, normalize=cfg.normalize)
            return x + y, carry

        return apply

    blocks = {kind: block(linear if kind[0] == LINEAR else full) for kind in sorted(set(cfg.kinds))}
    return sublayers.walk(params, tokens, cfg, blocks, carry, remat, lambda x: norm(x, params["norm"]))


head, forward = builders.head, builders.forward(hidden)
