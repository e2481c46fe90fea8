"""InternLM3 (Shanghai AI Laboratory, 2025): Llama, whose files may also name the biases otherwise."""

from fdel.models import config, llama

MODEL_TYPE, ARCHITECTURE = "internlm3", "InternLM3ForCausalLM"


@config.config
class Config(config.Decoder):
    """Sizes and constants."""

    DEFAULTS = dict(
        vocab=128512, embed=4096, ffn=10240, layers=48, heads=32, kv_heads=2, head_dim=128, max_positions=32768,
        norm_eps=1e-5,
    )  # fmt: skip
    attn_bias: bool = config.hf("attention_bias", lambda d: d.get("qkv_bias", False))
    mlp_bias: bool = config.hf("mlp_bias", lambda d: d.get("bias", False))
    o_bias = property(lambda self: self.mlp_bias)


spec, hidden, state_spec, head, forward = llama.spec, llama.hidden, llama.state_spec, llama.head, llama.forward
