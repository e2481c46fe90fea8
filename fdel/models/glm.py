"""GLM-4 (arXiv:2406.12793): Llama with biases of queries, keys and values, half of each head rotated by neighbours."""

from fdel import ops
from fdel.models import builders, config, llama, sublayers

MODEL_TYPE, ARCHITECTURE = "glm", "GlmForCausalLM"


@config.config
class Config(config.Decoder):
    """Sizes and constants."""

    DEFAULTS = dict(
        vocab=151552, embed=4096, ffn=13696, layers=40, heads=32, kv_heads=2, head_dim=128, max_positions=131072,
        norm_eps=1.5625e-7,
    )  # fmt: skip
    attn_bias: bool = config.hf("attention_bias", True)
    rope: ops.Rope = config.rotary(partial=0.5)


def spec(cfg: Config) -> dict:
    """Declare every array."""
    name = "model.layers.{layers}."
    layer = {
        **builders.prenorm(name, cfg.embed),
        **builders.gqa(name + "self_attn.", cfg, biased=cfg.attn_bias, o_biased=False),
        **builders.gate_up(name + "mlp.gate_up_proj.weight", cfg.embed, cfg.ffn, name + "mlp.down_proj.weight"),
    }
    return builders.decoder(cfg, layer)


@builders.hidden("attention")
def hidden(params, tokens, cfg: Config, batch: ops.Batch, carry: ops.Carry, remat: str | None):
    """Compute the final normalised hidden states, [... T embed]; called as `protocol.Family` says."""
    change = sublayers.rotate(ops.rotation(cfg.rope, batch), interleaved=True)
    return sublayers.walk(params, tokens, cfg, llama.block(cfg, batch, change), carry, remat)


state_spec, head, forward = builders.kv_state, builders.head, builders.forward(hidden)
