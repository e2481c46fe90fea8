"""GLM-4.5 (arXiv:2508.06471): grouped-query attention with partial rotation, and DeepSeek-V3's routed experts."""

from fdel import ops
from fdel.models import builders, config, deepseek_v3, sublayers
from fdel.models.deepseek_v3 import DENSE, MOE, moe_spec, rename

MODEL_TYPE, ARCHITECTURE = "glm4_moe", "Glm4MoeForCausalLM"
__all__ = ["ARCHITECTURE", "MODEL_TYPE", "Config", "forward", "head", "hidden", "rename", "spec", "state_spec"]


@config.config
class Config(deepseek_v3.Routed):
    """Sizes and constants."""

    DEFAULTS = dict(
        vocab=151552, embed=4096, ffn=10944, layers=46, heads=96, kv_heads=8, max_positions=131072, norm_eps=1e-5,
        partial_rotary_factor=0.5, moe_ffn=1408, experts=128, groups=1, topk_groups=1, route_scale=1.0,
        first_k_dense_replace=1,
    )  # fmt: skip
    ONLY = dict(scoring_func="sigmoid", topk_method="noaux_tc", moe_layer_freq=1, num_mtp_layers=config.ANY)
    qk_norm: bool = config.hf("use_qk_norm", False)


def spec(cfg: Config) -> dict:
    """Declare every array."""
    name = "model.layers.{layers}."
    ffn = {DENSE: builders.glu(name + "mlp.", cfg.embed, cfg.ffn), MOE: moe_spec(cfg, name + "mlp.")}
    layer = lambda kind: {
        **builders.prenorm(name, cfg.embed),
        **builders.gqa(name + "self_attn.", cfg, biased=cfg.attn_bias, o_biased=False),
        **(builders.qk_norm(name + "self_attn.", cfg) if cfg.qk_norm else {}),
        **ffn[kind],
    }
    return builders.decoder(cfg, layer)


@builders.hidden("attention", "router")
def hidden(params, tokens, cfg: Config, batch: ops.Batch, carry: ops.Carry, remat: str | None):
    """Compute the final normalised hidden states, [... T embed]; called as `protocol.Family` says."""
    rot, mask = ops.rotation(cfg.rope, batch), ops.Mask(cfg.head_dim**-0.5)
    norm = lambda x, w: ops.rms_norm(x, w, cfg.norm_eps)

    def block(x, carry, p, layer):
        h, change = norm(x, p["attn_norm"]), sublayers.normed(norm, p, rot)
        a, carry = sublayers.attention(h, carry, p, layer, batch, mask, change)
        y, carry = sublayers.sigmoid_experts(norm(x + a, p["mlp_norm"]), carry, p, cfg, batch)
        return x + a + y, carry

    return sublayers.walk(params, tokens, cfg, block, carry, remat)


state_spec, head, forward = builders.kv_state, builders.head, builders.forward(hidden)
