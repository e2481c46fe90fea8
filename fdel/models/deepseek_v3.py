"""DeepSeek-V3 (arXiv:2412.19437): latent attention, dense layers first, then routed experts beside shared ones."""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from fdel import ops
from fdel.models import builders, config
from fdel.params.spec import Param, layers, parts, zeros

MODEL_TYPE, ARCHITECTURE = "deepseek_v3", "DeepseekV3ForCausalLM"
DENSE, MOE = "dense", "moe"
LATENT_EPS = 1e-6  # of the norms of latents, whatever rms_norm_eps is


@dataclass(frozen=True, kw_only=True)
class Config:
    """Sizes and constants; `hf(...)` names each one's key in config.json."""

    vocab: int = config.hf("vocab_size", 129280)
    embed: int = config.hf("hidden_size", 7168)
    ffn: int = config.hf("intermediate_size", 18432)
    moe_ffn: int = config.hf("moe_intermediate_size", 2048)
    layers: int = config.hf("num_hidden_layers", 61)
    heads: int = config.hf("num_attention_heads", 128)
    q_latent: int | None = config.hf("q_lora_rank", 1536)
    latent: int = config.hf("kv_lora_rank", 512)
    nope_dim: int = config.hf("qk_nope_head_dim", 128)
    rope_dim: int = config.hf("qk_rope_head_dim", 64)
    v_dim: int = config.hf("v_head_dim", 128)
    dense_layers: int = config.hf("first_k_dense_replace", 3)
    experts: int = config.hf("n_routed_experts", 256)
    shared: int = config.hf("n_shared_experts", 1)
    top_k: int = config.hf("num_experts_per_tok", 8)
    groups: int = config.hf("n_group", 8)
    topk_groups: int = config.hf("topk_group", 4)
    normalize: bool = config.hf("norm_topk_prob", True)
    route_scale: float = config.hf("routed_scaling_factor", 2.5)
    norm_eps: float = config.hf("rms_norm_eps", 1e-6)
    act: str = config.hf("hidden_act", "silu", choices=tuple(ops.ACTIVATIONS))
    max_positions: int = config.hf("max_position_embeddings", 4096)
    tied: bool = config.hf("tie_word_embeddings", False)
    attn_bias: bool = config.hf("attention_bias", False)
    interleaved: bool = config.hf("rope_interleave", True)
    rope: ops.Rope = config.computed(
        lambda d: config.rope(d, d.get("qk_rope_head_dim", 64)), lambda r: {"rope_parameters": config.rope_to_hf(r)}
    )
    predictors: int = config.computed(lambda d: 0, lambda n: {"num_nextn_predict_layers": n}, default=0)
    source: str = config.source()

    @classmethod
    def from_hf(cls, d: dict) -> "Config":
        """Build from config.json; of older keys, the values that transformers implements are understood."""
        return config.from_hf(
            cls, d, scoring_func="sigmoid", topk_method="noaux_tc", moe_layer_freq=1, head_dim=config.ANY,
            num_key_value_heads=lambda c: c.heads, qk_head_dim=lambda c: c.nope_dim + c.rope_dim,
        )  # fmt: skip

    to_hf = config.to_hf

    @property
    def kinds(self) -> tuple[str, ...]:
        """The feed-forward of each layer."""
        return tuple(DENSE if i < self.dense_layers else MOE for i in range(self.layers))

    @property
    def scale(self) -> float:
        """The factor on attention scores; yarn sharpens them once more for queries and once for keys."""
        sharper = ops.yarn_mscale(self.rope.factor, self.rope.mscale_all or 0.0) if self.rope.kind != "default" else 1.0
        return (self.nope_dim + self.rope_dim) ** -0.5 * sharper**2


def rename(name: str, cfg: Config) -> str | None:
    """Leave out the layers that predict further tokens, which files number after the others."""
    layer = name.removeprefix("model.layers.").partition(".")[0]
    return None if layer.isdecimal() and int(layer) >= cfg.layers else name


def attention_spec(cfg: Config, name: str) -> dict:
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


def moe_spec(cfg: Config, name: str) -> dict:
    """Declare routed experts, their selection bias, and the shared experts as one feed-forward."""
    spec = builders.moe(name, cfg.embed, cfg.moe_ffn, cfg.experts)
    return spec | {
        "router": replace(spec["router"], dtype="float32"),
        "router_bias": Param("experts", (cfg.experts,), zeros, name + "gate.e_score_correction_bias", dtype="float32"),
        "shared": builders.glu(name + "shared_experts.", cfg.embed, cfg.moe_ffn * cfg.shared),
    }


def spec(cfg: Config) -> dict:
    """Declare every array."""
    name = "model.layers.{layers}."
    ffn = {DENSE: builders.glu(name + "mlp.", cfg.embed, cfg.ffn), MOE: moe_spec(cfg, name + "mlp.")}

    def layer(kind):
        return {
            "attn_norm": builders.norm(name + "input_layernorm.weight", cfg.embed),
            **attention_spec(cfg, name + "self_attn."),
            "mlp_norm": builders.norm(name + "post_attention_layernorm.weight", cfg.embed),
            **ffn[kind],
        }

    top = {
        "embed": builders.embedding("model.embed_tokens.weight", cfg.vocab, cfg.embed),
        "layers": layers(layer, cfg.kinds),
        "norm": builders.norm("model.norm.weight", cfg.embed),
    }
    return top if cfg.tied else top | {"head": builders.head("lm_head.weight", cfg.vocab, cfg.embed)}


def state_spec(cfg: Config, *, pages: int, page: int = 64, rows: int = 0) -> ops.Pages:
    """Declare what serving must remember: latents and rotary keys of `pages` pages of `page` tokens."""
    return builders.latent_pages(cfg.layers, cfg.latent + cfg.rope_dim, pages=pages, page=page)


def hidden(params, tokens, cfg: Config, batch: ops.Batch | None = None, state=None, *, remat: str | None = None):
    """Compute the final normalised hidden states: tokens int[B T] (Packed) or int[T] (Paged) -> [..., embed], state."""
    batch = ops.packed(tokens) if batch is None else batch
    rot = ops.rotation(cfg.rope, batch)
    rope = ops.rope_interleaved if cfg.interleaved else ops.rope
    mask, act = ops.Mask(cfg.scale), ops.ACTIVATIONS[cfg.act]
    join = lambda a, b: jnp.concatenate([a, b], -1)

    def attention(h, state, p, layer):
        q = h
        if "q_a" in p:
            q = ops.rms_norm(ops.linear("...d,rd->...r", h, p["q_a"], p.get("q_a_bias")), p["q_norm"], LATENT_EPS)
        q = ops.einsum("...r,nhr->...nh", q, p["q"])
        q = join(q[..., : cfg.nope_dim], rope(q[..., cfg.nope_dim :], rot))
        kv = ops.linear("...d,cd->...c", h, p["kv_a"], p.get("kv_a_bias"))
        latent = ops.rms_norm(kv[..., : cfg.latent], p["kv_norm"], LATENT_EPS)
        kv = join(latent, rope(kv[..., None, cfg.latent :], rot)[..., 0, :])
        a, state = ops.mla(batch, state, layer, q, kv, p["k"], p["v"], mask=mask)
        return ops.linear("...nh,dnh->...d", a, p["o"], p.get("o_bias")), state

    def dense(h, state, p):
        return ops.glu(h, p, act), state

    def moe(h, state, p):
        logits = ops.einsum("...d,ed->...e", h.astype(jnp.float32), p["router"])
        weights, experts = ops.route_sigmoid(
            logits, cfg.top_k, bias=p["router_bias"], groups=cfg.groups, topk_groups=cfg.topk_groups,
            scale=cfg.route_scale, normalize=cfg.normalize,
        )  # fmt: skip
        scores = jax.nn.sigmoid(logits)
        state = ops.watch_router(batch, state, scores / scores.sum(-1, keepdims=True), experts)
        return ops.moe(h, p["experts"], weights, experts, act) + ops.glu(h, p["shared"], act), state

    def block(ffn):
        def apply(x, state, p, layer):
            a, state = attention(ops.rms_norm(x, p["attn_norm"], cfg.norm_eps), state, p, layer)
            x = x + a
            y, state = ffn(ops.rms_norm(x, p["mlp_norm"], cfg.norm_eps), state, p)
            return x + y, state

        return apply

    x = ops.embed(params["embed"], tokens)
    blocks = {DENSE: block(dense), MOE: block(moe)}
    x, state = ops.layers(blocks, x, state, params["layers"], cfg.kinds, remat=remat)
    return ops.rms_norm(x, params["norm"], cfg.norm_eps), state


def head(params, cfg: Config) -> ops.Head:
    """The output projection, for `ops.logits` and the chunked losses."""
    return ops.Head(params["head"] if "head" in params else params["embed"])


def forward(params, tokens, cfg: Config, batch: ops.Batch | None = None, state=None):
    """Compute logits: tokens int[B T] with Packed (the default), int[T] with Paged -> (float32 [..., V], state)."""
    x, state = hidden(params, tokens, cfg, batch, state)
    return ops.logits(x, head(params, cfg)), state
