"""Qwen3-VL (arXiv:2511.21631): Qwen3 whose first layers take states of several depths of the tower, at images' tokens."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from fdel import ops
from fdel.models import builders, config, qwen2_vl, qwen3, sight, sublayers
from fdel.models.config import FULL
from fdel.models.keys import ConfigError
from fdel.models.qwen2_vl import layer_norm
from fdel.ops.rope import Rope
from fdel.params.spec import Param, normal, stack

MODEL_TYPE, ARCHITECTURE = "qwen3_vl", "Qwen3VLForConditionalGeneration"
DEEP = "deep"  # a layer behind which a part of the images' entries is added


@config.config
class Text(qwen3.Config):
    """Sizes and constants of the language model."""

    DEFAULTS = qwen3.Config.DEFAULTS | dict(
        vocab=151936, embed=4096, ffn=22016, layers=32, heads=32, kv_heads=32, max_positions=128000
    )
    rope: Rope = qwen2_vl.sections((24, 20, 20), theta=5e5, mrope_interleaved=True)


@config.config
class Tower(qwen2_vl.Tower):
    """Sizes of a tower; it has a learned position for each of `positions` places of a square."""

    DEFAULTS = dict(layers=27, patch=16)
    embed: int = config.hf("hidden_size", 1152)
    out: int = config.hf("out_hidden_size", 3584)
    ffn: int = config.hf("intermediate_size", 4304)
    positions: int = config.hf("num_position_embeddings", 2304)
    act: str = config.act("hidden_act", "gelu_pytorch_tanh")


@config.config
class Vision(Tower):
    """Sizes of the tower, and which of its layers' states go to layers of the language model."""

    deep: tuple[int, ...] = config.hf(
        "deepstack_visual_indexes", (8, 16, 24)
    )  # layers whose states are parts of entries


class Sighted(qwen2_vl.Sighted):
    """What the families of this tower have in common."""

    @property
    def kinds(self) -> tuple[Any, ...]:
        """Of each layer of the language model, whether it is DEEP, as the first are, and its kind."""
        deep, plain = len(self.vision.deep), self.text.kinds or (FULL,) * self.text.layers
        return tuple((DEEP, kind) if i < deep else ("", kind) for i, kind in enumerate(plain))

    @classmethod
    def ties(cls, d: Any) -> bool:
        """Whether the output projection is the embedding; only what stands around the parts counts."""
        return bool(d.get("tie_word_embeddings"))

    @staticmethod
    def fit(text: Any, tower: Any) -> None:
        """Refuse a tower that does not fit the language model."""
        qwen2_vl.Sighted.fit(text, tower)
        side, deep = int(tower.positions**0.5), getattr(tower, "deep", ())
        if side**2 != tower.positions:
            raise ConfigError(f"'num_position_embeddings': found {tower.positions}, expected a square number")
        fits = all(isinstance(i, int) and 0 <= i < tower.layers for i in deep) and list(deep) == sorted(set(deep))
        if not fits or len(deep) > text.layers:
            expected = f"rising numbers below {tower.layers}, at most {text.layers} of them"
            raise ConfigError(f"'deepstack_visual_indexes': found {deep}, expected {expected}")


@dataclass(frozen=True, kw_only=True)
class Config(Sighted):
    """Sizes and constants."""

    TEXT, VISION, TYPES = Text, Vision, ("qwen3_vl_text", "qwen3_vl_vision")


def tower_spec(cfg: Any) -> dict[str, Any]:
    """Declare the tower and its projectors, one for each part of an entry; the file has it below "model."."""
    v, name = cfg.vision, "visual.blocks.{layers}."
    names = "linear_fc1", "linear_fc2"
    layer = {
        **builders.layer_norm("attn_norm", name + "norm1", v.embed),
        **qwen2_vl.attention_spec(v, name + "attn."),
        **builders.layer_norm("mlp_norm", name + "norm2", v.embed),
        **builders.mlp(name + "mlp.", v.embed, v.ffn, names),
    }
    table = Param("positions embed", (v.positions, v.embed), normal(builders.STD), "visual.pos_embed.weight", inputs=0)
    merger = lambda name, size: qwen2_vl.merger_spec(cfg, name, builders.layer_norm("norm", name + "norm", size), names)
    depths = range(len(getattr(v, "deep", ())))
    deep = {str(i): merger(f"visual.deepstack_merger_list.{i}.", v.unit * v.embed) for i in depths}
    layers = stack(layer, "layers", range(v.layers))
    tree = {
        "vision": qwen2_vl.patch_spec(v, biased=True) | {"positions": table, "layers": layers},
        "projector": merger("visual.merger.", v.embed) | ({"deep": deep} if deep else {}),
    }
    return jax.tree.map(lambda p: p.renamed(lambda name: f"model.{name}"), tree)


def below(tree: dict[str, Any]) -> dict[str, Any]:
    """Give a language model's arrays the names that they have below "model.language_model."."""
    inside = lambda p: p.renamed(lambda name: name.replace("model.", "model.language_model.", 1))
    return jax.tree.map(lambda p: inside(p) if p.hf.startswith("model.") else p, tree)


def spec(cfg: Config) -> dict:
    """Declare every array: the language model's at the top, the tower's and the projectors' below."""
    return below(qwen3.spec(replace(cfg.text, kinds=cfg.kinds))) | tower_spec(cfg)


def interpolated(table: Float[Array, "S D"], places: Int[Array, "N P 3"]) -> Float[Array, "N P D"]:
    """Compute learned positions, which lie on a square whose corners are those of each image, between its places."""
    side = int(table.shape[0] ** 0.5)

    def lines(at: Int[Array, "N P"]) -> sight.Lines:
        place = jnp.maximum(at, 0)
        source = (place * (side - 1)).astype(jnp.float32) / jnp.maximum(place.max(1, keepdims=True), 1)
        low = jnp.floor(source).astype(jnp.int32)
        return [(low, 1 - (source - low)), (jnp.minimum(low + 1, side - 1), source - low)]

    return sight.interpolated(table.reshape(side, side, -1), lines(places[..., 1]), lines(places[..., 2]))


def encode(
    params: Any, patches: ops.Patches, cfg: Any
) -> Float[Array, "*rows entries D"] | Float[Array, "*rows entries parts D"]:
    """Compute the entries of images, patches [*rows images P numbers] in the order of `fdel.media.qwen`.

    Their parts are the embedding, and what is added behind each of the first layers; without these there are none.
    """
    v, p, projector = cfg.vision, params["vision"], params["projector"]
    values, places = qwen2_vl.pictures(patches, v)
    act, deep = ops.ACTIVATIONS[v.act], getattr(v, "deep", ())
    feed = lambda h, p: ops.mlp(h, p, act)
    apply = qwen2_vl.block(v, qwen2_vl.within(places[..., 0]), qwen2_vl.axial(places, v), layer_norm, feed)
    x = qwen2_vl.embed_patches(p, values)
    x = x + interpolated(p["positions"], places)
    carry = ops.Carry(taps=ops.Taps(hidden=ops.HiddenStates(tuple(i + 1 for i in deep)))) if deep else ops.Carry()
    x, carry = ops.layers(apply, x, carry, p["layers"])
    parts = [qwen2_vl.merge(layer_norm(x, projector, "norm"), projector, v)]
    for i, x in enumerate(carry.taps.hidden.values if carry.taps and carry.taps.hidden else ()):
        q = projector["deep"][str(i)]
        wide = x.reshape(x.shape[0], -1, v.unit * v.embed)
        parts.append(qwen2_vl.merge(layer_norm(wide, q, "norm"), q, v))
    x = jnp.stack(parts, 2) if deep else parts[0]
    return x.reshape(*patches.values.shape[:-3], -1, *x.shape[2:])


def walk(
    params: Any, tokens: Array, cfg: Any, blocks: Mapping[str, Callable], carry: ops.Carry, remat: str | None
) -> tuple[Float[Array, "... D"], ops.Carry]:
    """Apply every layer with the block of its kind; behind the first ones the next part of the entries is added."""
    of_kind = {(deep, kind): deepened(blocks[kind]) if deep else blocks[kind] for deep, kind in sorted(set(cfg.kinds))}
    return sublayers.walk(params, tokens, replace(cfg.text, kinds=cfg.kinds), of_kind, carry, remat)


def deepened(apply: Callable) -> Callable:
    """Make of a block one behind which the next part of the images' entries is added at their tokens."""

    def deep(x, carry, p, layer):
        x, carry = apply(x, carry, p, layer)
        if (media := carry.media) is None:
            return x, carry
        return x + jnp.where(media.index[..., None] >= 0, ops.entries(media, layer + 1), 0).astype(x.dtype), carry

    return deep


@builders.hidden("attention", encode=encode, rotary=True)
def hidden(params, tokens, cfg: Config, batch: ops.Batch, carry: ops.Carry, remat: str | None):
    """Compute the final normalised hidden states, [... T embed]; called as `protocol.Family` says."""
    return walk(params, tokens, cfg, qwen3.blocks(cfg.text, batch), carry, remat)


state_spec, head, forward = builders.kv_state, builders.head, builders.forward(hidden)
