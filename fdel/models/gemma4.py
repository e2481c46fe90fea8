"""Gemma 4 (Google, 2026): a language model that sees: its tower's states, averaged in squares, stand as tokens."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from fdel import ops
from fdel.models import builders, config, gemma4_text, sight
from fdel.models.pixtral import theta
from fdel.params.spec import Param, constant, normal, stack

MODEL_TYPE, ARCHITECTURE = "gemma4", "Gemma4ForConditionalGeneration"
BOUNDS = {"input_min": -1, "input_max": 1, "output_min": -1, "output_max": 1}  # of a clipped map, infinite at first
HEARS = ("model.audio_tower.", "model.embed_audio.")  # what hears is left out


@config.config
class Vision:
    """Sizes and constants of the tower."""

    MODEL_TYPE = "gemma4_vision"
    ONLY = {"attention_bias": False, "max_position_embeddings": config.ANY}
    embed: int = config.hf("hidden_size", 768)
    ffn: int = config.hf("intermediate_size", 3072)
    layers: int = config.hf("num_hidden_layers", 16)
    heads: int = config.hf("num_attention_heads", 12)
    kv_heads: int = config.hf("num_key_value_heads", 12)
    head_dim: int = config.hf("head_dim", 64)
    act: str = config.act("hidden_activation", "gelu_pytorch_tanh")
    norm_eps: float = config.hf("rms_norm_eps", 1e-6)
    theta: float = config.computed(theta, lambda v: {"rope_parameters": {"rope_type": "axial", "rope_theta": v}})
    side: int = config.hf("pooling_kernel_size", 3)  # patches along the side of the square that becomes an entry
    patch: int = config.hf("patch_size", 16)  # pixels along a side
    places: int = config.hf("position_embedding_size", 10_240)  # the most rows and columns
    standard: bool = config.hf("standardize", False)
    clipped: bool = config.hf("use_clipped_linears", False)  # what goes in and out of each linear map of a layer


@config.config
class Config(sight.Around):
    """The language model and the tower."""

    ONLY = dict.fromkeys(
        "vocab_size tie_word_embeddings audio_config boi_token_id eoi_token_id video_token_id boa_token_id eoa_token_index "
        "audio_token_id".split(), config.ANY)  # fmt: skip
    text: Any = config.computed(
        lambda d: sight.language(d, "gemma4_text", tied=True),
        lambda v: sight.write_language(v) | {"audio_config": None},
    )
    vision: Any = sight.tower_config("gemma4_vision")
    image: int = config.hf("image_token_id", 258_880)


def tower(cfg: Vision, name: str) -> dict[str, Any]:
    """Declare the arrays of the tower."""
    d, layer, inner = (
        cfg.embed,
        name + "encoder.layers.{layers}.",
        lambda p: replace(p, hf=p.hf.replace("_proj.", "_proj.linear.")),
    )
    norms = dict(attn_norm="input", attn_post_norm="post_attention", mlp_norm="pre_feedforward",
                 mlp_post_norm="post_feedforward")  # fmt: skip
    maps = builders.gqa(layer + "self_attn.", cfg) | builders.glu(layer + "mlp.", d, cfg.ffn)
    bounds = {
        f"{part}_{side}": Param("", (), constant(sign * jnp.inf), p.hf.replace(".weight", f".{side}"))
        for part, p in maps.items() for side, sign in BOUNDS.items() if cfg.clipped
    }  # fmt: skip
    tree = bounds | {
        **{part: builders.norm(f"{layer}{file}_layernorm.weight", d) for part, file in norms.items()},
        **{part: inner(p) for part, p in maps.items()}, **builders.qk_norm(layer + "self_attn.", cfg),
    }  # fmt: skip
    table = name + "patch_embedder.position_embedding_table"
    standard = {"mean": builders.bias(name + "std_bias", d), "scale": builders.norm(name + "std_scale", d)}
    return {
        "patch": builders.matrix(name + "patch_embedder.input_proj.weight", ("channels", 3 * cfg.patch**2), ("embed", d)),
        "positions": Param("rep positions embed", (2, cfg.places, d), normal(builders.STD), table),
        "layers": stack(tree, "layers", range(cfg.layers)), **(standard if cfg.standard else {}),
    }  # fmt: skip


def states(params: Any, patches: ops.Patches, cfg: Vision, places: tuple[int, ...]) -> tuple[Array, ...]:
    """Compute hidden states [images patches D] at places as transformers counts. Patches past the tables give NaN."""
    values, at, _ = sight.flat(patches, params["patch"].dtype)
    x, real = ops.einsum("npk,dk->npd", 2 * (values - 0.5), params["patch"]), at[..., 0] >= 0
    axes = at[..., 2], at[..., 1]  # columns, then rows
    for table, i in zip(params["positions"], axes, strict=True):
        x = x + ops.embed(table, jnp.where(real, i, 0))
    segments = jnp.where(real, 0, -1)
    batch = ops.Packed(jnp.broadcast_to(jnp.arange(x.shape[1]), segments.shape), segments, single=True)
    rots = [ops.rotation(ops.Rope(cfg.head_dim // 2, cfg.theta), replace(batch, positions=i)) for i in axes]
    turn = lambda x: jnp.concatenate([ops.rope(h, rot) for h, rot in zip(jnp.split(x, 2, -1), rots, strict=True)], -1)
    norm, act = lambda x, w: ops.rms_norm(x, w, cfg.norm_eps), ops.ACTIVATIONS[cfg.act]

    def block(x, carry, p, layer):
        h = norm(x, p["attn_norm"])
        q, k, v = (_linear("npd,hkd->nphk", h, p, i) for i in "qkv")
        q, k, v = turn(norm(q, p["q_norm"])), turn(norm(k, p["k_norm"])), norm(v, None)
        a, carry = ops.attend(batch, carry, layer, q, k, v, mask=ops.Mask(1.0, causal=False))
        x = x + norm(_linear("nphk,dhk->npd", a, p, "o"), p["attn_post_norm"])
        h = norm(x, p["mlp_norm"])
        if cfg.clipped:
            gate, up = (_linear("npd,fd->npf", h, p, i) for i in ("gate", "up"))
            return x + norm(_linear("npf,df->npd", act(gate) * up, p, "down"), p["mlp_post_norm"]), carry
        return x + norm(ops.glu(h, p, act), p["mlp_post_norm"]), carry

    return sight.states_at(block, x, params["layers"], places)[1]


def _linear(subscripts: str, x: Array, p: Any, part: str) -> Array:
    """Apply a linear map; where the file has bounds of its inputs and outputs, which are not learnt, within them."""
    bound = lambda side: jax.lax.stop_gradient(p[f"{part}_{side}"].astype(x.dtype))
    if f"{part}_input_min" not in p:
        return ops.einsum(subscripts, x, p[part])
    y = ops.einsum(subscripts, jnp.clip(x, bound("input_min"), bound("input_max")), p[part])
    return jnp.clip(y, bound("output_min"), bound("output_max"))


def spec(cfg: Config) -> dict:
    """Declare every array: the language model's at the top, the tower's below "vision", and the projector."""
    inside = lambda p: p.renamed(lambda name: name.replace("model.", "model.language_model.", 1))
    project = builders.matrix("model.embed_vision.embedding_projection.weight", ("channels", cfg.vision.embed),
                              ("embed", cfg.embed))  # fmt: skip
    text = jax.tree.map(inside, gemma4_text.spec(cfg.text))
    return text | {"vision": tower(cfg.vision, "model.vision_tower."), "projector": {"out": project}}


def rename(name: str, cfg: Config) -> str | None:
    """Leave out what the language model does, and what hears."""
    if name.startswith(HEARS):
        return None
    inner = gemma4_text.rename(name.replace("model.language_model.", "model.", 1), cfg.text)
    return None if inner is None or (cfg.tied and name.startswith("lm_head.")) else name


def encode(params: Any, patches: ops.Patches, cfg: Config) -> Float[Array, "*rows entries D"]:
    """Compute what stands in the place of tokens: an entry of each square of patches, which stand one after the other."""
    (x,), p, v = states(params["vision"], patches, cfg.vision, (-1,)), params["vision"], cfg.vision
    dtype, x = x.dtype, x.reshape(len(x), -1, v.side**2, x.shape[-1]).astype(jnp.float32).mean(2) * v.embed**0.5
    x = (x - p["mean"].astype(jnp.float32)) * p["scale"].astype(jnp.float32) if v.standard else x
    x = ops.rms_norm(x.astype(dtype), None, v.norm_eps)
    return sight.entries(ops.einsum("npc,dc->npd", x, params["projector"]["out"]), patches.values.shape[:-2])


hidden = builders.hidden("attention", "router", encode=encode, ahead=lambda cfg: cfg.text.looks is not None)(sight.walk)
state_spec, head = sight.state_spec, sight.head
forward = builders.forward(hidden, head)
