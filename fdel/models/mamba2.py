"""Mamba-2 (arXiv:2405.21060): a stack of state-space mixers; what serving remembers has a fixed size."""

import math

import jax
import jax.numpy as jnp

from fdel import ops
from fdel.models import builders, config, sublayers
from fdel.params.spec import Param

MODEL_TYPE, ARCHITECTURE = "mamba2", "Mamba2ForCausalLM"


def limits(d: dict) -> tuple[float, float]:
    """Read the range of the time step; JSON has no infinity, so files spell it in words."""
    low, high = d.get("time_step_limit") or (0.0, math.inf)
    number = lambda v: float(v["__float__"] if isinstance(v, dict) else v)
    return number(low), number(high)


@config.config
class Recurrent:
    """The fields that Mamba and Mamba-2 have; `hf(...)` names each one's key in config.json."""

    vocab: int = config.hf("vocab_size", 32768)
    embed: int = config.hf("hidden_size", 4096)
    layers: int = config.hf("num_hidden_layers", 64)
    state: int = config.hf("state_size", 128)
    kernel: int = config.hf("conv_kernel", 4)
    norm_eps: float = config.hf("layer_norm_epsilon", 1e-5)
    act: str = config.act()
    tied: bool = config.hf("tie_word_embeddings", False)
    bias: bool = config.hf("use_bias", False)
    conv_bias: bool = config.hf("use_conv_bias", True)
    float32_residual: bool = config.hf("residual_in_fp32", True)


@config.config
class Config(Recurrent):
    """Sizes and constants."""

    DEFAULTS = {"expand": 2}
    ONLY = {
        **dict.fromkeys(("time_step_rank", "time_step_min", "time_step_max", "time_step_floor"), config.ANY),
        "norm_before_gate": config.ANY, "expand": lambda c: c.inner / c.embed, "intermediate_size": lambda c: c.inner,
    }  # fmt: skip
    heads: int = config.hf("num_heads", 128)
    head_dim: int = config.hf("head_dim", 64)
    groups: int = config.hf("n_groups", 8)
    chunk: int = config.hf("chunk_size", 256)
    limits: tuple[float, float] = config.computed(
        limits, lambda v: {"time_step_limit": [{"__float__": "Infinity"} if x == math.inf else x for x in v]}
    )

    def to_hf(self) -> dict:
        """Write config.json."""
        return config.to_hf(self) | {"expand": self.inner // self.embed}

    inner = property(lambda self: self.heads * self.head_dim)  # channels of the mixer
    # What is convolved: x, and B beside C.
    mixed = property(lambda c: {"x": ("inner", (c.inner,)), "bc": ("channels", (2 * c.groups * c.state,))})


def mixer_spec(cfg: Config, name: str, *, out_bias: bool) -> dict:
    """Declare a mixer; the file's in_proj holds z, x, B, C and dt one below the other."""
    heads = lambda part, init: Param("heads", (cfg.heads,), init, name + part, dtype="float32")
    sides = {"z": ("inner", (cfg.inner,)), **cfg.mixed, "dt": ("heads", (cfg.heads,))}
    tree = {
        **builders.fused(name + "in_proj.weight", ("embed", cfg.embed), **sides),
        "conv": builders.fused_conv(name + "conv1d.weight", cfg.kernel, **cfg.mixed),
        "decay": heads("A_log", builders.decay_init),
        "skip": heads("D", builders.ones),
        "step": heads("dt_bias", builders.step_init),
        "mixer_norm": builders.norm(name + "norm.weight", cfg.inner, "inner"),
        "out": builders.matrix(name + "out_proj.weight", ("inner", cfg.inner), ("embed", cfg.embed)),
    }
    if cfg.bias:
        tree |= builders.fused(name + "in_proj.bias", ("", 0), **{f"{k}_bias": side for k, side in sides.items()})
    if out_bias:
        tree["out_bias"] = builders.bias(name + "out_proj.bias", cfg.embed)
    if cfg.conv_bias:
        tree["conv_bias"] = builders.fused(name + "conv1d.bias", ("", 0), **cfg.mixed)
    return tree


def spec(cfg: Config) -> dict:
    """Declare every array."""
    name = "backbone.layers.{layers}."
    norm = {"norm": builders.norm(name + "norm.weight", cfg.embed)}
    layer = norm | mixer_spec(cfg, name + "mixer.", out_bias=cfg.bias)
    return builders.decoder(cfg, layer, "backbone.embeddings", "backbone.norm_f")


def rename(name: str, cfg: Config) -> str:
    """Map file names to spec names: the first Mamba files call the embedding `embedding`."""
    return name.replace("backbone.embedding.", "backbone.embeddings.")


def mixer_slots(cfg: Config, layers: int, rows: int) -> ops.Slots:
    """Declare what mixers must remember: convolution inputs and state of `rows` sequences."""
    conv = builders.fused_conv("", cfg.kernel, **cfg.mixed)
    return builders.slots(layers, rows, (cfg.heads, cfg.head_dim, cfg.state), conv=conv)


def state_spec(cfg: Config, *, pages: int = 0, page: int = 64, rows: int) -> ops.State:
    """Declare what serving must remember: convolution inputs and mixer state of `rows` sequences."""
    return ops.State(slots=mixer_slots(cfg, cfg.layers, rows))


def mix(h, carry, p, layer, cfg: Config, batch, scales=(1.0, 1.0, 1.0, 1.0), gate_first: bool = True):
    """Apply a mixer to normalised hidden states.

    `scales` multiply z, x, B beside C, and dt: numbers, or one of each channel. The norm, if p has one, is of each group
    of channels, and stands after the gate or before it.
    """
    act, split = ops.ACTIVATIONS[cfg.act], lambda x, *size: x.reshape(*x.shape[:-1], *size)
    project = lambda i, scale: ops.linear("...d,id->...i", h, p[i], p.get(i + "_bias")) * jnp.asarray(scale, h.dtype)
    z, x, bc, dt = map(project, ("z", "x", "bc", "dt"), scales)
    mixed, carry = ops.causal_conv(batch, carry, layer, {"x": x, "bc": bc}, p["conv"], p.get("conv_bias"))
    x, (b, c) = act(mixed["x"]), jnp.split(act(mixed["bc"]), 2, -1)
    dt = jnp.clip(jax.nn.softplus(dt.astype(jnp.float32) + p["step"]), *cfg.limits)
    y, carry = ops.ssd(
        batch, carry, layer, split(x, cfg.heads, cfg.head_dim), dt, -jnp.exp(p["decay"].astype(jnp.float32)),
        split(b, cfg.groups, cfg.state), split(c, cfg.groups, cfg.state), d=p["skip"], chunk=min(cfg.chunk, 256),
    )  # fmt: skip
    y, gate = y.reshape(z.shape).astype(jnp.float32), jax.nn.silu(z.astype(jnp.float32))
    y = y * gate if gate_first else y
    if "mixer_norm" in p:
        y = ops.rms_norm(split(y, cfg.groups, -1), p["mixer_norm"].reshape(cfg.groups, -1), cfg.norm_eps)
    y = y.reshape(z.shape) if gate_first else y.reshape(z.shape) * gate
    return ops.linear("...i,di->...d", y.astype(h.dtype), p["out"], p.get("out_bias")), carry


@builders.hidden()
def hidden(params, tokens, cfg: Config, batch: ops.Batch, carry: ops.Carry, remat: str | None):
    """Compute the final normalised hidden states, [... T embed]; called as `protocol.Family` says."""

    def block(x, carry, p, layer):
        h = ops.rms_norm(x, p["norm"], cfg.norm_eps).astype(p["norm"].dtype)
        y, carry = mix(h, carry, p, layer, cfg, batch)
        return x + y, carry

    norm = lambda x: ops.rms_norm(x, params["norm"], cfg.norm_eps).astype(params["norm"].dtype)
    dtype = jnp.float32 if cfg.float32_residual else None
    return sublayers.walk(params, tokens, cfg, block, carry, remat, norm, dtype=dtype)


head, forward = builders.head, builders.forward(hidden)
