"""EXAONE 3 and 3.5 (arXiv:2408.03541, 2412.04862): Llama under other names."""

from fdel.models import builders, config, llama

MODEL_TYPE, ARCHITECTURE = "exaone", "ExaoneForCausalLM"


@config.config
class Config(config.Decoder):
    """Sizes and constants; what an absent key means is the published class's (configuration_exaone.py)."""

    DEFAULTS = dict(vocab=102400, embed=2048, heads=32, tied=True)
    ONLY = {"num_hidden_layers": lambda c: c.layers}
    ffn: int = config.hf("intermediate_size", lambda d: 4 * d["hidden_size"])
    layers: int = config.hf("num_layers", lambda d: d.get("num_hidden_layers", 32))
    norm_eps: float = config.hf("layer_norm_epsilon", 1e-5)
    act: str = config.act("activation_function")


def spec(cfg: Config) -> dict:
    """Declare every array."""
    name = "transformer.h.{layers}."
    layer = {
        "attn_norm": builders.norm(name + "ln_1.weight", cfg.embed),
        **builders.gqa(name + "attn.attention.", cfg, names=("q_proj", "k_proj", "v_proj", "out_proj")),
        "mlp_norm": builders.norm(name + "ln_2.weight", cfg.embed),
        **builders.glu(name + "mlp.", cfg.embed, cfg.ffn, ("c_fc_0", "c_fc_1", "c_proj")),
    }
    return builders.decoder(cfg, layer, "transformer.wte", "transformer.ln_f")


hidden, state_spec, head, forward = llama.hidden, llama.state_spec, llama.head, llama.forward
