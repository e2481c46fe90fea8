"""Read and write adapters as PEFT does: adapter_config.json and adapter_model.safetensors.

What is trained whole, such as a new head, stands there under its own name (modules_to_save).

Modules have the names of transformers' (`Param.module`); files with names of the checkpoint are read too. Each adapted one
has lora_A [r, in] and lora_B [out, r], the factors a and b of a `LowRank` leaf with the axes of each side in one, as the
Param lays them out. An embedding, to PEFT, maps tokens to channels: it has lora_embedding_A [r, vocab] and
lora_embedding_B [embed, r], our b and a transposed (https://github.com/huggingface/peft).
"""

import functools
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

from fdel.ops.weights import LowRank, is_weight

from . import kept
from .files import json_object, safetensors_header
from .hf_layout import Layout, Matrix, as_modules, axes_in, file_dims, hf_names, layout, matrix
from .kept import PREFIX
from .patterns import Patterns
from .quantize import change, declarations
from .spec import Param, named_leaves, zeros
from .tensor import CheckpointError, Tensor

Tree = Any

TABLES = ("embed", "positions")  # leaves whose rows are looked up
WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
# Fields of adapter_config.json that do not change what the tensors mean, and those that may have some values only.
NEUTRAL = {
    "alpha_pattern", "auto_mapping", "base_model_name_or_path", "corda_config", "ensure_weight_tying", "eva_config",
    "exclude_modules", "fan_in_fan_out", "inference_mode", "layers_pattern", "layers_to_transform", "loftq_config",
    "lora_alpha", "lora_dropout", "lora_ga_config", "megatron_config", "megatron_core", "modules_to_save", "peft_version",
    "qalora_group_size", "r", "rank_pattern", "revision", "runtime_config", "target_modules", "task_type", "use_rslora",
}  # fmt: skip
ALLOWED = {"peft_type": ("LORA",), "bias": ("none",), "init_lora_weights": (True, "gaussian", "eva", "orthogonal")}


class _Pair(NamedTuple):
    """A lora_A and a lora_B: where they belong in the stacked axes of their array, and what they are multiplied with."""

    at: tuple[int, ...]
    names: tuple[str, str]
    tensors: tuple[Tensor, ...]
    table: bool
    rank: int
    scale: float


def load_peft(spec: Tree, params: Tree, path: str | Path, *, max_rank: int | None = None) -> Tree:
    """Give params the adapter in directory `path`, in float32; what it has whole takes the place of params' own.

    Of the base weights nothing is read. Layers of a stack without an adapter get one that is zero and stays so in
    training; lower ranks are padded with zeros. Parts of a fused tensor get their rows of lora_B and a lora_A each. What
    cannot be applied exactly (another kind of adapter, an initialisation that changes the base, a tensor without a place
    in the spec), a rank above `max_rank` and values that are not finite: `CheckpointError`. Names, shapes and ranks are
    checked before any tensor is read.
    """
    path = Path(path)
    for name in CONFIG, WEIGHTS:
        if not (path / name).is_file():
            raise FileNotFoundError(f"{path} has no {name}; PEFT's save_pretrained writes it (.bin files are not read)")
    problems: list[str] = []
    modules = sum(math.prod(len(r) for _, r in p.stacked) for _, p, _ in _adaptable(spec, params))
    config = _config_of(path / CONFIG, problems, modules)
    scale = _scales(config, problems)
    header = safetensors_header(path / WEIGHTS, problems, (1 << 16) + 1024 * modules)
    files = {name: t for name, t in header.items() if ".base_layer." not in name}
    spec = _as_named(spec, files)
    leaves = list(_adaptable(spec, params))
    whole = {} if problems else kept.find(spec, params, files, config.get("modules_to_save"), problems)
    pairs = {} if problems else _pairs(leaves, files, scale, max_rank, problems)
    arrays = {} if problems else {x: _assemble(p, m, pairs[x], problems) for x, p, m in leaves if x in pairs}
    fresh = {} if problems else {x: kept.read(p, t, problems) for x, (p, t) in whole.items()}
    if problems:
        raise CheckpointError(path, problems)

    def one(leaf: str, w: Any) -> Any:
        if leaf in arrays and isinstance(w, LowRank):
            raise ValueError(f"{leaf} has an adapter; merge or unload it before another one is loaded")
        w = jnp.asarray(fresh[leaf], w.dtype) if leaf in fresh else w
        return LowRank(w, *map(jnp.asarray, arrays[leaf])) if leaf in arrays else w

    return change(one, params)


def _as_named(spec: Tree, files: Collection[str]) -> Tree:
    """Declare arrays by the names that more of these tensors have: those of modules, or of the checkpoint, as of old."""

    def found(spec: Tree) -> int:
        names = {f"{PREFIX}{name}" for _, p in named_leaves(spec) if p.hf for name in hf_names(p)}
        names |= {name.removesuffix(".weight") for name in names}
        return sum(name.partition(".lora_")[0] in names for name in files)

    return max(as_modules(spec), spec, key=found)


def _pairs(
    leaves: Sequence[tuple[str, Param, Matrix]], files: Mapping[str, Tensor], scale: Callable[[str, int], float],
    max_rank: int | None, problems: list[str],
) -> dict[str, list[_Pair]]:  # fmt: skip
    """Find the tensors of each leaf by their names and shapes; nothing is read."""
    out: dict[str, list[_Pair]] = {}
    used: set[str] = set()
    for leaf, p, m in leaves:
        table = leaf in TABLES
        for index, module in _modules(p):
            names = _tensor_names(module, table)
            if any(name not in files for name in names):
                continue
            used |= {*names}
            found = tuple(files[name] for name in names)  # parts of a fused tensor have the same
            a, b = (t.shape[::-1] for t in reversed(found)) if table else (t.shape for t in found)
            kinds = [str(t.dtype) for t in found if not jnp.issubdtype(t.dtype, jnp.floating)]
            try:
                if kinds:
                    raise ValueError(f"{kinds[0]}; expected floating-point numbers")
                rank = a[0] if a else 0
                expected = [x.file_shape for x in _layouts(p, m, max(rank, 1))]
                if [a, b] != expected:
                    raise ValueError(f"expected {expected[0]}, {expected[1]}")
                if max_rank is not None and rank > max_rank:
                    raise ValueError(f"rank {rank}; the most is {max_rank} here (max_lora_rank)")
                out.setdefault(leaf, []).append(_Pair(index, names, found, table, rank, scale(module, rank)))
            except ValueError as e:
                problems.append(f"{names[0]} {a}, {names[1]} {b}: {e}")
    problems += [f"{name} has no place in the spec" for name in files if name not in used]
    return out


def save_peft(
    spec: Tree, params: Tree, path: str | Path, *, base_name: str = "", whole: str | None = None,
    task_type: str = "CAUSAL_LM",
) -> None:  # fmt: skip
    """Write the adapters of params to directory `path` for PEFT; `base_name` is the path or hub id of the base model.

    Arrays whose path matches the regular expression `whole` are written as they are, their modules as modules_to_save.
    The adapters of the parts of a fused tensor become one of the sum of their ranks: lora_A one above the other, and in
    lora_B only the rows of a part are not zero in its columns. Params without an adapter: ValueError.
    """
    spec, leaves = as_modules(spec), dict(named_leaves(params, is_leaf=is_weight))
    apart = kept.lay_out(params, spec, whole)
    parts: dict[tuple[str, bool], list[tuple[np.ndarray, np.ndarray, float]]] = {}
    for leaf, p, m in _adaptable(spec, params):
        if isinstance(w := leaves.pop(leaf), LowRank):
            for module, part in _parts(p, m, w):
                parts.setdefault((module, leaf in TABLES), []).append(part)
    lost = [leaf for leaf, w in leaves.items() if isinstance(w, LowRank)]
    if lost or not parts:
        raise ValueError(f"PEFT has no place for adapters of {', '.join(lost)}" if lost else "params have no adapter")
    out = {f"{PREFIX}{name}": x for name, x in apart.items()}
    ranks, alphas = {}, {}
    for (module, table), group in parts.items():
        scale = group[0][2]
        a = np.concatenate([part for part, _, _ in group])
        b = np.concatenate([(part * (s / scale)).astype(part.dtype) for _, part, s in group], axis=1)
        ranks[module], alphas[module] = len(a), round(scale * len(a), 6)
        pair = map(np.ascontiguousarray, (b.T, a.T)) if table else (a, b)
        out |= zip(_tensor_names(module, table), pair, strict=True)
    names = {name for _, p in named_leaves(spec) for name in hf_names(p)}
    every = {name.removesuffix(".weight") for name in names if name.endswith(".weight")}
    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    config = _config(ranks, alphas, every) | {"base_model_name_or_path": base_name, "task_type": task_type}
    config |= {"modules_to_save": kept.modules(apart, names)} if apart else {}
    (path / CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", "utf-8")
    save_file(out, path / WEIGHTS, {"format": "pt"})


def _config_of(file: Path, problems: list[str], modules: int) -> dict[str, Any]:
    """Read adapter_config.json, of a model with so many modules."""
    most = (1 << 16) + 512 * modules
    if (size := file.stat().st_size) > most:
        raise CheckpointError(file.parent, [f"{file.name}: {size:,} bytes; expected {most:,} at most"])
    config = json_object(file, file.read_bytes(), problems)
    refused = {k: v for k, v in config.items() if v and k not in NEUTRAL and v not in ALLOWED.get(k, ())}
    problems += [f"{file.name}: {k}={str(v)[:100]!r} is not supported" for k, v in refused.items()]
    return config


def _scales(config: Mapping[str, Any], problems: list[str]) -> Callable[[str, int], float]:
    """Make a function of (module, rank) that gives its scale."""
    alphas = config.get("alpha_pattern") or {}
    alphas = alphas if isinstance(alphas, dict) else {"alpha_pattern": alphas}
    each = {"lora_alpha": config.get("lora_alpha"), **alphas}
    wrong = [k for k, v in each.items() if type(v) not in (int, float) or not abs(v) < 1e30]
    problems += [f"{CONFIG}: {k[:100]!r}: {str(each[k])[:100]!r}; expected a finite number" for k in wrong]
    try:
        patterns = Patterns(alphas)
    except ValueError as e:
        problems.append(f"{CONFIG}: alpha_pattern: {e}")
    root = math.sqrt if config.get("use_rslora") else float
    return lambda module, rank: patterns.get(module, config["lora_alpha"]) / root(rank)


def _adaptable(spec: Tree, params: Tree) -> Iterator[tuple[str, Param, Matrix]]:
    """The leaves of params that are weights of modules: (path, declaration, how it is a matrix)."""
    for leaf, p in declarations(params, spec).items():
        m = matrix(p)
        if m and p.hf.endswith(".weight") and m.batch == len(p.stacked):
            yield leaf, p, m


def _modules(p: Param) -> Iterator[tuple[tuple[int, ...], str]]:
    """(Index in the stacked axes, name of the module) of each checkpoint tensor of an array."""
    indices = np.ndindex(tuple(len(r) for _, r in p.stacked))
    return zip(indices, (name.removesuffix(".weight") for name in hf_names(p)), strict=True)


def _tensor_names(module: str, table: bool) -> tuple[str, str]:
    kind = "lora_embedding_{}" if table else "lora_{}.weight"
    return f"{PREFIX}{module}.{kind.format('A')}", f"{PREFIX}{module}.{kind.format('B')}"


@functools.lru_cache(maxsize=64)
def _layouts(p: Param, m: Matrix, rank: int) -> tuple[Layout, Layout]:
    """How lora_A maps to [rank, *inputs] and lora_B to [*outputs, rank]."""
    sizes = dict(zip(p.axes.split(), p.shape, strict=True)) | {"rank": rank}

    def one(axes: list[str], side: Sequence[str], file: str) -> Layout:
        dim = next(d for d in file_dims(p) if side[0] in axes_in(d))
        shape = tuple(sizes[axis] for axis in axes)
        return layout(Param(" ".join(axes), shape, zeros, p.hf, file.format(dim), p.part if "[" in dim else None))

    _, outputs, inputs = m.cut(p.axes.split())
    return one(["rank", *inputs], inputs, "rank {}"), one([*outputs, "rank"], outputs, "{} rank")


def _assemble(p: Param, m: Matrix, pairs: Sequence[_Pair], problems: list[str]) -> tuple[np.ndarray, ...]:
    """Read the tensors of one array's modules: its factors a and b, and scale. Notes what is not finite."""
    rank = max(pair.rank for pair in pairs)
    batch, outputs, inputs = m.cut(p.shape)
    a, b = np.zeros((*batch, rank, *inputs), np.float32), np.zeros((*batch, *outputs, rank), np.float32)
    scale = np.zeros(batch, np.float32)
    for index, names, tensors, table, r, s in pairs:
        with np.errstate(over="ignore"):
            files = [t.read().astype(np.float32) for t in tensors]
        wrong = (n for n, x in zip(names, files, strict=True) if not np.isfinite(x).all())
        problems += [f"{n} holds values that are not finite" for n in wrong]
        file_a, file_b = (x.T for x in reversed(files)) if table else files
        layout_a, layout_b = _layouts(p, m, r)
        a[index][:r], b[index][..., :r], scale[index] = layout_a.read(file_a), layout_b.read(file_b), s
    return a, b, scale


def _parts(p: Param, m: Matrix, w: LowRank) -> Iterator[tuple[str, tuple[np.ndarray, np.ndarray, float]]]:
    """What an adapter is in the file: (module, (lora_A, lora_B, scale)); layers whose scale is zero have none."""
    a, b, scale = np.asarray(w.a), np.asarray(w.b), np.asarray(w.scale)
    layouts = _layouts(p, m, b.shape[-1])
    for index, module in _modules(p):
        if scale[index]:
            file_a, file_b = (np.zeros(x.file_shape, a.dtype) for x in layouts)
            layouts[0].write(file_a, a[index])
            layouts[1].write(file_b, b[index])
            yield module, (file_a, file_b, float(scale[index]))


def _config(ranks: Mapping[str, int], alphas: Mapping[str, float], every: set[str]) -> dict[str, Any]:
    """adapter_config.json of modules with these ranks and alphas, where the model has the modules `every`."""
    (rank, _), (alpha, _) = Counter(ranks.values()).most_common(1)[0], Counter(alphas.values()).most_common(1)[0]
    last = lambda module: module.rpartition(".")[2]
    around = {part for x in every for part in x.split(".")[:-1]}  # modules that hold others
    short = {last(x) for x in ranks} - {last(x) for x in every - set(ranks)} - around
    differing = lambda values, usual: {re.escape(k): v for k, v in values.items() if v != usual}
    return {
        "peft_type": "LORA", "inference_mode": True, "bias": "none", "use_rslora": False,
        "r": rank, "lora_alpha": alpha, "lora_dropout": 0.0, "init_lora_weights": True,
        "rank_pattern": differing(ranks, rank), "alpha_pattern": differing(alphas, alpha),
        "target_modules": sorted({last(x) if last(x) in short else x for x in ranks}),
    }  # fmt: skip
