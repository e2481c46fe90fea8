"""Arctic (Snowflake, 2024): Mixtral's layers, dense ones between; experts may read what attention reads, beside an MLP."""

from fdel import ops
from fdel.models import builders, config, sublayers
from fdel.params.hf_layout import without_modules

MODEL_TYPE, ARCHITECTURE = "arctic", "ArcticForCausalLM"
NAMES = ("w1", "w3", "w2")
DENSE, MOE = "dense", "moe"


@config.config
class Config(config.Decoder):
    """Sizes and constants."""

    DEFAULTS = dict(
        vocab=32000, embed=4096, ffn=14336, layers=32, heads=32, max_positions=4096, norm_eps=1e-5, rope_theta=1e6,
    )  # fmt: skip
    # How training divided and dropped tokens; a forward pass here keeps them all.
    ONLY = dict.fromkeys(
        ("moe_train_capacity_factor", "moe_eval_capacity_factor", "moe_min_capacity", "moe_token_dropping",
         "enable_expert_tensor_parallelism", "quantization", "max_sequence_length"), config.ANY
    )  # fmt: skip
    experts: int = config.hf("num_local_experts", 8)
    top_k: int = config.hf("num_experts_per_tok", 1)
    every: int = config.hf("moe_layer_frequency", 2)
    parallel: bool = config.hf("parallel_attn_mlp_res", False)
    window: int | None = config.hf("sliding_window", None)

    # The feed-forward of each layer.
    kinds = property(lambda self: tuple(DENSE if (i + 1) % self.every else MOE for i in range(self.layers)))


def spec(cfg: Config) -> dict:
    """Declare every array."""
    name = "model.layers.{layers}."
    moe = builders.moe(name + "block_sparse_moe.", cfg.embed, cfg.ffn, cfg.experts, NAMES)
    if cfg.parallel:
        moe["residual"] = builders.glu(name + "residual_mlp.", cfg.embed, cfg.embed, NAMES)
        moe["residual_norm"] = builders.norm(name + "residual_layernorm.weight", cfg.embed)
    ffn = {MOE: moe, DENSE: builders.glu(name + "block_sparse_moe.mlp.", cfg.embed, cfg.ffn, NAMES)}
    layer = lambda kind: builders.prenorm(name, cfg.embed) | builders.gqa(name + "self_attn.", cfg) | ffn[kind]
    return without_modules(builders.decoder(cfg, layer))


@builders.hidden("attention", "router")
def hidden(params, tokens, cfg: Config, batch: ops.Batch, carry: ops.Carry, remat: str | None):
    """Compute the final normalised hidden states, [... T embed]; called as `protocol.Family` says."""
    turn, mask = sublayers.rotate(ops.rotation(cfg.rope, batch)), ops.Mask(cfg.head_dim**-0.5, window=cfg.window)
    norm, act = lambda x, w: ops.rms_norm(x, w, cfg.norm_eps), ops.ACTIVATIONS[cfg.act]

    def block(x, carry, p, layer):
        a, carry = sublayers.attention(norm(x, p["attn_norm"]), carry, p, layer, batch, mask, turn)
        before, x = x, x + a
        h = norm(before if "residual" in p else x, p["mlp_norm"])
        if "residual" in p:
            x = x + ops.glu(norm(x, p["residual_norm"]), p["residual"], act)
        y, carry = sublayers.softmax_experts(h, carry, p, cfg, batch, normalize=cfg.top_k > 1)
        return x + y, carry

    return sublayers.walk(params, tokens, cfg, block, carry, remat)


state_spec, head, forward = builders.kv_state, builders.head, builders.forward(hidden)
