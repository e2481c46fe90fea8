"""Read and write adapters as PEFT does: adapter_config.json and adapter_model.safetensors.

Each adapted module of the checkpoint has lora_A [r, in] and lora_B [out, r], whose rows and columns are laid out as the
module's weight is; so a Param's own layout says how they map to the factors of a `LowRank` leaf. An embedding has
lora_embedding_A [r, vocab] and lora_embedding_B [embed, r] (https://github.com/huggingface/peft).
"""

import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from fdel.ops.weights import LowRank, is_weight

from .files import CheckpointError, tensors, write_safetensors
from .quantize import Matrix, change, declarations, file_dims, matrix
from .spec import Layout, Param, hf_names, layout, named_leaves, zeros

Tree = Any

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
# Fields of adapter_config.json that do not change what the tensors mean, and those that may have some values only.
NEUTRAL = {
    "alpha_pattern", "auto_mapping", "base_model_name_or_path", "corda_config", "ensure_weight_tying", "eva_config",
    "exclude_modules", "fan_in_fan_out", "inference_mode", "layers_pattern", "layers_to_transform", "loftq_config",
    "lora_alpha", "lora_dropout", "lora_ga_config", "megatron_config", "megatron_core", "peft_version",
    "qalora_group_size", "r", "rank_pattern", "revision", "runtime_config", "target_modules", "task_type", "use_rslora",
}  # fmt: skip
ALLOWED = {"peft_type": ("LORA",), "bias": ("none",), "init_lora_weights": (True, "gaussian", "eva", "orthogonal")}


def load_peft(spec: Tree, params: Tree, path: str | Path) -> Tree:
    """Give params the adapter in directory `path`; the factors are float32, and of the base weights nothing is read.

    Layers of a stack without an adapter get one that is zero and stays so in training; lower ranks are padded with zeros.
    Parts of a fused tensor get their rows of lora_B and a lora_A each. What cannot be applied exactly (other kinds of
    adapters, initialisations that change the base, tensors without a place in the spec) is a `CheckpointError`.
    """
    path = Path(path)
    for name in CONFIG, WEIGHTS:
        if not (path / name).is_file():
            raise FileNotFoundError(f"{path} has no {name}; PEFT's save_pretrained writes it (.bin files are not read)")
    config = json.loads((path / CONFIG).read_text("utf-8"))
    found = {name: t for name, t in tensors(path / WEIGHTS).items() if ".base_layer." not in name}
    problems = [*_refused(config)]
    adapters: dict[str, tuple[np.ndarray, ...]] = {}
    for leaf, p, m in _adaptable(spec, params):
        read = {}
        for index, module in _modules(p):
            names = _tensor_names(module, m)
            if all(n in found for n in names):
                a, b = (found.pop(n).read().astype(np.float32) for n in names)
                read[index] = a, b, _scale(config, module, len(a))
                shapes = [x.file_shape for x in _layouts(p, m, len(a))]
                if [a.shape, b.shape] != shapes:
                    problems.append(f"{module}: lora_A {a.shape} and lora_B {b.shape}, expected {shapes[0]} and {shapes[1]}")
        if read and not problems:
            adapters[leaf] = _assemble(p, m, read)
    problems += [f"{name} has no place in the spec" for name in found]
    if problems:
        raise CheckpointError(path, problems)

    def one(leaf: str, w: Any) -> Any:
        if leaf in adapters and isinstance(w, LowRank):
            raise ValueError(f"{leaf} has an adapter; merge or unload it before another one is loaded")
        return LowRank(w, *map(jnp.asarray, adapters[leaf])) if leaf in adapters else w

    return change(one, params)


def save_peft(spec: Tree, params: Tree, path: str | Path, *, base_name: str = "") -> None:
    """Write the adapters of params to directory `path`, so that PEFT computes the same; `base_name` names the base model.

    The adapters of the parts of a fused tensor become one whose rank is their sum: lora_A one above the other, lora_B
    zero outside of each part's rows and columns. Params without an adapter: ValueError.
    """
    leaves = dict(named_leaves(params, is_leaf=is_weight))
    parts: dict[tuple[str, str], list[tuple[np.ndarray, np.ndarray, float]]] = {}
    conv = False
    for leaf, p, m in _adaptable(spec, params):
        if not isinstance(w := leaves.pop(leaf), LowRank):
            continue
        a, b, scale = (np.asarray(x) for x in (w.a, w.b, w.scale))
        layouts = _layouts(p, m, a.shape[-1])
        conv |= not m.lookup and p.axes.split()[m.batch] in re.findall(r"\w+", file_dims(p)[0])
        for index, module in _modules(p):
            if scale[index]:  # a layer that has no adapter
                files = [np.zeros(x.file_shape, y.dtype) for x, y in zip(layouts, (a, b), strict=True)]
                for x, file, ours in zip(layouts, files, (a, b), strict=True):
                    x.write(file, ours[index])
                parts.setdefault(_tensor_names(module, m), []).append((*files, float(scale[index])))
    lost = [leaf for leaf, w in leaves.items() if isinstance(w, LowRank)]
    if lost or not parts:
        raise ValueError(f"PEFT has no place for the adapters of {', '.join(lost)}" if lost else "params have no adapter")
    entries: dict[str, np.ndarray] = {}
    ranks: dict[str, int] = {}
    alphas: dict[str, float] = {}
    for names, group in parts.items():
        scale = group[0][2]
        entries[names[0]] = np.concatenate([a for a, _, _ in group])
        entries[names[1]] = np.concatenate([(b * (s / scale)).astype(b.dtype) for _, b, s in group], axis=1)
        module = _module_name(names[0])
        ranks[module], alphas[module] = len(entries[names[0]]), round(scale * len(entries[names[0]]), 6)
    every = {name.removesuffix(".weight") for _, p in named_leaves(spec) for name in hf_names(p)}
    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    config = _config(ranks, alphas, every) | {"base_model_name_or_path": base_name, "fan_in_fan_out": conv}
    (path / CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", "utf-8")
    shapes = {name: (x.shape, x.dtype) for name, x in entries.items()}
    write_safetensors(path / WEIGHTS, shapes, entries.__getitem__, {"format": "pt"})
