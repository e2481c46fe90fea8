"""Llama 4 (Meta, 2025): Llama 4's text model and a tower of tiles; squares of patches, projected, stand as tokens."""

import math
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from fdel import ops
from fdel.models import builders, clip, config, pixtral, sight, sublayers
from fdel.models.keys import ConfigError
from fdel.params.spec import Param, normal, stack

MODEL_TYPE, ARCHITECTURE = "llama4", "Llama4ForConditionalGeneration"
SHUFFLE = "pixel_shuffle_ratio"


def merge(d: dict) -> int:
    """Read how many patches lie along a side of the square that becomes an entry."""
    ratio = d.get(SHUFFLE, 0.5)
    side = round(1 / ratio) if isinstance(ratio, float) and 0 < ratio <= 1 else 0
    if not side or 1 / side != ratio:
        raise ConfigError(f"config field {SHUFFLE!r}: found {ratio!r}, expected 1 / n, as 0.5")
    return side


@config.config
class Vision(config.MultiHead):
    """Sizes and constants of the tower; `embed` channels of a patch, `out` of an entry before it is projected."""

    # The reference has an exact GELU and norms of 1e-5, whatever a file says.
    ONLY = dict.fromkeys(
        ("hidden_act", "norm_eps", "vision_feature_select_strategy", "vision_feature_layer"), config.ANY
    ) | dict(multi_modal_projector_bias=False)
    act, norm_eps = "gelu", 1e-5
    embed: int = config.hf("hidden_size", 768)
    ffn: int = config.hf("intermediate_size", 5632)
    layers: int = config.hf("num_hidden_layers", 34)
    heads: int = config.hf("num_attention_heads", 16)
    channels: int = config.hf("num_channels", 3)
    image: int = config.hf("image_size", 448)  # pixels along a tile's side
    patch: int = config.hf("patch_size", 14)
    inner: int = config.hf("projector_input_dim", 4096)
    out: int = config.hf("projector_output_dim", 4096)
    given: int = config.hf("vision_output_dim", 7680)
    merge: int = config.computed(merge, lambda n: {SHUFFLE: 1 / n})
    theta: float = config.computed(
        pixtral.theta, lambda v: {"rope_parameters": {"rope_type": "default", "rope_theta": v}}
    )

    side = property(lambda self: self.image // self.patch)  # patches along a tile's side


@config.config
class Config(sight.Around):
    """The language model and the tower."""

    ONLY = dict.fromkeys("boi_token_index eoi_token_index tie_word_embeddings".split(), config.ANY)
    text: Any = config.computed(lambda d: sight.language(d, "llama4_text"), sight.write_language)
    vision: Vision = sight.part("vision_config", Vision, "llama4_vision_model")
    image: int = config.hf("image_token_index", 200092)


def tower(v: Vision, name: str) -> dict[str, Any]:
    """Declare the arrays of the tower."""
    d, layer = v.embed, name + "model.layers.{layers}."
    tree = {
        **builders.layer_norm("attn_norm", layer + "input_layernorm", d),
        **builders.gqa(layer + "self_attn.", v, biased=True),
        **builders.layer_norm("mlp_norm", layer + "post_attention_layernorm", d),
        **builders.mlp(layer + "mlp.", d, v.ffn, ("fc1", "fc2")),
    }
    return {
        "class": Param("embed", (d,), normal(builders.STD), name + "class_embedding"),
        "patch": builders.matrix(
            name + "patch_embedding.linear.weight", ("channels", v.channels * v.patch**2), ("embed", d)
        ),
        "positions": Param(
            "positions embed", (v.side**2 + 1, d), normal(builders.STD), name + "positional_embedding_vlm"
        ),
        **builders.layer_norm("first_norm", name + "layernorm_pre", d), "layers": stack(tree, "layers", range(v.layers)),
        **builders.layer_norm("norm", name + "layernorm_post", d),
    }  # fmt: skip


def spec(cfg: Config) -> dict:
    """Declare every array: the language model's at the top, the tower's and the projector's below.

    ConfigError for sizes of the tower that do not fit each other.
    """
    v, name = cfg.vision, "vision_model."
    wide, wants = v.merge**2 * v.embed, "vision_config fields"
    if v.ffn != wide or not v.inner == v.out == v.given:
        found = f"found {v.ffn}, {v.inner}, {v.out} and {v.given}, expected {wide}, and one size of the others"
        names = "'intermediate_size', 'projector_input_dim', 'projector_output_dim', 'vision_output_dim'"
        raise ConfigError(f"{wants} {names}: {found}")
    if v.image % (v.merge * v.patch):
        found = f"found tiles of {v.image} pixels, which {v.merge} x {v.patch} do not divide"
        raise ConfigError(f"{wants} 'image_size', 'patch_size', {SHUFFLE!r}: {found}")
    adapter, channels = name + "vision_adapter.mlp.", ("channels", v.out)
    projector = {
        "up": builders.matrix(adapter + "fc1.weight", ("embed", wide), ("inner", v.out)),
        "down": builders.matrix(adapter + "fc2.weight", ("inner", v.out), channels),
        "out": builders.matrix("multi_modal_projector.linear_1.weight", channels, ("embed", cfg.embed)),
    }
    return sight.language_spec(cfg) | {"vision": tower(v, name), "projector": projector}


def tiles(
    patches: ops.Patches, v: Vision, dtype: Any
) -> tuple[Float[Array, "tiles P numbers"], Bool[Array, "tiles P"], Int[Array, "tiles P 2"]]:
    """Cut images into tiles: the values of patches, whether they are there, and their rows and columns, counted from 1.

    Images are filled up to whole tiles. ValueError for patches of another size than the tower's.
    """
    values, places, _ = sight.flat(patches, dtype)
    count, numbers = values.shape[1:]
    if numbers != v.channels * v.patch**2 or count % v.merge**2:
        expected = f"a multiple of {v.merge**2} patches of {v.channels * v.patch**2} numbers"
        raise ValueError(f"media.inputs: found {count} patches of {numbers} numbers, expected {expected}")
    fill = lambda x, value: jnp.pad(x, ((0, 0), (0, -count % v.side**2), (0, 0)), constant_values=value)
    cut = lambda x: x.reshape(-1, v.side**2, x.shape[-1])
    places = cut(fill(places, -1))
    return cut(fill(values, 0)), places[..., 0] >= 0, places[..., 1:] + 1


def encode(params: Any, patches: ops.Patches, cfg: Config) -> Float[Array, "*rows entries D"]:
    """Compute what stands in the place of tokens: an entry of each square of patches, which lie one after the other.

    The patches of a tile see each other and the tile's class token, which stands last.
    """
    v, p, projector = cfg.vision, params["vision"], params["projector"]
    x, real, at = tiles(patches, v, p["patch"].dtype)
    last = lambda x, value: jnp.concatenate([x, jnp.broadcast_to(value, (len(x), 1, *x.shape[2:]))], 1)
    index = jnp.where(real, (at[..., 0] - 1) * v.side + at[..., 1] - 1, 0)
    x = last(ops.linear("npk,dk->npd", x, p["patch"]), p["class"].astype(x.dtype))
    x = x + ops.embed(p["positions"], last(index, v.side**2))
    x = sublayers.layer_norm(x, p, "first_norm", v.norm_eps)
    segments = jnp.where(last(real, real[:, :1]), 0, -1)
    turned = sublayers.rotate(sight.axial(last(at[..., ::-1], 0), v.head_dim, v.theta), interleaved=True)
    batch = ops.Packed(jnp.broadcast_to(jnp.arange(x.shape[1]), segments.shape), segments, single=True)
    x, _ = ops.layers(clip.block(v, batch, False, turned), x, ops.Carry(), p["layers"])
    x = sublayers.layer_norm(x, p, "norm", v.norm_eps)[:, :-1]
    lead, count = patches.values.shape[:-2], patches.values.shape[-2] // v.merge**2
    x, act = x.reshape(math.prod(lead), -1, v.merge**2 * v.embed)[:, :count], ops.ACTIVATIONS[v.act]
    x = act(ops.linear("nec,fc->nef", x, projector["up"]))
    x = act(ops.linear("nef,cf->nec", x, projector["down"]))
    return sight.entries(ops.linear("nec,dc->ned", x, projector["out"]), lead)


hidden = builders.hidden("attention", "router", encode=encode)(sight.walk)
rename, state_spec, head = sight.rename, sight.state_spec, sight.head
forward = builders.forward(hidden, head)
