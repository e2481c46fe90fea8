"""DBRX (Databricks, 2024): LayerNorm, clipped queries, keys and values, and experts that lie in one matrix."""

import jax.numpy as jnp

from fdel import ops
from fdel.models import builders, config, keys, sublayers
from fdel.params.spec import Param, normal

MODEL_TYPE, ARCHITECTURE = "dbrx", "DbrxForCausalLM"
NORM_EPS = 1e-5


def act(d: dict) -> str:
    """Read the activation's name, which stands in an object."""
    name = keys.mapping("ffn_config.ffn_act_fn", d.get("ffn_config.ffn_act_fn")).get("name", "silu")
    if name not in ops.ACTIVATIONS:
        found = f"found {keys.show(name)}, understood are {', '.join(ops.ACTIVATIONS)}"
        raise keys.ConfigError(f"config field 'ffn_config.ffn_act_fn.name': {found}")
    return name


@config.config
class Config:
    """Sizes and constants; `hf(...)` names each one's key in config.json."""

    NESTED = ("attn_config", "ffn_config")
    ONLY = dict.fromkeys(("ffn_config.hidden_size", "ffn_config.moe_loss_weight"), config.ANY) | {
        "num_key_value_heads": lambda c: c.kv_heads
    }
    vocab: int = config.hf("vocab_size", 32000)
    embed: int = config.hf("d_model", 2048)
    layers: int = config.hf("n_layers", 24)
    heads: int = config.hf("n_heads", 16)
    kv_heads: int = config.hf("attn_config.kv_n_heads", 1)
    clip: float | None = config.hf("attn_config.clip_qkv", None)
    ffn: int = config.hf("ffn_config.ffn_hidden_size", 3584)
    experts: int = config.hf("ffn_config.moe_num_experts", 4)
    top_k: int = config.hf("ffn_config.moe_top_k", 1)
    p_norm: float | None = config.hf("ffn_config.moe_normalize_expert_weights", 1.0)
    jitter: float | None = config.hf("ffn_config.moe_jitter_eps", None)  # of training only, see `train.route`
    act: str = config.computed(act, lambda name: {"ffn_config.ffn_act_fn": {"name": name}})
    max_positions: int = config.hf("max_seq_len", 2048)
    tied: bool = config.hf("tie_word_embeddings", False, choices=(False,))
    rope: ops.Rope = config.rotary(
        lambda d: d["d_model"] // d["n_heads"], lambda d: d.get("attn_config.rope_theta") or 10000.0
    )

    head_dim = property(lambda self: self.embed // self.heads)


def spec(cfg: Config) -> dict:
    """Declare every array."""
    name, d = "transformer.blocks.{layers}.", cfg.embed
    weight, n, f, file = normal(builders.STD), cfg.experts, cfg.ffn, name + "ffn.experts.mlp."
    up = lambda part: Param("experts ffn embed", (n, f, d), weight, file + part, "(experts ffn) embed")
    down = Param("experts embed ffn", (n, d, f), weight, file + "w2", "(experts ffn) embed")
    layer = {
        "attn_norm": builders.norm(name + "norm_attn_norm.norm_1.weight", d),
        **builders.fused_qkv(name + "norm_attn_norm.attn.Wqkv", name + "norm_attn_norm.attn.out_proj", cfg),
        "mlp_norm": builders.norm(name + "norm_attn_norm.norm_2.weight", d),
        "router": builders.matrix(name + "ffn.router.layer.weight", ("embed", d), ("experts", cfg.experts)),
        "experts": {"gate": up("w1"), "up": up("v1"), "down": down},
    }
    return builders.decoder(cfg, layer, "transformer.wte", "transformer.norm_f")


@builders.hidden("attention", "router")
def hidden(params, tokens, cfg: Config, batch: ops.Batch, carry: ops.Carry, remat: str | None):
    """Compute the final normalised hidden states, [... T embed]; called as `protocol.Family` says."""
    turn, mask = sublayers.rotate(ops.rotation(cfg.rope, batch)), ops.Mask(cfg.head_dim**-0.5)
    norm = lambda x, p, part: sublayers.layer_norm(x, p, part, NORM_EPS)

    def route(logits, k):
        weights, experts = ops.route_softmax(logits, k, normalize=False)
        return weights if cfg.p_norm is None else weights / jnp.linalg.norm(weights, cfg.p_norm, -1, True), experts

    def block(x, carry, p, layer):
        h = norm(x, p, "attn_norm")
        a, carry = sublayers.attention(h, carry, p, layer, batch, mask, turn, clip=cfg.clip)
        y, carry = sublayers.softmax_experts(norm(x + a, p, "mlp_norm"), carry, p, cfg, batch, route=route)
        return x + a + y, carry

    return sublayers.walk(params, tokens, cfg, block, carry, remat, lambda x: norm(x, params, "norm"))


state_spec, head, forward = builders.kv_state, builders.head, builders.forward(hidden)
