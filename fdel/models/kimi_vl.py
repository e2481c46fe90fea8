"""Kimi-VL (arXiv:2504.07491): DeepSeek-V3's language model and MoonViT, a tower for images of any size."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from fdel import ops
from fdel.models import builders, clip, config, llava, sight, sublayers
from fdel.models.keys import ConfigError
from fdel.params.hf_layout import without_modules
from fdel.params.spec import Param, normal, stack

MODEL_TYPE, ARCHITECTURE = "kimi_vl", "KimiVLForConditionalGeneration"
EPS = 1e-5  # of every norm of the tower and the projector, which no config says


def merge(d: dict) -> int:
    """Read how many patches lie along a side of the square that becomes an entry."""
    found = d.get("merge_kernel_size", [2, 2])
    if not isinstance(found, list | tuple) or len(found) != 2 or found[0] != found[1] or type(found[0]) is not int:
        raise ConfigError(f"config field 'merge_kernel_size': found {found!r}, expected the same number twice")
    return found[0]


@config.config
class Vision(config.MultiHead):
    """Sizes of the tower; it has learned positions of rows x columns places, between which an image's lie."""

    act, norm_eps, channels, theta = "gelu_pytorch_tanh", EPS, 3, 10000.0
    embed: int = config.hf("hidden_size", 1152)
    ffn: int = config.hf("intermediate_size", 4304)
    layers: int = config.hf("num_hidden_layers", 27)
    heads: int = config.hf("num_attention_heads", 16)
    patch: int = config.hf("patch_size", 14)
    rows: int = config.hf("init_pos_emb_height", 64)
    columns: int = config.hf("init_pos_emb_width", 64)
    merge: int = config.computed(merge, lambda n: {"merge_kernel_size": [n, n]})


@config.config
class Config(sight.Around):
    """The language model and the tower."""

    ONLY = dict.fromkeys("ignore_index vocab_size tie_word_embeddings".split(), config.ANY)
    project_act = "gelu"
    text: Any = config.computed(lambda d: sight.language(d, "deepseek_v3"), sight.write_language)
    vision: Vision = sight.part("vision_config", Vision, "moonvit")
    image: int = config.hf("media_placeholder_token_id", 163605)


def spec(cfg: Config) -> dict:
    """Declare every array: the language model's at the top, the tower's and the projector's below."""
    v, d, name, block = cfg.vision, cfg.vision.embed, "vision_tower.", "vision_tower.encoder.blocks.{layers}."
    side, wide = ("heads head_dim", (v.heads, v.head_dim)), v.merge**2 * d
    layer = {
        **builders.layer_norm("attn_norm", block + "norm0", d),
        **builders.fused(block + "wqkv.weight", ("embed", d), q=side, k=side, v=side),
        **builders.fused(block + "wqkv.bias", ("", 0), q_bias=side, k_bias=side, v_bias=side),
        "o": builders.heads_in(block + "wo.weight", v.heads, v.head_dim, d),
        "o_bias": builders.bias(block + "wo.bias", d),
        **builders.layer_norm("mlp_norm", block + "norm1", d),
        **builders.mlp(block + "mlp.", d, v.ffn, ("fc0", "fc1")),
    }
    table = Param(
        "height width embed",
        (v.rows, v.columns, d),
        normal(builders.STD),
        name + "patch_embed.pos_emb.weight",
        inputs=0,
    )
    vision = {
        "patch": clip.patch_embedding(name + "patch_embed.proj", v),
        "patch_bias": builders.bias(name + "patch_embed.proj.bias", d), "positions": table,
        "layers": stack(layer, "layers", range(v.layers)),
        **builders.layer_norm("norm", name + "encoder.final_layernorm", d),
    }  # fmt: skip
    name = "multi_modal_projector."
    projector = {
        **builders.layer_norm("norm", name + "pre_norm", d),
        "in": builders.matrix(name + "linear_1.weight", ("channels", wide), ("inner", wide)),
        "in_bias": builders.bias(name + "linear_1.bias", wide, "inner"),
        "out": builders.matrix(name + "linear_2.weight", ("inner", wide), ("embed", cfg.embed)),
        "out_bias": builders.bias(name + "linear_2.bias", cfg.embed),
    }
    return without_modules(sight.language_spec(cfg)) | {"vision": vision, "projector": projector}


def encode(params: Any, patches: ops.Patches, cfg: Config) -> Float[Array, "*rows entries D"]:
    """Compute what stands in the place of tokens: an entry of each square of patches, which stand one after the other."""
    v, p, projector = cfg.vision, params["vision"], params["projector"]
    values, places, lead = sight.flat(patches, p["patch"].dtype)
    if values.shape[1] % v.merge**2 or values.shape[2] != 3 * v.patch**2:
        expected = f"a multiple of {v.merge**2} patches of {3 * v.patch**2} numbers"
        raise ValueError(f"media.inputs: found {values.shape[1]} patches of {values.shape[2]}, expected {expected}")
    x = ops.linear("npk,dk->npd", values, p["patch"].reshape(v.embed, -1), p["patch_bias"])
    x = x + sight.cubic(p["positions"], places)
    # Pairs of channels turn by the column and the row, in turn.
    pairs = lambda x: x.reshape(*x.shape[:-1], 2, -1).swapaxes(-1, -2).reshape(x.shape)
    cos, sin = map(pairs, sight.axial(places[..., :0:-1], v.head_dim, v.theta))
    segments = jnp.where(places[..., 0] >= 0, 0, -1)
    batch = ops.Packed(jnp.broadcast_to(jnp.arange(x.shape[1]), segments.shape), segments, single=True)
    block = clip.block(v, batch, False, sublayers.rotate((cos, sin), interleaved=True))
    x, _ = ops.layers(block, x, ops.Carry(), p["layers"])
    x = sublayers.layer_norm(sublayers.layer_norm(x, p, "norm", EPS), projector, "norm", EPS)
    x = x.reshape(len(x), -1, v.merge**2 * v.embed)
    return sight.entries(llava.project(x, projector, cfg), lead)


hidden = builders.hidden("attention", "router", encode=encode)(sight.walk)
rename, state_spec, head = sight.rename, sight.state_spec, sight.head
forward = builders.forward(hidden, head)
