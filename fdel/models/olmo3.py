"""OLMo 3 (Ai2, 2025): OLMo 2 where three layers of four attend in a window; those have rotary parameters of their own."""

from fdel import ops
from fdel.models import builders, config, olmo2, sublayers
from fdel.models.config import FULL, SLIDING

MODEL_TYPE, ARCHITECTURE = "olmo3", "Olmo3ForCausalLM"


def ropes(d: dict) -> tuple[ops.Rope, ops.Rope]:
    """Read the rotary parameters of sliding and of full layers; older files scale those of full layers only."""
    old = d | {"rope_parameters": None, "rope_scaling": None}
    read = lambda d, kind: config.rope(d, config.given_head_dim(d), theta=5e5, layer_type=kind)
    return read(d if SLIDING in (d.get("rope_parameters") or {}) else old, SLIDING), read(d, FULL)


@config.config
class Config(config.Decoder):
    """Sizes and constants."""

    DEFAULTS = olmo2.Config.DEFAULTS
    attn_bias: bool = config.hf("attention_bias", False)
    window: int = config.hf("sliding_window", 4096)
    kinds: tuple[str, ...] = config.pattern(4)
    rope: tuple[ops.Rope, ops.Rope] = config.ropes(ropes)


@builders.hidden("attention")
def hidden(params, tokens, cfg: Config, batch: ops.Batch, carry: ops.Carry, remat: str | None):
    """Compute the final normalised hidden states, [... T embed]; called as `protocol.Family` says."""
    local, full = (ops.rotation(rope, batch) for rope in cfg.rope)
    blocks = {SLIDING: olmo2.block(cfg, batch, local, cfg.window), FULL: olmo2.block(cfg, batch, full)}
    return sublayers.walk(params, tokens, cfg, blocks, carry, remat)


spec, state_spec, head, forward = olmo2.spec, builders.kv_state, builders.head, builders.forward(hidden)
