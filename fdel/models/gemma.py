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
        vocab_size=256000, hidden_size=3072, intermediate_size=24576, num_hidden_layers=28, num_attention_heads=16,
        num_key_value_heads=16, head_dim=256, max_position_embeddings=8192, tie_word_embeddings=True,
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
