"""Gemma (arXiv:2403.08295): Llama with norm scales around one, scaled embeddings and a tanh GELU."""

from functools import partial

from fdel import ops
from fdel.models import builders, config, llama, sublayers

MODEL_TYPE, ARCHITECTURE = "gemma", "GemmaForCausalLM"
GELU = "gelu_pytorch_tanh"


@config.config
class Config(config.Decoder):
    """Sizes and constants."""

    DEFAULTS = dict(
        vocab=256000, embed=3072, ffn=24576, layers=28, heads=16, kv_heads=16, head_dim=256, max_positions=8192, tied=True,
    )  # fmt: skip
    ONLY = {"hidden_activation": lambda c: c.act}
    act: str = config.act(default=GELU)
    attn_bias: bool = config.hf("attention_bias", False)

    def __post_init__(self) -> None:
        if self.act == "gelu":  # the first files say so, and mean its tanh form
            object.__setattr__(self, "act", GELU)


def spec(cfg: Config) -> dict:
    """Declare every array; norm scales are stored around zero."""
    return llama.spec(cfg, norm=builders.bias)


@builders.hidden("attention")
def hidden(params, tokens, cfg: Config, batch: ops.Batch, carry: ops.Carry, remat: str | None):
    """Compute the final normalised hidden states, [... T embed]; called as `protocol.Family` says."""
    norm, change = partial(ops.rms_norm, offset=1.0), sublayers.rotate(ops.rotation(cfg.rope, batch))
    block, last = llama.block(cfg, batch, change, norm=norm), lambda x: norm(x, params["norm"], cfg.norm_eps)
    return sublayers.walk(params, tokens, cfg, block, carry, remat, last, scale=cfg.embed**0.5)


state_spec, head, forward = builders.kv_state, builders.head, builders.forward(hidden)
