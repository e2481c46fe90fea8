"""Mistral (arXiv:2310.06825): Llama whose layers all attend in a window."""

from fdel.models import config, llama

MODEL_TYPE, ARCHITECTURE = "mistral", "MistralForCausalLM"


@config.config
class Config(config.Decoder):
    """Sizes and constants."""

    DEFAULTS = dict(
        vocab_size=32000, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, max_position_embeddings=131072,
    )  # fmt: skip
    window: int | None = config.hf("sliding_window", 4096)


spec, hidden, state_spec, head, forward = llama.spec, llama.hidden, llama.state_spec, llama.head, llama.forward
