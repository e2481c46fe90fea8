"""Pixtral's tower of images (arXiv:2410.07073): images of any size, rotary positions of rows and columns.

It gives states of patches and writes no text: no `protocol.Family`. Load it by `models.load(path, family=pixtral)`.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from fdel import ops
from fdel.models import builders, clip, config, sight, sublayers
from fdel.params.spec import stack

MODEL_TYPE, ARCHITECTURE = "pixtral", "PixtralVisionModel"
EPS = 1e-5  # of every norm, which no config says


def theta(d: dict) -> float:
    """Read the base of the rotary frequencies; ConfigError for rotary parameters of another kind."""
    p = config.K.mapping("rope_parameters", d.get("rope_parameters"))
    kind, value = p.get("rope_type", "axial"), p.get("rope_theta", d.get("rope_theta") or 10000.0)
    if kind not in ("axial", "default") or set(p) - {"rope_type", "rope_theta"} or not 0 < float(value) < 1e12:
        raise config.ConfigError(f"config field 'rope_parameters': found {config.show(p)}, only 'axial' is understood")
    return float(value)


@config.config
class Config(config.MultiHead):
    """Sizes and constants."""

    MODEL_TYPE = "pixtral"
    ONLY = {
        "vocab_size": config.ANY,
        "projection_dim": config.ANY,
        "image_size": config.ANY,  # the largest, which the image processor bounds
        "head_dim": lambda cfg: cfg.head_dim,
    }
    embed: int = config.hf("hidden_size", 1024)
    ffn: int = config.hf("intermediate_size", 4096)
    layers: int = config.hf("num_hidden_layers", 24)
    heads: int = config.hf("num_attention_heads", 16)
    channels: int = config.hf("num_channels", 3)
    patch: int = config.hf("patch_size", 16)  # pixels along a side
    act: str = config.act(default="gelu")
    theta: float = config.computed(theta, lambda v: {"rope_parameters": {"rope_type": "axial", "rope_theta": v}})


Vision = Config


def tower(cfg: Config, name: str) -> dict[str, Any]:
    """Declare every array."""
    d, layer = cfg.embed, name + "transformer.layers.{layers}."
    tree = {
        "attn_norm": builders.norm(layer + "attention_norm.weight", d), **builders.gqa(layer + "attention.", cfg),
        "mlp_norm": builders.norm(layer + "ffn_norm.weight", d), **builders.glu(layer + "feed_forward.", d, cfg.ffn),
    }  # fmt: skip
    return {
        "patch": clip.patch_embedding(name + "patch_conv", cfg),
        "first_norm": builders.norm(name + "ln_pre.weight", d),
        "layers": stack(tree, "layers", range(cfg.layers)),
    }


def spec(cfg: Config) -> dict:
    """Declare every array of the tower alone."""
    return tower(cfg, "")


def rotation(places: Array, cfg: Config) -> tuple[Array, Array]:
    """Compute cos and sin of each patch: even frequencies turn by its row, odd ones by its column."""
    inv = cfg.theta ** (-np.arange(0, cfg.head_dim, 2) / cfg.head_dim)
    turn = lambda at, inv: at[..., None].astype(jnp.float32) * jnp.asarray(inv, jnp.float32)
    angles = jnp.concatenate([turn(places[..., 1], inv[0::2]), turn(places[..., 2], inv[1::2])], -1)
    return ops.cos_sin(angles)


def states(params: Any, patches: ops.Patches, cfg: Config, places: tuple[int, ...]) -> tuple[Array, ...]:
    """Compute hidden states [images patches D] at places as transformers counts."""
    values, at, _ = sight.flat(patches, params["patch"].dtype)
    x = ops.linear("npk,dk->npd", values, params["patch"].reshape(cfg.embed, -1))
    x = ops.rms_norm(x, params["first_norm"], EPS)
    segments = jnp.where(at[..., 0] >= 0, 0, -1)
    batch = ops.Packed(jnp.broadcast_to(jnp.arange(x.shape[1]), segments.shape), segments, single=True)
    change, mask = sublayers.rotate(rotation(at, cfg)), ops.Mask(cfg.head_dim**-0.5, causal=False)
    act = ops.ACTIVATIONS[cfg.act]

    def block(x, carry, p, layer):
        a, carry = sublayers.attention(ops.rms_norm(x, p["attn_norm"], EPS), carry, p, layer, batch, mask, change)
        x = x + a
        return x + ops.glu(ops.rms_norm(x, p["mlp_norm"], EPS), p, act), carry

    return sight.states_at(block, x, params["layers"], places)[1]


def encode(params: Any, patches: ops.Patches, cfg: Config) -> Float[Array, "*images patches D"]:
    """Compute the last hidden states of patches."""
    (x,) = states(params, patches, cfg, (-1,))
    return x.reshape(*patches.values.shape[:-1], cfg.embed)
