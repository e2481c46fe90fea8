"""Mixtral (arXiv:2401.04088): a mixture of gated feed-forwards in every layer; attention is Llama's, in a window."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from fdel import ops
from fdel.models import builders, config
from fdel.models.llama import state_spec
from fdel.params.spec import layers

MODEL_TYPE, ARCHITECTURE = "mixtral", "MixtralForCausalLM"
__all__ = ["ARCHITECTURE", "MODEL_TYPE", "Config", "forward", "head", "hidden", "spec", "state_spec"]


@dataclass(frozen=True, kw_only=True)
class Config:
    """Sizes and constants; `hf(...)` names each one's key in config.json."""

    vocab: int = config.hf("vocab_size", 32000)
    embed: int = config.hf("hidden_size", 4096)
    ffn: int = config.hf("intermediate_size", 14336)
    layers: int = config.hf("num_hidden_layers", 32)
    heads: int = config.hf("num_attention_heads", 32)
    kv_heads: int = config.hf("num_key_value_heads", 8)
    head_dim: int = config.hf("head_dim", config.head_dim)
    experts: int = config.hf("num_local_experts", 8)
    top_k: int = config.hf("num_experts_per_tok", 2)
    norm_eps: float = config.hf("rms_norm_eps", 1e-5)
    act: str = config.hf("hidden_act", "silu", choices=tuple(ops.ACTIVATIONS))
    max_positions: int = config.hf("max_position_embeddings", 131072)
    tied: bool = config.hf("tie_word_embeddings", False)
    window: int | None = config.hf("sliding_window", None)
    jitter: float = config.hf("router_jitter_noise", 0.0)  # of training only, see `losses.model`
    rope: ops.Rope = config.computed(
        lambda d: config.rope(d, d.get("head_dim") or config.head_dim(d), theta=1e6),
        lambda r: {"rope_parameters": config.rope_to_hf(r)},
    )
    source: str = config.source()

    from_hf = classmethod(config.from_hf)
    to_hf = config.to_hf


def spec(cfg: Config) -> dict:
    """Declare every array."""
    name = "model.layers.{layers}."
    layer = {
        "attn_norm": builders.norm(name + "input_layernorm.weight", cfg.embed),
        **builders.gqa(name + "self_attn.", cfg.embed, cfg.heads, cfg.kv_heads, cfg.head_dim),
        "mlp_norm": builders.norm(name + "post_attention_layernorm.weight", cfg.embed),
        **builders.moe(name + "block_sparse_moe.", cfg.embed, cfg.ffn, cfg.experts, ("w1", "w3", "w2")),
    }
    top = {
        "embed": builders.embedding("model.embed_tokens.weight", cfg.vocab, cfg.embed),
        "layers": layers(lambda kind: layer, (None,) * cfg.layers),
        "norm": builders.norm("model.norm.weight", cfg.embed),
    }
    return top if cfg.tied else top | {"head": builders.head("lm_head.weight", cfg.vocab, cfg.embed)}


def hidden(params, tokens, cfg: Config, batch: ops.Batch | None = None, state=None, *, remat: str | None = None):
    """Compute the final normalised hidden states: tokens int[B T] (Packed) or int[T] (Paged) -> [..., embed], state."""
    batch = ops.packed(tokens) if batch is None else batch
    rot = ops.rotation(cfg.rope, batch)
    mask = ops.Mask(cfg.head_dim**-0.5, window=cfg.window)
    act = ops.ACTIVATIONS[cfg.act]

    def block(x, state, p, layer):
        h = ops.rms_norm(x, p["attn_norm"], cfg.norm_eps)
        q = ops.rope(ops.einsum("...d,nhd->...nh", h, p["q"]), rot)
        k = ops.rope(ops.einsum("...d,khd->...kh", h, p["k"]), rot)
        v = ops.einsum("...d,khd->...kh", h, p["v"])
        a, state = ops.attend(batch, state, layer, q, k, v, mask=mask)
        x = x + ops.einsum("...nh,dnh->...d", a, p["o"])
        h = ops.rms_norm(x, p["mlp_norm"], cfg.norm_eps)
        logits = ops.einsum("...d,ed->...e", h, p["router"], out_dtype=jnp.float32)
        weights, experts = ops.route_softmax(logits, cfg.top_k, normalize=True)
        state = ops.watch_router(batch, state, jax.nn.softmax(logits), experts)
        return x + ops.moe(h, p["experts"], weights, experts, act), state

    x = ops.embed(params["embed"], tokens)
    x, state = ops.layers(block, x, state, params["layers"], remat=remat)
    return ops.rms_norm(x, params["norm"], cfg.norm_eps), state


def head(params, cfg: Config) -> ops.Head:
    """The output projection, for `ops.logits` and the chunked losses."""
    return ops.Head(params["head"] if "head" in params else params["embed"])


def forward(params, tokens, cfg: Config, batch: ops.Batch | None = None, state=None):
    """Compute logits: tokens int[B T] with Packed (the default), int[T] with Paged -> (float32 [..., V], state)."""
    x, state = hidden(params, tokens, cfg, batch, state)
    return ops.logits(x, head(params, cfg)), state
