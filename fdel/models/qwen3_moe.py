"""Qwen3-MoE (arXiv:2505.09388): Qwen3's attention, and a mixture of gated feed-forwards in some layers or in all."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from fdel import ops
from fdel.models import builders, config
from fdel.models.qwen3 import attention, attention_spec, state_spec, top_spec, window
from fdel.params.spec import layers

MODEL_TYPE, ARCHITECTURE = "qwen3_moe", "Qwen3MoeForCausalLM"
DENSE, MOE = "dense", "moe"
__all__ = ["ARCHITECTURE", "MODEL_TYPE", "Config", "forward", "head", "hidden", "spec", "state_spec"]


def experts(d: dict) -> int:
    """Read the number of experts, which newer files call num_local_experts."""
    return d.get("num_experts", d.get("num_local_experts", 128))


def kinds(d: dict) -> tuple[str, ...]:
    """Read the feed-forward of each layer: every decoder_sparse_step-th has experts unless mlp_only_layers names it."""
    step, dense = d.get("decoder_sparse_step", 1), d.get("mlp_only_layers") or []
    sparse = lambda i: i not in dense and experts(d) > 0 and (i + 1) % step == 0
    return tuple(MOE if sparse(i) else DENSE for i in range(d.get("num_hidden_layers", 24)))


def kinds_to_hf(kinds: tuple[str, ...]) -> dict:
    """Write mlp_only_layers."""
    return {"mlp_only_layers": [i for i, k in enumerate(kinds) if k == DENSE], "decoder_sparse_step": 1}


def head_dim(d: dict) -> int:
    """Read the head size, which older configs leave out."""
    return d.get("head_dim") or d.get("hidden_size", 2048) // d.get("num_attention_heads", 32)


@dataclass(frozen=True, kw_only=True)
class Config:
    """Sizes and constants; `hf(...)` names each one's key in config.json."""

    vocab: int = config.hf("vocab_size", 151936)
    embed: int = config.hf("hidden_size", 2048)
    ffn: int = config.hf("intermediate_size", 6144)
    moe_ffn: int = config.hf("moe_intermediate_size", 768)
    layers: int = config.hf("num_hidden_layers", 24)
    heads: int = config.hf("num_attention_heads", 32)
    kv_heads: int = config.hf("num_key_value_heads", 4)
    head_dim: int = config.hf("head_dim", head_dim)
    experts: int = config.hf("num_experts", experts)
    top_k: int = config.hf("num_experts_per_tok", 8)
    normalize: bool = config.hf("norm_topk_prob", False)
    norm_eps: float = config.hf("rms_norm_eps", 1e-6)
    act: str = config.hf("hidden_act", "silu", choices=tuple(ops.ACTIVATIONS))
    max_positions: int = config.hf("max_position_embeddings", 32768)
    tied: bool = config.hf("tie_word_embeddings", False)
    attn_bias: bool = config.hf("attention_bias", False)
    window: int | None = config.computed(
        window,
        lambda w: {"sliding_window": w, "use_sliding_window": w is not None},
    )
    kinds: tuple[str, ...] = config.computed(kinds, kinds_to_hf)
    rope: ops.Rope = config.computed(
        lambda d: config.rope(d, head_dim(d)), lambda r: {"rope_parameters": config.rope_to_hf(r)}
    )
    source: str = config.source()

    from_hf = classmethod(config.from_hf)

    def to_hf(self) -> dict:
        """Write config.json, with the number of experts under both of its names."""
        return config.to_hf(self) | {"num_local_experts": self.experts}


def spec(cfg: Config) -> dict:
    """Declare every array."""
    name = "model.layers.{layers}."
    ffn = {
        DENSE: builders.glu(name + "mlp.", cfg.embed, cfg.ffn),
        MOE: builders.moe(name + "mlp.", cfg.embed, cfg.moe_ffn, cfg.experts),
    }
    return top_spec(cfg, layers(lambda kind: attention_spec(cfg, name) | ffn[kind], cfg.kinds))


def hidden(params, tokens, cfg: Config, batch: ops.Batch | None = None, state=None, *, remat: str | None = None):
    """Compute the final normalised hidden states: tokens int[B T] (Packed) or int[T] (Paged) -> [..., embed], state."""
    batch = ops.packed(tokens) if batch is None else batch
    rot = ops.rotation(cfg.rope, batch)
    mask = ops.Mask(cfg.head_dim**-0.5, window=cfg.window)
    act = ops.ACTIVATIONS[cfg.act]

    def dense(h, state, p):
        return ops.glu(h, p, act), state

    def moe(h, state, p):
        logits = ops.einsum("...d,ed->...e", h, p["router"], out_dtype=jnp.float32)
        weights, experts = ops.route_softmax(logits, cfg.top_k, normalize=cfg.normalize)
        state = ops.watch_router(batch, state, jax.nn.softmax(logits), experts)
        return ops.moe(h, p["experts"], weights, experts, act), state

    def block(ffn):
        def apply(x, state, p, layer):
            x, state = attention(x, state, p, layer, cfg, batch, rot, mask)
            y, state = ffn(ops.rms_norm(x, p["mlp_norm"], cfg.norm_eps), state, p)
            return x + y, state

        return apply

    x = ops.embed(params["embed"], tokens)
    blocks = {DENSE: block(dense), MOE: block(moe)}
    x, state = ops.layers(blocks, x, state, params["layers"], cfg.kinds, remat=remat)
    return ops.rms_norm(x, params["norm"], cfg.norm_eps), state


def head(params, cfg: Config) -> ops.Head:
    """The output projection, for `ops.logits` and the chunked losses."""
    return ops.Head(params["head"] if "head" in params else params["embed"])


def forward(params, tokens, cfg: Config, batch: ops.Batch | None = None, state=None):
    """Compute logits: tokens int[B T] with Packed (the default), int[T] with Paged -> (float32 [..., V], state)."""
    x, state = hidden(params, tokens, cfg, batch, state)
    return ops.logits(x, head(params, cfg)), state
