"""MiniMax-Text-01 (arXiv:2501.08313): lightning attention between softmax layers, and a stream that is normed itself."""

import jax
import jax.numpy as jnp
import numpy as np

from fdel import ops
from fdel.models import builders, config, mixtral, sublayers
from fdel.models.qwen3_next import FULL, LINEAR
from fdel.params.hf_layout import with_modules
from fdel.params.spec import Param, normal, ones, parts

MODEL_TYPE, ARCHITECTURE = "minimax", "MiniMaxForCausalLM"
DERIVED = (".slope_rate", ".query_decay", ".key_decay", ".diagonal_decay")  # tensors that follow from the config
LIGHTNING_EPS = 1e-6  # of the norm over all heads of a lightning layer, whatever rms_norm_eps is


def kinds(d: dict) -> tuple[str, ...]:
    """Read the mixer of each layer: every second one is lightning attention unless layer_types says otherwise."""
    default = [LINEAR if i % 2 else FULL for i in range(d["num_hidden_layers"])]
    return config.layer_types(d, default, (LINEAR, FULL))


def factors(part: str):
    """Declare the factors (of the normed stream, of what a sublayer adds to it)."""
    keys = f"{part}_alpha_factor", f"{part}_beta_factor"
    return config.computed(
        lambda d: tuple(float(d.get(k, 1.0)) for k in keys), lambda v: dict(zip(keys, v, strict=True))
    )  # fmt: skip


@config.config
class Config(mixtral.Config):
    """Sizes and constants, Mixtral's first."""

    ONLY = {"block_size": config.ANY}
    kinds: tuple[str, ...] = config.computed(kinds, lambda k: {"layer_types": list(k)})
    full: tuple[float, float] = factors("full_attn")
    linear: tuple[float, float] = factors("linear_attn")
    mlp: tuple[float, float] = factors("mlp")

    def decays(self) -> np.ndarray:
        """Compute the log decay of each layer and head: slopes of ALiBi, which fade from layer to layer."""
        slopes = 2.0 ** (-8 * (np.arange(self.heads) + 1) / self.heads)
        return -np.outer(1 - np.arange(self.layers) / (self.layers - 1 + 1e-5) + 1e-5, slopes)


def lightning_spec(cfg: Config, name: str) -> dict:
    """Declare lightning attention; the file holds query, key and value of each head side by side."""
    n, h, heads = cfg.heads, cfg.head_dim, ("heads", cfg.heads)
    axes, shape, fused = "heads head_dim embed", (n, h, cfg.embed), name + "qkv_proj.weight"
    inputs = {
        i: Param(axes, shape, normal(0.02), fused, "(heads [head_dim]) embed", cut)
        for i, cut in parts(q=h, k=h, v=h).items()
    }
    return inputs | {
        "mixer_norm": Param("heads head_dim", (n, h), ones, name + "norm.weight", "(heads head_dim)"),
        "gate": builders.heads_out(name + "output_gate.weight", heads, h, ("embed", cfg.embed)),
        "o": builders.heads_in(name + "out_proj.weight", n, h, cfg.embed),
    }


def spec(cfg: Config) -> dict:
    """Declare every array."""
    name = "model.layers.{layers}."
    attn = name + "self_attn."
    mixers = {LINEAR: lightning_spec(cfg, attn), FULL: builders.gqa(attn, cfg)}

    layer = lambda kind: {
        **builders.prenorm(name, cfg.embed),
        **mixers[kind],
        **builders.moe(name + "block_sparse_moe.", cfg.embed, cfg.ffn, cfg.experts, ("w1", "w3", "w2")),
    }

    return with_modules(builders.decoder(cfg, layer), mixtral.MODULES)


def rename(name: str, cfg: Config) -> str | None:
    """Leave out what files hold although it follows from the config."""
    return None if name.endswith(DERIVED) else name


def state_spec(cfg: Config, *, pages: int, page: int = 64, rows: int) -> ops.State:
    """Declare what serving must remember: pages of the softmax layers, sums of keys times values of the lightning ones."""
    full = cfg.kinds.count(FULL)
    kv = builders.kv_pages(full, cfg.kv_heads, cfg.head_dim, pages=pages, page=page)
    ssm = (cfg.heads, cfg.head_dim, cfg.head_dim)
    return ops.State(kv, builders.slots(cfg.layers - full, rows, ssm))


def lightning(h, carry, p, layer, decay, cfg: Config, batch):
    """Attend without softmax, earlier tokens fading: the recurrence of `ops.ssd` with steps of 1."""
    q, k, v = (ops.ACTIVATIONS[cfg.act](ops.einsum("...d,nhd->...nh", h, p[i])) for i in "qkv")
    y, carry = ops.ssd(batch, carry, layer, v, jnp.ones(v.shape[:-1], jnp.float32), decay, k, q)
    y = ops.rms_norm(y.reshape(*h.shape[:-1], -1), p["mixer_norm"].reshape(-1), LIGHTNING_EPS).reshape(y.shape)
    y = y * jax.nn.sigmoid(ops.einsum("...d,nhd->...nh", h, p["gate"]))
    return ops.einsum("...nh,dnh->...d", y, p["o"]), carry


@builders.hidden("attention", "router")
def hidden(params, tokens, cfg: Config, batch: ops.Batch, carry: ops.Carry, remat: str | None):
    """Compute the final normalised hidden states, [... T embed]; called as `protocol.Family` says."""
    rot, mask = ops.rotation(cfg.rope, batch), ops.Mask(cfg.head_dim**-0.5, window=cfg.window)
    decays = jnp.asarray(cfg.decays(), jnp.float32)

    def block(kind, factors):
        def apply(x, carry, p, layer):
            h, place = ops.rms_norm(x, p["attn_norm"], cfg.norm_eps), ops.pool_index(cfg.kinds, {kind}, layer)
            if kind == FULL:
                a, carry = sublayers.attention(h, carry, p, place, batch, mask, sublayers.rotate(rot))
            else:
                a, carry = lightning(h, carry, p, place, decays[layer], cfg, batch)
            h = ops.rms_norm(h * factors[0] + a * factors[1], p["mlp_norm"], cfg.norm_eps)
            y, carry = sublayers.softmax_experts(h, carry, p, cfg, batch, normalize=True)
            return h * cfg.mlp[0] + y * cfg.mlp[1], carry

        return apply

    blocks = {FULL: block(FULL, cfg.full), LINEAR: block(LINEAR, cfg.linear)}
    return sublayers.walk(params, tokens, cfg, blocks, carry, remat)


head, forward = builders.head, builders.forward(hidden)
