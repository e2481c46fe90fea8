"""GLM-4-0414 (arXiv:2406.12793): GLM with norms before and after attention and feed-forward."""

from fdel import ops
from fdel.models import builders, config, glm, sublayers

MODEL_TYPE, ARCHITECTURE = "glm4", "Glm4ForCausalLM"


@config.config
class Config(config.Decoder):
    """Sizes and constants."""

    DEFAULTS = glm.Config.DEFAULTS
    attn_bias: bool = config.hf("attention_bias", True)
    rope: ops.Rope = config.rotary(partial=0.5)


def spec(cfg: Config) -> dict:
    """Declare every array."""
    name = "model.layers.{layers}."
    norms = {"attn_norm": "input", "attn_post_norm": "post_self_attn", "mlp_norm": "post_attention",
             "mlp_post_norm": "post_mlp"}  # fmt: skip
    layer = {
        **{part: builders.norm(f"{name}{file}_layernorm.weight", cfg.embed) for part, file in norms.items()},
        **builders.gqa(name + "self_attn.", cfg, biased=cfg.attn_bias, o_biased=False),
        **builders.gate_up(name + "mlp.gate_up_proj.weight", cfg.embed, cfg.ffn, name + "mlp.down_proj.weight"),
    }
    return builders.decoder(cfg, layer)


@builders.hidden("attention")
def hidden(params, tokens, cfg: Config, batch: ops.Batch, carry: ops.Carry, remat: str | None):
    """Compute the final normalised hidden states, [... T embed]; called as `protocol.Family` says."""
    mask, norm = ops.Mask(cfg.head_dim**-0.5), lambda x, w: ops.rms_norm(x, w, cfg.norm_eps)
    change = sublayers.rotate(ops.rotation(cfg.rope, batch), interleaved=True)

    def block(x, carry, p, layer):
        a, carry = sublayers.attention(norm(x, p["attn_norm"]), carry, p, layer, batch, mask, change)
        x = x + norm(a, p["attn_post_norm"])
        h = ops.glu(norm(x, p["mlp_norm"]), p, ops.ACTIVATIONS[cfg.act])
        return x + norm(h, p["mlp_post_norm"]), carry

    return sublayers.walk(params, tokens, cfg, block, carry, remat)


state_spec, head, forward = builders.kv_state, builders.head, builders.forward(hidden)
