"""Gemma 3, text (arXiv:2503.19786): sandwich norms, normalised queries and keys, five local layers to one global."""

from fdel import ops
from fdel.models import builders, config, gemma2
from fdel.models.config import FULL, SLIDING

MODEL_TYPE, ARCHITECTURE = "gemma3_text", "Gemma3ForCausalLM"


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
    return config.rope(local, d["head_dim"], layer_type=SLIDING)


@config.config
class Config(config.Decoder):
    """Sizes and constants."""

    DEFAULTS = dict(
        vocab=262208, embed=2304, ffn=9216, layers=26, heads=8, kv_heads=4, head_dim=256, max_positions=131072, tied=True,
    )  # fmt: skip
    attn_bias: bool = config.hf("attention_bias", False)
    query_scale: int = config.hf("query_pre_attn_scalar", 256)
    act: str = config.act("hidden_activation", "gelu_pytorch_tanh")
    softcap: float | None = config.hf("final_logit_softcapping", None)
    window: int = config.hf("sliding_window", 4096)
    kinds: tuple[str, ...] = config.computed(kinds, lambda k: {"layer_types": list(k)})
    rope: tuple[ops.Rope, ops.Rope] = config.ropes(
        lambda d: (local_rope(d), config.rope(d, d["head_dim"], theta=1e6, layer_type=FULL))
    )


def spec(cfg: Config) -> dict:
    """Declare every array; norm scales are stored around zero."""
    return gemma2.spec(cfg, builders.qk_norm("model.layers.{layers}.self_attn.", cfg, builders.bias))


@builders.hidden("attention")
def hidden(params, tokens, cfg: Config, batch: ops.Batch, carry: ops.Carry, remat: str | None):
    """Compute the final normalised hidden states, [... T embed]; called as `protocol.Family` says."""
    of_kind = {SLIDING: (cfg.rope[0], cfg.window), FULL: (cfg.rope[1], None)}
    blocks = {
        kind: gemma2.block(cfg, batch, rope, ops.Mask(cfg.query_scale**-0.5, window=window))
        for kind, (rope, window) in of_kind.items()
    }
    return gemma2.walk(params, tokens, cfg, blocks, carry, remat)


state_spec, head, forward = builders.kv_state, builders.head, builders.forward(hidden)
