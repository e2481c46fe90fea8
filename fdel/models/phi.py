"""Phi-1 to Phi-2 (arXiv:2306.11644, 2309.05463): attention and a plain feed-forward in parallel, half of a head rotated."""

from fdel import ops
from fdel.models import builders, config, sublayers

MODEL_TYPE, ARCHITECTURE = "phi", "PhiForCausalLM"


@config.config
class Config(config.Decoder):
    """Sizes and constants."""

    DEFAULTS = dict(vocab=51200, embed=2048, ffn=8192, layers=24, heads=32)
    norm_eps: float = config.hf("layer_norm_eps", 1e-5)
    act: str = config.act(default="gelu_new")
    qk_norm: bool = config.hf("qk_layernorm", False)
    rope: ops.Rope = config.rotary(partial=0.5)


def spec(cfg: Config) -> dict:
    """Declare every array."""
    name, d = "model.layers.{layers}.", cfg.embed
    layer = {
        **builders.layer_norm("norm", name + "input_layernorm", d),
        **builders.gqa(name + "self_attn.", cfg, biased=True, names=("q_proj", "k_proj", "v_proj", "dense")),
        **builders.mlp(name + "mlp.", d, cfg.ffn, ("fc1", "fc2")),
    }
    for part in "qk" if cfg.qk_norm else "":
        layer |= builders.layer_norm(f"{part}_norm", f"{name}self_attn.{part}_layernorm", cfg.head_dim, "head_dim")
    return builders.decoder(cfg, layer, last="model.final_layernorm", norm_bias=True, head_bias=True)


@builders.hidden("attention")
def hidden(params, tokens, cfg: Config, batch: ops.Batch, carry: ops.Carry, remat: str | None):
    """Compute the final normalised hidden states, [... T embed]; called as `protocol.Family` says."""
    rot, mask = ops.rotation(cfg.rope, batch), ops.Mask(cfg.head_dim**-0.5)
    norm = lambda x, p, part: sublayers.layer_norm(x, p, part, cfg.norm_eps)

    def block(x, carry, p, layer):
        side = lambda x, part: ops.rope(norm(x, p, part) if cfg.qk_norm else x, rot)
        h, change = norm(x, p, "norm"), lambda q, k: (side(q, "q_norm"), side(k, "k_norm"))
        a, carry = sublayers.attention(h, carry, p, layer, batch, mask, change)
        return x + a + ops.mlp(h, p, ops.ACTIVATIONS[cfg.act]), carry

    return sublayers.walk(params, tokens, cfg, block, carry, remat, lambda x: norm(x, params, "norm"))


state_spec, head, forward = builders.kv_state, builders.head, builders.forward(hidden)
