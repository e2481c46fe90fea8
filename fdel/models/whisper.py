"""Whisper (arXiv:2212.04356): an encoder of sounds, and a decoder that attends to it as well as to its own past.

It writes down sounds: no text alone goes in, so it is no `protocol.Family`. Load it by `models.load(path, family=whisper)`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from fdel import ops
from fdel.models import builders, config, sublayers
from fdel.ops.batch import register
from fdel.params.spec import Param, normal, stack

MODEL_TYPE, ARCHITECTURE = "whisper", "WhisperForConditionalGeneration"
NAMES = "q_proj", "k_proj", "v_proj", "out_proj"
EPS = 1e-5  # torch's default, which no config says
UNREAD = """forced_decoder_ids use_weighted_layer_sum classifier_proj_size apply_spec_augment mask_time_prob
mask_time_length mask_time_min_masks mask_feature_prob mask_feature_length mask_feature_min_masks
num_hidden_layers scale_embedding"""


@config.config
class Config(config.MultiHead):
    """Sizes and constants; `hf(...)` names each one's key in config.json. What names no part is the decoder's."""

    ONLY = dict.fromkeys(UNREAD.split(), config.ANY) | {"tie_word_embeddings": True}
    vocab: int = config.hf("vocab_size", 51865)
    embed: int = config.hf("d_model", 384)
    ffn: int = config.hf("decoder_ffn_dim", 1536)
    layers: int = config.hf("decoder_layers", 4)
    heads: int = config.hf("decoder_attention_heads", 6)
    max_positions: int = config.hf("max_target_positions", 448)
    encoder_ffn: int = config.hf("encoder_ffn_dim", 1536)
    encoder_layers: int = config.hf("encoder_layers", 4)
    encoder_heads: int = config.hf("encoder_attention_heads", 6)
    states: int = config.hf("max_source_positions", 1500)  # that the encoder gives, of two frames each
    bins: int = config.hf("num_mel_bins", 80)
    act: str = config.act("activation_function", "gelu")
    median: int = config.hf("median_filter_width", 7)  # of attention over time, where words are found in it

    frames = property(lambda self: 2 * self.states)  # that the encoder takes


@register
@dataclass(frozen=True)
class Memory:
    """What the decoder attends to: keys and values of the encoder's states, for each layer, in a list or stacked."""

    k: Any  # Float[Array, "B heads head_dim states"] of each layer, as one query's scores are computed fastest on CPU
    v: Any  # Float[Array, "B heads states head_dim"]


def sinusoids(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Give the encoder's positions before training: sines, then cosines, of wavelengths from 2 pi to 20,000 pi states."""
    half = shape[1] // 2
    angles = jnp.arange(shape[0])[:, None] * 10000 ** (-jnp.arange(half) / (half - 1))
    return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1).astype(dtype)


def spec(cfg: Config) -> dict:
    """Declare every array: the decoder's at the top, the encoder's below "encoder". Keys have no bias."""
    d, file = cfg.embed, "model.{}.layers.{{layers}}.".format
    table = lambda n, part, begin: Param("positions embed", (n, d), begin, f"model.{part}.embed_positions.weight")
    conv = lambda n, inputs: Param(
        "embed channels kernel", (d, inputs, 3), normal(builders.STD), f"model.encoder.conv{n}.weight"
    )
    layer = _layer(file("encoder"), replace(cfg, heads=cfg.encoder_heads), cfg.encoder_ffn)
    encoder = {
        "conv1": conv(1, cfg.bins), "conv1_bias": builders.bias("model.encoder.conv1.bias", d),
        "conv2": conv(2, d), "conv2_bias": builders.bias("model.encoder.conv2.bias", d),
        "positions": table(cfg.states, "encoder", sinusoids), **builders.layer_norm("norm", "model.encoder.layer_norm", d),
        "layers": stack(layer, "layers", range(cfg.encoder_layers)),
    }  # fmt: skip
    layer = _layer(file("decoder"), cfg, cfg.ffn) | {
        **builders.layer_norm("cross_norm", file("decoder") + "encoder_attn_layer_norm", d),
        "cross": _attention(file("decoder") + "encoder_attn.", cfg),
    }
    return {
        "embed": Param("vocab embed", (cfg.vocab, d), normal(builders.STD), "model.decoder.embed_tokens.weight"),
        "positions": table(cfg.max_positions, "decoder", normal(builders.STD)),
        **builders.layer_norm("norm", "model.decoder.layer_norm", d),
        "layers": stack(layer, "layers", range(cfg.layers)), "encoder": encoder,
    }  # fmt: skip


def _attention(name: str, cfg: Any) -> dict[str, Param]:
    return {k: p for k, p in builders.gqa(name, cfg, biased=True, names=NAMES).items() if k != "k_bias"}


def _layer(name: str, cfg: Any, ffn: int) -> dict[str, Any]:
    return {
        **builders.layer_norm("attn_norm", name + "self_attn_layer_norm", cfg.embed),
        **_attention(name + "self_attn.", cfg),
        **builders.layer_norm("mlp_norm", name + "final_layer_norm", cfg.embed),
        **builders.mlp(name, cfg.embed, ffn, ("fc1", "fc2")),
    }


def rename(name: str, cfg: Config) -> str | None:
    """Leave out the output projection, which is the embedding."""
    return None if name == "proj_out.weight" else name


def encode(
    params: Any, features: Float[Array, "B bins frames"], cfg: Config, shares: Float[Array, " layers_1"] | None = None
) -> Float[Array, "B states D"]:
    """Compute the encoder's final normalised states of log-mel features (`media.sound.log_mel`) of cfg.frames frames.

    With `shares`, a sum instead: what each layer is given times its share, and those states times the last share.
    ValueError for features of other sizes. They are computed in the dtype of the weights.
    """
    if features.shape[1:] != (cfg.bins, cfg.frames):
        expected = f"expected [{cfg.bins}, {cfg.frames}] of each sound: pad or cut it to {cfg.frames} frames"
        raise ValueError(f"found features of shape {features.shape}; {expected}")
    p, act = params["encoder"], ops.ACTIVATIONS[cfg.act]
    x = features.astype(p["conv1"].dtype)
    for part, stride, given in (("conv1", 1, "NCH"), ("conv2", 2, "NHC")):  # channels last: no array is turned round
        x = jax.lax.conv_general_dilated(x, p[part], (stride,), [(1, 1)], dimension_numbers=(given, "OIH", "NHC"))
        x = act(x + p[f"{part}_bias"])
    x = x + p["positions"]
    batch = replace(ops.packed(jnp.zeros(x.shape[:2], jnp.int32)), full=True)
    mask = ops.Mask((cfg.embed // cfg.encoder_heads) ** -0.5, causal=False)

    def block(x, carry, p, layer):
        if shares is not None:
            carry = replace(carry, kept=carry.kept + shares[layer] * x)
        a, carry = sublayers.attention(_norm(x, p, "attn_norm"), carry, p, layer, batch, mask)
        x = x + a
        return x + ops.mlp(_norm(x, p, "mlp_norm"), p, act), carry

    kept = None if shares is None else jnp.zeros_like(x)
    x, carry = ops.layers(block, x, ops.Carry(kept=kept), p["layers"])
    x = _norm(x, p, "norm")
    return x if shares is None else carry.kept + shares[-1] * x


def remember(params: Any, states: Float[Array, "B states D"]) -> Memory:
    """Compute what the decoder's layers attend to, once for each sound."""
    keys = lambda p: ops.linear("bsd,nhd->bnhs", states, p["cross"]["k"])
    values = lambda p: ops.linear("bsd,nhd->bnsh", states, p["cross"]["v"], p["cross"]["v_bias"][:, None])
    tree = params["layers"]
    if isinstance(tree, list):
        return Memory([keys(p) for p in tree], [values(p) for p in tree])
    return Memory(jax.lax.map(keys, tree), jax.lax.map(values, tree))


def _norm(x: Array, p: Any, part: str) -> Array:
    return sublayers.layer_norm(x, p, part, EPS)


def state_spec(cfg: Config, *, pages: int, page: int = 64, rows: int = 0) -> ops.State:
    """Declare what serving remembers beside `Memory`: keys and values of the decoder's own tokens."""
    return builders.kv_state(cfg, pages=pages, page=page)


def hidden(
    params: Any, tokens: Int[Array, "..."], cfg: Config, memory: Memory, batch: ops.Batch | None = None,
    state: ops.State | None = None, *, watch: Sequence[tuple[int, int]] = (),
) -> tuple[Float[Array, "... D"], ops.State | None, Float[Array, "watched B T states"] | None]:  # fmt: skip
    """Compute the decoder's final normalised states: (x, state, weights).

    Row i of `memory` belongs to row i of a Packed batch (tokens int[B T]), and to block i of a Paged one (int[T], with
    state): every block is of a sequence of its own. `watch` names (layer, head) whose attention to the sound is to be
    given, float32.
    """
    batch = ops.packed(tokens) if batch is None else batch
    mask, act, kept = ops.Mask(cfg.head_dim**-0.5), ops.ACTIVATIONS[cfg.act], None
    rows = tokens if tokens.ndim == 2 else tokens.reshape(-1, batch.block)  # type: ignore[union-attr]
    if watch:
        kept = jnp.zeros((len(watch), *rows.shape, cfg.states), jnp.float32)
        of, heads = (np.array(x) for x in zip(*watch, strict=True))

    def block(x, carry, p, layer):
        a, carry = sublayers.attention(_norm(x, p, "attn_norm"), carry, p, layer, batch, mask)
        x, c, (keys, values) = x + a, p["cross"], p["sound"]
        q = ops.linear("...d,nhd->...nh", _norm(x, p, "cross_norm"), c["q"], c.get("q_bias"))
        q = q.reshape(*rows.shape, *q.shape[-2:])
        scores = jnp.einsum("btnh,bnhs->bnts", q, keys, preferred_element_type=jnp.float32)
        weights = jax.nn.softmax(scores * mask.scale)
        if watch:
            here = jnp.reshape(of == layer, (-1, 1, 1, 1))
            carry = replace(carry, kept=jnp.where(here, weights[:, heads].swapaxes(0, 1), carry.kept))
        a = jnp.einsum("bnts,bnsh->btnh", weights.astype(x.dtype), values)
        x = x + ops.linear("...nh,dnh->...d", a.reshape(*x.shape[:-1], *a.shape[-2:]), c["o"], c.get("o_bias"))
        return x + ops.mlp(_norm(x, p, "mlp_norm"), p, act), carry

    x = ops.embed(params["embed"], tokens)
    x = x + ops.embed(params["positions"], jnp.maximum(batch.positions, 0))
    join = lambda p, keys, values: {**p, "sound": (keys, values)}
    tree = params["layers"], memory.k, memory.v
    layers = list(map(join, *tree)) if isinstance(tree[0], list) else join(*tree)
    x, carry = ops.layers(block, x, ops.Carry(state, kept=kept), layers)
    return _norm(x, params, "norm"), carry.state, carry.kept


head = builders.head


def forward(
    params: Any, tokens: Int[Array, "..."], cfg: Config, memory: Memory, batch: ops.Batch | None = None,
    state: ops.State | None = None,
) -> tuple[Float[Array, "... V"], ops.State | None]:  # fmt: skip
    """Compute float32 logits of the next token by `hidden` and the embedding: (logits, state)."""
    x, state, _ = hidden(params, tokens, cfg, memory, batch, state)
    return ops.logits(x, head(params, cfg)), state
