"""Seed-OSS (ByteDance, 2025): Llama with biases of queries, keys and values."""

from fdel.models import config, llama

MODEL_TYPE, ARCHITECTURE = "seed_oss", "SeedOssForCausalLM"


@config.config
class Config(config.Decoder):
    """Sizes and constants."""

    DEFAULTS = dict(
        vocab_size=155136, hidden_size=4096, intermediate_size=27648, num_hidden_layers=64, num_attention_heads=80,
        num_key_value_heads=8, head_dim=128, max_position_embeddings=524288,
    )  # fmt: skip
    attn_bias: bool = config.hf("attention_bias", True)
    o_bias: bool = config.hf("attention_out_bias", False)
    mlp_bias: bool = config.hf("mlp_bias", False)


spec, hidden, state_spec, head, forward = llama.spec, llama.hidden, llama.state_spec, llama.head, llama.forward
