"""Mamba-2 (arXiv:2405.21060): a stack of state-space mixers; what serving remembers has a fixed size."""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from fdel import ops
from fdel.models import builders, config
from fdel.params.spec import Param, layers, normal, parts

MODEL_TYPE, ARCHITECTURE = "mamba2", "Mamba2ForCausalLM"


def limits(d: dict) -> tuple[float, float]:
    """Read the range of the time step; JSON has no infinity, so files spell it in words."""
    low, high = d.get("time_step_limit") or (0.0, math.inf)
    number = lambda v: float(v["__float__"] if isinstance(v, dict) else v)
    return number(low), number(high)


@dataclass(frozen=True, kw_only=True)
class Config:
    """Sizes and constants; `hf(...)` names each one's key in config.json."""

    vocab: int = config.hf("vocab_size", 32768)
    embed: int = config.hf("hidden_size", 4096)
    layers: int = config.hf("num_hidden_layers", 64)
    heads: int = config.hf("num_heads", 128)
    head_dim: int = config.hf("head_dim", 64)
    state: int = config.hf("state_size", 128)
    groups: int = config.hf("n_groups", 8)
    kernel: int = config.hf("conv_kernel", 4)
    chunk: int = config.hf("chunk_size", 256)
    norm_eps: float = config.hf("layer_norm_epsilon", 1e-5)
    act: str = config.hf("hidden_act", "silu", choices=tuple(ops.ACTIVATIONS))
    tied: bool = config.hf("tie_word_embeddings", False)
    bias: bool = config.hf("use_bias", False)
    conv_bias: bool = config.hf("use_conv_bias", True)
    float32_residual: bool = config.hf("residual_in_fp32", True)
    limits: tuple[float, float] = config.computed(
        limits, lambda v: {"time_step_limit": [{"__float__": "Infinity"} if x == math.inf else x for x in v]}
    )
    source: str = config.source()

    @classmethod
    def from_hf(cls, d: dict) -> "Config":
        """Build from config.json; hidden_size * expand must be the mixer's width."""
        steps = dict.fromkeys(("time_step_rank", "time_step_min", "time_step_max", "time_step_floor"), config.ANY)
        steps |= {"expand": lambda c: c.inner / c.embed, "intermediate_size": lambda c: c.inner}
        return config.from_hf(cls, {"expand": 2} | d, norm_before_gate=config.ANY, **steps)

    def to_hf(self) -> dict:
        """Write config.json."""
        return config.to_hf(self) | {"expand": self.inner // self.embed}

    @property
    def inner(self) -> int:
        """Channels of the mixer."""
        return self.heads * self.head_dim

    @property
    def channels(self) -> int:
        """Channels that pass through the convolution: x, B and C."""
        return self.inner + 2 * self.groups * self.state


def spec(cfg: Config) -> dict:
    """Declare every array; the file's in_proj holds z, the convolution's channels and dt side by side."""
    name = "backbone.layers.{layers}."
    mixer = name + "mixer."
    heads = lambda part, init: Param("heads", (cfg.heads,), init, mixer + part, dtype="float32")
    layer = {
        "norm": builders.norm(name + "norm.weight", cfg.embed),
        "conv": builders.conv(mixer + "conv1d.weight", cfg.channels, cfg.kernel),
        "decay": heads("A_log", builders.decay_init),
        "skip": heads("D", builders.ones),
        "step": heads("dt_bias", builders.step_init),
        "mixer_norm": builders.norm(mixer + "norm.weight", cfg.inner, "inner"),
        "out": builders.matrix(mixer + "out_proj.weight", ("inner", cfg.inner), ("embed", cfg.embed)),
    }  # fmt: skip
    for part, cut in parts(z=cfg.inner, xbc=cfg.channels, dt=cfg.heads).items():
        axis, size = {"z": ("inner", cfg.inner), "xbc": ("channels", cfg.channels), "dt": ("heads", cfg.heads)}[part]
        layer[part] = Param(
            f"{axis} embed", (size, cfg.embed), normal(0.02), mixer + "in_proj.weight", f"[{axis}] embed", cut
        )
        if cfg.bias:
            layer[part + "_bias"] = Param(axis, (size,), builders.zeros, mixer + "in_proj.bias", f"[{axis}]", cut)
    if cfg.bias:
        layer["out_bias"] = builders.bias(mixer + "out_proj.bias", cfg.embed)
    if cfg.conv_bias:
        layer["conv_bias"] = builders.bias(mixer + "conv1d.bias", cfg.channels, "channels")
    top = {
        "embed": builders.embedding("backbone.embeddings.weight", cfg.vocab, cfg.embed),
        "layers": layers(lambda kind: layer, (None,) * cfg.layers),
        "norm": builders.norm("backbone.norm_f.weight", cfg.embed),
    }
    return top if cfg.tied else top | {"head": builders.head("lm_head.weight", cfg.vocab, cfg.embed)}


def rename(name: str, cfg: Config) -> str:
    """Map file names to spec names: the first Mamba files call the embedding `embedding`."""
    return name.replace("backbone.embedding.", "backbone.embeddings.")


def state_spec(cfg: Config, *, pages: int = 0, page: int = 64, rows: int) -> ops.Slots:
    """Declare what serving must remember: convolution inputs and mixer state of `rows` sequences."""
    conv, ssm = (cfg.channels, cfg.kernel - 1), (cfg.heads, cfg.head_dim, cfg.state)
    return builders.slots(cfg.layers, conv, ssm, rows=rows)


def hidden(params, tokens, cfg: Config, batch: ops.Batch | None = None, state=None, *, remat: str | None = None):
    """Compute the final normalised hidden states: tokens int[B T] (Packed) or int[T] (Paged) -> [..., embed], state."""
    batch = ops.packed(tokens) if batch is None else batch
    act, shared = ops.ACTIVATIONS[cfg.act], cfg.groups * cfg.state
    split = lambda x, *size: x.reshape(*x.shape[:-1], *size)

    def block(x, state, p, layer):
        h = ops.rms_norm(x, p["norm"], cfg.norm_eps).astype(p["norm"].dtype)
        z, xbc, dt = (ops.linear("...d,id->...i", h, p[i], p.get(i + "_bias")) for i in ("z", "xbc", "dt"))
        xbc, state = ops.causal_conv(batch, state, layer, xbc, p["conv"], p.get("conv_bias"))
        u, b, c = jnp.split(act(xbc), (cfg.inner, cfg.inner + shared), -1)
        dt = jnp.clip(jax.nn.softplus(dt.astype(jnp.float32) + p["step"]), *cfg.limits)
        y, state = ops.ssd(
            batch, state, layer, split(u, cfg.heads, cfg.head_dim), dt, -jnp.exp(p["decay"].astype(jnp.float32)),
            split(b, cfg.groups, cfg.state), split(c, cfg.groups, cfg.state), d=p["skip"], chunk=min(cfg.chunk, 256),
        )  # fmt: skip
        y = y.reshape(z.shape).astype(jnp.float32) * jax.nn.silu(z.astype(jnp.float32))
        y = ops.rms_norm(split(y, cfg.groups, -1), p["mixer_norm"].reshape(cfg.groups, -1), cfg.norm_eps)
        return x + ops.linear("...i,di->...d", y.reshape(z.shape).astype(h.dtype), p["out"], p.get("out_bias")), state

    x = ops.embed(params["embed"], tokens)
    if cfg.float32_residual:
        x = x.astype(jnp.float32)
    x, state = ops.layers(block, x, state, params["layers"], remat=remat)
    return ops.rms_norm(x, params["norm"], cfg.norm_eps).astype(params["norm"].dtype), state


def head(params, cfg: Config) -> ops.Head:
    """The output projection, for `ops.logits` and the chunked losses."""
    return ops.Head(params["head"] if "head" in params else params["embed"])


def forward(params, tokens, cfg: Config, batch: ops.Batch | None = None, state=None):
    """Compute logits: tokens int[B T] with Packed (the default), int[T] with Paged -> (float32 [..., V], state)."""
    x, state = hidden(params, tokens, cfg, batch, state)
    return ops.logits(x, head(params, cfg)), state
