"""Qwen3-Omni (arXiv:2509.17765), its thinker: Qwen3-VL-MoE that also hears. What speaks loads apart, for `serve.speak`.

The talker is `qwen3_omni_talker`, the vocoder `code2wav`.
A sound is cut into chunks of a second, which go through convolutions alone; attention sees some of them together.
"""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from fdel import ops
from fdel.models import builders, config, qwen2_vl, qwen3_moe, qwen3_vl, sight, sublayers
from fdel.models.keys import ConfigError, mapping, show
from fdel.models.qwen3_moe import DENSE, MOE
from fdel.ops.rope import Rope
from fdel.params.spec import Param, normal, stack

MODEL_TYPE, ARCHITECTURE = "qwen3_omni_moe", "Qwen3OmniMoeForConditionalGeneration"
NAMES = "q_proj", "k_proj", "v_proj", "out_proj"
EPS = 1e-5  # torch's default, which no config says
CHUNK = 13  # states of a whole chunk, which transformers' count of tokens has as a number
RENAMED = {
    "thinker.model.language_model.": "thinker.model.",
    "thinker.model.visual.": "thinker.visual.",
    "thinker.model.audio_tower.": "thinker.audio_tower.",
}  # names of transformers' modules, as prefixes
SILENT = ("thinker.", "talker.", "code2wav.")  # parts of a file; the first is read
# Keys of a thinker_config, or of its audio_config, that name no part of the language model and change no number.
AROUND = "position_id_per_seconds audio_start_token_id audio_end_token_id user_token_id audio_token_id".split()
UNREAD = "dropout activation_dropout scale_embedding conv_chunksize num_hidden_layers".split()
# Names in the tower's projectors, and what Qwen3-VL calls them.
PROJECTORS = {
    r"visual\.deepstack_merger_list": "visual.merger_list",
    r"(merger\S*)\.norm\.": r"\1.ln_q.",
    r"(merger\S*)\.linear_fc1\.": r"\1.mlp.0.",
    r"(merger\S*)\.linear_fc2\.": r"\1.mlp.2.",
}


@config.config
class Text(qwen3_moe.Config):
    """Sizes and constants of the language model."""

    DEFAULTS = dict(
        vocab=3584, embed=2048, ffn=18944, layers=28, heads=28, kv_heads=4, max_positions=32768, normalize=True
    )
    rope: Rope = qwen2_vl.sections((24, 20, 20), theta=1e6, mrope_interleaved=True)


@config.config
class Audio(config.MultiHead):
    """Sizes of the tower for sounds; a chunk has 2 * `window` frames, and attention sees `seen` frames together."""

    ONLY = dict.fromkeys(UNREAD, config.ANY)
    embed: int = config.hf("d_model", 1280)
    ffn: int = config.hf("encoder_ffn_dim", 5120)
    layers: int = config.hf("encoder_layers", 32)
    heads: int = config.hf("encoder_attention_heads", 20)
    bins: int = config.hf("num_mel_bins", 128)
    states: int = config.hf("max_source_positions", 1500)
    window: int = config.hf("n_window", 50)
    seen: int = config.hf("n_window_infer", 800)
    channels: int = config.hf("downsample_hidden_size", 480)
    out: int = config.hf("output_dim", 3584)
    act: str = config.act("activation_function", "gelu")

    frames = property(lambda self: 2 * self.window)  # of a chunk
    together = property(lambda self: self.seen // self.frames)  # chunks that see each other


@dataclass(frozen=True, kw_only=True)
class Seeing(qwen3_vl.Sighted):
    """The language model and its tower for images."""

    TEXT, VISION, TYPES = Text, qwen3_vl.Vision, ("qwen3_omni_moe_text", "qwen3_omni_moe_vision_encoder")


@dataclass(frozen=True, kw_only=True)
class Config(Seeing):
    """Sizes and constants of the thinker, and its tower for sounds."""

    HEARING: ClassVar[Any] = Audio
    audio: Any = field(default_factory=Audio)

    @classmethod
    def from_hf(cls, d: Mapping[str, Any]) -> Any:
        """Read the dict of a config.json, from its thinker_config."""
        if not isinstance(d, Mapping) or not isinstance(d.get("thinker_config"), Mapping):
            raise ConfigError(f"config field 'thinker_config': found {show(d)}, expected an object")
        thinker = dict(d["thinker_config"])
        try:
            seen = Seeing.from_hf({k: v for k, v in thinker.items() if k not in AROUND})
            audio = cls.HEARING.from_hf(mapping("audio_config", thinker.get("audio_config")))
        except ConfigError as e:
            raise ConfigError(f"thinker_config: {e}") from e
        if audio.out != seen.embed or pooled(audio.frames) != CHUNK or audio.seen < audio.frames or audio.embed % 2:
            found = (
                f"output_dim {audio.out}, n_window {audio.window}, n_window_infer {audio.seen}, d_model {audio.embed}"
            )
            expected = f"{seen.embed}, 49 to 52, at least {audio.frames}, an even number"
            raise ConfigError(f"thinker_config.audio_config: found {found}, expected {expected}")
        return cls(
            **{f: getattr(seen, f) for f in ("text", "vision", "image_token")}, audio=audio, source=json.dumps(d)
        )

    def to_hf(self) -> dict[str, Any]:
        """Write the dict of a config.json, laid out as its source, without what speaks."""
        out = {k: v for k, v in json.loads(self.source).items() if k != "quantization_config"}
        source = out.get("thinker_config") or {"text_config": {}}
        kept = {f: getattr(self, f) for f in ("text", "vision", "image_token")}
        audio = {"model_type": "qwen3_omni_moe_audio_encoder"} | self.audio.to_hf()
        thinker = Seeing(**kept, source=json.dumps(source)).to_hf() | {"audio_config": audio}
        return out | {"thinker_config": thinker, "enable_audio_output": False}


def pooled(n: Any) -> Any:
    """Count what is left of n frames, or rows of mel bins, by three convolutions of stride 2."""
    for _ in range(3):
        n = (n - 1) // 2 + 1
    return n


def hearing_spec(a: Audio) -> dict[str, Any]:
    """Declare the tower for sounds and its projector."""
    name, d = "thinker.audio_tower.", a.embed
    conv = lambda n, inputs: {
        f"conv{n}": Param(
            "ffn channels height width", (a.channels, inputs, 3, 3), normal(builders.STD), f"{name}conv2d{n}.weight"
        ),
        f"conv{n}_bias": builders.bias(f"{name}conv2d{n}.bias", a.channels, "ffn"),
    }
    file = name + "layers.{layers}."
    layer = {
        **builders.layer_norm("attn_norm", file + "self_attn_layer_norm", d),
        **builders.gqa(file + "self_attn.", a, biased=True, names=NAMES),
        **builders.layer_norm("mlp_norm", file + "final_layer_norm", d),
        **builders.mlp(file, d, a.ffn, ("fc1", "fc2")),
    }
    return {
        **conv(1, 1), **conv(2, a.channels), **conv(3, a.channels),
        "conv_out": builders.matrix(name + "conv_out.weight", ("ffn", a.channels * pooled(a.bins)), ("embed", d)),
        "layers": stack(layer, "layers", range(a.layers)),
        **builders.layer_norm("norm", name + "ln_post", d),
        "up": builders.matrix(name + "proj1.weight", ("embed", d), ("ffn", d)),
        "up_bias": builders.bias(name + "proj1.bias", d, "ffn"),
        "down": builders.matrix(name + "proj2.weight", ("ffn", d), ("embed", a.out)),
        "down_bias": builders.bias(name + "proj2.bias", a.out),
    }  # fmt: skip


def spec(cfg: Config) -> dict:
    """Declare every array: the language model's at the top, the towers' and the projectors' below."""

    def seen(p: Param) -> Param:
        name = p.hf.replace("model.visual.", "thinker.visual.", 1)
        for theirs, ours in PROJECTORS.items():
            name = re.sub(theirs, ours, name)
        return replace(p, hf=name)

    text = builders.decoder(replace(cfg.text, kinds=cfg.kinds), lambda kind: qwen3_moe.layer_spec(cfg.text, kind[1]))
    text = jax.tree.map(lambda p: p.renamed(lambda name: "thinker." + name), text)
    towers = jax.tree.map(seen, qwen3_vl.tower_spec(cfg)) | {"hearing": hearing_spec(cfg.audio)}
    return sight.as_modules(text | towers, RENAMED)


def rename(name: str, cfg: Config) -> str | None:
    """Give the names of published files to tensors that are called as their modules; leave out the parts that speak."""
    name = sight.as_file(name, RENAMED)
    return name if name.startswith(SILENT[0]) or not name.startswith(SILENT) else None


def waves(count: int, size: int) -> np.ndarray:
    """Compute sines and cosines of places, float32[count, size], of wavelengths up to 10000 (arXiv:1706.03762)."""
    inverse = np.exp(-math.log(10000) / (size // 2 - 1) * np.arange(size // 2, dtype=np.float32)).astype(np.float32)
    angles = np.arange(count, dtype=np.float32)[:, None] * inverse
    return np.concatenate([np.sin(angles), np.cos(angles)], 1)


def hear(params: Any, sounds: ops.Sounds, cfg: Config) -> Float[Array, "*rows entries D"]:
    """Compute the entries of sounds, features [*rows sounds chunks bins frames]: 13 of each chunk.

    As transformers does in a batch that has a whole chunk: the last chunk of a sound is padded to one.
    """
    a, p = cfg.audio, params["hearing"]
    *lead, chunks, bins, frames = sounds.features.shape
    if (bins, frames) != (a.bins, a.frames):
        raise ValueError(f"media.inputs: found chunks of {bins} bins, {frames} frames, expected {a.bins}, {a.frames}")
    gelu = ops.ACTIVATIONS["gelu"]
    x = sounds.features.reshape(-1, 1, bins, frames).astype(p["conv1"].dtype)
    for part in ("conv1", "conv2", "conv3"):
        x = jax.lax.conv_general_dilated(x, p[part], (2, 2), [(1, 1)] * 2, dimension_numbers=("NCHW", "OIHW", "NCHW"))
        x = gelu(x + p[f"{part}_bias"][:, None, None])
    x = x.transpose(0, 3, 1, 2).reshape(x.shape[0], CHUNK, -1)
    x = ops.linear("ntf,df->ntd", x, p["conv_out"])
    x = (x + jnp.asarray(waves(CHUNK, a.embed), x.dtype)).reshape(-1, chunks * CHUNK, a.embed)
    batch = qwen2_vl.within(windows(sounds.lengths.reshape(-1, chunks), a))
    mask, act = ops.Mask(a.head_dim**-0.5, causal=False), ops.ACTIVATIONS[a.act]

    def block(x, carry, p, layer):
        h, carry = sublayers.attention(layer_norm(x, p, "attn_norm"), carry, p, layer, batch, mask)
        x = x + h
        return x + ops.mlp(layer_norm(x, p, "mlp_norm"), p, act), carry

    x, _ = ops.layers(block, x, ops.Carry(), p["layers"])
    x = act(ops.linear("ntd,fd->ntf", layer_norm(x, p, "norm"), p["up"], p["up_bias"]))
    x = ops.linear("ntf,df->ntd", x, p["down"], p["down_bias"])
    return x.reshape(*lead[:-1], -1, x.shape[-1])


def windows(lengths: Int[Array, "N chunks"], a: Audio) -> Int[Array, "N states"]:
    """Name the window of each state of sounds whose chunks have so many frames; -1 are padding."""
    there = jnp.arange(CHUNK) < pooled(lengths)[..., None]
    window = jnp.arange(lengths.shape[1])[:, None] // a.together
    return jnp.where(there & (lengths[..., None] > 0), window, -1).reshape(lengths.shape[0], -1)


def layer_norm(x: Array, p: Any, part: str) -> Array:
    """Normalise as the tower for sounds does."""
    return sublayers.layer_norm(x, p, part, EPS)


def encode(params: Any, inputs: Any, cfg: Config) -> Float[Array, "*rows entries parts D"]:
    """Compute the entries of `ops.Patches`, of `ops.Sounds`, or of a pair of both: those of images before those of sounds.

    Of sounds the parts behind the first, which the first layers add, are zeros.
    """
    out = []
    for x in inputs if isinstance(inputs, tuple) else (inputs,):
        if isinstance(x, ops.Sounds):
            heard = hear(params, x, cfg)
            out.append(jnp.stack([heard, *[jnp.zeros_like(heard)] * len(cfg.vision.deep)], -2))
        else:
            out.append(qwen3_vl.encode(params, x, cfg))
    return jnp.concatenate(out, -3)


@builders.hidden("attention", "router", encode=encode, rotary=True)
def hidden(params, tokens, cfg: Config, batch: ops.Batch, carry: ops.Carry, remat: str | None):
    """Compute the final normalised hidden states, [... T embed]; called as `protocol.Family` says."""
    blocks = dict.fromkeys((DENSE, MOE), qwen3_moe.block(cfg.text, batch))
    return qwen3_vl.walk(params, tokens, cfg, blocks, carry, remat)


state_spec, head, forward = builders.kv_state, builders.head, builders.forward(hidden)
