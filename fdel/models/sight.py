"""What families that see share: a Config around a language model's and a tower's, their arrays, names of both in files.

A tower is a file beside this one with `Vision`, its Config; `tower(cfg, name)`, its arrays; and
states(params, patches, cfg, places), its hidden states at some places, of every image.
"""

import importlib
import json
import re
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from fdel import models, ops
from fdel.models import config
from fdel.models.keys import ConfigError, mapping, show
from fdel.params.hf_layout import with_modules
from fdel.params.spec import Param

# Language models whose walk places media (`ops.place`), by model_type; what transformers assumes where a file says less.
LANGUAGES: dict[str, dict[str, Any]] = {
    "deepseek_v3": {},
    "llama4_text": {},
    "llama": dict(hidden_size=4096, intermediate_size=11008, num_hidden_layers=32, num_attention_heads=32),
    "mistral": {},
    "ministral3": {},
    "qwen2": {},
    "qwen3": {},
    "gemma3_text": {},
    "gemma4_text": {},
    "cohere2": {},
}
TOWERS = {
    "clip_vision_model": "clip",
    "gemma4_vision": "gemma4",
    "pixtral": "pixtral",
    "siglip_vision_model": "siglip",
}  # model_type of a vision_config -> file
INNER = "language_model."  # before the names of the language model's tensors
# Names of newer files (transformers holds its arrays so) and of older towers, as prefixes.
RENAMED = {
    "model.language_model.": INNER + "model.",
    "lm_head.": INNER + "lm_head.",
    "model.vision_tower.": "vision_tower.",
    "model.multi_modal_projector.": "multi_modal_projector.",
}


def language(d: Mapping[str, Any], default: str = "llama", tied: bool = False) -> Any:
    """Read the language model's Config of the text_config of a config dict; ConfigError for one that takes no media.

    Its head is tied if either config says so, as in transformers; `default` and `tied` are what it assumes otherwise.
    """
    inner = dict(mapping("text_config", d.get("text_config")))
    name = inner.setdefault("model_type", default)
    if name not in LANGUAGES:
        raise ConfigError(f"text_config: found model_type {show(name)}, understood are {', '.join(LANGUAGES)}")
    if d.get("tie_word_embeddings", tied):
        inner["tie_word_embeddings"] = True
    try:
        return models.family(name).Config.from_hf(LANGUAGES[name] | inner)
    except ConfigError as e:
        raise ConfigError(f"text_config: {e}") from e


def of_text(cfg: Any) -> ModuleType:
    """Give the family of the language model of a Config."""
    return models.family(json.loads(cfg.text.source)["model_type"])


def of_tower(cfg: Any) -> ModuleType:
    """Give the file of the tower of a Config."""
    return importlib.import_module(f"fdel.models.{TOWERS[cfg.vision.MODEL_TYPE]}")


def vision(d: Mapping[str, Any], default: str) -> Any:
    """Read the tower's Config of the vision_config of a config dict; `default` is its model_type where it has none."""
    inner = mapping("vision_config", d.get("vision_config"))
    name = inner.get("model_type", default)
    if name not in TOWERS:
        raise ConfigError(f"vision_config: found model_type {show(name)}, understood are {', '.join(TOWERS)}")
    try:
        return importlib.import_module(f"fdel.models.{TOWERS[name]}").Vision.from_hf(inner)
    except ConfigError as e:
        raise ConfigError(f"vision_config: {e}") from e


def write_language(text: Any) -> dict[str, Any]:
    """Write a language model's Config as keys of the whole."""
    inner = {"model_type": json.loads(text.source)["model_type"]} | text.to_hf()
    return {"text_config": inner, "tie_word_embeddings": text.tied}


def tower_config(default: str) -> Any:
    """Declare the field `vision` of a family whose towers are by default of this model_type."""
    return config.computed(
        lambda d: vision(d, default),
        lambda v: {"vision_config": {"model_type": v.MODEL_TYPE} | v.to_hf()},
    )


def part(key: str, cls: Any, model_type: str) -> Any:
    """Declare a field that is a Config of its own, of class `cls` and this model_type, in the object at `key`."""

    def read(d: dict) -> Any:
        inner = mapping(key, d.get(key))
        if inner.get("model_type", model_type) != model_type:
            raise ConfigError(f"{key}: found model_type {show(inner['model_type'])}, understood is {model_type}")
        try:
            return cls.from_hf(inner)
        except ConfigError as e:
            raise ConfigError(f"{key}: {e}") from e

    return config.computed(read, lambda v: {key: {"model_type": model_type} | v.to_hf()})


class Around:
    """Sizes and constants of the language model, `text`, by the names that others read of a Config."""

    text: Any

    vocab = property(lambda self: self.text.vocab)
    embed = property(lambda self: self.text.embed)
    layers = property(lambda self: self.text.layers)

    def __getattr__(self, name: str) -> Any:
        """What is no field here is the language model's."""
        if name.startswith("__") or name == "text":
            raise AttributeError(name)
        return getattr(self.text, name)


def language_spec(cfg: Any) -> dict[str, Any]:
    """Declare the language model's arrays."""
    return jax.tree.map(lambda p: p.renamed(lambda name: INNER + name), of_text(cfg).spec(cfg.text))


def as_modules(tree: Any, renamed: Mapping[str, str]) -> Any:
    """Note in declarations how transformers' modules are called: `renamed` has prefixes of theirs, with those of files."""
    return with_modules(tree, {f"^{re.escape(file)}": module for module, file in renamed.items()})


def spec(cfg: Any, projector: Mapping[str, Param]) -> dict[str, Any]:
    """Declare every array: the language model's at the top, the tower's below "vision", and those of the projector."""
    parts = {"vision": of_tower(cfg).tower(cfg.vision, "vision_tower."), "projector": dict(projector)}
    return as_modules(language_spec(cfg) | parts, RENAMED)


def as_file(name: str, renamed: Mapping[str, str]) -> str:
    """Give the name in a file of a tensor that may be called as its module: see `as_modules`."""
    return next((file + name.removeprefix(module) for module, file in renamed.items() if name.startswith(module)), name)


def rename(name: str, cfg: Any) -> str | None:
    """Give the names of published files and of transformers' modules as those that it saves.

    A head that is tied is left out.
    """
    name = as_file(name, RENAMED).replace("vision_tower.vision_model.", "vision_tower.", 1)
    if name.startswith(INNER):
        inner = getattr(of_text(cfg), "rename", lambda name, cfg: name)(name.removeprefix(INNER), cfg.text)
        return None if inner is None or (cfg.tied and inner.startswith("lm_head.")) else INNER + inner
    return None if name.endswith(".position_ids") else name


def walk(params, tokens, cfg: Any, batch: ops.Batch, carry: ops.Carry, remat: str | None):
    """Compute the language model's final normalised hidden states, [... T embed], with media of the carry."""
    return of_text(cfg).hidden.walk(params, tokens, cfg.text, batch, carry, remat)


def state_spec(cfg: Any, *, pages: int, page: int = 64, rows: int = 0) -> ops.State:
    """Declare what serving remembers: what the language model does."""
    return of_text(cfg).state_spec(cfg.text, pages=pages, page=page, rows=rows)


def head(params: Any, cfg: Any) -> ops.Head:
    """Give the output projection, the language model's."""
    return of_text(cfg).head(params, cfg.text)


def axial(at: Array, head_dim: int, theta: float) -> tuple[Array, Array]:
    """Compute cos and sin [... head_dim / 2] of angles: one half turns by the first of two places, one by the second."""
    inv = theta ** (-np.arange(0, head_dim // 2, 2) / (head_dim // 2))
    angles = at[..., None].astype(jnp.float32) * jnp.asarray(inv, jnp.float32)
    angles = angles.reshape(*at.shape[:-1], -1)
    return ops.cos_sin(angles)


def flat(patches: ops.Patches, dtype: Any) -> tuple[Float[Array, "N patches numbers"], Array, tuple[int, ...]]:
    """Give values [N patches numbers] and places [N patches 3] of all images, and what axes they had before."""
    lead = patches.values.shape[:-2]
    values = patches.values.reshape(-1, *patches.values.shape[-2:]).astype(dtype)
    return values, patches.places.reshape(-1, *patches.places.shape[-2:]), lead


Lines = list[tuple[Int[Array, "N P"], Float[Array, "N P"]]]  # rows, or columns, of a table for each patch, with weights


def interpolated(table: Float[Array, "H W D"], rows: Lines, columns: Lines) -> Float[Array, "N P D"]:
    """Sum learned positions at some rows and some columns of their table, with the weights of both, in float32."""
    out = jnp.zeros((*rows[0][0].shape, table.shape[-1]), jnp.float32)
    for row, down in rows:
        for column, right in columns:
            out += (down * right)[..., None] * table[row, column].astype(jnp.float32)
    return out.astype(table.dtype)


def cubic(table: Float[Array, "H W D"], places: Int[Array, "N P 3"]) -> Float[Array, "N P D"]:
    """Compute learned positions between those of a table that is as large as each image, by cubic convolution.

    With a = -0.75 (R. Keys, 1981), between the middles of cells; beyond its edges the table goes on as they are. As
    torch's `interpolate` and `grid_sample`, "bicubic".
    """

    def lines(at: Int[Array, "N P"], side: int) -> Lines:
        place = jnp.maximum(at, 0)
        source = (place.astype(jnp.float32) + 0.5) * side / (place.max(1, keepdims=True) + 1) - 0.5
        low, out = jnp.floor(source), []
        for i in range(-1, 3):
            x = jnp.abs(source - low - i)
            near, far = (1.25 * x - 2.25) * x * x + 1, ((-0.75 * x + 3.75) * x - 6) * x + 3
            out.append((jnp.clip(low.astype(jnp.int32) + i, 0, side - 1), jnp.where(x <= 1, near, far)))
        return out

    return interpolated(table, lines(places[..., 1], table.shape[0]), lines(places[..., 2], table.shape[1]))


def states_at(
    block: Any, x: Float[Array, "N T D"], layers: Any, places: tuple[int, ...]
) -> tuple[Float[Array, "N T D"], tuple[Float[Array, "N T D"], ...]]:
    """Walk the layers of a tower: what leaves the last one, and the hidden states at places (negative: from the end)."""
    count = len(layers) if isinstance(layers, list) else jax.tree.leaves(layers)[0].shape[0]
    at = tuple(p % (count + 1) for p in places)
    if not at:
        return ops.layers(block, x, ops.Carry(), layers)[0], ()
    layers = layers[: max(at)] if isinstance(layers, list) else layers
    x, carry = ops.layers(block, x, ops.Carry(taps=ops.Taps(hidden=ops.HiddenStates(at))), layers)
    return x, carry.taps.hidden.values  # type: ignore[union-attr]


def entries(x: Float[Array, "N T D"], lead: tuple[int, ...]) -> Float[Array, "*rows entries D"]:
    """Put what a tower gives of the images of a row one after the other."""
    return jnp.reshape(x, (*lead[:-1], -1, x.shape[-1]))
