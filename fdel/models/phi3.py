"""Phi-3 and Phi-4 (arXiv:2404.14219, 2412.08905): Llama with fused projections, windows, and a long rope on some."""

from fdel import ops
from fdel.models import builders, config, llama

MODEL_TYPE, ARCHITECTURE = "phi3", "Phi3ForCausalLM"
ORIGINAL = "original_max_position_embeddings"


def rotary(d: dict) -> ops.Rope:
    """Read the rotary parameters: the first files call a long rope yarn, and the length before it stands outside."""
    p = dict(config.K.mapping("rope_parameters", d.get("rope_parameters") or d.get("rope_scaling")))
    p["rope_type"] = {"yarn": "longrope"}.get(kind := p.get("rope_type", p.get("type", "default")), kind)
    return config.rope(d | {"rope_parameters": p | {ORIGINAL: d[ORIGINAL]}}, config.given_head_dim(d))


@config.config
class Config(config.Decoder):
    """Sizes and constants."""

    DEFAULTS = dict(vocab=32064, embed=3072, ffn=8192, layers=32, heads=32, max_positions=4096, norm_eps=1e-5)
    ONLY = {"full_attn_mod": 1, "interpolate_factor": 1}
    original: int = config.hf(ORIGINAL, 4096)
    window: int | None = config.hf("sliding_window", None)
    rope: ops.Rope = config.computed(rotary, lambda r: {"rope_parameters": config.rope_to_hf(r)})


def spec(cfg: Config) -> dict:
    """Declare every array."""
    name = "model.layers.{layers}."
    layer = {
        **builders.prenorm(name, cfg.embed),
        **builders.fused_qkv(name + "self_attn.qkv_proj", name + "self_attn.o_proj", cfg),
        **builders.gate_up(name + "mlp.gate_up_proj.weight", cfg.embed, cfg.ffn, name + "mlp.down_proj.weight"),
    }
    return builders.decoder(cfg, layer)


hidden, state_spec, head, forward = llama.hidden, llama.state_spec, llama.head, llama.forward
