"""Grok-1 (xAI, 2024): sandwich norms, capped attention scores, scaled embeddings and logits, two of eight experts."""

from fdel import ops
from fdel.models import builders, config, sublayers
from fdel.params.hf_layout import without_modules

MODEL_TYPE, ARCHITECTURE = "grok-1", "Grok1ModelForCausalLM"


@config.config
class Config(config.Decoder):
    """Sizes and constants; names and defaults are those of the published conversion, hpcai-tech/grok-1."""

    DEFAULTS = dict(
        vocab=32000, embed=4096, ffn=32768, layers=32, heads=32, kv_heads=32, max_positions=4096, norm_eps=1e-5, tied=True,
    )  # fmt: skip
    act: str = config.act(default="gelu_pytorch_tanh")
    experts: int = config.hf("num_experts", 8)
    top_k: int = config.hf("num_experts_per_tok", 2)
    embed_scale: float = config.hf("embedding_multiplier_scale", 1.0)
    score_scale: float = config.hf("attn_output_multiplier", 1.0)
    score_cap: float = config.hf("max_attn_value", 1.0)
    logit_scale: float = config.hf("output_multiplier_scale", 1.0)


def spec(cfg: Config) -> dict:
    """Declare every array."""
    name = "model.layers.{layers}."
    norm = lambda part: builders.norm(f"{name}{part}_norm.weight", cfg.embed)
    names = "linear", "linear_v", "linear_1"
    layer = {
        "attn_norm": norm("pre_attn"),
        **builders.gqa(name + "attn.", cfg),
        "attn_post_norm": norm("post_attn"),
        "mlp_norm": norm("pre_moe"),
        **builders.moe(name + "moe_block.", cfg.embed, cfg.ffn, cfg.experts, names),
        "mlp_post_norm": norm("post_moe"),
    }
    return without_modules(builders.decoder(cfg, layer))


@builders.hidden("attention", "router")
def hidden(params, tokens, cfg: Config, batch: ops.Batch, carry: ops.Carry, remat: str | None):
    """Compute the final normalised hidden states, [... T embed]; called as `protocol.Family` says."""
    turn, mask = sublayers.rotate(ops.rotation(cfg.rope, batch)), ops.Mask(cfg.score_scale, softcap=cfg.score_cap)
    norm = lambda x, w: ops.rms_norm(x, w, cfg.norm_eps)

    def block(x, carry, p, layer):
        a, carry = sublayers.attention(norm(x, p["attn_norm"]), carry, p, layer, batch, mask, turn)
        x = x + norm(a, p["attn_post_norm"])
        y, carry = sublayers.softmax_experts(norm(x, p["mlp_norm"]), carry, p, cfg, batch, normalize=False)
        return x + norm(y, p["mlp_post_norm"]), carry

    return sublayers.walk(params, tokens, cfg, block, carry, remat, scale=cfg.embed_scale)


state_spec, head, forward = builders.kv_state, builders.head, builders.forward(hidden)
