"""Llama (arXiv:2302.13971, 2407.21783): pre-norm decoder with grouped-query attention, rotary positions and SwiGLU."""

from dataclasses import dataclass

from jaxtyping import Array, Float, Int

from fdel import ops
from fdel.models import builders, config
from fdel.params.spec import layers

MODEL_TYPE, ARCHITECTURE = "llama", "LlamaForCausalLM"


@dataclass(frozen=True, kw_only=True)
class Config:
    """Sizes and constants; `hf(...)` names each one's key in config.json."""

    vocab: int = config.hf("vocab_size")
    embed: int = config.hf("hidden_size")
    ffn: int = config.hf("intermediate_size")
    layers: int = config.hf("num_hidden_layers")
    heads: int = config.hf("num_attention_heads")
    kv_heads: int = config.hf("num_key_value_heads", lambda d: d["num_attention_heads"])
    head_dim: int = config.hf("head_dim", config.head_dim)
    norm_eps: float = config.hf("rms_norm_eps", 1e-6)
    act: str = config.hf("hidden_act", "silu", choices=tuple(ops.ACTIVATIONS))
    max_positions: int = config.hf("max_position_embeddings", 2048)
    tied: bool = config.hf("tie_word_embeddings", False)
    attn_bias: bool = config.hf("attention_bias", False)
    mlp_bias: bool = config.hf("mlp_bias", False)
    window: int | None = None
    rope: ops.Rope = config.computed(
        lambda d: config.rope(d, d.get("head_dim") or config.head_dim(d)),
        lambda r: {"rope_parameters": config.rope_to_hf(r)},
    )
    source: str = config.source()

    from_hf = classmethod(config.from_hf)
    to_hf = config.to_hf


def spec(cfg: Config) -> dict:
    """Declare every array: embed, layers (stacked), norm, and head unless tied."""
    name = "model.layers.{layers}."
    layer = {
        "attn_norm": builders.norm(name + "input_layernorm.weight", cfg.embed),
        **builders.gqa(name + "self_attn.", cfg.embed, cfg.heads, cfg.kv_heads, cfg.head_dim),
        "mlp_norm": builders.norm(name + "post_attention_layernorm.weight", cfg.embed),
        **builders.glu(name + "mlp.", cfg.embed, cfg.ffn),
    }
    if cfg.attn_bias:
        layer |= builders.gqa_bias(name + "self_attn.", cfg.heads, cfg.kv_heads, cfg.head_dim)
        layer["o_bias"] = builders.bias(name + "self_attn.o_proj.bias", cfg.embed)
    if cfg.mlp_bias:
        layer["gate_bias"] = builders.bias(name + "mlp.gate_proj.bias", cfg.ffn, "ffn")
        layer["up_bias"] = builders.bias(name + "mlp.up_proj.bias", cfg.ffn, "ffn")
        layer["down_bias"] = builders.bias(name + "mlp.down_proj.bias", cfg.embed)
    top = {
        "embed": builders.embedding("model.embed_tokens.weight", cfg.vocab, cfg.embed),
        "layers": layers(lambda kind: layer, (None,) * cfg.layers),
        "norm": builders.norm("model.norm.weight", cfg.embed),
    }
    return top if cfg.tied else top | {"head": builders.head("lm_head.weight", cfg.vocab, cfg.embed)}


def state_spec(cfg: Config, *, pages: int, page: int = 64, rows: int = 0) -> ops.Pages:
    """Declare what serving must remember: keys and values of `pages` pages of `page` tokens."""
    return builders.kv_pages(cfg.layers, cfg.kv_heads, cfg.head_dim, pages=pages, page=page)


def hidden(params, tokens, cfg: Config, batch: ops.Batch | None = None, state=None, *, remat: str | None = None):
    """Compute the final normalised hidden states: tokens int[B T] (Packed) or int[T] (Paged) -> [..., embed], state."""
    batch = ops.packed(tokens) if batch is None else batch
    rot = ops.rotation(cfg.rope, batch)
    mask = ops.Mask(cfg.head_dim**-0.5, window=cfg.window)
    act = ops.ACTIVATIONS[cfg.act]

    def block(x, state, p, layer):
        h = ops.rms_norm(x, p["attn_norm"], cfg.norm_eps)
        q = ops.rope(ops.linear("...d,nhd->...nh", h, p["q"], p.get("q_bias")), rot)
        k = ops.rope(ops.linear("...d,khd->...kh", h, p["k"], p.get("k_bias")), rot)
        v = ops.linear("...d,khd->...kh", h, p["v"], p.get("v_bias"))
        a, state = ops.attend(batch, state, layer, q, k, v, mask=mask)
        x = x + ops.linear("...nh,dnh->...d", a, p["o"], p.get("o_bias"))
        h = ops.rms_norm(x, p["mlp_norm"], cfg.norm_eps)
        return x + ops.glu(h, p, act), state

    x = ops.embed(params["embed"], tokens)
    x, state = ops.layers(block, x, state, params["layers"], remat=remat)
    return ops.rms_norm(x, params["norm"], cfg.norm_eps), state


def head(params, cfg: Config) -> ops.Head:
    """The output projection, for `ops.logits` and the chunked losses."""
    return ops.Head(params["head"] if "head" in params else params["embed"])


def forward(
    params, tokens: Int[Array, "..."], cfg: Config, batch: ops.Batch | None = None, state=None
) -> tuple[Float[Array, "... V"], object]:
    """Compute logits: tokens int[B T] with Packed (the default), int[T] with Paged -> (float32 [..., V], state)."""
    x, state = hidden(params, tokens, cfg, batch, state)
    return ops.logits(x, head(params, cfg)), state
