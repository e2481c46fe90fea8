"""A family that sees, over llama: patches become entries that know of each other, and turns have three components."""

from dataclasses import replace

import jax.numpy as jnp

from fdel import ops
from fdel.models import builders, llama, sublayers
from fdel.params.spec import Param, normal

MODEL_TYPE, ARCHITECTURE, Config, NUMBERS = "seer", "Seer", llama.Config, 12


def spec(cfg):
    """Llama's arrays, and the tower's."""
    matrix = lambda name, a, b: Param(f"{a[0]} {b[0]}", (a[1], b[1]), normal(0.5), name)
    tower = {"patches": matrix("vision.patches", ("numbers", NUMBERS), ("embed", cfg.embed)),
             "places": matrix("vision.places", ("components", 3), ("embed", cfg.embed))}  # fmt: skip
    return llama.spec(cfg) | {"vision": tower}


def encode(params, patches, cfg):
    """An entry for each patch."""
    real = (patches.places[..., :1] >= 0).astype(jnp.float32)
    h = patches.values @ params["vision"]["patches"] + jnp.sin(patches.places @ params["vision"]["places"])
    h = jnp.tanh(h + (h * real).sum(-2, keepdims=True) / jnp.maximum(real.sum(-2, keepdims=True), 1))
    return h.reshape(*h.shape[:-3], -1, cfg.embed)


@builders.hidden("attention", encode=encode, rotary=True)
def hidden(params, tokens, cfg, batch, carry, remat):
    """Llama's, turned by a sum of three components."""
    turns = jnp.repeat(batch.positions[..., None], 3, -1) if batch.rotary is None else batch.rotary
    rot = ops.rotation(cfg.rope, replace(batch, positions=turns @ jnp.array([1, 2, 4]), rotary=None))
    return sublayers.walk(params, tokens, cfg, llama.block(cfg, batch, sublayers.rotate(rot)), carry, remat)


state_spec, head, forward = builders.kv_state, builders.head, builders.forward(hidden)
