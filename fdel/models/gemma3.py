"""Gemma 3 (arXiv:2503.19786): a language model that sees: SigLIP's states, averaged, are tokens that see each other."""

from math import isqrt
from typing import Any

from jaxtyping import Array, Float

from fdel import ops
from fdel.models import builders, config, sight, sublayers
from fdel.params.spec import Param, normal

MODEL_TYPE, ARCHITECTURE = "gemma3", "Gemma3ForConditionalGeneration"


@config.config
class Config(sight.Around):
    """The language model, the tower, and how many tokens become of an image; two others stand around these."""

    ONLY = dict.fromkeys(("vocab_size", "tie_word_embeddings"), config.ANY)
    text: Any = config.computed(lambda d: sight.language(d, "gemma3_text", tied=True), sight.write_language)
    vision: Any = sight.tower_config("siglip_vision_model")
    image: int = config.hf("image_token_index", 262_144)
    begin: int = config.hf("boi_token_index", 255_999)
    end: int = config.hf("eoi_token_index", 256_000)
    tokens: int = config.hf("mm_tokens_per_image", 256)


def side(cfg: Config) -> int:
    """Give how many patches lie along the side of the square that becomes an entry; ConfigError if they do not divide."""
    n = cfg.vision.side // isqrt(cfg.tokens)
    if n**2 * cfg.tokens != cfg.vision.side**2:
        found = f"found {cfg.tokens} of {cfg.vision.side} x {cfg.vision.side} patches"
        raise config.ConfigError(f"config field 'mm_tokens_per_image': {found}; expected as many equal squares")
    return n


def spec(cfg: Config) -> dict:
    """Declare every array; see `sight.spec`. The scale of the projector's norm is stored around zero."""
    name, d, _ = "multi_modal_projector.", cfg.vision.embed, side(cfg)
    project = Param("embed channels", (cfg.embed, d), normal(builders.STD),
                    name + "mm_input_projection_weight", "channels embed")  # fmt: skip
    norm = builders.bias(name + "mm_soft_emb_norm.weight", d, "channels")
    return sight.spec(cfg, {"norm": norm, "out": project})


def encode(params: Any, patches: ops.Patches, cfg: Config) -> Float[Array, "*rows entries D"]:
    """Compute what stands in the place of tokens: an entry of each square of patches, which stand one after the other."""
    (x,) = sight.of_tower(cfg).states(params["vision"], patches, cfg.vision, (-1,))
    x = sublayers.layer_norm(x, params["vision"], "norm", cfg.vision.norm_eps)
    x = x.reshape(len(x), -1, side(cfg) ** 2, x.shape[-1]).mean(2)
    x = ops.rms_norm(x, params["projector"]["norm"], cfg.vision.norm_eps, offset=1.0)
    return sight.entries(ops.einsum("npc,dc->npd", x, params["projector"]["out"]), patches.values.shape[:-2])


hidden = builders.hidden("attention", encode=encode, ahead=lambda cfg: True)(sight.walk)
rename, state_spec, head = sight.rename, sight.state_spec, sight.head
forward = builders.forward(hidden, head)
