"""Qwen3-MoE (arXiv:2505.09388): Qwen3's attention, and a mixture of gated feed-forwards in some layers or in all."""

from collections.abc import Callable

from fdel import ops
from fdel.models import builders, config, sublayers
from fdel.models.qwen3 import attention, attention_spec, window_field

MODEL_TYPE, ARCHITECTURE = "qwen3_moe", "Qwen3MoeForCausalLM"
DENSE, MOE = "dense", "moe"


def experts(d: dict) -> int:
    """Read the number of experts, which newer files call num_local_experts."""
    return d.get("num_experts", d.get("num_local_experts", 128))


def kinds(d: dict) -> tuple[str, ...]:
    """Read the feed-forward of each layer: every decoder_sparse_step-th has experts unless mlp_only_layers names it."""
    step, dense = d.get("decoder_sparse_step", 1), d.get("mlp_only_layers") or []
    sparse = lambda i: i not in dense and experts(d) > 0 and (i + 1) % step == 0
    return tuple(MOE if sparse(i) else DENSE for i in range(d["num_hidden_layers"]))


def kinds_to_hf(kinds: tuple[str, ...]) -> dict:
    """Write mlp_only_layers."""
    return {"mlp_only_layers": [i for i, k in enumerate(kinds) if k == DENSE], "decoder_sparse_step": 1}


@config.config
class Config(config.Decoder):
    """Sizes and constants."""

    DEFAULTS = dict(vocab=151936, embed=2048, ffn=6144, layers=24, heads=32, kv_heads=4, max_positions=32768)
    moe_ffn: int = config.hf("moe_intermediate_size", 768)
    experts: int = config.hf("num_experts", experts)
    top_k: int = config.hf("num_experts_per_tok", 8)
    normalize: bool = config.hf("norm_topk_prob", False)
    attn_bias: bool = config.hf("attention_bias", False)
    window: int | None = window_field()
    kinds: tuple[str, ...] = config.computed(kinds, kinds_to_hf)

    def to_hf(self) -> dict:
        """Write config.json, with the number of experts under both of its names."""
        return config.to_hf(self) | {"num_local_experts": self.experts}


def layer_spec(cfg: Config, kind: str) -> dict:
    """Declare a layer: attention, and experts or one feed-forward."""
    name = "model.layers.{layers}."
    moe = builders.moe(name + "mlp.", cfg.embed, cfg.moe_ffn, cfg.experts)
    return attention_spec(cfg, name) | (moe if kind == MOE else builders.glu(name + "mlp.", cfg.embed, cfg.ffn))


def spec(cfg: Config) -> dict:
    """Declare every array."""
    return builders.decoder(cfg, lambda kind: layer_spec(cfg, kind))


def block(cfg: Config, batch: ops.Batch) -> Callable:
    """Make the block of every layer."""
    rot = ops.rotation(cfg.rope, batch)
    mask = ops.Mask(cfg.head_dim**-0.5, window=cfg.window)

    def apply(x, carry, p, layer):
        x, carry = attention(x, carry, p, layer, cfg, batch, rot, mask)
        h = ops.rms_norm(x, p["mlp_norm"], cfg.norm_eps)
        y, carry = sublayers.softmax_experts(h, carry, p, cfg, batch, normalize=cfg.normalize)
        return x + y, carry

    return apply


@builders.hidden("attention", "router")
def hidden(params, tokens, cfg: Config, batch: ops.Batch, carry: ops.Carry, remat: str | None):
    """Compute the final normalised hidden states, [... T embed]; called as `protocol.Family` says."""
    return sublayers.walk(params, tokens, cfg, block(cfg, batch), carry, remat)


state_spec, head, forward = builders.kv_state, builders.head, builders.forward(hidden)
