"""Llama 4's and Kimi-VL's towers: shapes, and what is refused. Their numbers are checked by test_sight.py."""

import json

import jax
import jax.numpy as jnp
import pytest
import tiny

from fdel import models, ops, params

PATCHES = {"llama4": 16, "kimi_vl": 8}


@pytest.mark.parametrize("name", PATCHES)
def test_shapes(name):
    """An entry of four patches, and none of what fills an image up to whole tiles."""
    family, count = models.family(name), PATCHES[name] + 4
    cfg = family.Config.from_hf(tiny.TINY[name].values)
    weights = params.abstract(family.spec(cfg))
    patches = ops.Patches(jnp.zeros((2, 3, count, 48)), jnp.zeros((2, 3, count, 3), int))
    entries = jax.eval_shape(lambda p, x: family.encode(p, x, cfg), weights, patches)
    assert entries.shape == (2, 3 * count // 4, 64)
    tokens = jnp.zeros((2, 9), int)
    batch = ops.Packed(tokens, tokens, media=ops.Media(tokens, inputs=patches))
    run = lambda p, t, b: family.forward(p, t, cfg, b)[0]
    assert jax.eval_shape(run, weights, tokens, batch).shape == (2, 9, 128)
    wrong = ops.Patches(patches.values[:, :, 1:], patches.places[:, :, 1:])
    with pytest.raises(ValueError, match=f"found {count - 1} patches of 48.*, expected a multiple of 4 patches of 48"):
        jax.eval_shape(lambda p, x: family.encode(p, x, cfg), weights, wrong)


BROKEN = [
    ("llama4", {"pixel_shuffle_ratio": 0.4}, "'pixel_shuffle_ratio': found 0.4, expected 1 / n"),
    ("llama4", {"intermediate_size": 48}, "'intermediate_size', .*: found 48, 40, 40 and 40, expected 128"),
    ("llama4", {"image_size": 20}, "found tiles of 20 pixels, which 2 x 4 do not divide"),
    ("llama4", {"model_type": "vit"}, "vision_config: found model_type 'vit', understood is llama4_vision_model"),
    ("kimi_vl", {"merge_kernel_size": [2, 1]}, "'merge_kernel_size': found .*, expected the same number twice"),
    ("kimi_vl", {"unheard": 1}, "vision_config: config field 'unheard'"),
]


@pytest.mark.parametrize(("name", "change", "message"), BROKEN)
def test_towers_that_are_not_understood(name, change, message):
    values = json.loads(json.dumps(tiny.TINY[name].values))
    values["vision_config"] |= change
    with pytest.raises(models.ConfigError, match=message):
        models.family(name).spec(models.family(name).Config.from_hf(values))


def test_a_llama4_without_a_vision_config_is_its_language_model():
    values = {"model_type": "llama4", "text_config": tiny.TINY["llama4"].values["text_config"]}
    assert models.of_config(values) is models.family("llama4_text")
    assert models.of_config(values | {"vision_config": {"patch_size": 14}}) is models.family("llama4")
