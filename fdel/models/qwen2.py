"""Qwen2 (arXiv:2407.10671): Llama with biases of queries, keys and values; some layers may attend in a window."""

from fdel import ops
from fdel.models import builders, config, llama, qwen3, sublayers
from fdel.models.config import FULL, SLIDING

MODEL_TYPE, ARCHITECTURE = "qwen2", "Qwen2ForCausalLM"


@config.config
class Config(config.Decoder):
    """Sizes and constants."""

    DEFAULTS = dict(vocab=151936, embed=4096, ffn=22016, layers=32, heads=32, kv_heads=32, max_positions=32768)
    attn_bias, o_bias = True, False
    window: int | None = qwen3.window_field()
    kinds: tuple[str, ...] = config.computed(qwen3.kinds, lambda k: {"layer_types": list(k)})


def blocks(cfg: Config, batch: ops.Batch) -> dict:
    """Make the block of each kind of layer."""
    change = sublayers.rotate(ops.rotation(cfg.rope, batch))
    return {kind: llama.block(cfg, batch, change, w) for kind, w in ((FULL, None), (SLIDING, cfg.window))}


@builders.hidden("attention")
def hidden(params, tokens, cfg: Config, batch: ops.Batch, carry: ops.Carry, remat: str | None):
    """Compute the final normalised hidden states, [... T embed]; called as `protocol.Family` says."""
    return sublayers.walk(params, tokens, cfg, blocks(cfg, batch), carry, remat)


spec, state_spec, head, forward = llama.spec, builders.kv_state, builders.head, builders.forward(hidden)
