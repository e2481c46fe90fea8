"""CLIP (arXiv:2103.00020): a tower of images and one of texts, whose projected states are near where they belong together.

It scores images and texts and writes none: no `protocol.Family`. Load it by `models.load(path, family=clip)`.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from fdel import ops
from fdel.models import builders, config, sight, sublayers
from fdel.params.spec import Param, constant, normal, stack

MODEL_TYPE, ARCHITECTURE = "clip", "CLIPModel"
PADDED = False  # what stands behind a text changes nothing
NAMES = "q_proj", "k_proj", "v_proj", "out_proj"


@config.config
class Vision(config.MultiHead):
    """Sizes and constants of the tower of images."""

    MODEL_TYPE = "clip_vision_model"
    ONLY = dict.fromkeys(("vocab_size", "projection_dim"), config.ANY)
    embed: int = config.hf("hidden_size", 768)
    ffn: int = config.hf("intermediate_size", 3072)
    layers: int = config.hf("num_hidden_layers", 12)
    heads: int = config.hf("num_attention_heads", 12)
    channels: int = config.hf("num_channels", 3)
    image: int = config.hf("image_size", 224)  # pixels along a side
    patch: int = config.hf("patch_size", 32)
    norm_eps: float = config.hf("layer_norm_eps", 1e-5)
    act: str = config.act(default="quick_gelu")

    side = property(lambda self: self.image // self.patch)  # patches along a side


@config.config
class Text(config.MultiHead):
    """Sizes and constants of the tower of texts."""

    ONLY = {"projection_dim": config.ANY}
    vocab: int = config.hf("vocab_size", 49408)
    embed: int = config.hf("hidden_size", 512)
    ffn: int = config.hf("intermediate_size", 2048)
    layers: int = config.hf("num_hidden_layers", 12)
    heads: int = config.hf("num_attention_heads", 8)
    max_positions: int = config.hf("max_position_embeddings", 77)
    norm_eps: float = config.hf("layer_norm_eps", 1e-5)
    act: str = config.act(default="quick_gelu")
    end: int = config.hf("eos_token_id", 49407)  # 2 in older files, where it is the greatest id of a text


@config.config
class Config:
    """Sizes and constants of both towers, and of what they are projected to."""

    ONLY = dict.fromkeys(("logit_scale_init_value", "text_config_dict", "vision_config_dict"), config.ANY)
    width: int = config.hf("projection_dim", 512)
    text: Text = sight.part("text_config", Text, "clip_text_model")
    vision: Vision = sight.tower_config("clip_vision_model")

    vocab = property(lambda self: self.text.vocab)
    embed = property(lambda self: self.text.embed)
    layers = property(lambda self: self.text.layers)


def tower_layers(name: str, cfg: Any) -> dict[str, Any]:
    """Declare the stacked layers of a tower."""
    name, d = name + "encoder.layers.{layers}.", cfg.embed
    layer = {
        **builders.layer_norm("attn_norm", name + "layer_norm1", d),
        **builders.gqa(name + "self_attn.", cfg, biased=True, names=NAMES),
        **builders.layer_norm("mlp_norm", name + "layer_norm2", d),
        **builders.mlp(name + "mlp.", d, cfg.ffn, ("fc1", "fc2")),
    }
    return stack(layer, "layers", range(cfg.layers))


def patch_embedding(name: str, cfg: Any) -> Param:
    """Declare the convolution that embeds a patch, {name}.weight."""
    shape = (cfg.embed, cfg.channels, cfg.patch, cfg.patch)
    return Param("embed channels height width", shape, normal(builders.STD), f"{name}.weight")


def table(axis: str, n: int, d: int, name: str) -> Param:
    """Declare a table of n embeddings, {name}.weight."""
    return Param(f"{axis} embed", (n, d), normal(builders.STD), f"{name}.weight")


def tower(cfg: Vision, name: str) -> dict[str, Any]:
    """Declare the arrays of the tower of images."""
    d = cfg.embed
    return {
        "class": Param("embed", (d,), normal(builders.STD), name + "embeddings.class_embedding"),
        "patch": patch_embedding(name + "embeddings.patch_embedding", cfg),
        "positions": table("positions", cfg.side**2 + 1, d, name + "embeddings.position_embedding"),
        **builders.layer_norm("first_norm", name + "pre_layrnorm", d), "layers": tower_layers(name, cfg),
        **builders.layer_norm("norm", name + "post_layernorm", d),
    }  # fmt: skip


def spec(cfg: Config) -> dict:
    """Declare every array: the towers' below "text" and "vision", and the projections of their states."""
    t, project = cfg.text, lambda name, d: builders.matrix(name, ("embed", d), ("channels", cfg.width))
    return {
        "text": {
            "embed": table("vocab", t.vocab, t.embed, "text_model.embeddings.token_embedding"),
            "positions": table("positions", t.max_positions, t.embed, "text_model.embeddings.position_embedding"),
            "layers": tower_layers("text_model.", t),
            **builders.layer_norm("norm", "text_model.final_layer_norm", t.embed),
        },
        "vision": tower(cfg.vision, "vision_model."),
        "text_projection": project("text_projection.weight", t.embed),
        "vision_projection": project("visual_projection.weight", cfg.vision.embed),
        "scale": Param("", (), constant(2.6592), "logit_scale"),
    }


def rename(name: str, cfg: Config) -> str | None:
    """Leave out the indices of positions."""
    return None if name.endswith(".position_ids") else name


def block(cfg: Any, batch: ops.Batch, causal: bool, change: Any = None) -> Any:
    """Make the block of a tower's layers; `change` as in `sublayers.attention`."""
    mask, act = ops.Mask(cfg.head_dim**-0.5, causal=causal), ops.ACTIVATIONS[cfg.act]
    norm = lambda x, p, part: sublayers.layer_norm(x, p, part, cfg.norm_eps)

    def apply(x, carry, p, layer):
        a, carry = sublayers.attention(norm(x, p, "attn_norm"), carry, p, layer, batch, mask, change)
        x = x + a
        return x + ops.mlp(norm(x, p, "mlp_norm"), p, act), carry

    return apply


def _images(
    p: Any, values: Array, places: Array, cfg: Vision, at: tuple[int, ...]
) -> tuple[Float[Array, "N T D"], tuple[Float[Array, "N T D"], ...]]:
    x = ops.linear("npk,dk->npd", values, p["patch"].reshape(cfg.embed, -1))
    real, index = places[..., 0] >= 0, places[..., 1] * cfg.side + places[..., 2] + 1
    first = jnp.broadcast_to(p["class"].astype(x.dtype), (len(x), 1, cfg.embed))
    ahead = lambda a, value: jnp.pad(a, ((0, 0), (1, 0)), constant_values=value)
    index = ahead(jnp.where(real, index, 0), 0)
    x = jnp.concatenate([first, x], 1) + ops.embed(p["positions"], index)
    segments = ahead(jnp.where(real, 0, -1), 0)
    batch = ops.Packed(jnp.broadcast_to(jnp.arange(x.shape[1]), segments.shape), segments, single=True)
    x = sublayers.layer_norm(x, p, "first_norm", cfg.norm_eps)
    return sight.states_at(block(cfg, batch, False), x, p["layers"], at)


def states(params: Any, patches: ops.Patches, cfg: Vision, places: tuple[int, ...]) -> tuple[Array, ...]:
    """Compute hidden states [images 1 + patches D] of a tower, the class token's first, at places as transformers counts.

    Patches of another grid than the tower's give NaN.
    """
    values, at, _ = sight.flat(patches, params["patch"].dtype)
    return _images(params, values, at, cfg, places)[1]


def image_features(params: Any, patches: ops.Patches, cfg: Config) -> Float[Array, "*images width"]:
    """Compute the projected states of images, not normalised."""
    p = params["vision"]
    values, at, lead = sight.flat(patches, p["patch"].dtype)
    x, _ = _images(p, values, at, cfg.vision, ())
    x = sublayers.layer_norm(x[:, 0], p, "norm", cfg.vision.norm_eps)
    return ops.linear("nd,cd->nc", x, params["vision_projection"]).reshape(*lead, -1)


def text_features(params: Any, tokens: Int[Array, "B T"], cfg: Config) -> Float[Array, "B width"]:
    """Compute the projected states of texts at the first token that ends them, not normalised.

    What stands behind that token changes nothing. Of files whose end is 2 it is the first of the greatest id.
    """
    p, t = params["text"], cfg.text
    if tokens.shape[1] > t.max_positions:
        raise ValueError(f"found texts of {tokens.shape[1]} tokens, expected at most {t.max_positions}; cut them")
    batch = ops.packed(tokens)
    x = ops.embed(p["embed"], tokens) + ops.embed(p["positions"], batch.positions)
    x, _ = ops.layers(block(t, batch, True), x, ops.Carry(), p["layers"])
    x = sublayers.layer_norm(x, p, "norm", t.norm_eps)
    last = jnp.argmax(tokens if t.end == 2 else tokens == t.end, -1)
    x = jnp.take_along_axis(x, last[:, None, None], 1)[:, 0]
    return ops.linear("nd,cd->nc", x, params["text_projection"])


def cosines(images: Float[Array, "images width"], texts: Float[Array, "texts width"]) -> Float[Array, "images texts"]:
    """Compute the cosines of features, float32."""
    unit = lambda x: x.astype(jnp.float32) / jnp.linalg.norm(x.astype(jnp.float32), axis=-1, keepdims=True)
    return jnp.einsum("ic,tc->it", unit(images), unit(texts))


def logits(
    params: Any, images: Float[Array, "images width"], texts: Float[Array, "texts width"]
) -> Float[Array, "images texts"]:
    """Compute scaled cosines of features, float32: softmax over texts classifies images without training."""
    return jnp.exp(params["scale"].astype(jnp.float32)) * cosines(images, texts)


def probabilities(logits: Float[Array, "images texts"]) -> Float[Array, "images texts"]:
    """Compute how likely each text is of an image, if one of them is."""
    return jax.nn.softmax(logits, -1)


def forward(
    params: Any, tokens: Int[Array, "texts T"], cfg: Config, patches: ops.Patches
) -> Float[Array, "images texts"]:
    """Compute the logits of images for texts."""
    images = image_features(params, patches, cfg).reshape(-1, cfg.width)
    return logits(params, images, text_features(params, tokens, cfg))
