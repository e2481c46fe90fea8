"""What a checkpoint is made of: parameters, bytes, FLOPs, cache and shards; and how two checkpoints differ."""

import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh

from fdel import models, params
from fdel.ops.weights import is_weight
from fdel.params.hf_layout import matrix
from fdel.params.mesh import shared, spread
from fdel.params.spec import leaf_dtype

Table = list[tuple[str, ...]]


def render(rows: Table) -> str:
    """Align rows in columns; the first column to the left, the others to the right."""
    first, *widths = (max(map(len, column)) for column in zip(*rows, strict=True))
    line = lambda name, *cells: "  ".join([name.ljust(first), *map(str.rjust, cells, widths)])
    return "\n".join(line(*row).rstrip() for row in rows)


def flops_per_token(module: Any, cfg: Any, context: int) -> int:
    """Count multiply-adds times two of one token's forward at a context length.

    Each weight matrix counts once, experts by the share that is routed to; the embedding counts if it is the head too.
    Attention adds 2 (q k^T and p v) products over the visible keys per layer.
    """
    spec, total = module.spec(cfg), 0.0
    for path, p in params.named_leaves(spec):
        m = matrix(p)
        share = cfg.top_k / cfg.experts if "experts" in p.axes.split()[: m.batch if m else 0] else 1.0
        lookup = path == "positions" or (path == "embed" and "head" in spec)
        convolution = p.hf.endswith(".weight") and len(params.layout(p).file_shape) > 1
        multiplied = m is not None or convolution
        total += 0 if lookup or not multiplied else 2 * math.prod(p.shape) * share
    state = module.state_spec(cfg, pages=1, page=1, rows=0)
    pages = [p for p in jax.tree.leaves(state) if "pages" in p.axes.split()]
    for p in pages:
        layers, _, _, _, dim = p.shape
        total += 2 * layers * cfg.heads * dim * context * (2 if len(pages) == 1 else 1)
    return round(total)


def cache_bytes(module: Any, cfg: Any, dtype: Any) -> tuple[int, int]:
    """Count what serving remembers: bytes per token, and bytes per sequence whatever its length."""
    size = lambda **n: params.nbytes(module.state_spec(cfg, page=64, **n), dtype)
    base = size(pages=1, rows=1)
    return (size(pages=2, rows=1) - base) // 64, size(pages=1, rows=2) - base


def info(directory: Path, *, mesh: str | None = None, context: int | None = None, rules: str = "train") -> str:
    """Describe a checkpoint from its config.json and tensor headers; no weight is read.

    With a mesh ("fsdp=2,tp=4") a table follows: each array's axes, shape, sharding and bytes per device.
    """
    module, cfg = models.read_config(directory)
    spec, found = module.spec(cfg), params.tensors(directory)
    bytes_by = Counter[str]()
    for t in found.values():
        bytes_by[str(t.dtype)] += t.nbytes
    context = context or getattr(cfg, "max_positions", 0) or 2048
    plain = [
        kind
        for kind, _ in bytes_by.most_common()
        if jnp.issubdtype(kind, jnp.floating) and jnp.dtype(kind).itemsize > 1
    ]
    dtype = jnp.dtype(plain[0] if plain else jnp.bfloat16)
    token, sequence = cache_bytes(module, cfg, dtype)
    rows: Table = [
        ("family", module.MODEL_TYPE),
        ("parameters", f"{params.count(spec):,}"),
        *((f"bytes in {kind}", f"{n:,}") for kind, n in bytes_by.most_common()),
        ("tensors in files", f"{len(found):,}"),
        *quantized(models.stored(directory)),
        (f"FLOPs per token at context {context}", f"{flops_per_token(module, cfg, context):,}"),
        (f"cache bytes per token ({dtype})", f"{token:,}"),
        ("cache bytes per sequence", f"{sequence:,}"),
    ]
    if mesh is None:
        return render(rows)
    cache = module.state_spec(cfg, pages=1, page=1, rows=0) if rules == "serve" else None
    return render(rows) + "\n\n" + sharding_table(spec, mesh, dtype, rules, cache)


def quantized(spec: Any) -> Table:
    """Say which matrices a file has in few bits, and which it has not; nothing of a file without any."""
    kinds, plain = Counter[str](), list[str]()
    for path, p in params.named_leaves(spec, is_leaf=is_weight):
        if is_weight(p):
            group = math.prod(p.inputs) // p.scale.shape[-1]
            kinds[f"in {p.format}, a scale per {group} inputs"] += 1
        elif matrix(p):
            plain.append(path)
    rest = ", ".join(plain[:6]) + (f" and {len(plain) - 6} more" if len(plain) > 6 else "")
    rows = [(f"matrices {kind}", f"{n:,}") for kind, n in kinds.items()]
    return [*rows, ("plain matrices", rest or "none")] if kinds else []


def sharding_table(spec: Any, mesh: str, dtype: Any, rules: str = "train", cache: Any = None) -> str:
    """Tabulate the shards of every array, and of a token's `cache` (a spec tree), on a mesh that need not exist here."""
    sizes = dict.fromkeys(params.AXES, 1) | params.parse_mesh(mesh)
    if -1 in sizes.values():
        raise ValueError(f"mesh {mesh!r}: give every size; there are no devices here to take the remaining ones from")
    abstract: Any = AbstractMesh(tuple(sizes.values()), tuple(sizes))
    chosen = {"train": params.TRAIN, "serve": params.SERVE}[rules]
    shardings = params.shardings(spec, abstract, chosen)
    rows: Table = [("array", "axes", "shape", "sharding", "bytes per device")]
    total = 0
    for (path, p), s in zip(params.named_leaves(spec), jax.tree.leaves(shardings), strict=True):
        mine = math.prod(s.shard_shape(p.shape)) * leaf_dtype(p, dtype).itemsize
        total += mine
        where = ", ".join("-" if a is None else a if isinstance(a, str) else "*".join(a) for a in s.spec)
        rows.append((path, p.axes, "x".join(map(str, p.shape)), f"({where})", f"{mine:,}"))
    rows.append(("total", "", "", "", f"{total:,}"))
    if cache:
        cache = spread(cache, abstract)
        held = params.nbytes(cache, dtype, params.shardings(cache, abstract, params.SERVE))
        rows.append(("cache of a token", "", "", "", f"{held:,}"))
    return "\n".join([render(rows), *shared(spec, abstract, chosen)])


def diff(a: Path, b: Path, *, tolerance: float = 0.0) -> Iterator[str]:
    """Compare two checkpoints tensor by tensor; yield one line per difference, none if they are equal.

    Values differ if |a - b| exceeds `tolerance` anywhere (NaN equals NaN); dtypes differ if it is 0. Tensors are read
    one at a time.
    """
    left, right = params.tensors(a), params.tensors(b)
    for name in sorted(left.keys() | right.keys()):
        if name not in left or name not in right:
            yield f"{name}: only in {a if name in left else b}"
        elif left[name].shape != right[name].shape:
            yield f"{name}: shape {left[name].shape} and {right[name].shape}"
        else:
            if left[name].dtype != right[name].dtype and not tolerance:
                yield f"{name}: dtype {left[name].dtype} and {right[name].dtype}"
            x, y = (t[name].read().astype(np.float64) for t in (left, right))
            same = (x == y) | (np.isnan(x) & np.isnan(y))
            gap = np.nan_to_num(np.abs(x - y), nan=np.inf, posinf=np.inf).max(where=~same, initial=-np.inf)
            if gap > tolerance:
                yield f"{name}: {(~same).sum():,} of {same.size:,} values differ, by up to {gap:.3g}"
