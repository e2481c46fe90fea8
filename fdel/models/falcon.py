"""Falcon (arXiv:2311.16867): one or two LayerNorms in parallel, or one after the other; rotary positions or ALiBi."""

import jax.numpy as jnp

from fdel import ops
from fdel.models import builders, config, sublayers

MODEL_TYPE, ARCHITECTURE = "falcon", "FalconForCausalLM"


def kv_heads(d: dict) -> int:
    """Read the number of key heads: num_kv_heads counts in the new decoder only, else there is one or one per head."""
    new, one = d["new_decoder_architecture"], d["multi_query"]
    given = d["num_kv_heads"] if new else 1 if one else None
    return given or d["num_attention_heads"]


@config.config
class Config:
    """Sizes and constants; `hf(...)` names each one's key in config.json."""

    ONLY = {"n_embed": lambda c: c.embed}
    vocab: int = config.hf("vocab_size", 65024)
    embed: int = config.hf("hidden_size", lambda d: d.get("n_embed", 4544))
    ffn: int = config.hf("ffn_hidden_size", lambda d: 4 * d["hidden_size"])
    layers: int = config.hf("num_hidden_layers", 32)
    heads: int = config.hf("num_attention_heads", 71)
    max_positions: int = config.hf("max_position_embeddings", 2048)
    norm_eps: float = config.hf("layer_norm_epsilon", 1e-5)
    act: str = config.act("activation", "gelu")
    tied: bool = config.hf("tie_word_embeddings", True)
    biased: bool = config.hf("bias", False)
    alibi: bool = config.hf("alibi", False)
    new: bool = config.hf("new_decoder_architecture", False)
    one_key: bool = config.hf("multi_query", True)
    parallel: bool = config.hf("parallel_attn", True)  # the new decoder is in any case
    norms: int | None = config.hf("num_ln_in_parallel_attn", None, choices=(None, 1, 2))
    kv_given: int | None = config.hf("num_kv_heads", None)
    kv_heads: int = config.computed(kv_heads, lambda n: {})
    rope: ops.Rope = config.rotary(config.head_dim)

    head_dim = property(lambda self: self.embed // self.heads)


def spec(cfg: Config) -> dict:
    """Declare every array; a layer without `mlp_norm` has one LayerNorm for attention and feed-forward."""
    name, attn = "transformer.h.{layers}.", "transformer.h.{layers}.self_attention."
    norm = lambda part, file: builders.layer_norm(part, name + file, cfg.embed)
    two = cfg.norms != 1 if cfg.new else not cfg.parallel
    first, second = ("ln_attn", "ln_mlp") if cfg.new and two else ("input_layernorm", "post_attention_layernorm")
    layer = {
        **norm("attn_norm", first),
        **(norm("mlp_norm", second) if two else {}),
        **builders.grouped_qkv(attn + "query_key_value", attn + "dense", cfg, biased=cfg.biased),
        **builders.mlp(name + "mlp.", cfg.embed, cfg.ffn, ("dense_h_to_4h", "dense_4h_to_h"), biased=cfg.biased),
    }
    return builders.decoder(cfg, layer, "transformer.word_embeddings", "transformer.ln_f", norm_bias=True)


@builders.hidden("attention")
def hidden(params, tokens, cfg: Config, batch: ops.Batch, carry: ops.Carry, remat: str | None):
    """Compute the final normalised hidden states, [... T embed]; called as `protocol.Family` says."""
    mask, change, alibi = ops.Mask(cfg.head_dim**-0.5), None, None
    if cfg.alibi:  # slopes of bfloat16, and scaled with the scores, as it was trained
        alibi = jnp.asarray(ops.alibi_slopes(cfg.heads)).astype(jnp.bfloat16).astype(jnp.float32) * mask.scale
    else:
        change = sublayers.rotate(ops.rotation(cfg.rope, batch))
    norm = lambda x, p, part: sublayers.layer_norm(x, p, part, cfg.norm_eps)

    def block(x, carry, p, layer):
        h = norm(x, p, "attn_norm")
        a, carry = sublayers.attention(h, carry, p, layer, batch, mask, change, alibi=alibi)
        if "mlp_norm" in p:
            h = norm(x if cfg.new or cfg.parallel else x + a, p, "mlp_norm")
        return x + a + ops.mlp(h, p, ops.ACTIVATIONS[cfg.act]), carry

    return sublayers.walk(params, tokens, cfg, block, carry, remat, lambda x: norm(x, params, "norm"))


state_spec, head, forward = builders.kv_state, builders.head, builders.forward(hidden)
