"""RoBERTa (arXiv:1907.11692): an encoder, bidirectional, LayerNorm after each addition; scores tokens that are masked."""

import jax.numpy as jnp

from fdel import ops
from fdel.models import builders, config, sublayers
from fdel.models.heads import Head
from fdel.params.spec import Param, normal, stack

MODEL_TYPE, ARCHITECTURE = "roberta", "RobertaForMaskedLM"
NAMES = "self.query", "self.key", "self.value", "output.dense"
HEADS = {
    "sequence": Head("ForSequenceClassification", "classifier.out_proj", pool="first", dense="classifier.dense"),
    "token": Head("ForTokenClassification", "classifier"),
}


@config.config
class Config(config.MultiHead):
    """Sizes and constants; `hf(...)` names each one's key in config.json."""

    ONLY = {"position_embedding_type": "absolute", "tie_word_embeddings": True}
    vocab: int = config.hf("vocab_size", 50265)
    embed: int = config.hf("hidden_size", 768)
    ffn: int = config.hf("intermediate_size", 3072)
    layers: int = config.hf("num_hidden_layers", 12)
    heads: int = config.hf("num_attention_heads", 12)
    rows: int = config.hf("max_position_embeddings", 512)  # of the table of positions
    types: int = config.hf("type_vocab_size", 2)
    pad: int = config.hf("pad_token_id", 1)
    norm_eps: float = config.hf("layer_norm_eps", 1e-12)
    act: str = config.act(default="gelu")
    causal: bool = config.hf("is_decoder", False)

    max_positions = property(lambda self: self.rows - self.pad - 1)  # the first rows are padding's


def spec(cfg: Config) -> dict:
    """Declare every array; those of the masked language model's head are named head*."""
    start, d = "roberta.embeddings.", cfg.embed
    name = "roberta.encoder.layer.{layers}."
    layer = {
        **builders.gqa(name + "attention.", cfg, biased=True, names=NAMES),
        **builders.layer_norm("attn_norm", name + "attention.output.LayerNorm", d),
        **builders.mlp(name, d, cfg.ffn, ("intermediate.dense", "output.dense")),
        **builders.layer_norm("mlp_norm", name + "output.LayerNorm", d),
    }
    table = lambda axis, n, file: Param(
        f"{axis} embed", (n, d), normal(builders.STD), f"{start}{file}_embeddings.weight"
    )
    return {
        "embed": table("vocab", cfg.vocab, "word"), "positions": table("positions", cfg.rows, "position"),
        "types": table("labels", cfg.types, "token_type"), **builders.layer_norm("norm", start + "LayerNorm", d),
        "layers": stack(layer, "layers", range(cfg.layers)),
        "head_dense": builders.matrix("lm_head.dense.weight", ("embed", d), ("channels", d)),
        "head_dense_bias": builders.bias("lm_head.dense.bias", d, "channels"),
        **builders.layer_norm("head_norm", "lm_head.layer_norm", d),
        "head_bias": builders.bias("lm_head.bias", cfg.vocab, "vocab"),
    }  # fmt: skip


def rename(name: str, cfg: Config) -> str | None:
    """Leave out copies of the embedding, the indices of positions, and what pools."""
    copy = name.removeprefix("roberta.").startswith(("lm_head.decoder.", "pooler.")) or name.endswith(".position_ids")
    return None if copy else name


def state_spec(cfg: Config, *, pages: int, page: int = 64, rows: int = 0) -> ops.State:
    """Declare what serving remembers: of an encoder nothing, since its tokens see later ones."""
    return builders.kv_state(cfg, pages=pages, page=page) if cfg.causal else ops.State()


def positions(tokens, batch: ops.Batch, pad: int):
    """Count the tokens of each sequence that are not `pad`, from pad + 1 on; a `pad` itself has place `pad`.

    In a Paged call, where earlier tokens are not known, none of them is taken for a `pad`.
    """
    real = (tokens != pad).astype(jnp.int32)
    if isinstance(batch, ops.Paged):
        return jnp.maximum(batch.positions + 1, 0) * real + pad
    count, here = jnp.cumsum(real, -1), jnp.arange(tokens.shape[-1])
    first = jnp.maximum(here - batch.positions, 0)  # of the same sequence
    return (count - jnp.take_along_axis(count - real, first, -1)) * real + pad


@builders.hidden("attention")
def hidden(params, tokens, cfg: Config, batch: ops.Batch, carry: ops.Carry, remat: str | None):
    """Compute the final hidden states, [... T embed], with a head those that its projection takes; see `protocol.Family`.

    Every token is of type 0.
    """
    mask, act = ops.Mask(cfg.head_dim**-0.5, causal=cfg.causal), ops.ACTIVATIONS[cfg.act]
    norm = lambda x, p, part: sublayers.layer_norm(x, p, part, cfg.norm_eps)

    def block(x, carry, p, layer):
        a, carry = sublayers.attention(x, carry, p, layer, batch, mask)
        x = norm(x + a, p, "attn_norm")
        return norm(x + ops.mlp(x, p, act), p, "mlp_norm"), carry

    x = ops.embed(params["embed"], tokens) + ops.embed(params["types"], jnp.zeros_like(tokens))
    x = norm(x + ops.embed(params["positions"], positions(tokens, batch, cfg.pad)), params, "norm")
    x, carry = ops.layers(block, x, carry, params["layers"], remat=remat)
    if "head_dense" not in params:
        return x, carry
    x = ops.ACTIVATIONS["gelu"](ops.linear("...d,cd->...c", x, params["head_dense"], params["head_dense_bias"]))
    return norm(x, params, "head_norm"), carry


head, forward = builders.head, builders.forward(hidden)
