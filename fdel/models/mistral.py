"""Mistral (arXiv:2310.06825): Llama whose layers all attend in a window."""

from fdel.models import config, llama

MODEL_TYPE, ARCHITECTURE = "mistral", "MistralForCausalLM"


@config.config
class Config(config.Decoder):
    """Sizes and constants."""

    DEFAULTS = dict(vocab=32000, embed=4096, ffn=14336, layers=32, heads=32, kv_heads=8, max_positions=131072)
    window: int | None = config.hf("sliding_window", 4096)


spec, hidden, state_spec, head, forward = llama.spec, llama.hidden, llama.state_spec, llama.head, llama.forward
