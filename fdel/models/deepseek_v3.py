"""DeepSeek-V3 (arXiv:2412.19437): latent attention, dense layers first, then routed experts beside shared ones."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax.numpy as jnp

from fdel import ops
from fdel.models import builders, config, sublayers
from fdel.ops.rope import yarn_mscale
from fdel.params.spec import Param, parts, zeros

MODEL_TYPE, ARCHITECTURE = "deepseek_v3", "DeepseekV3ForCausalLM"
DENSE, MOE = "dense", "moe"
LATENT_EPS = 1e-6  # of the norms of latents, whatever rms_norm_eps is


def kinds(d: dict) -> tuple[str, ...]:
    """Read the feed-forward of each layer: the first first_k_dense_replace are dense."""
    return tuple(DENSE if i < d.get("first_k_dense_replace", 3) else MOE for i in range(d["num_hidden_layers"]))


def kinds_to_hf(kinds: tuple[str, ...]) -> dict:
    """Write first_k_dense_replace."""
    return {"first_k_dense_replace": kinds.count(DENSE)}


@config.config
class Routed(config.Decoder):
    """Sizes and constants of the experts, and which layers have them."""

    moe_ffn: int = config.hf("moe_intermediate_size", 2048)
    experts: int = config.hf("n_routed_experts", 256)
    shared: int = config.hf("n_shared_experts", 1)
    top_k: int = config.hf("num_experts_per_tok", 8)
    groups: int = config.hf("n_group", 8)
    topk_groups: int = config.hf("topk_group", 4)
    normalize: bool = config.hf("norm_topk_prob", True)
    route_scale: float = config.hf("routed_scaling_factor", 2.5)
    attn_bias: bool = config.hf("attention_bias", False)
    predictors: int = config.computed(lambda d: 0, lambda n: {"num_nextn_predict_layers": n}, default=0)
    kinds: tuple[str, ...] = config.computed(kinds, kinds_to_hf)


@config.config
class Config(Routed):
    """Sizes and constants; heads of keys and their sizes are those of latent attention."""

    DEFAULTS = dict(vocab=129280, embed=7168, ffn=18432, layers=61, heads=128, max_positions=4096, rope_dim=64)
    # Of older keys, the values that transformers implements are understood.
    ONLY = dict(
        scoring_func="sigmoid", topk_method="noaux_tc", moe_layer_freq=1, head_dim=config.ANY,
        num_key_value_heads=lambda c: c.heads, qk_head_dim=lambda c: c.nope_dim + c.rope_dim,
    )  # fmt: skip
    q_latent: int | None = config.hf("q_lora_rank", 1536)
    latent: int = config.hf("kv_lora_rank", 512)
    nope_dim: int = config.hf("qk_nope_head_dim", 128)
    rope_dim: int = config.hf("qk_rope_head_dim", 64)
    v_dim: int = config.hf("v_head_dim", 128)
    interleaved: bool = config.hf("rope_interleave", True)
    rope: ops.Rope = config.rotary(lambda d: d["qk_rope_head_dim"])
    head_dim: int = config.computed(lambda d: d["qk_rope_head_dim"], lambda n: {}, default=0)  # unused
    kv_heads: int = config.computed(lambda d: d["num_attention_heads"], lambda n: {}, default=0)

    @property
    def scale(self) -> float:
        """The factor on attention scores; yarn sharpens them once more for queries and once for keys."""
        sharper = yarn_mscale(self.rope.factor, self.rope.mscale_all or 0.0) if self.rope.kind != "default" else 1.0
        return (self.nope_dim + self.rope_dim) ** -0.5 * sharper**2


def rename(name: str, cfg: Config) -> str | None:
    """Leave out the layers that predict further tokens, which files number after the others."""
    layer = name.removeprefix("model.layers.").partition(".")[0]
    return None if layer.isdecimal() and int(layer) >= cfg.layers else name


def attention_spec(cfg, name: str) -> dict:
    """Declare latent attention; the file holds keys and values of each head side by side in kv_b_proj."""
    embed, width = ("embed", cfg.embed), cfg.nope_dim + cfg.rope_dim
    heads, sides = ("heads", cfg.heads), parts(k=cfg.nope_dim, v=cfg.v_dim)
    from_latent = lambda side, size: replace(
        builders.heads_out(name + "kv_b_proj.weight", heads, size, ("latent", cfg.latent)),
        hf_axes="(heads [head_dim]) latent", part=sides[side],
    )  # fmt: skip
    spec = {
        "kv_a": builders.matrix(name + "kv_a_proj_with_mqa.weight", embed, ("latent", cfg.latent + cfg.rope_dim)),
        "kv_norm": builders.norm(name + "kv_a_layernorm.weight", cfg.latent, "latent"),
        "k": from_latent("k", cfg.nope_dim),
        "v": from_latent("v", cfg.v_dim),
        "o": builders.heads_in(name + "o_proj.weight", cfg.heads, cfg.v_dim, cfg.embed),
    }
    if cfg.q_latent is None:
        spec["q"] = builders.heads_out(name + "q_proj.weight", heads, width, embed)
    else:
        spec["q_a"] = builders.matrix(name + "q_a_proj.weight", embed, ("q_latent", cfg.q_latent))
        spec["q_norm"] = builders.norm(name + "q_a_layernorm.weight", cfg.q_latent, "q_latent")
        spec["q"] = builders.heads_out(name + "q_b_proj.weight", heads, width, ("q_latent", cfg.q_latent))
    if cfg.attn_bias:
        spec["kv_a_bias"] = builders.bias(name + "kv_a_proj_with_mqa.bias", cfg.latent + cfg.rope_dim, "latent")
        spec["o_bias"] = builders.bias(name + "o_proj.bias", cfg.embed)
        if cfg.q_latent is not None:
            spec["q_a_bias"] = builders.bias(name + "q_a_proj.bias", cfg.q_latent, "q_latent")
    return spec


def moe_spec(cfg, name: str, names: tuple[str, str, str] | None = None) -> dict:
    """Declare routed experts, their selection bias, and the shared experts as one feed-forward."""
    spec = builders.moe(name, cfg.embed, cfg.moe_ffn, cfg.experts, names)
    return spec | {
        "router": replace(spec["router"], dtype="float32"),
        "router_bias": Param("experts", (cfg.experts,), zeros, name + "gate.e_score_correction_bias", dtype="float32"),
        "shared": builders.glu(name + "shared_experts.", cfg.embed, cfg.moe_ffn * cfg.shared),
    }


def spec(cfg: Config, moe_spec: Callable[[Any, str], dict] = moe_spec) -> dict:
    """Declare every array."""
    name = "model.layers.{layers}."
    ffn = {DENSE: builders.glu(name + "mlp.", cfg.embed, cfg.ffn), MOE: moe_spec(cfg, name + "mlp.")}
    layer = lambda kind: builders.prenorm(name, cfg.embed) | attention_spec(cfg, name + "self_attn.") | ffn[kind]
    return builders.decoder(cfg, layer)


def state_spec(cfg: Config, *, pages: int, page: int = 64, rows: int = 0) -> ops.State:
    """Declare what serving must remember: latents and rotary keys of `pages` pages of `page` tokens."""
    return ops.State(builders.latent_pages(cfg.layers, cfg.latent + cfg.rope_dim, pages=pages, page=page))


def latent_norm(x, p, part):
    """Normalise latents by their root mean square, or by LayerNorm where `p` has its biases."""
    if f"{part}_bias" in p:
        return sublayers.layer_norm(x, p, part, LATENT_EPS)
    return ops.rms_norm(x, p[part], LATENT_EPS)


def query_latent(h, p):
    """Compute the latent of the queries."""
    return latent_norm(ops.linear("...d,rd->...r", h, p["q_a"], p.get("q_a_bias")), p, "q_norm")


def attention(h, carry, p, layer, cfg, batch, rot, mask, attend=ops.mla):
    """Attend by latents: keys and values are linear maps of `cfg.latent` channels, and share rotary channels.

    `attend` is called as `ops.mla`.
    """
    rope = ops.rope_interleaved if cfg.interleaved else ops.rope
    join = lambda a, b: jnp.concatenate([a, b], -1)
    q = ops.einsum("...r,nhr->...nh", query_latent(h, p) if "q_a" in p else h, p["q"])
    kv = ops.linear("...d,cd->...c", h, p["kv_a"], p.get("kv_a_bias"))
    latent = latent_norm(kv[..., : cfg.latent], p, "kv_norm")
    if rot is not None:
        q = join(q[..., : cfg.nope_dim], rope(q[..., cfg.nope_dim :], rot))
    turned = kv[..., cfg.latent :] if rot is None else rope(kv[..., None, cfg.latent :], rot)[..., 0, :]
    a, carry = attend(batch, carry, layer, q, join(latent, turned), p["k"], p["v"], mask=mask)
    return ops.linear("...nh,dnh->...d", a, p["o"], p.get("o_bias")), carry


def walk(params, tokens, cfg, batch: ops.Batch, carry: ops.Carry, remat: str | None, moe=sublayers.sigmoid_experts):
    """Compute the final normalised hidden states, [... T embed]; `moe` is the feed-forward of layers with experts."""
    rot, mask = ops.rotation(cfg.rope, batch), ops.Mask(cfg.scale)

    def block(x, carry, p, layer):
        h = ops.rms_norm(x, p["attn_norm"], cfg.norm_eps)
        a, carry = attention(h, carry, p, layer, cfg, batch, rot, mask)
        y, carry = moe(ops.rms_norm(x + a, p["mlp_norm"], cfg.norm_eps), carry, p, cfg, batch)
        return x + a + y, carry

    return sublayers.walk(params, tokens, cfg, block, carry, remat)


hidden = builders.hidden("attention", "router")(walk)
head, forward = builders.head, builders.forward(hidden)
