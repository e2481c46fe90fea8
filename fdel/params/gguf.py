"""GGUF, llama.cpp's files of one model (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md): config and matrices.

Tensors get the names of the Hub's Llama, Mixtral, Qwen 2 and Qwen 3, dense or of experts. The blocks of a quantised one
are rows of bytes here, named with their type ("...q_proj.weight:q4_k"), from which `gguf_blocks` reads a
`Quantized`.
"""

import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from fdel import gguf

from .formats import Found, derived
from .gguf_blocks import BLOCKS
from .tensor import CheckpointError, Tensor

PLAIN = {0: np.dtype(np.float32), 1: np.dtype(np.float16), 30: np.dtype(ml_dtypes.bfloat16)}
NAMES = {
    "token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head", "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
    "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
}  # fmt: skip
# What of a mixture is where: the tensors of all experts lie one behind the other in one tensor of the file.
EXPERTS = {"mixtral": ("block_sparse_moe", "w1", "w3", "w2"), "qwen3_moe": ("mlp", "gate_proj", "up_proj", "down_proj")}
KINDS = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "qwen3moe": "qwen3_moe"}  # architecture: model_type
MOST_EXPERTS = 2**12
SCALING = {"factor": "factor", "original_context_length": "original_max_position_embeddings"}
KEYS = {
    "hidden_size": "embedding_length", "intermediate_size": "feed_forward_length", "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count", "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "max_position_embeddings": "context_length",
}  # fmt: skip
EXPERT_KEYS = {
    "mixtral": {"num_local_experts": "expert_count", "num_experts_per_tok": "expert_used_count"},
    "qwen3_moe": {"num_experts": "expert_count", "num_experts_per_tok": "expert_used_count",
                  "moe_intermediate_size": "expert_feed_forward_length"},
}  # fmt: skip


def _header(file: Path) -> gguf.Header:
    try:
        return gguf.read(file)
    except ValueError as e:
        raise CheckpointError(file, [str(e)]) from e


def _model_type(meta: Mapping[str, Any]) -> str | None:
    """Give the Hub's model_type; a Llama with experts is a Mixtral."""
    kind = meta.get("general.architecture")
    return "mixtral" if kind == "llama" and meta.get("llama.expert_count") else KINDS.get(str(kind))


def config(file: Path) -> dict[str, Any]:
    """Give the dict of a config.json for a file of one of `KINDS`. CheckpointError for others."""
    meta, infos = _header(file)
    kind, model_type = meta.get("general.architecture"), _model_type(meta)
    of = {key.removeprefix(f"{kind}."): value for key, value in meta.items()}
    keys = KEYS | EXPERT_KEYS.get(str(model_type), {})
    problems = [f"{file.name}: no {kind}.{key}" for key in keys.values() if key not in of]
    if model_type is None:
        problems = [f"{file.name}: general.architecture is {kind!r}; understood are {', '.join(map(repr, KINDS))}"]
    per_layer = {*keys.values()} - {"attention.layer_norm_rms_epsilon"} | {
        "attention.head_count_kv",
        "attention.key_length",
    }
    for key in sorted(per_layer & of.keys()):
        if type(of[key]) is not int or of[key] < 1:
            problems.append(f"{file.name}: {key} is {of[key]!r:.100}; understood is one number above 0 for all layers")
    if "token_embd.weight" not in infos or len(infos["token_embd.weight"].shape) != 2:
        problems.append(f"{file.name}: no matrix token_embd.weight [vocabulary embedding]")
    rope = _rope(file, of, infos, problems)
    if problems:
        raise CheckpointError(file, problems)
    d = {ours: of[key] for ours, key in keys.items()}
    heads = d["num_attention_heads"]
    return d | {
        "model_type": model_type, "vocab_size": infos["token_embd.weight"].shape[0],
        "num_key_value_heads": of.get("attention.head_count_kv", heads),
        "head_dim": of.get("attention.key_length", d["hidden_size"] // heads), "rope_theta": of.get("rope.freq_base", 1e4),
        "tie_word_embeddings": "output.weight" not in infos, "quantization_config": {"quant_method": "gguf"},
        **({"rope_scaling": rope} if rope else {}),
        **({"attention_bias": True} if "blk.0.attn_q.bias" in infos and model_type != "qwen2" else {}),
        **({"norm_topk_prob": True} if model_type == "qwen3_moe" else {}),  # llama.cpp does so in any case
    }  # fmt: skip


def _rope(
    file: Path, of: Mapping[str, Any], infos: Mapping[str, gguf.Info], problems: list[str]
) -> dict[str, Any]:  # fmt: skip
    """Read how rotary frequencies are scaled: by rope.scaling, or each divided by a number of rope_freqs (Llama 3.1)."""
    said = {key.removeprefix("rope.scaling."): x for key, x in of.items() if key.startswith("rope.scal")}
    kind, odd = said.pop("type", "none"), said.keys() - SCALING.keys() - {"finetuned"}
    if kind not in ("none", "linear", "yarn") or kind != "none" and (odd or not said.get("factor")):
        named = ", ".join(f"{key} {x!r:.100}" for key, x in said.items())
        problems.append(f"{file.name}: rope.scaling of type {kind!r:.100}, {named or 'without a factor'}; understood are "
                        "linear and yarn, with factor and original_context_length")  # fmt: skip
        return {}
    if "rope_freqs.weight" not in infos:
        found = {SCALING[key]: x for key, x in said.items() if key in SCALING}
        return {} if kind == "none" else {"rope_type": kind} | found
    shape, number, there, offset = infos["rope_freqs.weight"]
    if kind == "none" and number == 0 and len(shape) == 1 and offset + 4 * shape[0] <= there.stat().st_size:
        factors = np.fromfile(there, "<f4", shape[0], offset=offset).tolist()
        if all(0 < x < 1e9 for x in factors):  # both lists: the same at every length
            return {"rope_type": "longrope", "short_factor": factors, "long_factor": factors, "attention_factor": 1.0}
    problems.append(f"{file.name}: rope_freqs.weight of type {number}, shape {list(shape)}, with scaling {kind!r}; "
                    "understood are positive f32, and no scaling beside them")  # fmt: skip
    return {}


def _split(name: str, model_type: str | None) -> tuple[str, str]:
    """Give the Hub's name of a tensor, with {} for an expert's number, and which part of a layer it is.

    A name that GGUF does not have stays.
    """
    match, names = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name), NAMES
    if model_type in EXPERTS:
        place, *parts = EXPERTS[model_type]
        of_all = {
            f"ffn_{part}_exps": f"{place}.experts.{{}}.{x}"
            for part, x in zip(("gate", "up", "down"), parts, strict=True)
        }
        names = NAMES | of_all | {"ffn_gate_inp": f"{place}.gate"}
    if match is None or match[2] not in names:
        return name, ""
    layer = "" if match[1] is None else f"model.layers.{match[1]}."
    return f"{layer}{names[match[2]]}.{match[3]}", match[2]


def header(file: Path, problems: list[str], readinto: Callable[[Path, int, np.ndarray, int], None]) -> Found:
    """Give the tensors by the Hub's names; append what is wrong with them to `problems`."""
    (meta, infos), out = _header(file), {}
    sizes = {there: there.stat().st_size for there in {info.file for info in infos.values()}}
    heads = {"attn_q": "head_count", "attn_k": "head_count_kv"} if meta.get("general.architecture") == "llama" else {}
    infos.pop("rope_freqs.weight", None)  # `config` reads it
    for name, (shape, kind, there, offset) in infos.items():
        (ours, part), dtype = _split(name, _model_type(meta)), PLAIN.get(kind)
        if kind in BLOCKS and shape and shape[-1] % BLOCKS[kind][1] == 0:
            label, numbers, width = BLOCKS[kind]
            ours, dtype, shape = f"{ours}:{label}", np.dtype(np.uint8), (*shape[:-1], shape[-1] // numbers * width)
        if dtype is None:
            known = ", ".join(["f32, f16, bf16", *(label for label, *_ in BLOCKS.values())])
            problems.append(
                f"{there.name}: {name} is of ggml's type {kind}, shape {list(shape)}; understood are {known}"
            )
            continue
        tensor = Tensor(shape, dtype, there, partial(readinto, there, offset))
        if offset + tensor.nbytes > sizes[there]:
            problems.append(f"{there.name}: {name} ends past the file: truncated, fetch it again")
        count = meta.get(f"llama.attention.{heads.get(part, '')}")
        if part.endswith("_exps"):
            if len(shape) == 3 and 0 < shape[0] <= MOST_EXPERTS:
                at = lambda e, f=there, n=tensor.nbytes // shape[0], o=offset: partial(readinto, f, o + e * n)
                out.update({ours.format(e): Tensor(shape[1:], dtype, there, at(e)) for e in range(shape[0])})
            else:
                problems.append(f"{there.name}: {name} of shape {list(shape)} is no matrix for each expert")
        elif count is None:
            out[ours] = tensor
        elif type(count) is int and count > 0 and shape and shape[0] % (2 * count) == 0:
            out[ours] = _halves(tensor, count)
        else:
            problems.append(f"{there.name}: {name} of shape {list(shape)} has no rows for {count!r:.100} heads")
    return out


def _halves(t: Tensor, heads: int) -> Tensor:
    """Undo the order of llama.cpp, whose rotary pairs are neighbours: rows of a head's first half, then of its second."""
    make = lambda: t.read().reshape(heads, -1, 2, *t.shape[1:]).swapaxes(1, 2)
    return derived(t, t.shape, t.dtype, make)
