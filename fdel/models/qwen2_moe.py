"""Qwen2-MoE (arXiv:2407.10671): Llama's attention with biases, and routed experts beside a gated shared one."""

from fdel import ops
from fdel.models import builders, config, qwen3_moe, sublayers
from fdel.models.config import FULL, SLIDING
from fdel.models.qwen3 import window, window_field
from fdel.models.qwen3_next import ffn_spec, kinds_to_hf

MODEL_TYPE, ARCHITECTURE = "qwen2_moe", "Qwen2MoeForCausalLM"


def kinds(d: dict) -> tuple[tuple[str, str], ...]:
    """Read (attention, feed-forward) of each layer; every other one below max_window_layers may attend in a window."""
    n, first = d["num_hidden_layers"], d.get("max_window_layers", 28)
    near = lambda i: window(d) is not None and i % 2 == 0 and i < first
    attention = config.layer_types(d, [SLIDING if near(i) else FULL for i in range(n)], (FULL, SLIDING))
    return tuple(zip(attention, qwen3_moe.kinds(d), strict=True))


@config.config
class Config(config.Decoder):
    """Sizes and constants."""

    DEFAULTS = dict(vocab=151936, embed=2048, ffn=5632, layers=24, heads=16, kv_heads=16, max_positions=32768)
    moe_ffn: int = config.hf("moe_intermediate_size", 1408)
    shared_ffn: int = config.hf("shared_expert_intermediate_size", 5632)
    experts: int = config.hf("num_experts", 60)
    top_k: int = config.hf("num_experts_per_tok", 4)
    normalize: bool = config.hf("norm_topk_prob", False)
    attn_bias: bool = config.hf("qkv_bias", True)
    window: int | None = window_field()
    kinds: tuple[tuple[str, str], ...] = config.computed(kinds, kinds_to_hf)


def spec(cfg: Config) -> dict:
    """Declare every array."""
    name = "model.layers.{layers}."
    layer = lambda kind: {
        **builders.prenorm(name, cfg.embed),
        **builders.gqa(name + "self_attn.", cfg, biased=cfg.attn_bias, o_biased=False),
        **ffn_spec(cfg, kind[1], name + "mlp."),
    }
    return builders.decoder(cfg, layer)


@builders.hidden("attention", "router")
def hidden(params, tokens, cfg: Config, batch: ops.Batch, carry: ops.Carry, remat: str | None):
    """Compute the final normalised hidden states, [... T embed]; called as `protocol.Family` says."""
    turn, windows = sublayers.rotate(ops.rotation(cfg.rope, batch)), {FULL: None, SLIDING: cfg.window}

    def block(attention):
        mask = ops.Mask(cfg.head_dim**-0.5, window=windows[attention])

        def apply(x, carry, p, layer):
            h = ops.rms_norm(x, p["attn_norm"], cfg.norm_eps)
            a, carry = sublayers.attention(h, carry, p, layer, batch, mask, turn)
            h, p = ops.rms_norm(x + a, p["mlp_norm"], cfg.norm_eps), p.get("ffn", p)
            y, carry = sublayers.softmax_experts(h, carry, p, cfg, batch, normalize=cfg.normalize)
            return x + a + y, carry

        return apply

    return sublayers.walk(params, tokens, cfg, {kind: block(kind[0]) for kind in sorted(set(cfg.kinds))}, carry, remat)


state_spec, head, forward = builders.kv_state, builders.head, builders.forward(hidden)
