"""Xerxes 2 (EasyDeL, github.com/erfanzar/EasyDeL): latent attention with LayerNorm, sandwich norms, routed layers."""

from fdel import ops
from fdel.models import builders, config, qwen3_moe, sublayers
from fdel.models.deepseek_v3 import DENSE, MOE, attention, attention_spec, state_spec

MODEL_TYPE, ARCHITECTURE = "xerxes2", "Xerxes2ForCausalLM"
__all__ = ["ARCHITECTURE", "MODEL_TYPE", "Config", "forward", "head", "hidden", "spec", "state_spec"]


@config.config
class Config(config.Decoder):
    """Sizes and constants; names and defaults are EasyDeL's."""

    DEFAULTS = dict(vocab=256128, embed=4096, ffn=16384, layers=32, heads=32, max_positions=16384)
    ONLY = dict.fromkeys(("head_dim", "num_key_value_heads", "layer_types"), config.ANY)
    ONLY |= dict(rope_scaling=None, hidden_act="silu")
    moe_ffn: int = config.hf("moe_intermediate_size", 8192)
    experts: int = config.hf("num_experts", 128)
    top_k: int = config.hf("num_experts_per_tok", 8)
    normalize: bool = config.hf("norm_topk_prob", False)
    q_latent: int | None = config.hf("q_lora_dim", 1536)
    latent: int = config.hf("kv_lora_dim", 512)
    nope_dim: int = config.hf("qk_nope_head_dim", 128)
    rope_dim: int = config.hf("qk_rope_head_dim", 64)
    v_dim: int = config.hf("vhead_dim", 128)
    rope: ops.Rope = config.rotary(lambda d: d["qk_rope_head_dim"])
    kinds: tuple[str, ...] = config.computed(qwen3_moe.kinds, qwen3_moe.kinds_to_hf)
    head_dim: int = config.computed(lambda d: d["qk_rope_head_dim"], lambda n: {}, default=0)  # unused
    kv_heads: int = config.computed(lambda d: d["num_attention_heads"], lambda n: {}, default=0)

    interleaved = attn_bias = property(lambda self: False)


def spec(cfg: Config) -> dict:
    """Declare every array."""
    name = "model.layers.{layers}."
    norm = lambda part: builders.norm(f"{name}{part}_layernorm.weight", cfg.embed)
    latents = {"kv": cfg.latent} | ({} if cfg.q_latent is None else {"q": cfg.q_latent})
    ffn = {
        DENSE: builders.gate_up(name + "mlp.gate_up_proj.weight", cfg.embed, cfg.ffn, name + "mlp.down_proj.weight"),
        MOE: builders.moe(name + "mlp.", cfg.embed, cfg.moe_ffn, cfg.experts),
    }
    layer = lambda kind: {
        "attn_norm": norm("input"),
        **attention_spec(cfg, name + "self_attn."),
        **{
            f"{i}_norm_bias": builders.bias(f"{name}self_attn.{i}_a_layernorm.bias", n, "latent")
            for i, n in latents.items()
        },
        "attn_post_norm": norm("post_attention"),
        "mlp_norm": norm("pre_feedforward"),
        **ffn[kind],
        "mlp_post_norm": norm("post_feedforward"),
    }
    return builders.decoder(cfg, layer)


@builders.hidden("attention", "router")
def hidden(params, tokens, cfg: Config, batch: ops.Batch, carry: ops.Carry, remat: str | None):
    """Compute the final normalised hidden states, [... T embed]; called as `protocol.Family` says."""
    rot, mask = ops.rotation(cfg.rope, batch), ops.Mask((cfg.nope_dim + cfg.rope_dim) ** -0.5)
    norm = lambda x, w: ops.rms_norm(x, w, cfg.norm_eps)

    def block(x, carry, p, layer):
        a, carry = attention(norm(x, p["attn_norm"]), carry, p, layer, cfg, batch, rot, mask)
        x = x + norm(a, p["attn_post_norm"])
        h = norm(x, p["mlp_norm"])
        y, carry = sublayers.softmax_experts(h, carry, p, cfg, batch, normalize=cfg.normalize)
        return x + norm(y, p["mlp_post_norm"]), carry

    return sublayers.walk(params, tokens, cfg, block, carry, remat)


head, forward = builders.head, builders.forward(hidden)
