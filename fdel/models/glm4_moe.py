"""GLM-4.5 (arXiv:2508.06471): grouped-query attention with partial rotation, and DeepSeek-V3's routed experts."""

from fdel import ops
from fdel.models import builders, config, sublayers
from fdel.models.deepseek_v3 import DENSE, MOE, kinds_to_hf, moe_spec, rename
from fdel.params.spec import layers

MODEL_TYPE, ARCHITECTURE = "glm4_moe", "Glm4MoeForCausalLM"
__all__ = ["ARCHITECTURE", "MODEL_TYPE", "Config", "forward", "head", "hidden", "rename", "spec", "state_spec"]


def kinds(d: dict) -> tuple[str, ...]:
    """Read the feed-forward of each layer: the first first_k_dense_replace are dense."""
    return tuple(DENSE if i < d.get("first_k_dense_replace", 1) else MOE for i in range(d["num_hidden_layers"]))


@config.config
class Config(config.Decoder):
    """Sizes and constants."""

    DEFAULTS = dict(
        vocab_size=151552, hidden_size=4096, intermediate_size=10944, num_hidden_layers=46, num_attention_heads=96,
        num_key_value_heads=8, max_position_embeddings=131072, rms_norm_eps=1e-5, partial_rotary_factor=0.5,
    )  # fmt: skip
    ONLY = dict(scoring_func="sigmoid", topk_method="noaux_tc", moe_layer_freq=1, num_mtp_layers=config.ANY)
    moe_ffn: int = config.hf("moe_intermediate_size", 1408)
    experts: int = config.hf("n_routed_experts", 128)
    shared: int = config.hf("n_shared_experts", 1)
    top_k: int = config.hf("num_experts_per_tok", 8)
    groups: int = config.hf("n_group", 1)
    topk_groups: int = config.hf("topk_group", 1)
    normalize: bool = config.hf("norm_topk_prob", True)
    route_scale: float = config.hf("routed_scaling_factor", 1.0)
    attn_bias: bool = config.hf("attention_bias", False)
    qk_norm: bool = config.hf("use_qk_norm", False)
    kinds: tuple[str, ...] = config.computed(kinds, kinds_to_hf)
    predictors: int = config.computed(lambda d: 0, lambda n: {"num_nextn_predict_layers": n}, default=0)


def spec(cfg: Config) -> dict:
    """Declare every array."""
    name = "model.layers.{layers}."
    ffn = {DENSE: builders.glu(name + "mlp.", cfg.embed, cfg.ffn), MOE: moe_spec(cfg, name + "mlp.")}
    norms = {f"{i}_norm": builders.norm(f"{name}self_attn.{i}_norm.weight", cfg.head_dim, "head_dim") for i in "qk"}
    layer = lambda kind: {
        **builders.prenorm(name, cfg.embed),
        **builders.gqa(name + "self_attn.", cfg, biased=cfg.attn_bias, o_biased=False),
        **(norms if cfg.qk_norm else {}),
        **ffn[kind],
    }
    return builders.top(cfg, layers(layer, cfg.kinds))


@builders.hidden("attention", "router")
def hidden(params, tokens, cfg: Config, batch: ops.Batch, carry: ops.Carry, remat: str | None):
    """Compute the final normalised hidden states, [... T embed]; called as `protocol.Family` says."""
    rot, mask, act = ops.rotation(cfg.rope, batch), ops.Mask(cfg.head_dim**-0.5), ops.ACTIVATIONS[cfg.act]
    norm = lambda x, w: ops.rms_norm(x, w, cfg.norm_eps)

    def block(kind):
        def apply(x, carry, p, layer):
            change = sublayers.normed(norm, p, rot) if cfg.qk_norm else sublayers.rotate(rot)
            a, carry = sublayers.attention(norm(x, p["attn_norm"]), carry, p, layer, batch, mask, change)
            h = norm(x + a, p["mlp_norm"])
            if kind == DENSE:
                return x + a + ops.glu(h, p, act), carry
            y, carry = sublayers.sigmoid_experts(h, carry, p, cfg, batch)
            return x + a + y, carry

        return apply

    return sublayers.walk(params, tokens, cfg, {kind: block(kind) for kind in (DENSE, MOE)}, carry, remat)


state_spec, head, forward = builders.kv_state, builders.head, builders.forward(hidden)
