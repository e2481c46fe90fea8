"""Aya Vision (arXiv:2505.08751): a language model that sees: SigLIP's states of squares in tiles stand as tokens."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from fdel import ops
from fdel.models import builders, config, llava, mistral3, sight, sublayers

MODEL_TYPE, ARCHITECTURE = "aya_vision", "AyaVisionForConditionalGeneration"


@config.config
class Config(sight.Around):
    """The language model, the tower, and how squares of patches become tokens."""

    ONLY = dict.fromkeys(("vocab_size", "tie_word_embeddings"), config.ANY) | {"vision_feature_select_strategy": "full"}
    text: Any = config.computed(lambda d: sight.language(d, "cohere2", tied=True), sight.write_language)
    vision: Any = sight.tower_config("siglip_vision_model")
    image: int = config.hf("image_token_index", 255_036)
    place: int = config.computed(
        lambda d: mistral3.one(llava.of_places(d.get("vision_feature_layer", -1))),
        lambda v: {"vision_feature_layer": v},
    )
    merge: int = config.hf("downsample_factor", 2)  # patches along a side of a square
    norm_eps: float = config.hf("adapter_layer_norm_eps", 1e-6)
    inner: int = config.hf("alignment_intermediate_size", lambda d: sight.language(d, "cohere2").embed)


def spec(cfg: Config) -> dict:
    """Declare every array; see `sight.spec`."""
    name, size, d = "multi_modal_projector.", cfg.vision.embed * cfg.merge**2, ("inner", cfg.inner // 2)
    return sight.spec(cfg, {
        **builders.layer_norm("norm", name + "layernorm", size, "channels"),
        **builders.fused(name + "linear_1.weight", ("channels", size), up=("inner", d[1:]), gate=("inner", d[1:])),
        **{f"{part}_bias": p for part, p in builders.fused(name + "linear_1.bias", ("", 0), up=("inner", d[1:]),
                                                           gate=("inner", d[1:])).items()},
        "out": builders.matrix(name + "linear_2.weight", d, ("embed", cfg.embed)),
        "out_bias": builders.bias(name + "linear_2.bias", cfg.embed),
    })  # fmt: skip


def encode(params: Any, patches: ops.Patches, cfg: Config) -> Float[Array, "*rows entries D"]:
    """Compute what stands in the place of tokens: an entry of each square of patches.

    A tile has as many patches as the tower takes, one tile of an image behind the other; the tower sees each by itself.
    """
    *lead, count, _ = patches.values.shape
    size, squares, p = cfg.vision.side**2, cfg.merge**2, params["projector"]
    more = [(0, 0)] * len(lead) + [(0, -count % size), (0, 0)]
    tiles = lambda x, fill: jnp.pad(x, more, constant_values=fill).reshape(-1, size, x.shape[-1])
    (x,) = sight.of_tower(cfg).states(
        params["vision"], ops.Patches(tiles(patches.values, 0), tiles(patches.places, -1)), cfg.vision, (cfg.place,)
    )
    x = x.reshape(*lead, -1, squares * x.shape[-1])[..., : count // squares, :]
    x = sublayers.layer_norm(x, p, "norm", cfg.norm_eps)
    up, gate = (ops.linear("...c,ic->...i", x, p[part], p[f"{part}_bias"]) for part in ("up", "gate"))
    return sight.entries(ops.linear("...i,di->...d", jax.nn.silu(gate) * up, p["out"], p["out_bias"]), tuple(lead))


hidden = builders.hidden("attention", encode=encode)(sight.walk)


def head(params: Any, cfg: Config) -> ops.Head:
    """Give the output projection, the language model's but for its scale, which transformers leaves out here."""
    return replace(sight.head(params, cfg), scale=1.0)


rename, state_spec = sight.rename, sight.state_spec
forward = builders.forward(hidden, head)
