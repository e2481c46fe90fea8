"""Mixtral (arXiv:2401.04088): a mixture of gated feed-forwards in every layer; attention is Llama's, in a window."""

from fdel import ops
from fdel.models import builders, config, sublayers
from fdel.params.hf_layout import with_modules

MODEL_TYPE, ARCHITECTURE = "mixtral", "MixtralForCausalLM"
MODULES = {r"block_sparse_moe\.": "mlp."}  # what transformers' modules are called


@config.config
class Config(config.Decoder):
    """Sizes and constants."""

    DEFAULTS = dict(
        vocab=32000, embed=4096, ffn=14336, layers=32, heads=32, kv_heads=8, norm_eps=1e-5, max_positions=131072,
        rope_theta=1e6,
    )  # fmt: skip
    experts: int = config.hf("num_local_experts", 8)
    top_k: int = config.hf("num_experts_per_tok", 2)
    window: int | None = config.hf("sliding_window", None)
    jitter: float = config.hf("router_jitter_noise", 0.0)  # of training only, see `train.route`


def spec(cfg: Config) -> dict:
    """Declare every array."""
    name = "model.layers.{layers}."
    layer = {
        **builders.prenorm(name, cfg.embed),
        **builders.gqa(name + "self_attn.", cfg),
        **builders.moe(name + "block_sparse_moe.", cfg.embed, cfg.ffn, cfg.experts, ("w1", "w3", "w2")),
    }
    return with_modules(builders.decoder(cfg, layer), MODULES)


@builders.hidden("attention", "router")
def hidden(params, tokens, cfg: Config, batch: ops.Batch, carry: ops.Carry, remat: str | None):
    """Compute the final normalised hidden states, [... T embed]; called as `protocol.Family` says."""
    rot = ops.rotation(cfg.rope, batch)
    mask = ops.Mask(cfg.head_dim**-0.5, window=cfg.window)

    def block(x, carry, p, layer):
        h = ops.rms_norm(x, p["attn_norm"], cfg.norm_eps)
        a, carry = sublayers.attention(h, carry, p, layer, batch, mask, sublayers.rotate(rot))
        h = ops.rms_norm(x + a, p["mlp_norm"], cfg.norm_eps)
        y, carry = sublayers.softmax_experts(h, carry, p, cfg, batch, normalize=True)
        return x + a + y, carry

    return sublayers.walk(params, tokens, cfg, block, carry, remat)


state_spec, head, forward = builders.kv_state, builders.head, builders.forward(hidden)
