"""Read and write adapters as PEFT does: adapter_config.json and adapter_model.safetensors.

What is trained whole, such as a new head, stands there under its own name (modules_to_save).

Modules have the names of transformers' (`Param.module`); files with names of the checkpoint are read too. Each adapted one
has lora_A [r, in] and lora_B [out, r], the factors a and b of a `LowRank` leaf with the axes of each side in one, as the
Param lays them out. An embedding, to PEFT, maps tokens to channels: it has lora_embedding_A [r, vocab] and
lora_embedding_B [embed, r], our b and a transposed (https://github.com/huggingface/peft). Of n experts in one parameter it
has lora_A [(n r), in] and lora_B [out, (r n)].
"""

import json
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

from fdel.ops.weights import LowRank, is_weight

from . import kept, peft_names, tied
from .files import json_object, safetensors_header
from .hf_layout import Matrix, as_modules, hf_names
from .kept import PREFIX
from .patterns import Patterns
from .peft_layout import adaptable, experts_of, is_table, names_of, sides
from .quantize import change
from .spec import Param, named_leaves
from .tensor import CheckpointError, Tensor

Tree = Any

OLDER = {"vision_tower.vision_model.": "vision_tower."}  # of modules in older versions of transformers
WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
# Fields of adapter_config.json that do not change what the tensors mean, and those that may have some values only.
NEUTRAL = {
    "alpha_pattern", "auto_mapping", "base_model_name_or_path", "corda_config", "ensure_weight_tying", "eva_config",
    "exclude_modules", "fan_in_fan_out", "inference_mode", "layers_pattern", "layers_to_transform", "loftq_config",
    "lora_alpha", "lora_dropout", "lora_ga_config", "megatron_config", "megatron_core", "modules_to_save", "peft_version",
    "qalora_group_size", "r", "rank_pattern", "revision", "runtime_config", "target_modules", "target_parameters",
    "task_type", "use_rslora",
}  # fmt: skip
ALLOWED = {"peft_type": ("LORA",), "bias": ("none",), "init_lora_weights": (True, "gaussian", "eva", "orthogonal")}


class _Pair(NamedTuple):
    """A lora_A and a lora_B: where they belong in the stacked axes of their array, and what they are multiplied with."""

    at: tuple[int, ...]
    names: tuple[str, str]
    tensors: tuple[Tensor, ...]
    rank: int
    scale: float


def load_peft(spec: Tree, params: Tree, path: str | Path, *, max_rank: int | None = None) -> Tree:
    """Give params the adapter in directory `path`, in float32; what it has whole takes the place of params' own.

    Of the base weights nothing is read. Layers of a stack without an adapter get one that is zero and stays so in
    training; lower ranks are padded with zeros. Parts of a fused tensor get their rows of lora_B and a lora_A each, without
    the ranks whose rows are zeros there and not in all parts, as `save_peft` writes them. What
    cannot be applied exactly (another kind of adapter, an initialisation that changes the base, a tensor without a place
    in the spec), a rank above `max_rank` and values that are not finite: `CheckpointError`. Names, shapes and ranks are
    checked before any tensor is read.
    """
    path = Path(path)
    for name in CONFIG, WEIGHTS:
        if not (path / name).is_file():
            raise FileNotFoundError(f"{path} has no {name}; PEFT's save_pretrained writes it (.bin files are not read)")
    problems: list[str] = []
    modules = sum(math.prod(len(r) for _, r in p.stacked) for _, p, _ in adaptable(spec, params))
    config = _config_of(path / CONFIG, problems, modules)
    scale, found = _scales(config, problems), peft_names.finder(config, problems)
    header = safetensors_header(path / WEIGHTS, problems, (1 << 16) + 1024 * modules)
    files = {_newer(name): t for name, t in header.items() if ".base_layer." not in name or ".lora_" in name}
    spec = _as_named(spec, files)
    leaves = list(adaptable(spec, params))
    whole = {} if problems else kept.find(spec, params, files, config.get("modules_to_save"), problems)
    both = tied.modules({leaf: p for leaf, p, _ in leaves}, params)
    twice = tied.take(both, files, scale, problems) if both and not problems else []
    pairs = {} if problems else _pairs(leaves, files, scale, found, max_rank, problems)
    if not problems:
        tied.check(twice, problems)
    made = ((x, _assemble(x, p, m, pairs[x], max_rank, problems)) for x, p, m in leaves if x in pairs)
    arrays = {} if problems else {x: factors for x, factors in made if factors[-1].any()}
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
        names |= {name.rpartition(".")[0] for name in names}
        return sum(name.partition(".lora_")[0].removesuffix(".base_layer") in names for name in files)

    return max(as_modules(spec), spec, key=found)


def _newer(name: str) -> str:
    """Name a tensor of a module that older versions of transformers call otherwise."""
    for old, new in OLDER.items():
        name = name.replace(old, new, 1)
    return name


def _pairs(
    leaves: Sequence[tuple[str, Param, Matrix]], files: Mapping[str, Tensor], scale: Callable[[str, int], float],
    found: Callable[[str], bool], max_rank: int | None, problems: list[str],
) -> dict[str, list[_Pair]]:  # fmt: skip
    """Find the tensors of each leaf by their names and shapes; nothing is read."""
    out: dict[str, list[_Pair]] = {}
    used: set[str] = set()
    parts = Counter(name for _, p, _ in leaves for name in hf_names(p))
    for leaf, p, m in leaves:
        for index, name in names_of(p):
            module = peft_names.target(name, found)
            names = peft_names.tensor_names(module, found, is_table(leaf))
            if any(name not in files for name in names) or (not name.endswith(".weight") and not found(name)):
                continue
            used |= {*names}
            tensors = tuple(files[name] for name in names)  # parts of a fused tensor have the same
            a, b = (t.shape for t in tensors)
            kinds = [str(t.dtype) for t in tensors if not jnp.issubdtype(t.dtype, jnp.floating)]
            try:
                if kinds:
                    raise ValueError(f"{kinds[0]}; expected floating-point numbers")
                rank = a[0] // math.prod(experts_of(p, m)) if a else 0
                expected = sides(leaf, p, m, max(rank, 1)).shapes
                if (a, b) != expected:
                    raise ValueError(f"expected {expected[0]}, {expected[1]}")
                if max_rank is not None and rank > max_rank * parts[name]:
                    raise ValueError(f"rank {rank}; the most is {max_rank} here (max_lora_rank)")
                out.setdefault(leaf, []).append(_Pair(index, names, tensors, rank, scale(module, rank)))
            except ValueError as e:
                problems.append(f"{names[0]} {a}, {names[1]} {b}: {e}")
    problems += [f"{name} has no place in the spec" for name in files if name not in used]
    return out


def without_place(spec: Tree, params: Tree) -> list[str]:
    """Name the arrays of params whose adapters `save_peft` cannot write."""
    places = {leaf for leaf, _, _ in adaptable(as_modules(spec), params)}
    adapted = [leaf for leaf, w in named_leaves(params, is_leaf=is_weight) if isinstance(w, LowRank)]
    return [leaf for leaf in adapted if leaf not in places]


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
    parts: dict[str, list[tuple[np.ndarray, np.ndarray, float]]] = {}
    tables, routers = set(), set()
    places = list(adaptable(spec, params))
    both = tied.modules({leaf: p for leaf, p, _ in places}, params)
    for leaf, p, m in places:
        if isinstance(w := leaves[leaf], LowRank):
            for name, part in _parts(leaf, p, m, w):
                parts.setdefault(name, []).append(part)
                tables |= {name} if is_table(leaf) else set()
                routers |= {name} if leaf.rpartition(".")[2] == "router" else set()
    lost = without_place(spec, params)
    if lost or not parts:
        raise ValueError(f"PEFT has no place for adapters of {', '.join(lost)}" if lost else "params have no adapter")
    out = {f"{PREFIX}{name}": x for name, x in apart.items()}
    names = {name for _, p in named_leaves(spec) for name in hf_names(p)}
    parameters = peft_names.as_parameters(names, routers)
    found = lambda name: name in parameters and name in parts
    ranks, alphas = {}, {}
    for name, group in parts.items():
        module, scale = peft_names.target(name, found), group[0][2]
        a = np.concatenate([part for part, _, _ in group], axis=-2)
        b = np.concatenate([(part * (s / scale)).astype(part.dtype) for _, part, s in group], axis=1)
        ranks[module], alphas[module] = a.shape[-2], round(scale * a.shape[-2], 6)
        pair = map(np.ascontiguousarray, (a.reshape(-1, a.shape[-1]), b.reshape(len(b), -1)))
        out |= zip(peft_names.tensor_names(module, found, name in tables), pair, strict=True)
    alike = both is not None and both[0] in ranks
    if both and alike:
        factor_a, factor_b, *head = tied.names(both)
        out |= zip(head, (np.ascontiguousarray(out[x].T) for x in (factor_b, factor_a)), strict=True)
        ranks[both[1]], alphas[both[1]] = ranks[both[0]], alphas[both[0]]
    every = {name.removesuffix(".weight") for name in names if name.endswith(".weight")}
    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    config = peft_names.config(ranks, alphas, every, parameters)
    config |= {"base_model_name_or_path": base_name, "task_type": task_type, "ensure_weight_tying": alike}
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


def _assemble(
    leaf: str, p: Param, m: Matrix, pairs: Sequence[_Pair], max_rank: int | None, problems: list[str]
) -> tuple[np.ndarray, ...]:  # fmt: skip
    """Read the tensors of one array's modules: its factors a and b, and scale. Notes what is not finite, and its rank."""
    read = []
    for pair in pairs:
        with np.errstate(over="ignore"):
            files = [t.read().astype(np.float32) for t in pair.tensors]
        wrong = (n for n, x in zip(pair.names, files, strict=True) if not np.isfinite(x).all())
        problems += [f"{n} holds values that are not finite" for n in wrong]
        read.append(sides(leaf, p, m, pair.rank).read(*files))
    rank = max(b.shape[-1] for _, b in read)
    if max_rank is not None and rank > max_rank:
        problems.append(f"{leaf}: rank {rank}; the most is {max_rank} here (max_lora_rank)")
    batch, outputs, inputs = m.cut(p.shape)
    a, b = np.zeros((*batch, rank, *inputs), np.float32), np.zeros((*batch, *outputs, rank), np.float32)
    scale = np.zeros(batch, np.float32)
    every = [slice(None)] * len(experts_of(p, m))
    for pair, (own_a, own_b) in zip(pairs, read, strict=True):
        ranks = slice(own_b.shape[-1])
        a[pair.at][(*every, ranks)], b[pair.at][..., ranks] = own_a, own_b
        scale[pair.at] = pair.scale if own_b.shape[-1] else 0
    return a, b, scale


def _parts(
    leaf: str, p: Param, m: Matrix, w: LowRank
) -> Iterator[tuple[str, tuple[np.ndarray, np.ndarray, float]]]:  # fmt: skip
    """What an adapter is in the file: (name, (A, B, scale)), see `Sides`; layers whose scale is zero have none."""
    a, b, scale = np.asarray(w.a), np.asarray(w.b), np.asarray(w.scale)
    both = sides(leaf, p, m, b.shape[-1])
    for index, name in names_of(p):
        if (own := scale[index]).any():
            most = own.flat[np.abs(own).argmax()]  # experts have scales of their own, a parameter has one
            file_a, file_b = both.write(a[index], b[index])
            yield name, (file_a, (file_b * (own / most)).astype(b.dtype), float(most))
