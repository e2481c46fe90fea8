"""gpt-oss (arXiv:2508.10925): experts with biases and a clipped gate; attention with sinks, every other layer near."""

import jax
import jax.numpy as jnp

from fdel import ops
from fdel.models import builders, config, sublayers
from fdel.models.config import FULL, SLIDING
from fdel.params.spec import Param, normal, zeros

MODEL_TYPE, ARCHITECTURE = "gpt_oss", "GptOssForCausalLM"
YARN = {"rope_type": "yarn", "factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096}


def rope(d: dict) -> ops.Rope:
    """Read rotary parameters; those of the published models where the file has none."""
    given = d if d.get("rope_parameters") or d.get("rope_scaling") else d | {"rope_parameters": YARN}
    return config.rope(given, d["head_dim"], theta=150000.0)


@config.config
class Config(config.Decoder):
    """Sizes and constants."""

    DEFAULTS = dict(
        vocab=201088, embed=2880, ffn=2880, layers=36, heads=64, kv_heads=8, head_dim=64, norm_eps=1e-5,
        max_positions=131072,
    )  # fmt: skip
    # Other names of keys that stand beside these in published files.
    ONLY = dict(
        hidden_act="silu", experts_per_token=lambda c: c.top_k, initial_context_length=lambda c: c.rope.original
    )
    experts: int = config.hf("num_local_experts", 128)
    top_k: int = config.hf("num_experts_per_tok", 4)
    alpha: float = config.hf("swiglu_alpha", 1.702)
    limit: float = config.hf("swiglu_limit", 7.0)
    attn_bias: bool = config.hf("attention_bias", True)
    window: int = config.hf("sliding_window", 128)
    kinds: tuple[str, ...] = config.pattern(2)
    rope: ops.Rope = config.computed(rope, lambda r: {"rope_parameters": config.rope_to_hf(r)})


def moe_spec(cfg: Config, name: str) -> dict:
    """Declare router and experts; the file holds matrices [in, out], with columns of gate and up in turns."""
    e, f, d = cfg.experts, cfg.ffn, cfg.embed
    weight, file = normal(builders.STD), name + "experts."
    experts = {
        "down": Param("experts embed ffn", (e, d, f), weight, file + "down_proj", "experts ffn embed"),
        "down_bias": Param("experts embed", (e, d), zeros, file + "down_proj_bias"),
    }
    for part, turn in (("gate", (0, 2)), ("up", (1, 2))):
        fused, axes = file + "gate_up_proj", "(ffn [1])"
        experts[part] = Param("experts ffn embed", (e, f, d), weight, fused, f"experts embed {axes}", turn)
        experts[part + "_bias"] = Param("experts ffn", (e, f), zeros, fused + "_bias", f"experts {axes}", turn)
    router = builders.matrix(name + "router.weight", ("embed", d), ("experts", e))
    return {"router": router, "router_bias": builders.bias(name + "router.bias", e, "experts"), "experts": experts}


def spec(cfg: Config) -> dict:
    """Declare every array."""
    name = "model.layers.{layers}."
    layer = {
        **builders.prenorm(name, cfg.embed),
        **builders.gqa(name + "self_attn.", cfg, biased=cfg.attn_bias),
        "sinks": builders.bias(name + "self_attn.sinks", cfg.heads, "heads"),
        **moe_spec(cfg, name + "mlp."),
    }
    return builders.decoder(cfg, layer)


@builders.hidden("attention", "router")
def hidden(params, tokens, cfg: Config, batch: ops.Batch, carry: ops.Carry, remat: str | None):
    """Compute the final normalised hidden states, [... T embed]; called as `protocol.Family` says."""
    turn = sublayers.rotate(ops.rotation(cfg.rope, batch))

    def gated(gate, up):
        gate, up = jnp.minimum(gate, cfg.limit), jnp.clip(up, -cfg.limit, cfg.limit)
        return (up + 1) * gate * jax.nn.sigmoid(cfg.alpha * gate)

    def block(window):
        mask = ops.Mask(cfg.head_dim**-0.5, window=window)

        def apply(x, carry, p, layer):
            h = ops.rms_norm(x, p["attn_norm"], cfg.norm_eps)
            a, carry = sublayers.attention(h, carry, p, layer, batch, mask, turn)
            h = ops.rms_norm(x + a, p["mlp_norm"], cfg.norm_eps)
            y, carry = sublayers.softmax_experts(h, carry, p, cfg, batch, normalize=True, gated=gated)
            return x + a + y, carry

        return apply

    blocks = {SLIDING: block(cfg.window), FULL: block(None)}
    return sublayers.walk(params, tokens, cfg, blocks, carry, remat)


state_spec, head, forward = builders.kv_state, builders.head, builders.forward(hidden)
