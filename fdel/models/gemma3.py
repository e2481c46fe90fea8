"""Gemma 3, text (arXiv:2503.19786): sandwich norms, normalised queries and keys, five local layers to one global."""

from dataclasses import dataclass

import jax.numpy as jnp

from fdel import ops
from fdel.models import builders, config
from fdel.params.spec import layers

MODEL_TYPE, ARCHITECTURE = "gemma3_text", "Gemma3ForCausalLM"
FULL, SLIDING = "full_attention", "sliding_attention"


def kinds(d: dict) -> tuple[str, ...]:
    """Read the attention kind of each layer: layer_types, or every sliding_window_pattern-th full."""
    pattern = d.get("sliding_window_pattern", d.get("_sliding_window_pattern", 6))
    default = [SLIDING if (i + 1) % pattern else FULL for i in range(d["num_hidden_layers"])]
    return config.layer_types(d, default, (FULL, SLIDING))


def local_rope(d: dict) -> ops.Rope:
    """Read the rotary parameters of sliding layers (never scaled in older files)."""
    local = {"rope_theta": d.get("rope_local_base_freq", 10000.0), "rope_parameters": d.get("rope_parameters")}
    if SLIDING not in (local["rope_parameters"] or {}):
        local.pop("rope_parameters")
    return config.rope(local, d.get("head_dim", 256), layer_type=SLIDING)


@dataclass(frozen=True, kw_only=True)
class Config:
    """Sizes and constants; `hf(...)` names each one's key in config.json."""

    vocab: int = config.hf("vocab_size", 262208)
    embed: int = config.hf("hidden_size", 2304)
    ffn: int = config.hf("intermediate_size", 9216)
    layers: int = config.hf("num_hidden_layers", 26)
    heads: int = config.hf("num_attention_heads", 8)
    kv_heads: int = config.hf("num_key_value_heads", 4)
    head_dim: int = config.hf("head_dim", 256)
    query_scale: int = config.hf("query_pre_attn_scalar", 256)
    norm_eps: float = config.hf("rms_norm_eps", 1e-6)
    act: str = config.hf("hidden_activation", "gelu_pytorch_tanh", choices=tuple(ops.ACTIVATIONS))
    max_positions: int = config.hf("max_position_embeddings", 131072)
    tied: bool = config.hf("tie_word_embeddings", True)
    softcap: float | None = config.hf("final_logit_softcapping", None)
    window: int = config.hf("sliding_window", 4096)
    kinds: tuple[str, ...] = config.computed(kinds, lambda k: {"layer_types": list(k)})
    ropes: tuple[ops.Rope, ops.Rope] = config.computed(
        lambda d: (local_rope(d), config.rope(d, d.get("head_dim", 256), theta=1e6, layer_type=FULL)),
        lambda r: {"rope_parameters": {SLIDING: config.rope_to_hf(r[0]), FULL: config.rope_to_hf(r[1])}},
    )
    source: str = config.source()

    from_hf = classmethod(config.from_hf)
    to_hf = config.to_hf


def spec(cfg: Config) -> dict:
    """Declare every array; norm scales are stored around zero."""
    name = "model.layers.{layers}."
    norm = lambda part: builders.bias(f"{name}{part}.weight", cfg.embed)
    layer = {
        "attn_norm": norm("input_layernorm"),
        **builders.gqa(name + "self_attn.", cfg.embed, cfg.heads, cfg.kv_heads, cfg.head_dim),
        "q_norm": builders.bias(name + "self_attn.q_norm.weight", cfg.head_dim, "head_dim"),
        "k_norm": builders.bias(name + "self_attn.k_norm.weight", cfg.head_dim, "head_dim"),
        "attn_post_norm": norm("post_attention_layernorm"),
        "mlp_norm": norm("pre_feedforward_layernorm"),
        **builders.glu(name + "mlp.", cfg.embed, cfg.ffn),
        "mlp_post_norm": norm("post_feedforward_layernorm"),
    }
    top = {
        "embed": builders.embedding("model.embed_tokens.weight", cfg.vocab, cfg.embed),
        "layers": layers(lambda kind: layer, cfg.kinds),
        "norm": builders.bias("model.norm.weight", cfg.embed),
    }
    return top if cfg.tied else top | {"head": builders.head("lm_head.weight", cfg.vocab, cfg.embed)}


def state_spec(cfg: Config, *, pages: int, page: int = 64, rows: int = 0) -> ops.Pages:
    """Declare what serving must remember: keys and values of `pages` pages of `page` tokens."""
    return builders.kv_pages(cfg.layers, cfg.kv_heads, cfg.head_dim, pages=pages, page=page)


def hidden(params, tokens, cfg: Config, batch: ops.Batch | None = None, state=None, *, remat: str | None = None):
    """Compute the final normalised hidden states: tokens int[B T] (Packed) or int[T] (Paged) -> [..., embed], state."""
    batch = ops.packed(tokens) if batch is None else batch
    norm = lambda x, w: ops.rms_norm(x, w, cfg.norm_eps, offset=1.0)

    def block(rope, window):
        rot, mask = ops.rotation(rope, batch), ops.Mask(cfg.query_scale**-0.5, window=window)

        def apply(x, state, p, layer):
            h = norm(x, p["attn_norm"])
            q = ops.rope(norm(ops.einsum("...d,nhd->...nh", h, p["q"]), p["q_norm"]), rot)
            k = ops.rope(norm(ops.einsum("...d,khd->...kh", h, p["k"]), p["k_norm"]), rot)
            v = ops.einsum("...d,khd->...kh", h, p["v"])
            a, state = ops.attend(batch, state, layer, q, k, v, mask=mask)
            x = x + norm(ops.einsum("...nh,dnh->...d", a, p["o"]), p["attn_post_norm"])
            h = ops.glu(norm(x, p["mlp_norm"]), p, ops.ACTIVATIONS[cfg.act])
            return x + norm(h, p["mlp_post_norm"]), state

        return apply

    blocks = {SLIDING: block(cfg.ropes[0], cfg.window), FULL: block(cfg.ropes[1], None)}
    x = ops.embed(params["embed"], tokens)
    x = x * jnp.asarray(cfg.embed**0.5, x.dtype)  # the constant is rounded to the weights' dtype, as in the original
    x, state = ops.layers(blocks, x, state, params["layers"], cfg.kinds, remat=remat)
    return norm(x, params["norm"]), state


def head(params, cfg: Config) -> ops.Head:
    """The output projection, for `ops.logits` and the chunked losses."""
    return ops.Head(params["head"] if "head" in params else params["embed"], softcap=cfg.softcap)


def forward(params, tokens, cfg: Config, batch: ops.Batch | None = None, state=None):
    """Compute logits: tokens int[B T] with Packed (the default), int[T] with Paged -> (float32 [..., V], state)."""
    x, state = hidden(params, tokens, cfg, batch, state)
    return ops.logits(x, head(params, cfg)), state
