"""EasyLM's streaming checkpoints as Hugging Face checkpoints: what `fdel convert --from easylm` does.

A file is a stream of msgpack pairs: a parameter's path, and the bytes that flax makes of its array, themselves msgpack with
an array as extension type 1 (shape, dtype, bytes). Kernels are [inputs outputs]; wq and wk are in the order of the first
LLaMA release, whose rotary pairs are neighbours, where Hugging Face's are halves of a head. Its GPT-J, OPT and RoBERTa
have the names of transformers' Flax classes, which are torch's but for the last part. Needs msgpack (extra `train`).
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from fdel import models, params
from fdel.params.files import write_checkpoint

CHUNKED = "__msgpack_chunked_array__"  # flax divides arrays of more than a GiB
NAMES = {
    "transformer.wte.embedding": "model.embed_tokens.weight", "transformer.ln_f.kernel": "model.norm.weight",
    "lm_head.kernel": "lm_head.weight",
}  # fmt: skip
LAYER = {
    "attention.wq.kernel": "self_attn.q_proj", "attention.wk.kernel": "self_attn.k_proj",
    "attention.wv.kernel": "self_attn.v_proj", "attention.wo.kernel": "self_attn.o_proj",
    "feed_forward.w1.kernel": "mlp.gate_proj", "feed_forward.w2.kernel": "mlp.down_proj",
    "feed_forward.w3.kernel": "mlp.up_proj", "attention_norm.kernel": "input_layernorm",
    "ffn_norm.kernel": "post_attention_layernorm",
}  # fmt: skip
FLAX = {"kernel": "weight", "scale": "weight", "embedding": "weight", "bias": "bias"}  # the last part of a name
KNOWN = ("llama", "gptj", "opt", "roberta")


def read(file: str | Path) -> Iterator[tuple[str, np.ndarray]]:
    """Yield (path joined by dots, array) of a stream, one at a time. CheckpointError for a file that is none."""
    try:
        import msgpack
    except ImportError as e:
        raise ImportError("EasyLM's checkpoints need msgpack: pip install 'fdel[train]'") from e

    def extension(code: int, data: bytes) -> Any:
        if code != 1:
            raise ValueError(f"extension type {code}, expected 1, an array")
        shape, dtype, raw = msgpack.unpackb(data, raw=True)
        return np.frombuffer(raw, jnp.dtype(dtype.decode())).reshape(shape)

    def whole(value: Any) -> np.ndarray:
        if isinstance(value, dict) and CHUNKED in value:
            numbered = lambda d: [d[str(i)] for i in range(len(d))]
            return np.concatenate(numbered(value["chunks"])).reshape(numbered(value["shape"]))
        if not isinstance(value, np.ndarray):
            raise ValueError(f"found {type(value).__name__}, expected an array")
        return value

    with Path(file).open("rb") as f:
        try:
            for key, value in msgpack.Unpacker(f, max_buffer_size=2**32 - 1):
                name = ".".join(map(str, key)).removeprefix("params.").removeprefix("params.")
                yield name, whole(msgpack.unpackb(value, ext_hook=extension, strict_map_key=False))
        except (ValueError, TypeError, msgpack.exceptions.UnpackException) as e:
            raise params.CheckpointError(file, [f"is no streaming checkpoint of EasyLM's parameters: {e}"]) from e


def convert(
    file: str | Path, config: str | Path | None, target: str | Path, *, dtype: Any = None, shard_bytes: int
) -> int:
    """Write a stream as a Hugging Face checkpoint of the model that a config.json describes; give the parameters' number.

    The host holds all arrays. CheckpointError lists names and shapes that do not fit the config.
    """
    if config is None:
        raise ValueError("--config is missing: a config.json of the model's size, which EasyLM's files lack")
    config = Path(config)
    family, cfg = models.read_config(config.parent if config.is_file() else config)
    if family.MODEL_TYPE not in KNOWN:
        known = ", ".join(KNOWN)
        raise models.ConfigError(f"{config}: found model_type {family.MODEL_TYPE}, EasyLM's checkpoints are of {known}")
    found, rename = {}, getattr(family, "rename", lambda name, cfg: name)
    tensor = _tensor if family.MODEL_TYPE == "llama" else _flax
    for name, x in read(file):
        theirs, array = tensor(name, x, cfg)
        if (ours := rename(theirs, cfg)) is not None:
            found[ours] = array if dtype is None else array.astype(dtype)
    wanted = {p.hf: params.layout(p).file_shape for _, p in params.named_leaves(params.unstack(family.spec(cfg)))}
    faults = [f"{name} is missing" for name in sorted(wanted.keys() - found)]
    faults += [f"{name} is not in the model" for name in sorted(found.keys() - wanted)]
    shared = wanted.keys() & found.keys()
    faults += [f"{n} is {found[n].shape}, expected {wanted[n]}" for n in sorted(shared) if found[n].shape != wanted[n]]
    if faults:
        raise params.CheckpointError(file, faults)
    entries = {name: (x.shape, x.dtype) for name, x in found.items()}
    write_checkpoint(Path(target), entries, found.__getitem__, shard_bytes, {"format": "pt"})
    d = models.config_dict(family, cfg)
    (Path(target) / "config.json").write_text(json.dumps(d, indent=2, sort_keys=True) + "\n")
    return sum(x.size for x in found.values())


def _tensor(name: str, x: np.ndarray, cfg: Any) -> tuple[str, np.ndarray]:
    """Give Hugging Face's name and layout of one array."""
    if name in NAMES:
        return NAMES[name], x.T if name == "lm_head.kernel" else x
    start, _, rest = name.removeprefix("transformer.h.").partition(".")
    if not name.startswith("transformer.h.") or rest not in LAYER:
        raise params.CheckpointError(name, ["is no parameter of EasyLM's Llama"])
    if rest in ("attention.wq.kernel", "attention.wk.kernel"):  # [D, (heads pairs 2)] -> [(heads 2 pairs), D]
        x = x.reshape(len(x), -1, cfg.head_dim // 2, 2).swapaxes(2, 3).reshape(len(x), -1)
    return f"model.layers.{start}.{LAYER[rest]}.weight", x.T


def _flax(name: str, x: np.ndarray, cfg: Any) -> tuple[str, np.ndarray]:
    """Give torch's name and layout of one array of a Flax model."""
    start, _, last = name.rpartition(".")
    if last not in FLAX:
        raise params.CheckpointError(name, [f"ends in none of {', '.join(FLAX)}, as a Flax model's parameters do"])
    return f"{start}.{FLAX[last]}", x.T if last == "kernel" else x
