"""Phi-3.5-MoE (arXiv:2404.14219): LayerNorm with biases, and two experts of a sparse mixer (arXiv:2409.12136)."""

from functools import partial

from fdel import ops
from fdel.models import builders, config, mixtral, sublayers
from fdel.params.hf_layout import with_modules

MODEL_TYPE, ARCHITECTURE = "phimoe", "PhimoeForCausalLM"
MODULES = {r"block_sparse_moe\.gate\.": "mlp.router."} | mixtral.MODULES


@config.config
class Config(mixtral.Config):
    """Sizes and constants, Mixtral's first."""

    DEFAULTS = mixtral.Config.DEFAULTS | dict(vocab=32064, ffn=6400, experts=16)
    top_k: int = config.hf("num_experts_per_tok", 2, choices=(2,))
    band: float = config.hf("router_jitter_noise", 0.01)  # which experts share a weight, see `ops.route_sparsemixer`
    jitter: float = config.hf("input_jitter_noise", 0.0)  # of training only, see `train.route`
    attn_bias: bool = config.hf("attention_bias", False)
    head_bias: bool = config.hf("lm_head_bias", False)


def spec(cfg: Config) -> dict:
    """Declare every array."""
    name = "model.layers.{layers}."
    layer = {
        **builders.layer_norm("attn_norm", name + "input_layernorm", cfg.embed),
        **builders.gqa(name + "self_attn.", cfg, biased=cfg.attn_bias),
        **builders.layer_norm("mlp_norm", name + "post_attention_layernorm", cfg.embed),
        **builders.moe(name + "block_sparse_moe.", cfg.embed, cfg.ffn, cfg.experts, ("w1", "w3", "w2")),
    }
    return with_modules(builders.decoder(cfg, layer, norm_bias=True, head_bias=cfg.head_bias), MODULES)


@builders.hidden("attention", "router")
def hidden(params, tokens, cfg: Config, batch: ops.Batch, carry: ops.Carry, remat: str | None):
    """Compute the final normalised hidden states, [... T embed]; called as `protocol.Family` says."""
    turn, mask = sublayers.rotate(ops.rotation(cfg.rope, batch)), ops.Mask(cfg.head_dim**-0.5, window=cfg.window)
    norm = lambda x, p, part: sublayers.layer_norm(x, p, part, cfg.norm_eps)
    route = partial(ops.route_sparsemixer, band=cfg.band)

    def block(x, carry, p, layer):
        a, carry = sublayers.attention(norm(x, p, "attn_norm"), carry, p, layer, batch, mask, turn)
        y, carry = sublayers.softmax_experts(norm(x + a, p, "mlp_norm"), carry, p, cfg, batch, route=route)
        return x + a + y, carry

    return sublayers.walk(params, tokens, cfg, block, carry, remat, lambda x: norm(x, params, "norm"))


state_spec, head, forward = builders.kv_state, builders.head, builders.forward(hidden)
