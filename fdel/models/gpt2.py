"""GPT-2 (Radford et al., 2019): LayerNorm, biases, learned positions, fused and transposed projections, tied head."""

from dataclasses import dataclass

import jax.numpy as jnp

from fdel import ops
from fdel.models import builders, config
from fdel.params.spec import Param, layers, normal, parts, zeros

MODEL_TYPE, ARCHITECTURE = "gpt2", "GPT2LMHeadModel"


@dataclass(frozen=True, kw_only=True)
class Config:
    """Sizes and constants; `hf(...)` names each one's key in config.json."""

    vocab: int = config.hf("vocab_size", 50257)
    embed: int = config.hf("n_embd", 768)
    ffn: int = config.hf("n_inner", lambda d: 4 * d.get("n_embd", 768))
    layers: int = config.hf("n_layer", 12)
    heads: int = config.hf("n_head", 12)
    max_positions: int = config.hf("n_positions", 1024)
    norm_eps: float = config.hf("layer_norm_epsilon", 1e-5)
    act: str = config.hf("activation_function", "gelu_new", choices=tuple(ops.ACTIVATIONS))
    scaled: bool = config.hf("scale_attn_weights", True)
    tied: bool = config.hf("tie_word_embeddings", True)
    source: str = config.source()

    @classmethod
    def from_hf(cls, d: dict) -> "Config":
        """Build from config.json; what it says of summaries and of the order of products is not read."""
        summary = {key: config.ANY for key in d if isinstance(key, str) and key.startswith("summary_")}
        return config.from_hf(cls, d, reorder_and_upcast_attn=config.ANY, n_ctx=config.ANY, **summary)

    to_hf = config.to_hf

    @property
    def head_dim(self) -> int:
        """Channels per head."""
        return self.embed // self.heads


def spec(cfg: Config) -> dict:
    """Declare every array. Checkpoints store matrices transposed, [in, out], with q, k and v side by side."""
    name, d, n, h = "transformer.h.{layers}.", cfg.embed, cfg.heads, cfg.head_dim
    qkv = parts(q=d, k=d, v=d)
    layer = {
        "attn_norm": builders.norm(name + "ln_1.weight", d),
        "attn_norm_bias": builders.bias(name + "ln_1.bias", d),
        "o": Param("embed heads head_dim", (d, n, h), normal(0.02), name + "attn.c_proj.weight", "(heads head_dim) embed"),
        "o_bias": builders.bias(name + "attn.c_proj.bias", d),
        "mlp_norm": builders.norm(name + "ln_2.weight", d),
        "mlp_norm_bias": builders.bias(name + "ln_2.bias", d),
        "up": Param("ffn embed", (cfg.ffn, d), normal(0.02), name + "mlp.c_fc.weight", "embed ffn"),
        "up_bias": builders.bias(name + "mlp.c_fc.bias", cfg.ffn, "ffn"),
        "down": Param("embed ffn", (d, cfg.ffn), normal(0.02), name + "mlp.c_proj.weight", "ffn embed"),
        "down_bias": builders.bias(name + "mlp.c_proj.bias", d),
    }  # fmt: skip
    for part, cut in qkv.items():
        fused = name + "attn.c_attn."
        layer[part] = Param(
            "heads head_dim embed", (n, h, d), normal(0.02), fused + "weight", "embed [heads head_dim]", cut
        )
        layer[part + "_bias"] = Param("heads head_dim", (n, h), zeros, fused + "bias", "[heads head_dim]", cut)
    top = {
        "embed": builders.embedding("transformer.wte.weight", cfg.vocab, d),
        "positions": Param("positions embed", (cfg.max_positions, d), normal(0.01), "transformer.wpe.weight"),
        "layers": layers(lambda kind: layer, (None,) * cfg.layers),
        "norm": builders.norm("transformer.ln_f.weight", d),
        "norm_bias": builders.bias("transformer.ln_f.bias", d),
    }
    return top if cfg.tied else top | {"head": builders.head("lm_head.weight", cfg.vocab, d)}


def rename(name: str, cfg: Config) -> str | None:
    """Map file names to spec names: the first GPT-2 files lack the prefix and carry the causal mask."""
    if name.endswith((".attn.bias", ".attn.masked_bias")):
        return None
    return name if name.startswith(("transformer.", "lm_head.")) else f"transformer.{name}"


def state_spec(cfg: Config, *, pages: int, page: int = 64, rows: int = 0) -> ops.Pages:
    """Declare what serving must remember: keys and values of `pages` pages of `page` tokens."""
    return builders.kv_pages(cfg.layers, cfg.heads, cfg.head_dim, pages=pages, page=page)


def hidden(params, tokens, cfg: Config, batch: ops.Batch | None = None, state=None, *, remat: str | None = None):
    """Compute the final normalised hidden states: tokens int[B T] (Packed) or int[T] (Paged) -> [..., embed], state."""
    batch = ops.packed(tokens) if batch is None else batch
    mask = ops.Mask(cfg.head_dim**-0.5 if cfg.scaled else 1.0)
    norm = lambda x, p, part: ops.layer_norm(x, p[part], p[part + "_bias"], cfg.norm_eps)

    def block(x, state, p, layer):
        h = norm(x, p, "attn_norm")
        q, k, v = (ops.linear("...d,nhd->...nh", h, p[i], p[i + "_bias"]) for i in "qkv")
        a, state = ops.attend(batch, state, layer, q, k, v, mask=mask)
        x = x + ops.linear("...nh,dnh->...d", a, p["o"], p["o_bias"])
        return x + ops.mlp(norm(x, p, "mlp_norm"), p, ops.ACTIVATIONS[cfg.act]), state

    x = ops.embed(params["embed"], tokens) + ops.embed(params["positions"], jnp.maximum(batch.positions, 0))
    x, state = ops.layers(block, x, state, params["layers"], remat=remat)
    return norm(x, params, "norm"), state


def head(params, cfg: Config) -> ops.Head:
    """The output projection, for `ops.logits` and the chunked losses."""
    return ops.Head(params["head"] if "head" in params else params["embed"])


def forward(params, tokens, cfg: Config, batch: ops.Batch | None = None, state=None):
    """Compute logits: tokens int[B T] with Packed (the default), int[T] with Paged -> (float32 [..., V], state)."""
    x, state = hidden(params, tokens, cfg, batch, state)
    return ops.logits(x, head(params, cfg)), state
