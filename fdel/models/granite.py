"""Granite (IBM, 2024): Llama whose embeddings, scores, residual additions and logits have a factor each."""

from fdel import ops
from fdel.models import builders, config, llama, sublayers

MODEL_TYPE, ARCHITECTURE = "granite", "GraniteForCausalLM"


@config.config
class Config(config.Decoder):
    """Sizes and constants."""

    DEFAULTS = dict(vocab=32000, embed=4096, ffn=11008, layers=32, heads=32)
    attn_bias: bool = config.hf("attention_bias", False)
    mlp_bias: bool = config.hf("mlp_bias", False)
    embed_scale: float = config.hf("embedding_multiplier", 1.0)
    score_scale: float = config.hf("attention_multiplier", 1.0)
    add_scale: float = config.hf("residual_multiplier", 1.0)
    logit_divisor: float = config.hf("logits_scaling", 1.0)
    logit_scale: float = config.computed(lambda d: 1 / d["logits_scaling"], lambda scale: {})


spec = llama.spec


@builders.hidden("attention")
def hidden(params, tokens, cfg: Config, batch: ops.Batch, carry: ops.Carry, remat: str | None):
    """Compute the final normalised hidden states, [... T embed]; called as `protocol.Family` says."""
    turn, mask = sublayers.rotate(ops.rotation(cfg.rope, batch)), ops.Mask(cfg.score_scale)
    norm = lambda x, w: ops.rms_norm(x, w, cfg.norm_eps)

    def block(x, carry, p, layer):
        a, carry = sublayers.attention(norm(x, p["attn_norm"]), carry, p, layer, batch, mask, turn)
        x = x + a * cfg.add_scale
        return x + ops.glu(norm(x, p["mlp_norm"]), p, ops.ACTIVATIONS[cfg.act]) * cfg.add_scale, carry

    return sublayers.walk(params, tokens, cfg, block, carry, remat, scale=cfg.embed_scale)


state_spec, head, forward = builders.kv_state, builders.head, builders.forward(hidden)
