"""Qwen3 (arXiv:2505.09388): Llama with RMS-normalised queries and keys per head; some layers may attend in a window."""

from typing import Any

from fdel import ops
from fdel.models import builders, config, sublayers
from fdel.models.config import FULL, SLIDING

MODEL_TYPE, ARCHITECTURE = "qwen3", "Qwen3ForCausalLM"


def window(d: dict) -> int | None:
    """Read the window, which counts only with use_sliding_window; the keys are read in any case."""
    size, used = d.get("sliding_window", 4096), d.get("use_sliding_window", False)
    return size if used else None


def kinds(d: dict) -> tuple[str, ...]:
    """Read the attention kind of each layer: layer_types, or sliding from max_window_layers on."""
    n, first = d["num_hidden_layers"], d.get("max_window_layers", 28)
    default = [SLIDING if window(d) is not None and i >= first else FULL for i in range(n)]
    return config.layer_types(d, default, (FULL, SLIDING))


def window_field() -> Any:
    """Declare the field `window`, None where no layer has one."""
    return config.computed(window, lambda w: {"sliding_window": w, "use_sliding_window": w is not None}, default=None)


@config.config
class Config(config.Decoder):
    """Sizes and constants."""

    DEFAULTS = dict(head_dim=128, max_positions=32768)
    attn_bias: bool = config.hf("attention_bias", False)
    window: int | None = window_field()
    kinds: tuple[str, ...] = config.computed(kinds, lambda k: {"layer_types": list(k)})


def attention_spec(cfg, name: str) -> dict:
    """Declare the attention half of a layer: its norm, projections and the norms of queries and keys."""
    return {
        **builders.prenorm(name, cfg.embed),
        **builders.gqa(name + "self_attn.", cfg, biased=cfg.attn_bias),
        **builders.qk_norm(name + "self_attn.", cfg),
    }


def spec(cfg: Config) -> dict:
    """Declare every array."""
    name = "model.layers.{layers}."
    layer = attention_spec(cfg, name) | builders.glu(name + "mlp.", cfg.embed, cfg.ffn)
    return builders.decoder(cfg, layer)


def attention(x, carry, p, layer, cfg, batch, rot, mask):
    """Apply the attention half of a layer to the residual stream."""
    h = ops.rms_norm(x, p["attn_norm"], cfg.norm_eps)
    norm = lambda x, scale: ops.rms_norm(x, scale, cfg.norm_eps)
    a, carry = sublayers.attention(h, carry, p, layer, batch, mask, sublayers.normed(norm, p, rot))
    return x + a, carry


def blocks(cfg: Config, batch: ops.Batch) -> dict:
    """Make the block of each kind of layer."""
    rot = ops.rotation(cfg.rope, batch)
    act = ops.ACTIVATIONS[cfg.act]

    def block(window):
        mask = ops.Mask(cfg.head_dim**-0.5, window=window)

        def apply(x, carry, p, layer):
            x, carry = attention(x, carry, p, layer, cfg, batch, rot, mask)
            return x + ops.glu(ops.rms_norm(x, p["mlp_norm"], cfg.norm_eps), p, act), carry

        return apply

    return {FULL: block(None), SLIDING: block(cfg.window)}


@builders.hidden("attention")
def hidden(params, tokens, cfg: Config, batch: ops.Batch, carry: ops.Carry, remat: str | None):
    """Compute the final normalised hidden states, [... T embed]; called as `protocol.Family` says."""
    return sublayers.walk(params, tokens, cfg, blocks(cfg, batch), carry, remat)


state_spec, head, forward = builders.kv_state, builders.head, builders.forward(hidden)
