"""OLMo (arXiv:2402.00838): Llama with LayerNorms that have neither scale nor bias; projections may be clipped."""

from fdel import ops
from fdel.models import builders, config, sublayers

MODEL_TYPE, ARCHITECTURE = "olmo", "OlmoForCausalLM"


@config.config
class Config(config.Decoder):
    """Sizes and constants."""

    DEFAULTS = dict(vocab=50304, embed=4096, ffn=11008, layers=32, heads=32)
    norm_eps: float = 1e-5
    attn_bias: bool = config.hf("attention_bias", False)
    clip: float | None = config.hf("clip_qkv", None)


def spec(cfg: Config) -> dict:
    """Declare every array."""
    name = "model.layers.{layers}."
    layer = builders.gqa(name + "self_attn.", cfg, biased=cfg.attn_bias) | builders.glu(
        name + "mlp.", cfg.embed, cfg.ffn
    )
    tree = builders.decoder(cfg, layer)
    del tree["norm"]
    return tree


@builders.hidden("attention")
def hidden(params, tokens, cfg: Config, batch: ops.Batch, carry: ops.Carry, remat: str | None):
    """Compute the final normalised hidden states, [... T embed]; called as `protocol.Family` says."""
    mask, change = ops.Mask(cfg.head_dim**-0.5), sublayers.rotate(ops.rotation(cfg.rope, batch))
    norm = lambda x: ops.layer_norm(x, None, None, cfg.norm_eps)

    def block(x, carry, p, layer):
        a, carry = sublayers.attention(norm(x), carry, p, layer, batch, mask, change, clip=cfg.clip)
        x = x + a
        return x + ops.glu(norm(x), p, ops.ACTIVATIONS[cfg.act]), carry

    return sublayers.walk(params, tokens, cfg, block, carry, remat, norm)


state_spec, head, forward = builders.kv_state, builders.head, builders.forward(hidden)
