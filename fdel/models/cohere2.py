"""Command R7B and Command A (arXiv:2504.00698): Command R where three layers of four attend in a window, with positions."""

from fdel import ops
from fdel.models import builders, cohere, config, sublayers
from fdel.models.config import FULL, SLIDING

MODEL_TYPE, ARCHITECTURE = "cohere2", "Cohere2ForCausalLM"


@config.config
class Config(config.Decoder):
    """Sizes and constants."""

    DEFAULTS = cohere.Config.DEFAULTS
    ONLY = dict(
        position_embedding_type="rope_gptj", order_of_interleaved_layers="local_attn_first", rotary_pct=1.0,
        use_gated_activation=True, use_parallel_block=True, use_embedding_sharing=lambda c: c.tied,
        use_parallel_embedding=config.ANY, layer_switch=config.ANY, model_max_length=config.ANY,
    )  # fmt: skip
    norm_eps: float = config.hf("layer_norm_eps", 1e-5)
    attn_bias: bool = config.hf("attention_bias", False)
    logit_scale: float = config.hf("logit_scale", 0.0625)
    window: int = config.hf("sliding_window", 4096)
    kinds: tuple[str, ...] = config.pattern(4)
    qk_norm = False


@builders.hidden("attention")
def hidden(params, tokens, cfg: Config, batch: ops.Batch, carry: ops.Carry, remat: str | None):
    """Compute the final normalised hidden states, [... T embed]; called as `protocol.Family` says."""
    rot, norm = ops.rotation(cfg.rope, batch), lambda x: ops.layer_norm(x, params["norm"], None, cfg.norm_eps)
    blocks = {SLIDING: cohere.block(cfg, batch, rot, cfg.window), FULL: cohere.block(cfg, batch, None)}
    return sublayers.walk(params, tokens, cfg, blocks, carry, remat, norm)


spec, state_spec, head, forward = cohere.spec, builders.kv_state, builders.head, builders.forward(hidden)
