"""Whisper's encoder with a head that names the class of a sound: transformers' WhisperForAudioClassification.

No text goes in, so it is no `protocol.Family`. Load it by `models.load(path, family=whisper_classes)`.
"""

from dataclasses import replace
from typing import Any

import jax
from jaxtyping import Array, Float

from fdel import ops
from fdel.models import builders, config, heads, whisper
from fdel.params.spec import Param, constant

MODEL_TYPE, ARCHITECTURE = "whisper", "WhisperForAudioClassification"


@config.config
class Config(whisper.Config):
    """Sizes and constants of the encoder, and of the layer before the head."""

    ONLY = {k: v for k, v in whisper.Config.ONLY.items() if k not in ("use_weighted_layer_sum", "classifier_proj_size")}
    width: int = config.hf("classifier_proj_size", 256)
    weighted: bool = config.hf("use_weighted_layer_sum", False)  # a learnt sum of all hidden states goes to the head
    labels: int = config.computed(heads.label_count, lambda n: {})


def spec(cfg: Config) -> dict:
    """Declare every array: the encoder's below "encoder", which the file has at the top."""
    encoder = whisper.spec(cfg)["encoder"]
    named = jax.tree.map(lambda p: replace(p, hf=p.hf.removeprefix("model.")), encoder)
    d, states = cfg.embed, cfg.encoder_layers + 1
    sums = {"shares": Param("states", (states,), constant(1 / states), "layer_weights")} if cfg.weighted else {}
    return {
        "encoder": named, **sums,
        "mix": builders.matrix("projector.weight", ("embed", d), ("ffn", cfg.width)),
        "mix_bias": builders.bias("projector.bias", cfg.width, "ffn"),
        "classes": builders.matrix("classifier.weight", ("ffn", cfg.width), ("labels", cfg.labels)),
        "classes_bias": builders.bias("classifier.bias", cfg.labels, "labels"),
    }  # fmt: skip


def logits(params: Any, features: Float[Array, "B bins frames"], cfg: Config) -> Float[Array, "B labels"]:
    """Score the classes of sounds, of log-mel features (`media.sound.log_mel`) of cfg.frames frames; float32.

    `heads.label_names(cfg, cfg.labels)` names them, `heads.probabilities` turns scores into probabilities.
    """
    shares = jax.nn.softmax(params["shares"]) if cfg.weighted else None
    x = whisper.encode(params, features, cfg, shares)
    x = ops.linear("bsd,fd->bsf", x, params["mix"], params["mix_bias"]).mean(1)
    return ops.linear("bf,lf->bl", x, params["classes"], params["classes_bias"]).astype("float32")
