"""InternLM2 (arXiv:2403.17297): Llama under other names; each head of keys beside its queries and values in one tensor."""

from fdel.models import builders, config, llama

MODEL_TYPE, ARCHITECTURE = "internlm2", "InternLM2ForCausalLM"


@config.config
class Config(config.Decoder):
    """Sizes and constants; what an absent key means is the published class's (configuration_internlm2.py)."""

    DEFAULTS = dict(vocab=103168, embed=4096, ffn=11008, layers=32, heads=32)
    attn_bias: bool = config.hf("bias", True)


def spec(cfg: Config) -> dict:
    """Declare every array."""
    name = "model.layers.{layers}."
    layer = {
        "attn_norm": builders.norm(name + "attention_norm.weight", cfg.embed),
        **builders.grouped_qkv(name + "attention.wqkv", name + "attention.wo", cfg, biased=cfg.attn_bias),
        "mlp_norm": builders.norm(name + "ffn_norm.weight", cfg.embed),
        **builders.glu(name + "feed_forward.", cfg.embed, cfg.ffn, ("w1", "w3", "w2")),
    }
    return builders.decoder(cfg, layer, "model.tok_embeddings", "model.norm", head="output")


hidden, state_spec, head, forward = llama.hidden, llama.state_spec, llama.head, llama.forward
