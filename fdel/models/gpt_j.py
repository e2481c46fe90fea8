"""GPT-J (Wang and Komatsuzaki, 2021): attention and feed-forward in parallel on one LayerNorm, neighbours rotated."""

from fdel import ops
from fdel.models import builders, config, sublayers
from fdel.params.spec import stack

MODEL_TYPE, ARCHITECTURE = "gptj", "GPTJForCausalLM"


def rotary(d: dict) -> ops.Rope:
    """Read the number of rotated channels; it must fit a head."""
    dim, size = d.get("rotary_dim", 64), d["n_embd"] // d["n_head"]
    if not isinstance(dim, int) or not 0 < dim <= size:
        found = f"found {config.show(dim)}, expected an even number of channels, at most the {size} of a head"
        raise config.ConfigError(f"config field 'rotary_dim': {found}")
    return config.rope({}, dim)


@config.config
class Config:
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

    head_dim = property(lambda self: self.embed // self.heads)
    kv_heads = property(lambda self: self.heads)  # of keys and values: all of them


def spec(cfg: Config) -> dict:
    """Declare every array."""
    name = "transformer.h.{layers}."
    layer = {
        **builders.layer_norm("attn_norm", name + "ln_1", cfg.embed),
        **builders.gqa(name + "attn.", cfg, names=("q_proj", "k_proj", "v_proj", "out_proj")),
        **builders.mlp(name + "mlp.", cfg.embed, cfg.ffn, ("fc_in", "fc_out")),
    }
    layers = stack(layer, "layers", range(cfg.layers))
    tree = builders.top(cfg, layers, "transformer.wte.weight", "transformer.ln_f.weight")
    tree |= {"norm_bias": builders.bias("transformer.ln_f.bias", cfg.embed)}
    return tree | {"head_bias": builders.bias("lm_head.bias", cfg.vocab, "vocab")}


def rename(name: str, cfg: Config) -> str | None:
    """Leave out the causal mask that older files carry."""
    return None if name.endswith((".attn.bias", ".attn.masked_bias")) else name


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


state_spec, head, forward = builders.kv_state, builders.head, builders.forward(hidden)
