"""Gemma 4, text (Google, 2026): Gemma 3's sandwich, a wider head on global layers, inputs per layer, shared keys, MoE."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from fdel import ops
from fdel.models import builders, config
from fdel.models.config import FULL, SLIDING
from fdel.models.keys import mapping
from fdel.params.spec import Param, ones

MODEL_TYPE, ARCHITECTURE = "gemma4_text", "Gemma4ForCausalLM"
OWN, SHARED = "own", "shared"  # keys and values: of this layer, or those of the last layer of its type that has some
ROPES = {
    SLIDING: {"rope_type": "default", "rope_theta": 1e4},
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
}


def kinds(d: dict) -> tuple[tuple[str, str], ...]:
    """Read (attention, whose keys) of each layer; the last is always full, and the last num_kv_shared_layers share."""
    n, shared = d["num_hidden_layers"], d.get("num_kv_shared_layers", 0)
    types = config.layer_types(d, [FULL if (i + 1) % 6 == 0 else SLIDING for i in range(n)], (FULL, SLIDING))
    types = (*types[:-1], FULL)
    if shared and set(types[: n - shared]) != set(types):
        found = f"found {shared}, a type of layer has no keys then"
        raise config.ConfigError(f"config field 'num_kv_shared_layers': {found}")
    return tuple((t, SHARED if i >= n - shared else OWN) for i, t in enumerate(types))


def rope(d: dict, kind: str) -> ops.Rope:
    """Read the rotary parameters of a type of layer."""
    dim = d["head_dim"] if kind == SLIDING else d["global_head_dim"]
    return config.rope(d | {"rope_parameters": d.get("rope_parameters") or ROPES}, dim, layer_type=kind)


@config.config
class Config(config.Decoder):
    """Sizes and constants. `experts`, `top_k` and `moe_ffn` are of a branch beside the feed-forward, None without one."""

    DEFAULTS = dict(
        vocab=262144, embed=2304, ffn=9216, layers=30, heads=8, kv_heads=4, head_dim=256, max_positions=131072, tied=True,
    )  # fmt: skip
    act: str = config.act("hidden_activation", "gelu_pytorch_tanh")
    softcap: float | None = config.hf("final_logit_softcapping", None)
    window: int = config.hf("sliding_window", 512)
    full_head_dim: int = config.hf("global_head_dim", 512)
    full_kv_heads: int | None = config.hf("num_global_key_value_heads", None)
    shared_kv: bool = config.hf("attention_k_eq_v", False)  # values of full layers are their keys, before norm and rope
    attn_bias: bool = config.hf("attention_bias", False)
    wide: bool = config.hf("use_double_wide_mlp", False)  # in layers that share keys
    input_vocab: int = config.hf("vocab_size_per_layer_input", 262144)
    input_dim: int = config.hf("hidden_size_per_layer_input", 256)
    moe: bool = config.hf("enable_moe_block", False)
    experts: int | None = config.hf("num_experts", None)
    top_k: int | None = config.hf("top_k_experts", None)
    moe_ffn: int | None = config.hf("moe_intermediate_size", None)
    looks: str | None = config.hf(
        "use_bidirectional_attention", None, choices=(None, "vision")
    )  # of images, in windows
    pad: int = config.computed(
        lambda d: d.get("pad_token_id") or 0, lambda v: {"pad_token_id": v}
    )  # that media count as
    kinds: tuple[tuple[str, str], ...] = config.computed(
        kinds, lambda k: {"layer_types": [t for t, _ in k], "num_kv_shared_layers": sum(s == SHARED for _, s in k)}
    )
    rope: Any = config.ropes(lambda d: (rope(d, SLIDING), rope(d, FULL)))

    @classmethod
    def from_hf(cls, d: Mapping[str, Any]) -> "Config":
        """Read the dict of a config.json, whose per_layer_config, if it has one, says how full layers differ."""
        if isinstance(d, Mapping) and d.get("per_layer_config") is not None:
            layers = mapping("per_layer_config", d["per_layer_config"]).values()
            other = [mapping("per_layer_config", x) for x in layers]
            if any(x != other[0] or not x.keys() <= {"head_dim", "num_key_value_heads"} for x in other):
                raise config.ConfigError("config field 'per_layer_config': full layers that differ are not understood")
            own = {"head_dim": d.get("head_dim", 256)} | dict(*other[:1])
            full = {"global_head_dim": own["head_dim"], "num_global_key_value_heads": own.get("num_key_value_heads")}
            d = {k: v for k, v in d.items() if k != "per_layer_config"} | full
        cfg = config.from_hf(cls, d)
        sizes = (cfg.experts, cfg.top_k, cfg.moe_ffn) if cfg.moe else (1,)
        if not all(sizes) or cfg.heads % cfg.attention(FULL).kv_heads:
            found = f"found experts, top_k_experts and their size = {sizes}, {cfg.full_kv_heads} global heads of keys"
            raise config.ConfigError(f"config fields: {found}; expected what fits {cfg.heads} heads and each other")
        return cfg

    def attention(self, kind: str) -> "Config":
        """Give the Config with the heads of a type of layer."""
        if kind == SLIDING:
            return self
        kv_heads = self.full_kv_heads if self.shared_kv and self.full_kv_heads else self.kv_heads
        return replace(self, head_dim=self.full_head_dim, kv_heads=kv_heads)


def attention_spec(cfg: Config, kind: tuple[str, str], name: str) -> dict:
    """Declare the attention of a layer; some have neither keys nor values of their own, some no values."""
    own = cfg.attention(kind[0])
    tree = builders.gqa(name, own, biased=cfg.attn_bias) | builders.qk_norm(name, own)
    lacks = "kv" if kind[1] == SHARED else "v" if cfg.shared_kv and kind[0] == FULL else ""
    return {k: p for k, p in tree.items() if k[0] not in lacks}


def moe_spec(cfg: Any, name: str) -> dict:
    """Declare the experts beside the feed-forward; the file holds gate and up of an expert in one tensor."""
    d, n = cfg.embed, cfg.experts
    norm = lambda part: builders.norm(f"{name}{part}.weight", d)
    return {
        "router": builders.matrix(name + "router.proj.weight", ("embed", d), ("experts", n)),
        "router_scale": builders.norm(name + "router.scale", d),
        "expert_scale": builders.norm(name + "router.per_expert_scale", n, "experts"),
        "experts": builders.fused_experts(name + "experts.", d, cfg.moe_ffn, n),
        "moe_norm": norm("pre_feedforward_layernorm_2"), "moe_post_norm": norm("post_feedforward_layernorm_2"),
        "dense_post_norm": norm("post_feedforward_layernorm_1"),
    }  # fmt: skip


def spec(cfg: Config) -> dict:
    """Declare every array."""
    name, embed, inputs = "model.layers.{layers}.", ("embed", cfg.embed), ("latent", cfg.input_dim)
    norm = lambda part: builders.norm(f"{name}{part}.weight", cfg.embed)
    more = moe_spec(cfg, name) if cfg.moe else {}
    if cfg.input_dim:
        more |= {
            "input_gate": builders.matrix(name + "per_layer_input_gate.weight", embed, inputs),
            "input_out": builders.matrix(name + "per_layer_projection.weight", inputs, embed),
            "input_norm": norm("post_per_layer_input_norm"),
        }

    layer = lambda kind: more | {
            "attn_norm": norm("input_layernorm"), **attention_spec(cfg, kind, name + "self_attn."),
            "attn_post_norm": norm("post_attention_layernorm"), "mlp_norm": norm("pre_feedforward_layernorm"),
            **builders.glu(name + "mlp.", cfg.embed, cfg.ffn * (2 if cfg.wide and kind[1] == SHARED else 1)),
            "mlp_post_norm": norm("post_feedforward_layernorm"), "scale": Param("", (), ones, name + "layer_scalar", "1"),
        }  # fmt: skip

    tree, every = builders.decoder(cfg, layer), ("latent", cfg.layers * cfg.input_dim)
    if not cfg.input_dim:
        return tree
    return tree | {
        "input_embed": builders.matrix("model.embed_tokens_per_layer.weight", every, ("vocab", cfg.input_vocab)),
        "input_project": builders.matrix("model.per_layer_model_projection.weight", embed, every),
        "inputs_norm": builders.norm("model.per_layer_projection_norm.weight", cfg.input_dim, "latent"),
    }


def rename(name: str, cfg: Config) -> str | None:
    """Leave out keys and values of layers that use those of another; published files have them."""
    layer, _, part = name.removeprefix("model.layers.").partition(".")
    idle = layer.isdecimal() and int(layer) >= cfg.layers - sum(own == SHARED for _, own in cfg.kinds)
    return None if idle and part.startswith(("self_attn.k_", "self_attn.v_")) else name


def state_spec(cfg: Config, *, pages: int, page: int = 64, rows: int = 0) -> ops.State:
    """Declare what serving must remember: pages of the sliding layers and of the full ones, whose heads differ."""
    pool = lambda c, n: builders.kv_pages(n, c.kv_heads, c.head_dim, pages=pages, page=page)
    return ops.State(tuple(pool(cfg.attention(kind), cfg.kinds.count((kind, OWN))) for kind in (SLIDING, FULL)))


def attention(h, carry, p, layer, kind, cfg: Config, batch, rot, mask):
    """Attend with the layer's own keys and values, or with those of the last layer that has some."""
    norm = lambda x, scale: ops.rms_norm(x, scale, cfg.norm_eps)
    project = lambda i: ops.linear("...d,nhd->...nh", h, p[i], p.get(i + "_bias"))
    q, pool = ops.rope(norm(project("q"), p["q_norm"]), rot), (SLIDING, FULL).index(kind[0])
    heads = cfg.attention(kind[0]).kv_heads
    place = ops.pool_index(cfg.kinds, {(kind[0], OWN)}, layer)
    if kind[1] == SHARED:
        k, v = carry.kept[kind[0]] if carry.kept else (None, None)
        place = cfg.kinds.count((kind[0], OWN)) - 1
    else:
        k = project("k")
        v = norm(project("v") if "v" in p else k, None)
        k = ops.rope(norm(k, p["k_norm"]), rot)
        carry = replace(carry, kept=carry.kept and carry.kept | {kind[0]: (k, v)})
    a, carry = ops.attend(batch, carry, ops.Place(layer, pool, place, heads), q, k, v, mask=mask)
    return ops.linear("...nh,dnh->...d", a, p["o"], p.get("o_bias")), carry


def experts(x, carry, p, cfg: Any, batch):
    """Apply the routed experts; the router reads the stream, normed without weights."""
    h, carry = ops.jittered(ops.rms_norm(x, None, cfg.norm_eps) * p["router_scale"] * cfg.embed**-0.5, carry)
    logits = ops.einsum("...d,ed->...e", h, p["router"], out_dtype=jnp.float32)
    weights, chosen = ops.route_softmax(logits, cfg.top_k, normalize=True)
    carry = ops.watch_router(batch, carry, logits, jax.nn.softmax(logits), chosen)
    weights = weights * p["expert_scale"][chosen]
    chosen, carry = ops.limited(batch, carry, chosen, cfg.experts)
    h = ops.rms_norm(x, p["moe_norm"], cfg.norm_eps)
    return ops.moe(h, p["experts"], weights, chosen, ops.ACTIVATIONS[cfg.act]), carry


def layer_inputs(params, x, tokens, cfg: Config, media: ops.Media | None):
    """Give what each layer adds, [... layers channels]: of the token itself, and of its embedding."""
    every = lambda y: y.reshape(*tokens.shape, cfg.layers, cfg.input_dim)
    own = ops.embed(params["input_embed"], tokens) * jnp.asarray(cfg.input_dim**0.5, x.dtype)
    if media is not None:  # nothing is learnt there: torch has no gradient of padding
        own = jnp.where(media.index[..., None] >= 0, jax.lax.stop_gradient(own), own)
    project = ops.einsum("...d,cd->...c", x, params["input_project"]) * cfg.embed**-0.5
    return (ops.rms_norm(every(project), params["inputs_norm"], cfg.norm_eps) + every(own)) * 2**-0.5


@builders.hidden("attention", "router")
def hidden(params, tokens, cfg: Config, batch: ops.Batch, carry: ops.Carry, remat: str | None):
    """Compute the final normalised hidden states, [... T embed]; called as `protocol.Family` says."""
    norm, act = lambda x, w: ops.rms_norm(x, w, cfg.norm_eps), ops.ACTIVATIONS[cfg.act]
    if carry.media is not None:
        tokens = jnp.where(carry.media.index >= 0, cfg.pad, tokens)
    x = ops.embed(params["embed"], tokens)
    x = x * jnp.asarray(cfg.embed**0.5, x.dtype)  # the constant is rounded to the weights' dtype, as in the original
    x = ops.place(x, carry.media)
    inputs = layer_inputs(params, x, tokens, cfg, carry.media) if cfg.input_dim else None

    def block(kind):
        seen = batch if kind[0] == SLIDING else replace(batch, ahead=None)
        rot = ops.rotation(cfg.rope[kind[0] == FULL], batch)
        mask = ops.Mask(1.0, window=cfg.window if kind[0] == SLIDING else None)

        def apply(x, carry, p, layer):
            a, carry = attention(norm(x, p["attn_norm"]), carry, p, layer, kind, cfg, seen, rot, mask)
            x = x + norm(a, p["attn_post_norm"])
            h = ops.glu(norm(x, p["mlp_norm"]), p, act)
            if cfg.moe:
                y, carry = experts(x, carry, p, cfg, batch)
                h = norm(h, p["dense_post_norm"]) + norm(y, p["moe_post_norm"])
            x = x + norm(h, p["mlp_post_norm"])
            if inputs is not None:
                h = act(ops.einsum("...d,cd->...c", x, p["input_gate"])) * inputs[..., layer, :]
                x = x + norm(ops.einsum("...c,dc->...d", h, p["input_out"]), p["input_norm"])
            return x * p["scale"], carry

        return apply

    if isinstance(batch, ops.Packed) and cfg.kinds[-1][1] == SHARED:
        shape = lambda kind: (*tokens.shape, (c := cfg.attention(kind)).kv_heads, c.head_dim)
        carry = replace(carry, kept={kind: (jnp.zeros(shape(kind), x.dtype),) * 2 for kind in (SLIDING, FULL)})
    blocks = {kind: block(kind) for kind in sorted(set(cfg.kinds))}
    x, carry = ops.layers(blocks, x, carry, params["layers"], cfg.kinds, remat=remat)
    return norm(x, params["norm"]), carry


head, forward = builders.head, builders.forward(hidden)
