"""StarCoder2 (arXiv:2402.19173): LayerNorms, biases, a plain feed-forward; attention is Llama's, in a window."""

from fdel import ops
from fdel.models import builders, config, sublayers

MODEL_TYPE, ARCHITECTURE = "starcoder2", "Starcoder2ForCausalLM"


@config.config
class Config(config.Decoder):
    """Sizes and constants."""

    DEFAULTS = dict(vocab=49152, embed=3072, ffn=12288, layers=30, heads=24, kv_heads=2, max_positions=4096, tied=True)
    # Published files say so; transformers reads none of these.
    ONLY = dict(
        activation_function=config.ANY, attention_softmax_in_fp32=config.ANY, layer_norm_epsilon=config.ANY,
        mlp_type="default", norm_type="layer_norm", scale_attention_softmax_in_fp32=config.ANY, scale_attn_weights=True,
    )  # fmt: skip
    norm_eps: float = config.hf("norm_epsilon", 1e-5)
    act: str = config.act(default="gelu_pytorch_tanh")
    biased: bool = config.hf("use_bias", True)
    window: int | None = config.hf("sliding_window", None)


def spec(cfg: Config) -> dict:
    """Declare every array."""
    name, d = "model.layers.{layers}.", cfg.embed
    layer = {
        **builders.layer_norm("attn_norm", name + "input_layernorm", d),
        **builders.gqa(name + "self_attn.", cfg, biased=cfg.biased),
        **builders.layer_norm("mlp_norm", name + "post_attention_layernorm", d),
        **builders.mlp(name + "mlp.", d, cfg.ffn, ("c_fc", "c_proj"), biased=cfg.biased),
    }
    return builders.decoder(cfg, layer, norm_bias=True)


@builders.hidden("attention")
def hidden(params, tokens, cfg: Config, batch: ops.Batch, carry: ops.Carry, remat: str | None):
    """Compute the final normalised hidden states, [... T embed]; called as `protocol.Family` says."""
    turn, mask = sublayers.rotate(ops.rotation(cfg.rope, batch)), ops.Mask(cfg.head_dim**-0.5, window=cfg.window)
    norm = lambda x, p, part: sublayers.layer_norm(x, p, part, cfg.norm_eps)

    def block(x, carry, p, layer):
        a, carry = sublayers.attention(norm(x, p, "attn_norm"), carry, p, layer, batch, mask, turn)
        x = x + a
        return x + ops.mlp(norm(x, p, "mlp_norm"), p, ops.ACTIVATIONS[cfg.act]), carry

    return sublayers.walk(params, tokens, cfg, block, carry, remat, lambda x: norm(x, params, "norm"))


state_spec, head, forward = builders.kv_state, builders.head, builders.forward(hidden)
