"""Qwen2.5-VL (arXiv:2502.13923): Qwen2-VL whose tower attends in windows, but for a few layers; gated feed-forwards."""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from fdel import ops
from fdel.models import builders, config, qwen2, qwen2_vl, sublayers
from fdel.models.config import FULL
from fdel.models.keys import ConfigError
from fdel.models.qwen2_vl import EPS
from fdel.params.spec import layers

MODEL_TYPE, ARCHITECTURE = "qwen2_5_vl", "Qwen2_5_VLForConditionalGeneration"
NEAR = "window"  # a layer that attends in windows


def kinds(d: dict) -> tuple[str, ...]:
    """Read which layers attend to all of a frame."""
    full = d.get("fullatt_block_indexes", [7, 15, 23, 31])
    return tuple(FULL if i in full else NEAR for i in range(d["depth"]))


@config.config
class Vision(qwen2_vl.Tower):
    """Sizes of the tower; `window` is a window's side in pixels."""

    embed: int = config.hf("hidden_size", 3584)
    out: int = config.hf("out_hidden_size", 3584)
    ffn: int = config.hf("intermediate_size", 3420)
    window: int = config.hf("window_size", 112)
    act: str = config.act()
    kinds: tuple[str, ...] = config.computed(
        kinds, lambda kinds: {"fullatt_block_indexes": [i for i, kind in enumerate(kinds) if kind == FULL]}
    )

    cells = property(lambda self: self.window // self.merge // self.patch)  # entries along a window's side


@dataclass(frozen=True, kw_only=True)
class Config(qwen2_vl.Sighted):
    """Sizes and constants."""

    TEXT, VISION, TYPES = qwen2_vl.Text, Vision, ("qwen2_5_vl_text", "qwen2_5_vl_vision")

    @staticmethod
    def fit(text: Any, tower: Any) -> None:
        """Refuse a tower that cannot be, or whose windows hold no entry."""
        qwen2_vl.Sighted.fit(text, tower)
        if not tower.cells:
            expected = f"expected at least {tower.merge * tower.patch} pixels, of an entry"
            raise ConfigError(f"vision_config field 'window_size': found {tower.window}, {expected}")


def spec(cfg: Config) -> dict:
    """Declare every array: the language model's at the top, the tower's and the projector's below."""
    v, name = cfg.vision, "visual.blocks.{layers}."
    layer = {
        "attn_norm": builders.norm(name + "norm1.weight", v.embed),
        **qwen2_vl.attention_spec(v, name + "attn."),
        "mlp_norm": builders.norm(name + "norm2.weight", v.embed),
        **builders.glu(name + "mlp.", v.embed, v.ffn, biased=True),
    }
    merger = {"norm": builders.norm("visual.merger.ln_q.weight", v.embed)}
    tower = qwen2_vl.patch_spec(v) | {"layers": layers(lambda kind: layer, v.kinds)}
    return qwen2_vl.around(cfg, tower, qwen2_vl.merger_spec(cfg, "visual.merger.", merger))


def windows(places: Int[Array, "N P 3"], v: Vision) -> tuple[Int[Array, "N P"], Int[Array, "N P"]]:
    """Give the order in which the patches of a window lie together, and the window of each in that order; -1 are padding.

    Windows go along the rows of a frame. The patches of an entry stay together.
    """
    frame, row, column = (places[..., i] // n for i, n in enumerate((1, v.merge * v.cells, v.merge * v.cells)))
    most = lambda x: x.max(-1, keepdims=True) + 1
    window = (frame * most(row) + row) * most(column) + column
    last = jnp.iinfo(window.dtype).max
    order = jnp.argsort(jnp.where(places[..., 0] < 0, last, window), axis=-1, stable=True)
    return order, jnp.take_along_axis(jnp.where(places[..., 0] < 0, -1, window), order, -1)


def encode(params: Any, patches: ops.Patches, cfg: Config) -> Float[Array, "*rows entries D"]:
    """Compute the entries of images, patches [*rows images P numbers] in the order of `fdel.media.qwen`."""
    v, p = cfg.vision, params["vision"]
    values, places = qwen2_vl.pictures(patches, v)
    order, window = windows(places, v)
    values, places = (jnp.take_along_axis(x, order[..., None], 1) for x in (values, places))
    norm, act = lambda x, p, part: ops.rms_norm(x, p[part], EPS), ops.ACTIVATIONS[v.act]
    rot, feed = qwen2_vl.axial(places, v), lambda h, p: ops.glu(h, p, act)
    near, far = qwen2_vl.within(window), qwen2_vl.within(places[..., 0])
    blocks = {
        FULL: qwen2_vl.block(v, far, rot, norm, feed),
        NEAR: qwen2_vl.block(v, near, rot, norm, feed, v.unit * v.cells**2),
    }
    x, _ = ops.layers(blocks, qwen2_vl.embed_patches(p, values), ops.Carry(), p["layers"], v.kinds)
    x = qwen2_vl.merge(norm(x, params["projector"], "norm"), params["projector"], v)
    back = jnp.argsort(order[:, :: v.unit], axis=-1)
    x = jnp.take_along_axis(x, back[..., None], 1)
    return x.reshape(*patches.values.shape[:-3], -1, x.shape[-1])


@builders.hidden("attention", encode=encode, rotary=True)
def hidden(params, tokens, cfg: Config, batch: ops.Batch, carry: ops.Carry, remat: str | None):
    """Compute the final normalised hidden states, [... T embed]; called as `protocol.Family` says."""
    return sublayers.walk(params, tokens, cfg.text, qwen2.blocks(cfg.text, batch), carry, remat)


state_spec, head, forward, rename = builders.kv_state, builders.head, builders.forward(hidden), qwen2_vl.rename
