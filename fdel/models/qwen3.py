"""Qwen3 (arXiv:2505.09388): Llama with RMS-normalised queries and keys per head; some layers may attend in a window."""

from dataclasses import dataclass

from fdel import ops
from fdel.models import builders, config
from fdel.params.spec import layers

MODEL_TYPE, ARCHITECTURE = "qwen3", "Qwen3ForCausalLM"
FULL, SLIDING = "full_attention", "sliding_attention"


def window(d: dict) -> int | None:
    """Read the window, which counts only with use_sliding_window; the keys are read in any case."""
    size, used = d.get("sliding_window", 4096), d.get("use_sliding_window", False)
    return size if used else None


def kinds(d: dict) -> tuple[str, ...]:
    """Read the attention kind of each layer: layer_types, or sliding from max_window_layers on."""
    n, first = d["num_hidden_layers"], d.get("max_window_layers", 28)
    default = [SLIDING if window(d) is not None and i >= first else FULL for i in range(n)]
    return config.layer_types(d, default, (FULL, SLIDING))


@dataclass(frozen=True, kw_only=True)
class Config:
    """Sizes and constants; `hf(...)` names each one's key in config.json."""

    vocab: int = config.hf("vocab_size")
    embed: int = config.hf("hidden_size")
    ffn: int = config.hf("intermediate_size")
    layers: int = config.hf("num_hidden_layers")
    heads: int = config.hf("num_attention_heads")
    kv_heads: int = config.hf("num_key_value_heads", lambda d: d["num_attention_heads"])
    head_dim: int = config.hf("head_dim", 128)
    norm_eps: float = config.hf("rms_norm_eps", 1e-6)
    act: str = config.hf("hidden_act", "silu", choices=tuple(ops.ACTIVATIONS))
    max_positions: int = config.hf("max_position_embeddings", 32768)
    tied: bool = config.hf("tie_word_embeddings", False)
    attn_bias: bool = config.hf("attention_bias", False)
    window: int | None = config.computed(
        window, lambda w: {"sliding_window": w, "use_sliding_window": w is not None}, default=None
    )
    kinds: tuple[str, ...] = config.computed(kinds, lambda k: {"layer_types": list(k)})
    rope: ops.Rope = config.computed(
        lambda d: config.rope(d, d.get("head_dim", 128)), lambda r: {"rope_parameters": config.rope_to_hf(r)}
    )
    source: str = config.source()

    from_hf = classmethod(config.from_hf)
    to_hf = config.to_hf


def attention_spec(cfg, name: str) -> dict:
    """Declare the attention half of a layer: its norm, projections and the norms of queries and keys."""
    spec = {
        "attn_norm": builders.norm(name + "input_layernorm.weight", cfg.embed),
        **builders.gqa(name + "self_attn.", cfg.embed, cfg.heads, cfg.kv_heads, cfg.head_dim),
        "q_norm": builders.norm(name + "self_attn.q_norm.weight", cfg.head_dim, "head_dim"),
        "k_norm": builders.norm(name + "self_attn.k_norm.weight", cfg.head_dim, "head_dim"),
        "mlp_norm": builders.norm(name + "post_attention_layernorm.weight", cfg.embed),
    }
    if cfg.attn_bias:
        spec |= builders.gqa_bias(name + "self_attn.", cfg.heads, cfg.kv_heads, cfg.head_dim)
        spec["o_bias"] = builders.bias(name + "self_attn.o_proj.bias", cfg.embed)
    return spec


def top_spec(cfg, stacked) -> dict:
    """Declare the arrays around the layers: embed, norm, and head unless tied."""
    top = {
        "embed": builders.embedding("model.embed_tokens.weight", cfg.vocab, cfg.embed),
        "layers": stacked,
        "norm": builders.norm("model.norm.weight", cfg.embed),
    }
    return top if cfg.tied else top | {"head": builders.head("lm_head.weight", cfg.vocab, cfg.embed)}


def spec(cfg: Config) -> dict:
    """Declare every array."""
    name = "model.layers.{layers}."
    layer = attention_spec(cfg, name) | builders.glu(name + "mlp.", cfg.embed, cfg.ffn)
    return top_spec(cfg, layers(lambda kind: layer, cfg.kinds))


def state_spec(cfg: Config, *, pages: int, page: int = 64, rows: int = 0) -> ops.Pages:
    """Declare what serving must remember: keys and values of `pages` pages of `page` tokens."""
    return builders.kv_pages(cfg.layers, cfg.kv_heads, cfg.head_dim, pages=pages, page=page)


def attention(x, state, p, layer, cfg, batch, rot, mask):
    """Apply the attention half of a layer to the residual stream."""
    h = ops.rms_norm(x, p["attn_norm"], cfg.norm_eps)
    q = ops.rms_norm(ops.linear("...d,nhd->...nh", h, p["q"], p.get("q_bias")), p["q_norm"], cfg.norm_eps)
    k = ops.rms_norm(ops.linear("...d,khd->...kh", h, p["k"], p.get("k_bias")), p["k_norm"], cfg.norm_eps)
    v = ops.linear("...d,khd->...kh", h, p["v"], p.get("v_bias"))
    a, state = ops.attend(batch, state, layer, ops.rope(q, rot), ops.rope(k, rot), v, mask=mask)
    return x + ops.linear("...nh,dnh->...d", a, p["o"], p.get("o_bias")), state


def hidden(params, tokens, cfg: Config, batch: ops.Batch | None = None, state=None, *, remat: str | None = None):
    """Compute the final normalised hidden states: tokens int[B T] (Packed) or int[T] (Paged) -> [..., embed], state."""
    batch = ops.packed(tokens) if batch is None else batch
    rot = ops.rotation(cfg.rope, batch)
    act = ops.ACTIVATIONS[cfg.act]

    def block(window):
        mask = ops.Mask(cfg.head_dim**-0.5, window=window)

        def apply(x, state, p, layer):
            x, state = attention(x, state, p, layer, cfg, batch, rot, mask)
            return x + ops.glu(ops.rms_norm(x, p["mlp_norm"], cfg.norm_eps), p, act), state

        return apply

    blocks = {FULL: block(None), SLIDING: block(cfg.window)}
    x = ops.embed(params["embed"], tokens)
    x, state = ops.layers(blocks, x, state, params["layers"], cfg.kinds, remat=remat)
    return ops.rms_norm(x, params["norm"], cfg.norm_eps), state


def head(params, cfg: Config) -> ops.Head:
    """The output projection, for `ops.logits` and the chunked losses."""
    return ops.Head(params["head"] if "head" in params else params["embed"])


def forward(params, tokens, cfg: Config, batch: ops.Batch | None = None, state=None):
    """Compute logits: tokens int[B T] with Packed (the default), int[T] with Paged -> (float32 [..., V], state)."""
    x, state = hidden(params, tokens, cfg, batch, state)
    return ops.logits(x, head(params, cfg)), state
