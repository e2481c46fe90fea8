"""StableLM (arXiv:2402.17834): LayerNorms, a quarter of each head rotated; some with norms per head, or in parallel."""

from fdel import ops
from fdel.models import builders, config, sublayers
from fdel.params.spec import stack

MODEL_TYPE, ARCHITECTURE = "stablelm", "StableLmForCausalLM"


@config.config
class Config(config.Decoder):
    """Sizes and constants."""

    DEFAULTS = dict(vocab=50304, embed=2560, ffn=6912, layers=32, heads=32, kv_heads=32, max_positions=4096)
    norm_eps: float = config.hf("layer_norm_eps", 1e-5)
    attn_bias: bool = config.hf("use_qkv_bias", False)
    qk_norm: bool = config.hf("qk_layernorm", False)
    parallel: bool = config.hf("use_parallel_residual", False)
    rope: ops.Rope = config.rotary(partial=0.25)


def spec(cfg: Config) -> dict:
    """Declare every array; each head has a norm of its own in the file."""
    name, d = "model.layers.{layers}.", cfg.embed
    layer = {
        **builders.layer_norm("attn_norm", name + "input_layernorm", d),
        **builders.gqa(name + "self_attn.", cfg, biased=cfg.attn_bias, o_biased=False),
        **builders.glu(name + "mlp.", d, cfg.ffn),
    }
    if not cfg.parallel:
        layer |= builders.layer_norm("mlp_norm", name + "post_attention_layernorm", d)
    if cfg.qk_norm:
        for part, axis, n in ("q", "heads", cfg.heads), ("k", "kv_heads", cfg.kv_heads):
            file = f"{name}self_attn.{part}_layernorm.norms.{{{axis}}}.weight"
            layer[f"{part}_norm"] = stack(builders.norm(file, cfg.head_dim, "head_dim"), axis, range(n))
    return builders.decoder(cfg, layer, norm_bias=True)


@builders.hidden("attention")
def hidden(params, tokens, cfg: Config, batch: ops.Batch, carry: ops.Carry, remat: str | None):
    """Compute the final normalised hidden states, [... T embed]; called as `protocol.Family` says."""
    rot, mask = ops.rotation(cfg.rope, batch), ops.Mask(cfg.head_dim**-0.5)
    norm = lambda x, p, part: sublayers.layer_norm(x, p, part, cfg.norm_eps)
    of_head = lambda x, w: ops.layer_norm(x, w, None, cfg.norm_eps)

    def block(x, carry, p, layer):
        h = norm(x, p, "attn_norm")
        a, carry = sublayers.attention(h, carry, p, layer, batch, mask, sublayers.normed(of_head, p, rot))
        h = h if cfg.parallel else norm(x + a, p, "mlp_norm")
        return x + a + ops.glu(h, p, ops.ACTIVATIONS[cfg.act]), carry

    return sublayers.walk(params, tokens, cfg, block, carry, remat, lambda x: norm(x, params, "norm"))


state_spec, head, forward = builders.kv_state, builders.head, builders.forward(hidden)
