"""Qwen2-VL (arXiv:2409.12191): Qwen2 with rotary positions of three components, and a tower for images of any size."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from fdel import ops
from fdel.models import builders, config, qwen2, sight, sublayers
from fdel.models.keys import OUTER, ConfigError, mapping, show
from fdel.models.rope import rope
from fdel.ops.rope import Rope
from fdel.params.spec import Param, normal, stack

MODEL_TYPE, ARCHITECTURE = "qwen2_vl", "Qwen2VLForConditionalGeneration"
EPS = 1e-6  # of the tower's norms, which no config says
RENAMED = {"model.language_model.": "model.", "model.visual.": "visual."}  # names of transformers' modules, as prefixes


def sections(default: tuple[int, int, int], **more: Any) -> Any:
    """Declare the field `rope` of heads that turn by three components; `default`: what files without sections mean."""

    theta: float = more.pop("theta")

    def read(d: dict) -> Rope:
        given = dict(mapping("rope_parameters", d.get("rope_parameters") or d.get("rope_scaling")))
        if given.get("mrope_section") is None:
            given |= {"mrope_section": list(default)}
        return rope(d | {"rope_parameters": given | more}, config.given_head_dim(d), theta=theta)

    return config.computed(read, lambda r: {"rope_parameters": config.rope_to_hf(r)})


@config.config
class Text(qwen2.Config):
    """Sizes and constants of the language model."""

    DEFAULTS = qwen2.Config.DEFAULTS | dict(
        vocab=152064, embed=8192, ffn=29568, layers=80, heads=64, kv_heads=8, norm_eps=1e-5
    )
    rope: Rope = sections((16, 24, 24), theta=1e6)


def theta(d: dict) -> float:
    """Read the base of the tower's rotary frequencies; another kind of them is a ConfigError."""
    p = mapping("vision_config.rope_parameters", d.get("rope_parameters"))
    if p.get("rope_type", "axial") != "axial" or set(p) - {"rope_type", "rope_theta"}:
        raise ConfigError(f"config field 'vision_config.rope_parameters': found {show(p)}, understood is 'axial'")
    return float(p.get("rope_theta", 10000.0))


@config.config
class Tower(config.MultiHead):
    """Sizes of a tower; an entry of the language model is of merge x merge patches."""

    ONLY = {"in_channels": 3, "in_chans": 3, "spatial_patch_size": lambda v: v.patch, "tokens_per_second": config.ANY}
    layers: int = config.hf("depth", 32)
    heads: int = config.hf("num_heads", 16)
    patch: int = config.hf("patch_size", 14)
    frames: int = config.hf("temporal_patch_size", 2)  # of a patch
    merge: int = config.hf("spatial_merge_size", 2)
    theta: float = config.computed(theta, lambda t: {"rope_parameters": {"rope_type": "axial", "rope_theta": t}})

    unit = property(lambda self: self.merge**2)  # patches of an entry


@config.config
class Vision(Tower):
    """Sizes of the tower; its feed-forward is `ratio` times as wide."""

    embed: int = config.hf("embed_dim", 1280)
    out: int = config.hf("hidden_size", 3584)
    ratio: int = config.hf("mlp_ratio", 4)
    act: str = config.act("hidden_act", "quick_gelu")


@dataclass(frozen=True, kw_only=True)
class Sighted(sight.Around):
    """A language model and its tower. A family says how it reads both, in TEXT and VISION."""

    TEXT: ClassVar[Any]
    VISION: ClassVar[Any]
    TYPES: ClassVar[tuple[str, str]]  # model_type of both
    text: Any
    vision: Any
    image_token: int = 151655
    source: str = field(default="{}", compare=False, repr=False)

    @classmethod
    def from_hf(cls, d: Mapping[str, Any]) -> Any:
        """Read the dict of a config.json; the language model's keys are in text_config, or around the tower's."""
        if not isinstance(d, Mapping) or not all(isinstance(key, str) for key in d):
            raise ConfigError(f"config.json: found {show(d)}, expected an object")
        if d.get("text_config") is None:
            inner = {k: v for k, v in d.items() if k not in OUTER}
        else:
            inner = config.text_part(d, cls.__module__)
        inner["tie_word_embeddings"] = cls.ties(d)
        vision = dict(mapping("vision_config", d.get("vision_config")))
        token = d.get("image_token_id", cls.image_token)
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < 2**31:
            raise ConfigError(f"config field 'image_token_id': found {show(token)}, expected a token id")
        text = cls.TEXT.from_hf(inner)
        try:
            tower = cls.VISION.from_hf(vision)
        except ConfigError as e:
            raise ConfigError(f"vision_config: {e}") from e
        cls.fit(text, tower)
        return cls(text=text, vision=tower, image_token=token, source=json.dumps(d))

    @classmethod
    def ties(cls, d: Mapping[str, Any]) -> bool:
        """Whether the output projection is the embedding: what a file says around its parts, or in its text_config."""
        inner = mapping("text_config", d.get("text_config"))
        return bool(d.get("tie_word_embeddings") or inner.get("tie_word_embeddings"))

    @staticmethod
    def fit(text: Any, tower: Any) -> None:
        """Refuse a tower whose heads do not turn by rows and columns."""
        if tower.embed % tower.heads or tower.embed // tower.heads % 4:
            found = f"found heads of {tower.embed} / {tower.heads} channels"
            raise ConfigError(f"vision_config: {found}, expected a multiple of 4")

    def to_hf(self) -> dict[str, Any]:
        """Write the dict of a config.json, laid out as its source."""
        out = json.loads(self.source)
        flat = bool(out) and out.get("text_config") is None
        out |= {"image_token_id": self.image_token, "tie_word_embeddings": self.text.tied}
        text, vision = self.text.to_hf(), self.vision.to_hf()
        out["vision_config"] = {"model_type": self.TYPES[1]} | vision
        out |= text if flat else {"text_config": {"model_type": self.TYPES[0]} | text}
        out.pop("quantization_config", None)
        return out


@dataclass(frozen=True, kw_only=True)
class Config(Sighted):
    """Sizes and constants."""

    TEXT, VISION, TYPES = Text, Vision, ("qwen2_vl_text", "qwen2_vl_vision")


def patch_spec(v: Any, biased: bool = False) -> dict[str, Param]:
    """Declare the linear map of a patch, a convolution in the file."""
    shape, name = (v.embed, 3, v.frames, v.patch, v.patch), "visual.patch_embed.proj."
    axes = "embed channels frames height width"
    tree = {"patch": Param(axes, shape, normal(builders.STD), name + "weight", inputs=0)}
    return tree | ({"patch_bias": builders.bias(name + "bias", v.embed)} if biased else {})


def attention_spec(v: Any, name: str) -> dict[str, Param]:
    """Declare attention whose queries, keys and values lie one below the other in the file."""
    side = "heads head_dim", (v.heads, v.head_dim)
    return {
        **builders.fused(name + "qkv.weight", ("embed", v.embed), q=side, k=side, v=side),
        **builders.fused(name + "qkv.bias", ("", 0), q_bias=side, k_bias=side, v_bias=side),
        "o": builders.heads_in(name + "proj.weight", v.heads, v.head_dim, v.embed),
        "o_bias": builders.bias(name + "proj.bias", v.embed),
    }  # fmt: skip


def width(cfg: Any) -> int:
    """Give the numbers of an entry of the tower; ConfigError where the language model's embeddings have others."""
    if cfg.vision.out != cfg.embed:
        found = f"found entries of {cfg.vision.out} numbers"
        raise ConfigError(f"vision_config: {found}, expected {cfg.embed}, the hidden size")
    return int(cfg.embed)


def merger_spec(
    cfg: Any, name: str, norm: dict[str, Param], names: tuple[str, str] = ("mlp.0", "mlp.2")
) -> dict[str, Any]:
    """Declare the projector of merge x merge patches' states, to an entry of the language model (`width`)."""
    v, out = cfg.vision, width(cfg)
    wide = v.unit * v.embed
    return {
        **norm,
        "up": builders.matrix(f"{name}{names[0]}.weight", ("embed", wide), ("ffn", wide)),
        "up_bias": builders.bias(f"{name}{names[0]}.bias", wide, "ffn"),
        "down": builders.matrix(f"{name}{names[1]}.weight", ("ffn", wide), ("embed", out)),
        "down_bias": builders.bias(f"{name}{names[1]}.bias", out),
    }


def spec(cfg: Config) -> dict:
    """Declare every array: the language model's at the top, the tower's and the projector's below."""
    v, name = cfg.vision, "visual.blocks.{layers}."
    layer = {
        **builders.layer_norm("attn_norm", name + "norm1", v.embed),
        **attention_spec(v, name + "attn."),
        **builders.layer_norm("mlp_norm", name + "norm2", v.embed),
        **builders.mlp(name + "mlp.", v.embed, v.ratio * v.embed, ("fc1", "fc2")),
    }
    merger = builders.layer_norm("norm", "visual.merger.ln_q", v.embed)
    tower = patch_spec(v) | {"layers": stack(layer, "layers", range(v.layers))}
    return around(cfg, tower, merger_spec(cfg, "visual.merger.", merger))


def around(cfg: Any, tower: dict[str, Any], merger: dict[str, Any]) -> dict[str, Any]:
    """Put the arrays of the tower and the projector beside the language model's, with the names of their modules."""
    return sight.as_modules(qwen2.spec(cfg.text) | {"vision": tower, "projector": merger}, RENAMED)


def rename(name: str, cfg: Any) -> str | None:
    """Give the names of published files to the tensors of those that have the names of transformers' modules."""
    return sight.as_file(name, RENAMED)


def pictures(patches: ops.Patches, v: Any) -> tuple[Float[Array, "N P numbers"], Int[Array, "N P 3"]]:
    """Lay images out along one axis; ValueError for patches of another size, or that do not make whole entries."""
    *_, count, numbers = patches.values.shape
    if numbers != 3 * v.frames * v.patch**2 or count % v.unit:
        expected = f"a multiple of {v.unit} patches of {3 * v.frames * v.patch**2} numbers"
        raise ValueError(f"media.inputs: found {count} patches of {numbers} numbers, expected {expected}")
    return patches.values.reshape(-1, count, numbers), patches.places.reshape(-1, count, 3)


def embed_patches(p: Mapping[str, Any], values: Float[Array, "N P numbers"]) -> Float[Array, "N P D"]:
    """Apply the linear map of a patch, in the dtype of the weights."""
    cut = values.reshape(*values.shape[:2], *p["patch"].shape[1:]).astype(p["patch"].dtype)
    return ops.linear("npcfhw,dcfhw->npd", cut, p["patch"], p.get("patch_bias"))


def axial(places: Int[Array, "N P 3"], v: Any) -> tuple[Array, Array]:
    """Compute cos and sin [N P head_dim / 2] of angles of which one half is of rows and one of columns."""
    return sight.axial(places[..., 1:], v.head_dim, v.theta)


def within(segments: Int[Array, "N P"]) -> ops.Packed:
    """Make the batch in which patches see those of their segment; -1 are padding."""
    return ops.Packed(jnp.broadcast_to(jnp.arange(segments.shape[1]), segments.shape), segments)


def block(
    v: Any, batch: ops.Batch, rot: tuple[Array, Array], norm: Callable[[Array, Any, str], Array],
    feed: Callable[[Array, Any], Array], longest: int | None = None,
) -> Callable:  # fmt: skip
    """Make the block of a tower's layer, with norm(x, p, part) before attention and before the feed-forward feed(h, p).

    No segment of the batch has more patches than `longest`, and each lies together: what is farther is not computed.
    """
    mask, change = ops.Mask(v.head_dim**-0.5, causal=False, window=longest), sublayers.rotate(rot)

    def apply(x, carry, p, layer):
        a, carry = sublayers.attention(norm(x, p, "attn_norm"), carry, p, layer, batch, mask, change)
        x = x + a
        return x + feed(norm(x, p, "mlp_norm"), p), carry

    return apply


def merge(x: Float[Array, "N P D"], p: Mapping[str, Any], v: Any) -> Float[Array, "N entries out"]:
    """Project the states of each entry's patches, side by side."""
    x = ops.linear("nec,fc->nef", x.reshape(x.shape[0], -1, v.unit * v.embed), p["up"], p["up_bias"])
    return ops.linear("nef,df->ned", ops.ACTIVATIONS["gelu"](x), p["down"], p["down_bias"])


def layer_norm(x: Array, p: Any, part: str) -> Array:
    """Normalise as the towers do."""
    return sublayers.layer_norm(x, p, part, EPS)


def encode(params: Any, patches: ops.Patches, cfg: Config) -> Float[Array, "*rows entries D"]:
    """Compute the entries of images, patches [*rows images P numbers] in the order of `fdel.media.qwen`."""
    v, p = cfg.vision, params["vision"]
    values, places = pictures(patches, v)
    act = ops.ACTIVATIONS[v.act]
    apply = block(v, within(places[..., 0]), axial(places, v), layer_norm, lambda h, p: ops.mlp(h, p, act))
    x, _ = ops.layers(apply, embed_patches(p, values), ops.Carry(), p["layers"])
    x = merge(layer_norm(x, params["projector"], "norm"), params["projector"], v)
    return x.reshape(*patches.values.shape[:-3], -1, x.shape[-1])


@builders.hidden("attention", encode=encode, rotary=True)
def hidden(params, tokens, cfg: Config, batch: ops.Batch, carry: ops.Carry, remat: str | None):
    """Compute the final normalised hidden states, [... T embed]; called as `protocol.Family` says."""
    return sublayers.walk(params, tokens, cfg.text, qwen2.blocks(cfg.text, batch), carry, remat)


state_spec, head, forward = builders.kv_state, builders.head, builders.forward(hidden)
