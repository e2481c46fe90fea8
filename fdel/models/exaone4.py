"""EXAONE 4 (arXiv:2507.11407): norms behind attention and feed-forward; three layers in a window, one without positions."""

from fdel import ops
from fdel.models import builders, config, olmo2, sublayers
from fdel.models.config import FULL, SLIDING

MODEL_TYPE, ARCHITECTURE = "exaone4", "Exaone4ForCausalLM"


def kinds(d: dict) -> tuple[str, ...]:
    """Read the attention of each layer: layer_types, or every n-th full, or a word of L and G that repeats, G the last."""
    n, every = d["num_hidden_layers"], d.get("sliding_window_pattern", 4)
    if isinstance(every, str):
        local = ["GL".index(every[i % len(every)]) for i in range(n - 1)] + [0]
    else:
        local = [every and (i + 1) % every for i in range(n)]
    default = [SLIDING if x and d["sliding_window"] is not None else FULL for x in local]
    return config.layer_types(d, default, (FULL, SLIDING))


@config.config
class Config(config.Decoder):
    """Sizes and constants."""

    DEFAULTS = dict(vocab=102400, embed=4096, ffn=16384, layers=32, heads=32, kv_heads=32, norm_eps=1e-5)
    window: int | None = config.hf("sliding_window", 4096)
    kinds: tuple[str, ...] = config.computed(kinds, lambda k: {"layer_types": list(k)})


def spec(cfg: Config) -> dict:
    """Declare every array."""
    return olmo2.spec(cfg, per_head=True)


@builders.hidden("attention")
def hidden(params, tokens, cfg: Config, batch: ops.Batch, carry: ops.Carry, remat: str | None):
    """Compute the final normalised hidden states, [... T embed]; called as `protocol.Family` says."""
    rot = ops.rotation(cfg.rope, batch)
    blocks = {
        SLIDING: olmo2.block(cfg, batch, rot, cfg.window, per_head=True),
        FULL: olmo2.block(cfg, batch, None if cfg.window else rot, per_head=True),
    }
    return sublayers.walk(params, tokens, cfg, blocks, carry, remat)


state_spec, head, forward = builders.kv_state, builders.head, builders.forward(hidden)
