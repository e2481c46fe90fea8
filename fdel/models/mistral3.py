"""Mistral 3: a language model that sees: Pixtral's states, normalised, merged in squares and projected, stand as tokens."""

import dataclasses
import json
from collections.abc import Collection
from typing import Any

from jaxtyping import Array, Float

from fdel import ops
from fdel.models import builders, config, llava, sight
from fdel.params.spec import Param, normal

MODEL_TYPE, ARCHITECTURE = "mistral3", "Mistral3ForConditionalGeneration"


@config.config
class Config(sight.Around):
    """The language model, the tower, and how squares of patches become tokens."""

    ONLY = dict.fromkeys("image_seq_length ignore_index vocab_size tie_word_embeddings".split(), config.ANY)
    text: Any = config.computed(lambda d: sight.language(d, "mistral", tied=True), sight.write_language)
    vision: Any = sight.tower_config("pixtral")
    image: int = config.hf("image_token_index", 10)
    place: int = config.computed(
        lambda d: one(llava.of_places(d.get("vision_feature_layer", -1))), lambda v: {"vision_feature_layer": v}
    )
    merge: int = config.hf("spatial_merge_size", 2)  # patches along a side of a square
    project_act: str = config.hf("projector_hidden_act", "gelu", choices=tuple(ops.ACTIVATIONS))
    project_bias: bool = config.hf("multimodal_projector_bias", False)


def one(places: tuple[int, ...]) -> int:
    """Give the only one of several places; the norm of the projector is of one state."""
    if len(places) != 1:
        raise config.ConfigError(f"config field 'vision_feature_layer': found {list(places)}, expected one")
    return places[0]


def of_file(cfg: Config, names: Collection[str]) -> Config:
    """Give the Config of a file with these tensors: where config.json does not say it, a head in it is not tied."""
    said, head = json.loads(cfg.source).get("tie_word_embeddings"), any("lm_head." in name for name in names)
    return dataclasses.replace(cfg, text=dataclasses.replace(cfg.text, tied=False)) if head and said is None else cfg


def spec(cfg: Config) -> dict:
    """Declare every array; see `sight.spec`."""
    name, d, squares = "multi_modal_projector.", cfg.vision.embed, cfg.merge**2
    merge = Param("channels embed rep", (d, d, squares), normal(builders.STD),
                  name + "patch_merger.merging_layer.weight", "channels (embed rep)")  # fmt: skip
    return sight.spec(cfg, {"norm": builders.norm(name + "norm.weight", d), "merge": merge} | llava.projector(cfg, d))


def encode(params: Any, patches: ops.Patches, cfg: Config) -> Float[Array, "*rows entries D"]:
    """Compute what stands in the place of tokens: an entry of each square of patches, which stand one after the other."""
    (x,) = sight.of_tower(cfg).states(params["vision"], patches, cfg.vision, (cfg.place,))
    p = params["projector"]
    x = ops.rms_norm(x, p["norm"], cfg.text.norm_eps)
    x = x.reshape(len(x), -1, cfg.merge**2, x.shape[-1])
    x = llava.project(ops.einsum("nprd,cdr->npc", x, p["merge"]), p, cfg)
    return sight.entries(x, patches.values.shape[:-2])


hidden = builders.hidden("attention", encode=encode)(sight.walk)
rename, state_spec, head = sight.rename, sight.state_spec, sight.head
forward = builders.forward(hidden, head)
