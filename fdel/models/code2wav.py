"""Qwen3-Omni's vocoder (arXiv:2509.17765): a decoder over frames of codes, then causal convolutions that give samples.

It makes sounds, so it is no `protocol.Family`. Load it of a whole checkpoint by `models.load(path, family=code2wav)`.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from fdel import ops
from fdel.models import builders, config, sublayers
from fdel.models.keys import ANY, ConfigError, show
from fdel.models.rope import rope, rope_to_hf
from fdel.ops.rope import Rope
from fdel.params.spec import Param, constant, normal, stack, zeros

MODEL_TYPE, ARCHITECTURE = "code2wav", "Qwen3OmniMoeForConditionalGeneration"
PART = "code2wav_config"  # of a config.json
OTHERS = "thinker_config talker_config enable_audio_output im_start_token_id im_end_token_id tts_pad_token_id "
OTHERS += "tts_bos_token_id tts_eos_token_id system_token_id user_token_id assistant_token_id"
EPS = 1e-6  # of the norms between convolutions, which no config says
KERNEL, DILATIONS = 7, (1, 3, 9)


def factors(key: str, default: tuple[int, ...]) -> Any:
    """Declare a field of how many times longer each stage makes a sequence."""

    def read(d: dict) -> tuple[int, ...]:
        found = d.get(key, default)
        if not isinstance(found, list | tuple) or not all(type(n) is int and 1 <= n <= 1024 for n in found):
            raise ConfigError(f"config field {key!r}: found {show(found)}, expected a list of numbers from 1 to 1024")
        return tuple(found)

    return config.computed(read, lambda value: {key: list(value)})


def rotary(d: dict) -> Rope:
    """Read how queries and keys are turned."""
    inner = {k: d.get(f"{PART}.{k}") for k in ("rope_parameters", "rope_scaling")}
    given = {"rope_theta": d.get(f"{PART}.rope_theta", 10000.0)} | inner
    return rope(given, d[f"{PART}.hidden_size"] // d[f"{PART}.num_attention_heads"])


@config.config
class Config:
    """Sizes and constants. A frame is a code out of `size` of each of `books`."""

    NESTED = (PART,)
    ONLY = dict.fromkeys([*OTHERS.split(), f"{PART}.layer_scale_initial_scale"], ANY)
    size: int = config.hf(f"{PART}.codebook_size", 2048)
    books: int = config.hf(f"{PART}.num_quantizers", 16)
    embed: int = config.hf(f"{PART}.hidden_size", 1024)
    ffn: int = config.hf(f"{PART}.intermediate_size", 3072)
    layers: int = config.hf(f"{PART}.num_hidden_layers", 8)
    heads: int = config.hf(f"{PART}.num_attention_heads", 16)
    kv_heads: int = config.hf(f"{PART}.num_key_value_heads", 16)
    max_positions: int = config.hf(f"{PART}.max_position_embeddings", 8000)
    window: int = config.hf(f"{PART}.sliding_window", 72)  # frames that a frame sees, itself too
    attn_bias: bool = config.hf(f"{PART}.attention_bias", False)
    norm_eps: float = config.hf(f"{PART}.rms_norm_eps", 1e-5)
    act: str = config.act(f"{PART}.hidden_act")
    channels: int = config.hf(f"{PART}.decoder_dim", 1536)  # halved by each stage of `rates`
    ratios: tuple[int, ...] = factors(f"{PART}.upsampling_ratios", (2, 2))
    rates: tuple[int, ...] = factors(f"{PART}.upsample_rates", (8, 5, 4, 3))
    rope: Rope = config.computed(rotary, lambda r: {f"{PART}.rope_parameters": rope_to_hf(r)})

    head_dim = property(lambda self: self.embed // self.heads)
    samples = property(lambda self: math.prod((*self.ratios, *self.rates)))  # of a frame


def _conv(name: str, inputs: int, outputs: int, kernel: int) -> dict[str, Param]:
    weight = Param("filters channels kernel", (outputs, inputs, kernel), normal(builders.STD), f"{name}.conv.weight")
    return {"weight": weight, "bias": builders.bias(f"{name}.conv.bias", outputs, "filters")}


def _longer(name: str, inputs: int, outputs: int, kernel: int) -> dict[str, Param]:
    weight = Param("channels filters kernel", (inputs, outputs, kernel), normal(builders.STD), f"{name}.conv.weight")
    return {"weight": weight, "bias": builders.bias(f"{name}.conv.bias", outputs, "filters")}


def _snake(name: str, size: int) -> dict[str, Param]:
    return {part: Param("channels", (size,), zeros, f"{name}.{part}") for part in ("alpha", "beta")}


def spec(cfg: Config) -> dict[str, Any]:
    """Declare every array: the decoder's at the top, those of the stages below "ratios" and "rates"."""
    d, file = cfg.embed, "code2wav.pre_transformer.layers.{layers}."
    scale = lambda name: Param("embed", (d,), constant(0.01), f"{file}{name}_layer_scale.scale")
    layer = {
        **builders.prenorm(file, d), **builders.gqa(file + "self_attn.", cfg, biased=cfg.attn_bias),
        **builders.glu(file + "mlp.", d, cfg.ffn), "attn_scale": scale("self_attn"), "mlp_scale": scale("mlp"),
    }  # fmt: skip

    def ratio(i: int, n: int) -> dict[str, Any]:
        name = f"code2wav.upsample.{i}.1."
        depthwise = builders.conv(name + "dwconv.conv.weight", KERNEL, "channels", (d,))
        return {
            "longer": _longer(f"code2wav.upsample.{i}.0", d, d, n),
            "conv": depthwise, "conv_bias": builders.bias(name + "dwconv.conv.bias", d),
            **builders.layer_norm("norm", name + "norm", d), **builders.mlp(name, d, 4 * d, ("pwconv1", "pwconv2")),
            "scale": Param("embed", (d,), constant(1e-6), name + "gamma"),
        }  # fmt: skip

    def rate(i: int, n: int) -> dict[str, Any]:
        name, wide, narrow = f"code2wav.decoder.{i + 1}.block.", cfg.channels >> i, cfg.channels >> (i + 1)
        residual = lambda j: {
            "snake1": _snake(f"{name}{j + 2}.act1", narrow), "conv1": _conv(f"{name}{j + 2}.conv1", narrow, narrow, KERNEL),
            "snake2": _snake(f"{name}{j + 2}.act2", narrow), "conv2": _conv(f"{name}{j + 2}.conv2", narrow, narrow, 1),
        }  # fmt: skip
        residuals = {str(dilation): residual(j) for j, dilation in enumerate(DILATIONS)}
        return {"snake": _snake(f"{name}0", wide), "longer": _longer(f"{name}1", wide, narrow, 2 * n)} | residuals

    last, narrow = f"code2wav.decoder.{len(cfg.rates) + 1}", cfg.channels >> len(cfg.rates)
    table = Param("vocab embed", (cfg.books * cfg.size, d), normal(builders.STD), "code2wav.code_embedding.weight")
    return {
        "embed": table, "layers": stack(layer, "layers", range(cfg.layers)),
        "norm": builders.norm("code2wav.pre_transformer.norm.weight", d),
        "ratios": {str(i): ratio(i, n) for i, n in enumerate(cfg.ratios)},
        "first": _conv("code2wav.decoder.0", d, cfg.channels, KERNEL),
        "rates": {str(i): rate(i, n) for i, n in enumerate(cfg.rates)},
        "snake": _snake(last, narrow),
        "last": _conv(f"code2wav.decoder.{len(cfg.rates) + 2}", narrow, 1, KERNEL),
    }  # fmt: skip


def rename(name: str, cfg: Config) -> str | None:
    """Leave out the parts that do not make sounds of codes."""
    return name if name.startswith("code2wav.") else None


def convolve(
    x: Float[Array, "B T C"], weight: Float[Array, "F _ K"], bias: Float[Array, " F"], *, dilation: int = 1, groups: int = 1
) -> Float[Array, "B T F"]:  # fmt: skip
    """Convolve along time, causally: no output sees what is behind it."""
    pad, order = [((weight.shape[-1] - 1) * dilation, 0)], ("NHC", "OIH", "NHC")
    out = jax.lax.conv_general_dilated(
        x,
        weight.astype(x.dtype),
        (1,),
        pad,
        rhs_dilation=(dilation,),
        dimension_numbers=order,
        feature_group_count=groups,
    )
    return out + bias


def lengthen(x: Float[Array, "B T C"], p: Any, n: int) -> Float[Array, "B S F"]:
    """Apply a transposed convolution of stride n along time: S = T n, or, if a kernel has 2 n places, (T - 1) n.

    Kernels that overlap are cut off by n at both ends, as transformers does.
    """
    y = jnp.einsum("btc,cfk->btkf", x, p["weight"].astype(x.dtype))
    y = y[:, :-1, n:] + y[:, 1:, :n] if y.shape[2] == 2 * n else y
    return y.reshape(x.shape[0], -1, y.shape[-1]) + p["bias"]


def snake(x: Float[Array, "B T C"], p: Any) -> Float[Array, "B T C"]:
    """Compute x + sin(x exp(alpha))^2 / exp(beta) (arXiv:2006.08195, with a magnitude of its own)."""
    return x + jnp.sin(x * jnp.exp(p["alpha"])) ** 2 / (jnp.exp(p["beta"]) + 1e-9)


def states(params: Any, codes: Int[Array, "B frames books"], cfg: Config) -> Float[Array, "B frames D"]:
    """Compute the decoder's final normalised states of frames; ValueError for another number of codes in each."""
    if codes.shape[-1] != cfg.books:
        raise ValueError(
            f"codes: found {codes.shape[-1]} in each frame, expected {cfg.books}: int[B, frames, {cfg.books}]"
        )
    x = ops.embed(params["embed"], codes + cfg.size * jnp.arange(cfg.books)).mean(-2)
    batch = ops.packed(codes[..., 0])
    mask, act = ops.Mask(cfg.head_dim**-0.5, window=cfg.window), ops.ACTIVATIONS[cfg.act]
    turn = sublayers.rotate(ops.rotation(cfg.rope, batch))

    def block(x, carry, p, layer):
        h = ops.rms_norm(x, p["attn_norm"], cfg.norm_eps)
        a, carry = sublayers.attention(h, carry, p, layer, batch, mask, turn)
        x = x + p["attn_scale"] * a
        return x + p["mlp_scale"] * ops.glu(ops.rms_norm(x, p["mlp_norm"], cfg.norm_eps), p, act), carry

    x, _ = ops.layers(block, x, ops.Carry(), params["layers"])
    return ops.rms_norm(x, params["norm"], cfg.norm_eps)


def decode(params: Any, codes: Int[Array, "B frames books"], cfg: Config) -> Float[Array, "B samples"]:
    """Compute the samples of some frames, float32 from -1 to 1: `cfg.samples` of each, less those cut off at the end."""
    x, gelu = states(params, codes, cfg), ops.ACTIVATIONS["gelu"]
    for i, n in enumerate(cfg.ratios):
        p = params["ratios"][str(i)]
        x = lengthen(x, p["longer"], n)
        h = convolve(x, p["conv"][:, None], p["conv_bias"], groups=cfg.embed)
        x = x + p["scale"] * ops.mlp(sublayers.layer_norm(h, p, "norm", EPS), p, gelu)
    x = convolve(x, **params["first"])
    for i, n in enumerate(cfg.rates):
        p = params["rates"][str(i)]
        x = lengthen(snake(x, p["snake"]), p["longer"], n)
        for dilation in DILATIONS:
            q = p[str(dilation)]
            h = convolve(snake(x, q["snake1"]), **q["conv1"], dilation=dilation)
            x = x + convolve(snake(h, q["snake2"]), **q["conv2"])
    x = convolve(snake(x, params["snake"]), **params["last"])
    return jnp.clip(x[..., 0].astype(jnp.float32), -1, 1)


def waveform(
    params: Any, codes: Int[Array, "B frames books"], cfg: Config, *, chunk: int = 300, context: int = 25
) -> Float[Array, "B samples"]:
    """Compute the samples of frames (see `decode`), `chunk` frames at a time, each with up to `context` before them.

    transformers' `chunked_decode`: a sound of more frames than a chunk differs a little from that which `decode` gives.
    """
    run, out = jax.jit(decode, static_argnames="cfg"), []
    for start in range(0, codes.shape[1], chunk):
        before = min(context, start)
        piece = run(params, codes[:, start - before : start + chunk], cfg)
        out.append(piece[:, before * cfg.samples :])
    return jnp.concatenate(out, 1)
