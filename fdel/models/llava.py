"""LLaVA (arXiv:2304.08485, 2310.03744): a language model that sees: a tower's hidden states, projected, stand as tokens."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from fdel import ops
from fdel.models import builders, config, sight
from fdel.params.spec import Param

MODEL_TYPE, ARCHITECTURE = "llava", "LlavaForConditionalGeneration"


@config.config
class Config(sight.Around):
    """The language model, the tower, and which of its hidden states are projected how."""

    ONLY = dict.fromkeys("image_seq_length ignore_index vocab_size tie_word_embeddings".split(), config.ANY)
    text: Any = config.computed(sight.language, sight.write_language)
    vision: Any = sight.tower_config("clip_vision_model")
    image: int = config.hf("image_token_index", 32000)
    places: tuple = config.computed(
        lambda d: of_places(d.get("vision_feature_layer", -2)),
        lambda v: {"vision_feature_layer": v[0] if len(v) == 1 else list(v)},
    )
    select: str = config.hf("vision_feature_select_strategy", "default", choices=("default", "full"))
    project_act: str = config.hf("projector_hidden_act", "gelu", choices=tuple(ops.ACTIVATIONS))
    project_bias: bool = config.hf("multimodal_projector_bias", True)


def of_places(value: Any) -> tuple[int, ...]:
    """Read vision_feature_layer: a number, or a list of them."""
    places = tuple(value) if isinstance(value, list) else (value,)
    if not places or not all(type(p) is int for p in places):
        raise config.ConfigError(f"config field 'vision_feature_layer': found {value!r}, expected integers")
    return places


def spec(cfg: Config) -> dict:
    """Declare every array; see `sight.spec`."""
    return sight.spec(cfg, projector(cfg, cfg.vision.embed * len(cfg.places)))


def projector(cfg: Any, inputs: int) -> dict[str, Param]:
    """Declare two linear maps, of a tower's channels to the language model's, and their biases."""
    name, d, tree = "multi_modal_projector.linear_", cfg.embed, dict[str, Param]()
    for part, n, a, b in (("in", 1, ("channels", inputs), "inner"), ("out", 2, ("inner", d), "embed")):
        tree[part] = builders.matrix(f"{name}{n}.weight", a, (b, d))
        tree |= {f"{part}_bias": builders.bias(f"{name}{n}.bias", d, b)} if cfg.project_bias else {}
    return tree


def project(x: Float[Array, "... channels"], p: Any, cfg: Any) -> Float[Array, "... D"]:
    """Apply the maps of `projector`."""
    act = ops.ACTIVATIONS[cfg.project_act]
    x = act(ops.linear("...d,fd->...f", x, p["in"], p.get("in_bias")))
    return ops.linear("...d,fd->...f", x, p["out"], p.get("out_bias"))


def encode(params: Any, patches: ops.Patches, cfg: Config) -> Float[Array, "*rows entries D"]:
    """Compute what stands in the place of tokens: an entry of each patch, and of the class token unless it is left out."""
    found = sight.of_tower(cfg).states(params["vision"], patches, cfg.vision, cfg.places)
    x = jnp.concatenate([s[:, 1:] if cfg.select == "default" else s for s in found], -1)
    return sight.entries(project(x, params["projector"], cfg), patches.values.shape[:-2])


hidden = builders.hidden("attention", encode=encode)(sight.walk)
rename, state_spec, head = sight.rename, sight.state_spec, sight.head
forward = builders.forward(hidden, head)
