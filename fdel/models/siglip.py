"""SigLIP (arXiv:2303.15343): a tower of images and one of texts, each pair of which is scored by itself.

It scores images and texts and writes none: no `protocol.Family`. Load it by `models.load(path, family=siglip)`.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from fdel import ops
from fdel.models import builders, clip, config, sight, sublayers
from fdel.params.spec import Param, normal, zeros

MODEL_TYPE, ARCHITECTURE = "siglip", "SiglipModel"
PADDED = True  # texts are seen with padding up to `max_positions`


@config.config
class Vision(config.MultiHead):
    """Sizes and constants of the tower of images."""

    MODEL_TYPE = "siglip_vision_model"
    ONLY = dict.fromkeys(("vocab_size", "projection_dim"), config.ANY)
    embed: int = config.hf("hidden_size", 768)
    ffn: int = config.hf("intermediate_size", 3072)
    layers: int = config.hf("num_hidden_layers", 12)
    heads: int = config.hf("num_attention_heads", 12)
    channels: int = config.hf("num_channels", 3)
    image: int = config.hf("image_size", 224)  # pixels along a side
    patch: int = config.hf("patch_size", 16)
    norm_eps: float = config.hf("layer_norm_eps", 1e-6)
    act: str = config.act(default="gelu_pytorch_tanh")
    pooled: bool = config.hf("vision_use_head", True)  # whether it has what pools its states

    side = property(lambda self: self.image // self.patch)  # patches along a side


@config.config
class Text(config.MultiHead):
    """Sizes and constants of the tower of texts."""

    vocab: int = config.hf("vocab_size", 32000)
    embed: int = config.hf("hidden_size", 768)
    ffn: int = config.hf("intermediate_size", 3072)
    layers: int = config.hf("num_hidden_layers", 12)
    heads: int = config.hf("num_attention_heads", 12)
    max_positions: int = config.hf("max_position_embeddings", 64)
    norm_eps: float = config.hf("layer_norm_eps", 1e-6)
    act: str = config.act(default="gelu_pytorch_tanh")
    width: int = config.hf("projection_size", lambda d: d["hidden_size"])


@config.config
class Config:
    """Sizes and constants of both towers."""

    text: Text = sight.part("text_config", Text, "siglip_text_model")
    vision: Vision = sight.tower_config("siglip_vision_model")

    vocab = property(lambda self: self.text.vocab)
    embed = property(lambda self: self.text.embed)
    layers = property(lambda self: self.text.layers)
    width = property(lambda self: self.text.width)


def tower(cfg: Vision, name: str) -> dict[str, Any]:
    """Declare the arrays of the tower of images, and of what pools its states."""
    d, start = cfg.embed, name + "embeddings."
    tree = {
        "patch": clip.patch_embedding(start + "patch_embedding", cfg),
        "patch_bias": builders.bias(start + "patch_embedding.bias", d),
        "positions": clip.table("positions", cfg.side**2, d, start + "position_embedding"),
        "layers": clip.tower_layers(name, cfg), **builders.layer_norm("norm", name + "post_layernorm", d),
    }  # fmt: skip
    if not cfg.pooled:
        return tree
    name, sides = name + "head.", dict.fromkeys("qkv", ("heads head_dim", (cfg.heads, cfg.head_dim)))
    biases = builders.fused(name + "attention.in_proj_bias", ("", 0), **sides)
    return tree | {
        "pool": {
            "probe": Param("embed", (d,), normal(builders.STD), name + "probe", "1 1 embed"),
            **builders.fused(name + "attention.in_proj_weight", ("embed", d), **sides),
            **{f"{part}_bias": p for part, p in biases.items()},
            "o": builders.heads_in(name + "attention.out_proj.weight", cfg.heads, cfg.head_dim, d),
            "o_bias": builders.bias(name + "attention.out_proj.bias", d),
            **builders.layer_norm("norm", name + "layernorm", d),
            **builders.mlp(name + "mlp.", d, cfg.ffn, ("fc1", "fc2")),
        }
    }


def spec(cfg: Config) -> dict:
    """Declare every array: the towers' below "text" and "vision", and the scale and bias of their product."""
    t = cfg.text
    one = lambda name: Param("labels", (1,), zeros, name)
    return {
        "text": {
            "embed": clip.table("vocab", t.vocab, t.embed, "text_model.embeddings.token_embedding"),
            "positions": clip.table(
                "positions", t.max_positions, t.embed, "text_model.embeddings.position_embedding"
            ),
            "layers": clip.tower_layers("text_model.", t),
            **builders.layer_norm("norm", "text_model.final_layer_norm", t.embed),
            "out": builders.matrix("text_model.head.weight", ("embed", t.embed), ("channels", t.width)),
            "out_bias": builders.bias("text_model.head.bias", t.width, "channels"),
        },
        "vision": tower(cfg.vision, "vision_model."), "scale": one("logit_scale"), "bias": one("logit_bias"),
    }  # fmt: skip


rename = clip.rename


def _images(
    p: Any, values: Array, places: Array, cfg: Vision, at: tuple[int, ...]
) -> tuple[Float[Array, "N P D"], tuple[Array, ...], Array]:
    x = ops.linear("npk,dk->npd", values, p["patch"].reshape(cfg.embed, -1), p["patch_bias"])
    real, index = places[..., 0] >= 0, places[..., 1] * cfg.side + places[..., 2]
    x = x + ops.embed(p["positions"], jnp.where(real, index, 0))
    segments = jnp.where(real, 0, -1)
    batch = ops.Packed(jnp.broadcast_to(jnp.arange(x.shape[1]), segments.shape), segments, single=True)
    x, found = sight.states_at(clip.block(cfg, batch, False), x, p["layers"], at)
    return x, found, real


def states(params: Any, patches: ops.Patches, cfg: Vision, places: tuple[int, ...]) -> tuple[Array, ...]:
    """Compute hidden states [images patches D] at places as transformers counts; none is normalised.

    Patches outside of the tower's grid give NaN.
    """
    values, at, _ = sight.flat(patches, params["patch"].dtype)
    return _images(params, values, at, cfg, places)[1]


def image_features(params: Any, patches: ops.Patches, cfg: Config) -> Float[Array, "*images width"]:
    """Compute the states of images that a learnt query pools, not normalised; ValueError for a tower without it."""
    p, v = params["vision"], cfg.vision
    if not v.pooled:
        raise ValueError("vision_use_head is false: this tower has states of patches, and none of the image")
    values, at, lead = sight.flat(patches, p["patch"].dtype)
    x, _, real = _images(p, values, at, v, ())
    x, pool = sublayers.layer_norm(x, p, "norm", v.norm_eps), p["pool"]
    q = ops.linear("d,hkd->hk", pool["probe"].astype(x.dtype), pool["q"], pool["q_bias"])
    k, u = (ops.linear("npd,hkd->nphk", x, pool[i], pool[f"{i}_bias"]) for i in "kv")
    scores = jnp.einsum("hk,nphk->nhp", q, k, preferred_element_type=jnp.float32) * v.head_dim**-0.5
    weights = jax.nn.softmax(jnp.where(real[:, None], scores, jnp.finfo(scores.dtype).min)).astype(x.dtype)
    x = ops.linear("nhk,dhk->nd", jnp.einsum("nhp,nphk->nhk", weights, u), pool["o"], pool["o_bias"])
    x = x + ops.mlp(sublayers.layer_norm(x, pool, "norm", v.norm_eps), pool, ops.ACTIVATIONS[v.act])
    return x.reshape(*lead, -1)


def text_features(params: Any, tokens: Int[Array, "B T"], cfg: Config) -> Float[Array, "B width"]:
    """Compute the projected states of texts at their last place, not normalised.

    Padding is text too: the model was trained on texts padded to `max_positions` tokens, and sees them so.
    """
    p, t = params["text"], cfg.text
    if tokens.shape[1] > t.max_positions:
        raise ValueError(f"found texts of {tokens.shape[1]} tokens, expected at most {t.max_positions}; cut them")
    batch = ops.packed(tokens)
    x = ops.embed(p["embed"], tokens) + ops.embed(p["positions"], batch.positions)
    x, _ = ops.layers(clip.block(t, batch, False), x, ops.Carry(), p["layers"])
    x = sublayers.layer_norm(x[:, -1], p, "norm", t.norm_eps)
    return ops.linear("nd,cd->nc", x, p["out"], p["out_bias"])


def logits(
    params: Any, images: Float[Array, "images width"], texts: Float[Array, "texts width"]
) -> Float[Array, "images texts"]:
    """Compute scaled cosines of features and a bias, float32: sigmoid says how likely a text is of an image."""
    scale, bias = (params[k].astype(jnp.float32) for k in ("scale", "bias"))
    return jnp.exp(scale) * clip.cosines(images, texts) + bias


def probabilities(logits: Float[Array, "images texts"]) -> Float[Array, "images texts"]:
    """Compute how likely each text is of an image, by itself."""
    return jax.nn.sigmoid(logits)


def forward(
    params: Any, tokens: Int[Array, "texts T"], cfg: Config, patches: ops.Patches
) -> Float[Array, "images texts"]:
    """Compute the logits of images for texts."""
    images = image_features(params, patches, cfg).reshape(-1, cfg.text.width)
    return logits(params, images, text_features(params, tokens, cfg))
