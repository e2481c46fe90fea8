"""GPT-J (Wang and Komatsuzaki, 2021): attention and feed-forward in parallel on one LayerNorm, neighbours rotated."""

from fdel import ops
from fdel.models import builders, config, sublayers

MODEL_TYPE, ARCHITECTURE = "gptj", "GPTJForCausalLM"


def rotary(d: dict) -> ops.Rope:
    """Read the number of rotated channels; it must fit a head."""
    dim, size = d.get("rotary_dim", 64), d["n_embd"] // d["n_head"]
    if not isinstance(dim, int) or not 0 < dim <= size:
        found = f"found {config.show(dim)}, expected an even number of channels, at most the {size} of a head"
        raise config.ConfigError(f"config field 'rotary_dim': {found}")
    return config.rope({}, dim)


@config.config
class Config(config.MultiHead):
    """Sizes and constants; `hf(...)` names each one's key in config.json."""

    ONLY = {"scale_attn_weights": True}
    vocab: int = config.hf("vocab_size", 50400)
    embed: int = config.hf("n_embd", 4096)
    ffn: int = config.hf("n_inner", lambda d: 4 * d["n_embd"])
    layers: int = config.hf("n_layer", 28)
    heads: int = config.hf("n_head", 16)
    max_positions: int = config.hf("n_positions", 2048)
    norm_eps: float = config.hf("layer_norm_epsilon", 1e-5)
    act: str = config.act("activation_function", "gelu_new")
    tied: bool = config.hf("tie_word_embeddings", False)
    rope: ops.Rope = config.computed(rotary, lambda r: {"rotary_dim": r.dim})


def spec(cfg: Config) -> dict:
    """Declare every array."""
    name = "transformer.h.{layers}."
    layer = {
        **builders.layer_norm("attn_norm", name + "ln_1", cfg.embed),
        **builders.gqa(name + "attn.", cfg, names=("q_proj", "k_proj", "v_proj", "out_proj")),
        **builders.mlp(name + "mlp.", cfg.embed, cfg.ffn, ("fc_in", "fc_out")),
    }
    return builders.decoder(cfg, layer, "transformer.wte", "transformer.ln_f", norm_bias=True, head_bias=True)


@builders.hidden("attention")
def hidden(params, tokens, cfg: Config, batch: ops.Batch, carry: ops.Carry, remat: str | None):
    """Compute the final normalised hidden states, [... T embed]; called as `protocol.Family` says."""
    mask, rotate = ops.Mask(cfg.head_dim**-0.5), sublayers.rotate(ops.rotation(cfg.rope, batch), interleaved=True)
    norm = lambda x, p, part: sublayers.layer_norm(x, p, part, cfg.norm_eps)

    def block(x, carry, p, layer):
        h = norm(x, p, "attn_norm")
        a, carry = sublayers.attention(h, carry, p, layer, batch, mask, rotate)
        return x + a + ops.mlp(h, p, ops.ACTIVATIONS[cfg.act]), carry

    return sublayers.walk(params, tokens, cfg, block, carry, remat, lambda x: norm(x, params, "norm"))


state_spec, head, forward, rename = builders.kv_state, builders.head, builders.forward(hidden), builders.without_mask
