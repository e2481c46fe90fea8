"""MPT (MosaicML, 2023): pre-norm decoder with ALiBi (arXiv:2108.12409) in the place of positions, and without biases."""

import jax.numpy as jnp

from fdel import ops
from fdel.models import builders, config, sublayers

MODEL_TYPE, ARCHITECTURE = "mpt", "MptForCausalLM"


@config.config
class Config(config.MultiHead):
    """Sizes and constants; `hf(...)` names each one's key in config.json."""

    NESTED = ("attn_config",)
    ONLY = {
        "attn_config.alibi": True, "attn_config.alibi_bias_max": 8, "attn_config.attn_type": "multihead_attention",
        "attn_config.attn_impl": config.ANY, "no_bias": True, "expansion_ratio": 4, "embedding_fraction": 1,
        **dict.fromkeys(("learned_pos_emb", "norm_type", "init_device", "init_config", "tokenizer_name"), config.ANY),
    }  # fmt: skip
    vocab: int = config.hf("vocab_size", 50368)
    embed: int = config.hf("d_model", 2048)
    layers: int = config.hf("n_layers", 24)
    heads: int = config.hf("n_heads", 16)
    max_positions: int = config.hf("max_seq_len", 2048)
    norm_eps: float = config.hf("layer_norm_epsilon", 1e-5)
    tied: bool = config.hf("tie_word_embeddings", True)
    clip: float | None = config.hf("attn_config.clip_qkv", None)
    scale: float | None = config.hf("attn_config.softmax_scale", None)
    ffn = property(lambda self: 4 * self.embed)


def spec(cfg: Config) -> dict:
    """Declare every array."""
    name = "transformer.blocks.{layers}."
    layer = {
        "attn_norm": builders.norm(name + "norm_1.weight", cfg.embed),
        **builders.fused_qkv(name + "attn.Wqkv", name + "attn.out_proj", cfg),
        "mlp_norm": builders.norm(name + "norm_2.weight", cfg.embed),
        **builders.mlp(name + "ffn.", cfg.embed, cfg.ffn, ("up_proj", "down_proj"), biased=False),
    }
    return builders.decoder(cfg, layer, "transformer.wte", "transformer.norm_f")


@builders.hidden("attention")
def hidden(params, tokens, cfg: Config, batch: ops.Batch, carry: ops.Carry, remat: str | None):
    """Compute the final normalised hidden states, [... T embed]; called as `protocol.Family` says."""
    mask = ops.Mask(cfg.head_dim**-0.5 if cfg.scale is None else cfg.scale)
    norm = lambda x, p, part: sublayers.layer_norm(x, p, part, cfg.norm_eps)
    alibi, clip = jnp.asarray(ops.alibi_slopes(cfg.heads)), cfg.clip or None

    def block(x, carry, p, layer):
        a, carry = sublayers.attention(norm(x, p, "attn_norm"), carry, p, layer, batch, mask, alibi=alibi, clip=clip)
        x = x + a
        return x + ops.mlp(norm(x, p, "mlp_norm"), p, ops.ACTIVATIONS["gelu"]), carry

    return sublayers.walk(params, tokens, cfg, block, carry, remat, lambda x: norm(x, params, "norm"))


state_spec, head, forward = builders.kv_state, builders.head, builders.forward(hidden)
