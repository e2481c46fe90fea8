"""GLM-4.1V (arXiv:2507.01006): GLM-4 that turns by three components, and a tower whose learned positions fit any image."""

from dataclasses import dataclass
from typing import Any

import jax
from jaxtyping import Array, Float

from fdel import ops
from fdel.models import builders, config, glm4, qwen2_vl, qwen3_vl, sight, sublayers
from fdel.models.keys import ConfigError
from fdel.ops.rope import Rope
from fdel.params.spec import Param, normal, stack

MODEL_TYPE, ARCHITECTURE = "glm4v", "Glm4vForConditionalGeneration"
EPS = 1e-5  # of the projector's norm, which no config says
# Ids of tokens, which published files have in their text_config too.
TOKENS = tuple(f"{kind}_{of}token_id" for kind in ("image", "video") for of in ("", "start_", "end_"))


@config.config
class Text(glm4.Config):
    """Sizes and constants of the language model."""

    DEFAULTS = dict(
        vocab=151552, embed=4096, ffn=13696, layers=40, heads=32, kv_heads=2, max_positions=32768, norm_eps=1e-5
    )
    ONLY = {"attention_bias": True, "head_dim": lambda c: c.embed // c.heads} | dict.fromkeys(TOKENS, config.ANY)
    rope: Rope = qwen2_vl.sections((8, 12, 12), theta=1e4)


@config.config
class Vision(qwen2_vl.Tower):
    """Sizes of the tower; it has learned positions for images of `image` pixels a side. `ffn` is of its projector."""

    DEFAULTS = dict(layers=24, heads=12)
    embed: int = config.hf("hidden_size", 1536)
    out: int = config.hf("out_hidden_size", 4096)
    ffn: int = config.hf("intermediate_size", 13696)
    image: int = config.hf("image_size", 336)
    norm_eps: float = config.hf("rms_norm_eps", 1e-5)
    act: str = config.act()
    attn_bias: bool = config.hf("attention_bias", False)

    side = property(lambda self: self.image // self.patch)  # learned positions along a side


@dataclass(frozen=True, kw_only=True)
class Config(qwen2_vl.Sighted):
    """Sizes and constants."""

    TEXT, VISION, TYPES = Text, Vision, ("glm4v_text", "glm4v_vision")
    image_token: int = 151343

    @staticmethod
    def fit(text: Any, tower: Any) -> None:
        """Refuse a tower that cannot be, or without positions."""
        qwen2_vl.Sighted.fit(text, tower)
        if not tower.side:
            found = f"found {tower.image}, expected at least {tower.patch} pixels, of a patch"
            raise ConfigError(f"vision_config field 'image_size': {found}")


def tower_spec(cfg: Any) -> dict[str, Any]:
    """Declare the tower and its projector; the file has them below "model."."""
    v, out, name = cfg.vision, qwen2_vl.width(cfg), "visual.blocks.{layers}."
    attention = qwen2_vl.attention_spec(v, name + "attn.")
    absent = {"o_bias"} if v.attn_bias else {"q_bias", "k_bias", "v_bias", "o_bias"}
    layer = {
        "attn_norm": builders.norm(name + "norm1.weight", v.embed),
        **{part: p for part, p in attention.items() if part not in absent},
        "mlp_norm": builders.norm(name + "norm2.weight", v.embed),
        **builders.glu(name + "mlp.", v.embed, out),
    }
    table = Param("positions embed", (v.side**2, v.embed), normal(builders.STD),
                  "visual.embeddings.position_embedding.weight", inputs=0)  # fmt: skip
    square = Param("ffn embed height width", (out, v.embed, v.merge, v.merge), normal(builders.STD),
                   "visual.downsample.weight", inputs=0)  # fmt: skip
    tree = {
        "vision": qwen2_vl.patch_spec(v, biased=True) | {
            "patch_norm": builders.norm("visual.post_conv_layernorm.weight", v.embed),
            "positions": table,
            "layers": stack(layer, "layers", range(v.layers)),
            "norm": builders.norm("visual.post_layernorm.weight", v.embed),
        },
        "projector": {
            "square": square,
            "square_bias": builders.bias("visual.downsample.bias", out, "ffn"),
            "mix": builders.matrix("visual.merger.proj.weight", ("ffn", out), ("embed", out)),
            **builders.layer_norm("norm", "visual.merger.post_projection_norm", out),
            **builders.glu("visual.merger.", out, v.ffn),
        },
    }  # fmt: skip
    return jax.tree.map(lambda p: p.renamed(lambda name: f"model.{name}"), tree)


def spec(cfg: Any) -> dict:
    """Declare every array: the language model's at the top, the tower's and the projector's below."""
    return qwen3_vl.below(glm4.spec(cfg.text)) | tower_spec(cfg)


def encode(params: Any, patches: ops.Patches, cfg: Any) -> Float[Array, "*rows entries D"]:
    """Compute the entries of images, patches [*rows images P numbers] in the order of `fdel.media.qwen`."""
    v, p, q = cfg.vision, params["vision"], params["projector"]
    values, places = qwen2_vl.pictures(patches, v)
    norm, act = lambda x, p, part: ops.rms_norm(x, p[part], v.norm_eps), ops.ACTIVATIONS[v.act]
    x = norm(qwen2_vl.embed_patches(p, values), p, "patch_norm")
    side = int(p["positions"].shape[0] ** 0.5)
    x = x + sight.cubic(p["positions"].reshape(side, side, -1), places)
    rot, feed = qwen2_vl.axial(places, v), lambda h, p: ops.glu(h, p, act)
    apply = qwen2_vl.block(v, qwen2_vl.within(places[..., 0]), rot, norm, feed)
    x, _ = ops.layers(apply, x, ops.Carry(), p["layers"])
    cut = norm(x, p, "norm").reshape(x.shape[0], -1, v.merge, v.merge, v.embed)
    x = ops.linear("nehwd,fdhw->nef", cut, q["square"], q["square_bias"])
    x = ops.einsum("nef,df->ned", x, q["mix"])
    x = ops.glu(ops.ACTIVATIONS["gelu"](sublayers.layer_norm(x, q, "norm", EPS)), q, act)
    return x.reshape(*patches.values.shape[:-3], -1, x.shape[-1])


@builders.hidden("attention", encode=encode, rotary=True)
def hidden(params, tokens, cfg: Any, batch: ops.Batch, carry: ops.Carry, remat: str | None):
    """Compute the final normalised hidden states, [... T embed]; called as `protocol.Family` says."""
    return glm4.hidden.walk(params, tokens, cfg.text, batch, carry, remat)  # type: ignore[attr-defined]


state_spec, head, forward = builders.kv_state, builders.head, builders.forward(hidden)
