"""SmolLM3 (Hugging Face, 2025): Llama where every fourth layer has no positions, and may attend in a window."""

from fdel import ops
from fdel.models import builders, config, llama, qwen3, sublayers
from fdel.models.config import FULL, SLIDING

MODEL_TYPE, ARCHITECTURE = "smollm3", "SmolLM3ForCausalLM"
Kinds = tuple[tuple[bool, str], ...]


def kinds(d: dict) -> Kinds:
    """Read of each layer whether it rotates, and its attention: by default sliding, with a window, where it does not."""
    n, every, given = d["num_hidden_layers"], d.get("no_rope_layer_interval", 4), d.get("no_rope_layers")
    rotates = [bool((i + 1) % every) for i in range(n)] if given is None else [bool(x) for x in given]
    if len(rotates) != n:
        raise config.ConfigError(f"config field 'no_rope_layers': found {config.show(given)}, expected {n} values")
    default = [SLIDING if qwen3.window(d) is not None and not r else FULL for r in rotates]
    return tuple(zip(rotates, config.layer_types(d, default, (FULL, SLIDING)), strict=True))


def kinds_to_hf(kinds: Kinds) -> dict:
    """Write both lists."""
    return {"no_rope_layers": [int(rotates) for rotates, _ in kinds], "layer_types": [kind for _, kind in kinds]}


@config.config
class Config(config.Decoder):
    """Sizes and constants."""

    DEFAULTS = dict(
        vocab=128256, embed=2048, ffn=11008, layers=36, heads=16, kv_heads=4, max_positions=32768, tied=True,
        sliding_window=None,
    )  # fmt: skip
    attn_bias: bool = config.hf("attention_bias", False)
    mlp_bias: bool = config.hf("mlp_bias", False)
    window: int | None = qwen3.window_field()
    kinds: Kinds = config.computed(kinds, kinds_to_hf)
    rope: ops.Rope = config.rotary(theta=2e6)


@builders.hidden("attention")
def hidden(params, tokens, cfg: Config, batch: ops.Batch, carry: ops.Carry, remat: str | None):
    """Compute the final normalised hidden states, [... T embed]; called as `protocol.Family` says."""
    changes = {True: sublayers.rotate(ops.rotation(cfg.rope, batch)), False: None}
    windows = {FULL: None, SLIDING: cfg.window}
    blocks = {(r, kind): llama.block(cfg, batch, changes[r], windows[kind]) for r, kind in set(cfg.kinds)}
    return sublayers.walk(params, tokens, cfg, blocks, carry, remat)


spec, state_spec, head, forward = llama.spec, builders.kv_state, builders.head, builders.forward(hidden)
