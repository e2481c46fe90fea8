"""Mamba (arXiv:2312.00752): a stack of selective scans, each with its own decay for every channel and state."""

import math

import jax
import jax.numpy as jnp

from fdel import ops
from fdel.models import builders, config, mamba2, sublayers
from fdel.models.mamba2 import rename
from fdel.params.spec import Param

MODEL_TYPE, ARCHITECTURE = "mamba", "MambaForCausalLM"
__all__ = ["ARCHITECTURE", "MODEL_TYPE", "Config", "forward", "head", "hidden", "rename", "spec", "state_spec"]


def rank(d: dict) -> int:
    """Read the rank of the time steps' projection, "auto" in the first files."""
    value = d.get("time_step_rank", "auto")
    return math.ceil(d["hidden_size"] / 16) if value == "auto" else int(value)


@config.config
class Config(mamba2.Recurrent):
    """Sizes and constants."""

    DEFAULTS = dict(vocab=50280, embed=768, layers=32, state=16, tied=True)
    ONLY = {
        **{f"time_step_{i}": config.ANY for i in ("min", "max", "floor", "scale", "init_scheme")},
        **dict.fromkeys("use_mambapy use_associative_scan fused_add_norm pad_vocab_size_multiple".split(), config.ANY),
        **dict.fromkeys(("intermediate_size", "d_inner"), lambda c: c.inner),
        "d_model": lambda c: c.embed, "n_layer": lambda c: c.layers,
    }  # fmt: skip
    expand: int = config.hf("expand", 2)
    latent: int = config.computed(rank, lambda v: {"time_step_rank": v})
    mixer_eps: float | None = None  # of norms without weights inside the mixer, which Falcon Mamba has

    inner = property(lambda self: self.expand * self.embed)  # channels of the mixer


def convolution(cfg: Config, name: str) -> Param:
    """Declare the convolution of a mixer."""
    return builders.conv(name + "conv1d.weight", cfg.kernel, "inner", (cfg.inner,))


def spec(cfg: Config) -> dict:
    """Declare every array; the file's in_proj holds x and z one below the other, its x_proj dt, B and C."""
    name = "backbone.layers.{layers}."
    mixer, inner, embed = name + "mixer.", ("inner", cfg.inner), ("embed", cfg.embed)
    state = ("state", (cfg.state,))
    layer = {
        "norm": builders.norm(name + "norm.weight", cfg.embed),
        **builders.fused(mixer + "in_proj.weight", embed, x=("inner", (cfg.inner,)), z=("inner", (cfg.inner,))),
        "conv": convolution(cfg, mixer),
        **builders.fused(mixer + "x_proj.weight", inner, dt=("latent", (cfg.latent,)), b=state, c=state),
        "step": builders.matrix(mixer + "dt_proj.weight", ("latent", cfg.latent), inner),
        "step_bias": Param("inner", (cfg.inner,), builders.step_init, mixer + "dt_proj.bias"),
        "decay": Param("inner state", (cfg.inner, cfg.state), builders.decay_init, mixer + "A_log", dtype="float32"),
        "skip": Param("inner", (cfg.inner,), builders.ones, mixer + "D", dtype="float32"),
        "out": builders.matrix(mixer + "out_proj.weight", inner, embed),
    }
    if cfg.bias:
        sides = {side: ("inner", (cfg.inner,)) for side in ("x_bias", "z_bias")}
        layer |= builders.fused(mixer + "in_proj.bias", ("", 0), **sides)
        layer["out_bias"] = builders.bias(mixer + "out_proj.bias", cfg.embed)
    if cfg.conv_bias:
        layer["conv_bias"] = builders.bias(mixer + "conv1d.bias", *reversed(inner))
    return builders.decoder(cfg, layer, "backbone.embeddings", "backbone.norm_f")


def state_spec(cfg: Config, *, pages: int = 0, page: int = 64, rows: int) -> ops.State:
    """Declare what serving must remember: convolution inputs and mixer state of `rows` sequences."""
    ssm = cfg.inner, cfg.state
    return ops.State(slots=builders.slots(cfg.layers, rows, ssm, "inner state", convolution(cfg, "")))


@builders.hidden()
def hidden(params, tokens, cfg: Config, batch: ops.Batch, carry: ops.Carry, remat: str | None):
    """Compute the final normalised hidden states, [... T embed]; called as `protocol.Family` says."""
    act, eps = ops.ACTIVATIONS[cfg.act], cfg.mixer_eps

    def block(x, carry, p, layer):
        h = ops.rms_norm(x, p["norm"], cfg.norm_eps).astype(p["norm"].dtype)
        u, z = (ops.linear("...d,id->...i", h, p[i], p.get(i + "_bias")) for i in "xz")
        u, carry = ops.causal_conv(batch, carry, layer, u, p["conv"], p.get("conv_bias"))
        u = act(u)
        dt, b, c = (ops.einsum("...i,si->...s", u, p[i]) for i in ("dt", "b", "c"))
        if eps is not None:
            dt, b, c = (ops.rms_norm(y, None, eps) for y in (dt, b, c))
        dt = ops.einsum("...r,ir->...i", dt, p["step"], out_dtype=jnp.float32) + p["step_bias"].astype(jnp.float32)
        y, carry = ops.selective_scan(
            batch, carry, layer, u, jax.nn.softplus(dt), -jnp.exp(p["decay"].astype(jnp.float32)), b, c, d=p["skip"]
        )
        return x + ops.linear("...i,di->...d", y * jax.nn.silu(z), p["out"], p.get("out_bias")), carry

    norm = lambda x: ops.rms_norm(x, params["norm"], cfg.norm_eps).astype(params["norm"].dtype)
    dtype = jnp.float32 if cfg.float32_residual else None
    return sublayers.walk(params, tokens, cfg, block, carry, remat, norm, dtype=dtype)


head, forward = builders.head, builders.forward(hidden)
