"""Kimi Linear (arXiv:2510.26692): delta-rule layers with a decay per channel, latent attention without positions, MoE."""

import re
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from fdel import ops
from fdel.models import builders, config, deepseek_v3, sublayers
from fdel.models.keys import mapping
from fdel.models.qwen3_next import FULL, LINEAR
from fdel.params.hf_layout import with_modules
from fdel.params.spec import Param

MODEL_TYPE, ARCHITECTURE = "kimi_linear", "KimiLinearForCausalLM"
DENSE, SPARSE = "dense", "sparse"
MODULES = {
    r"block_sparse_moe\.": "mlp.",
    r"\.(?=f_[ab]_proj\.)": ".forget_gate.",
}  # what transformers' modules are called
# The hub's keys, and what transformers calls them.
PUBLISHED = {
    "num_experts": "num_local_experts", "num_experts_per_token": "num_experts_per_tok", "moe_renormalize": "norm_topk_prob",
    "num_expert_group": "n_group", "num_shared_experts": "n_shared_experts",
    "model_max_length": "max_position_embeddings",
}  # fmt: skip
NESTED = {
    "head_dim": "linear_head_dim", "num_heads": "linear_num_heads", "short_conv_kernel_size": "linear_conv_kernel_dim",
}  # fmt: skip


def kinds(d: dict) -> tuple[tuple[str, str], ...]:
    """Read (mixer, feed-forward) of each layer; the hub's files number the mixers from 1."""
    n, dense, full = d["num_hidden_layers"], d.get("first_k_dense_replace", 1), d.get("full_attn_layers")
    others = d.get("kda_layers")
    attends = (lambda i: i + 1 in full) if full is not None and others is not None else (lambda i: i and i % 4 == 0)
    mixers = config.layer_types(d, [FULL if attends(i) else LINEAR for i in range(n)], (LINEAR, FULL))
    ffns = [DENSE if i < dense else SPARSE for i in range(n)]
    return tuple(zip(mixers, config.layer_types(d, ffns, (DENSE, SPARSE), "mlp_layer_types"), strict=True))


@config.config
class Config(deepseek_v3.Config):
    """Sizes and constants: attention and experts are DeepSeek-V3's."""

    DEFAULTS = dict(
        vocab=163840, embed=2304, ffn=9216, layers=27, heads=32, norm_eps=1e-5, max_positions=1048576, moe_ffn=1024,
        groups=1, topk_groups=1, route_scale=2.446, q_latent=None,
    )  # fmt: skip
    ONLY = deepseek_v3.Config.ONLY | dict(
        moe_router_activation_func="sigmoid", mla_use_nope=True, use_grouped_topk=config.ANY, rope_theta=config.ANY,
        rope_parameters=config.ANY, num_nextn_predict_layers=0, tie_word_embeddings=False,
    )  # fmt: skip
    experts: int = config.hf("num_local_experts", 256)
    key_dim: int = config.hf("linear_head_dim", 128)
    key_heads: int = config.hf("linear_num_heads", 32)
    kernel: int = config.hf("linear_conv_kernel_dim", 4)
    kinds: Any = config.computed(
        kinds, lambda k: {"layer_types": [m for m, _ in k], "mlp_layer_types": [f for _, f in k]}, default=()
    )
    rope: ops.Rope = config.computed(lambda d: None, lambda r: {}, default=None)  # there are no positions
    dense_layers: int = config.computed(lambda d: 0, lambda n: {}, default=0)  # see kinds
    predictors: int = config.computed(lambda d: 0, lambda n: {}, default=0)
    interleaved: bool = config.computed(lambda d: False, lambda n: {}, default=False)

    scale = property(lambda self: (self.nope_dim + self.rope_dim) ** -0.5)  # the factor on attention scores

    @classmethod
    def from_hf(cls, d: Mapping[str, Any]) -> "Config":
        """Read the dict of a config.json, in the hub's spelling or in that of transformers."""
        if isinstance(d, Mapping) and "linear_attn_config" in d:
            own = mapping("linear_attn_config", d["linear_attn_config"])
            d = {k: v for k, v in d.items() if k != "linear_attn_config"} | {
                NESTED.get(k, k): v for k, v in own.items()
            }
        if isinstance(d, Mapping):
            d = {PUBLISHED.get(k, k): v for k, v in d.items()}
        return config.from_hf(cls, d)


def convolutions(cfg: Config, name: str) -> dict[str, Param]:
    """Declare the convolutions of queries, keys and values."""
    heads = cfg.key_heads, cfg.key_dim
    return {i: builders.conv(f"{name}{i}_conv1d.weight", cfg.kernel, "heads head_dim", heads) for i in "qkv"}


def delta_spec(cfg: Config, name: str) -> dict:
    """Declare a delta-rule mixer; decay and output gate pass through a narrow layer."""
    n, h, embed, narrow = cfg.key_heads, cfg.key_dim, ("embed", cfg.embed), ("latent", cfg.key_dim)
    wide = lambda part, a: builders.heads_out(f"{name}{part}_proj.weight", ("heads", n), h, a)
    return {
        **{i: wide(i, embed) for i in "qkv"},
        "conv": convolutions(cfg, name),
        "decay_a": builders.matrix(name + "f_a_proj.weight", embed, narrow), "decay": wide("f_b", narrow),
        "rate": Param("heads", (n,), builders.decay_init, name + "A_log", "1 1 heads 1", dtype="float32"),
        "step": Param("heads head_dim", (n, h), builders.step_init, name + "dt_bias", "(heads head_dim)", dtype="float32"),
        "beta": builders.matrix(name + "b_proj.weight", embed, ("heads", n)),
        "gate_a": builders.matrix(name + "g_a_proj.weight", embed, narrow), "gate_b": wide("g_b", narrow),
        "mixer_norm": builders.norm(name + "o_norm.weight", h, "head_dim"),
        "o": builders.heads_in(name + "o_proj.weight", n, h, cfg.embed),
    }  # fmt: skip


def spec(cfg: Config) -> dict:
    """Declare every array, under the hub's names."""
    name = "model.layers.{layers}."
    mixers = {LINEAR: delta_spec, FULL: deepseek_v3.attention_spec}

    def layer(kind):
        dense = kind[1] == DENSE
        moe = deepseek_v3.moe_spec(cfg, name + "block_sparse_moe.", ("w1", "w3", "w2"))
        return {
            **builders.prenorm(name, cfg.embed),
            "mixer": mixers[kind[0]](cfg, name + "self_attn."),
            "mlp": builders.glu(name + "mlp.", cfg.embed, cfg.ffn) if dense else moe,
        }

    return with_modules(builders.decoder(cfg, layer), MODULES)


def rename(name: str, cfg: Config) -> str:
    """Map file names to spec names: transformers writes dense layers as if they were experts, the hub does not."""
    return re.sub(r"(layers\.\d+\.)block_sparse_moe\.(gate|up|down)_proj\.", r"\1mlp.\2_proj.", name)


def state_spec(cfg: Config, *, pages: int, page: int = 64, rows: int) -> ops.State:
    """Declare what serving must remember: latents of the layers that attend, recurrent slots of the others."""
    full = sum(mixer == FULL for mixer, _ in cfg.kinds)
    latents = builders.latent_pages(full, cfg.latent + cfg.rope_dim, pages=pages, page=page)
    ssm, conv = (cfg.key_heads, cfg.key_dim, cfg.key_dim), convolutions(cfg, "")
    return ops.State(latents, builders.slots(cfg.layers - full, rows, ssm, conv=conv))


def delta(h, carry, p, layer, cfg: Config, batch):
    """Mix by the delta rule: short convolution, unit-length q and k, a decay for each channel of the keys."""
    mixed = {i: ops.einsum("...d,nhd->...nh", h, p[i]) for i in "qkv"}
    mixed, carry = ops.causal_conv(batch, carry, layer, mixed, p["conv"])
    q, k, v = (ops.ACTIVATIONS[cfg.act](mixed[i]) for i in "qkv")
    twice = lambda a, b: ops.einsum("...c,nhc->...nh", ops.einsum("...d,cd->...c", h, p[a]), p[b])
    g = -jnp.exp(p["rate"])[:, None] * jax.nn.softplus(twice("decay_a", "decay").astype(jnp.float32) + p["step"])
    beta = jax.nn.sigmoid(ops.einsum("...d,nd->...n", h, p["beta"]))
    q, k = ops.l2norm(q) * cfg.key_dim**-0.5, ops.l2norm(k)
    o, carry = ops.gated_delta_rule(batch, carry, layer, q, k, v, g, beta)
    o = ops.rms_norm(o, p["mixer_norm"], cfg.norm_eps) * jax.nn.sigmoid(twice("gate_a", "gate_b"))
    return ops.einsum("...nh,dnh->...d", o, p["o"]), carry


@builders.hidden("attention", "router")
def hidden(params, tokens, cfg: Config, batch: ops.Batch, carry: ops.Carry, remat: str | None):
    """Compute the final normalised hidden states, [... T embed]; called as `protocol.Family` says."""
    mask = ops.Mask(cfg.scale)

    def block(kind):
        def apply(x, carry, p, layer):
            h = ops.rms_norm(x, p["attn_norm"], cfg.norm_eps)
            place = ops.pool_index(tuple(m for m, _ in cfg.kinds), {kind[0]}, layer)
            if kind[0] == FULL:
                a, carry = deepseek_v3.attention(h, carry, p["mixer"], place, cfg, batch, None, mask)
            else:
                a, carry = delta(h, carry, p["mixer"], place, cfg, batch)
            h = ops.rms_norm(x + a, p["mlp_norm"], cfg.norm_eps)
            y, carry = sublayers.sigmoid_experts(h, carry, p["mlp"], cfg, batch)
            return x + a + y, carry

        return apply

    return sublayers.walk(params, tokens, cfg, {kind: block(kind) for kind in sorted(set(cfg.kinds))}, carry, remat)


head, forward = builders.head, builders.forward(hidden)
