"""Seed-OSS (ByteDance, 2025): Llama with biases of queries, keys and values."""

from fdel.models import config, llama

MODEL_TYPE, ARCHITECTURE = "seed_oss", "SeedOssForCausalLM"


@config.config
class Config(config.Decoder):
    """Sizes and constants."""

    DEFAULTS = dict(
        vocab=155136, embed=4096, ffn=27648, layers=64, heads=80, kv_heads=8, head_dim=128, max_positions=524288,
    )  # fmt: skip
    attn_bias: bool = config.hf("attention_bias", True)
    o_bias: bool = config.hf("attention_out_bias", False)
    mlp_bias: bool = config.hf("mlp_bias", False)


spec, hidden, state_spec, head, forward = llama.spec, llama.hidden, llama.state_spec, llama.head, llama.forward
