"""Checkpoints in Hugging Face hub layout, both ways: a spec tree says which tensors make up which array, and how."""

import dataclasses
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fdel.ops.weights import Quantized, is_weight

from .files import scan, write_checkpoint
from .hf_layout import Layout, hf_names, layout
from .mesh import of_parts
from .place import Leaf, copy, fetch, plain
from .published import declare
from .spec import Param, named_leaves, unstack
from .tensor import NAMES, CheckpointError, Tensor

Tree = Any


@dataclass(frozen=True)
class _Share:
    """What one checkpoint tensor holds of one array: which array, where in its stacked axes, in which layout."""

    leaf: int
    index: tuple[int, ...]
    layout: Layout


def _span(x: Layout) -> tuple[tuple[int, int], int, int]:
    """The part of a fused dimension that is ours: (tensors before it, its size), start, stop."""
    for axis, (cut, size) in enumerate(zip(x.cut, x.flat, strict=True)):
        if (cut.start, cut.stop) != (0, size):
            return (math.prod(x.flat[:axis]), size), cut.start, cut.stop
    return (1, 1), 0, 1


def _shares(named: list[tuple[str, Param]]) -> dict[str, list[_Share]]:
    """Map each checkpoint tensor to the arrays in it. Parts that overlap or leave a hole are a ValueError."""
    out: dict[str, list[_Share]] = {}
    for i, (path, p) in enumerate(named):
        if not p.hf:
            raise ValueError(f"{path} has no checkpoint name (hf=...); only arrays of a model can be loaded or saved")
        shape, where = tuple(len(r) for _, r in p.stacked), layout(p)
        for index, name in zip(np.ndindex(shape), hf_names(p), strict=True):
            out.setdefault(name, []).append(_Share(i, index, where))
    wrong = []
    for name, group in out.items():
        fused, end = {_span(x.layout)[0] for x in group}, 0
        for _, start, stop in sorted(_span(x.layout) for x in group):
            end = stop if start == end else -1
        if len({x.layout.file_shape for x in group}) > 1 or len(fused) > 1 or end != fused.pop()[1]:
            paths = ", ".join(f"{named[x.leaf][0]} {list(_span(x.layout)[1:])}" for x in group)
            wrong.append(f"  {name}: the parts {paths} do not cover it exactly once")
    if wrong:
        raise ValueError("the spec declares checkpoint tensors wrongly:\n" + "\n".join(wrong[:20]))
    return out


def _target_dtype(p: Param, tensor: Tensor, dtype: Any) -> np.dtype:
    return tensor.dtype if dtype is None else jnp.dtype(p.dtype or dtype)


def _faults(p: Param, path: str, name: str, share: _Share, tensor: Tensor, dtype: Any) -> Iterator[str]:
    """Say why one checkpoint tensor cannot become its part of one array."""
    if tensor.shape != share.layout.file_shape:
        want = f"{path} ({p.hf_axes or p.axes}) wants {list(share.layout.file_shape)}"
        yield f"{name}: the shape is {list(tensor.shape)}, {want}"
    floating = jnp.issubdtype(p.dtype or jnp.float32, jnp.floating)
    if jnp.issubdtype(tensor.dtype, jnp.floating) != floating:
        yield f"{name}: the dtype is {tensor.dtype}, {path} is {'' if floating else 'not '}floating"
    target = _target_dtype(p, tensor, dtype)
    if jax.dtypes.canonicalize_dtype(target) != target:
        yield f"{name}: the dtype {target} needs jax_enable_x64; or pass dtype="


def _check(
    named: list[tuple[str, Param]], shares: Mapping[str, list[_Share]], found: Mapping[str, Tensor], dtype: Any,
    ignore: Iterable[str], problems: list[str],
) -> list[np.dtype]:  # fmt: skip
    """Compare a checkpoint with a spec: the dtype of each array, and every missing, unexpected or unfit tensor."""
    problems += [f"missing: {name} (for {named[s[0].leaf][0]})" for name, s in shares.items() if name not in found]
    patterns = [re.compile(pattern) for pattern in ignore]
    unexpected = (n for n in found if n not in shares and not any(pattern.search(n) for pattern in patterns))
    problems += [f"unexpected: {n} {list(found[n].shape)}; name it in ignore= if it may be dropped" for n in unexpected]
    dtypes: list[set[np.dtype]] = [set() for _ in named]
    for name in (name for name in shares if name in found):
        for share in shares[name]:
            path, p = named[share.leaf]
            problems += _faults(p, path, name, share, found[name], dtype)
            dtypes[share.leaf].add(_target_dtype(p, found[name], dtype))
    mixed = ((path, d) for (path, _), d in zip(named, dtypes, strict=True) if len(d) > 1)
    problems += [f"{path}: its tensors have different dtypes {sorted(map(str, d))}; pass dtype=" for path, d in mixed]
    return [next(iter(d), np.dtype(np.float32)) for d in dtypes]


def opened(
    spec: Tree, path: str | Path, *, dtype: Any = None, rename: Callable[[str], str | None] | None = None,
    quantization: Mapping[str, Any] | None = None,
) -> tuple[Tree, dict[str, Tensor], list[str]]:  # fmt: skip
    """Give a spec as a file has it, matrices in few bits as `Quantized` of Param, its tensors, and what is wrong with them.

    Raises CheckpointError where no spec can be given. Parameters as in `load`.
    """
    problems: list[str] = []
    found: dict[str, Tensor] = {}
    for name, tensor in scan(Path(path), problems).items():
        ours = name if rename is None else rename(name)
        if ours in found:
            problems.append(f"{name}: rename gives {ours}, which another tensor has already")
        elif ours is not None:
            found[ours] = tensor
    if quantization:
        spec = declare(spec, found, quantization, dtype, problems)
        if problems:
            raise CheckpointError(path, problems)
    return spec, found, problems


def load(
    spec: Tree, path: str | Path, *, dtype: Any = None, shardings: Tree | None = None,
    rename: Callable[[str], str | None] | None = None, ignore: Sequence[str] = (),
    quantization: Mapping[str, Any] | None = None,
) -> Tree:  # fmt: skip
    """Load the params of `spec` from a directory in hub layout, or from one .safetensors file.

    `dtype` casts every array except those whose Param fixes one; None keeps the checkpoint's dtypes. `shardings` is a
    tree like `spec` (see `mesh.shardings`). `rename` maps names in the file to names in the spec, or to None to leave a
    tensor out; `ignore` holds regular expressions (searched) for unexpected tensors that may be dropped. `quantization` is
    the `quantization_config` of a config.json: matrices that the file has in few bits become `Quantized`, and stay so.

    Reads tensor by tensor. On CPU the arrays are the memory that was read into (so the first program that takes them as
    donated arguments still copies them); on accelerators the host holds one tensor at a time. Before anything is read,
    one `CheckpointError` lists every missing, unexpected, mis-shaped, truncated or otherwise unfit tensor.
    """
    if dtype is not None and not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(f"dtype is {dtype}, expected a floating one; to store integers, load, then params.quantize")
    _shares(list(named_leaves(spec)))  # a ValueError
    spec, found, problems = opened(spec, path, dtype=dtype, rename=rename, quantization=quantization)
    named = list(named_leaves(spec))
    shares = _shares(named)
    dtypes = _check(named, shares, found, dtype, ignore, problems)
    if problems:
        raise CheckpointError(path, problems)
    split = lambda p, s: of_parts(p, s) if isinstance(p, Quantized) else s
    at = [None] * len(named)
    if shardings is not None:
        at = jax.tree.leaves(jax.tree.map(split, spec, shardings, is_leaf=is_weight))
    leaves = [Leaf(p.shape, d, s, len(p.stacked)) for (_, p), d, s in zip(named, dtypes, at, strict=True)]
    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
        for name, tensor in found.items():
            group = [(s, *leaves[s.leaf].begin(s.index)) for s in shares.get(name, [])]
            copy(tensor, [(s.layout, buffers, index) for s, buffers, index in group], pool)
            for s, buffers, _ in group:
                leaves[s.leaf].end(buffers, s.index)
    return jax.tree.unflatten(jax.tree.structure(spec), [leaf.array() for leaf in leaves])


@dataclass(frozen=True)
class _Item:
    """An array, or later an item of it: lets `unstack` take a tree apart without touching a device."""

    array: Any
    index: tuple[int, ...] = ()

    def __getitem__(self, i: int) -> "_Item":
        return _Item(self.array, (*self.index, i))

    shape = property(lambda self: self.array.shape[len(self.index) :])


def _unfit(path: str, p: Param, x: _Item) -> Iterator[str]:
    if tuple(x.shape) != p.shape:
        yield f"{path} has shape {list(x.shape)}, the spec says {list(p.shape)} ({p.axes})"
    if x.array.dtype not in NAMES:
        yield f"{path} has dtype {x.array.dtype}, which safetensors cannot hold"


def _pair(spec: Tree, params: Tree) -> tuple[list[tuple[str, Param]], list[_Item]]:
    """Bring spec and params into one structure, stacked or listed; give the leaves of both."""
    items = jax.tree.map(_Item, params, is_leaf=dataclasses.is_dataclass)
    kinds = {path: type(x.array).__name__ for path, x in named_leaves(items) if dataclasses.is_dataclass(x.array)}
    if kinds:
        path, kind = next(iter(kinds.items()))
        raise ValueError(f"{len(kinds)} arrays like {path} are {kind}, not plain: merge or dequantize them first")
    structure: Callable[[Tree], Any] = jax.tree.structure
    for s, x in ((spec, items), (unstack(spec), items), (spec, unstack(items))):
        if structure(s) == structure(x):
            break
    else:
        a, b = ({path for path, _ in named_leaves(unstack(t))} for t in (spec, items))
        diff = [f"params lack {x}" for x in sorted(a - b)] + [f"the spec lacks {x}" for x in sorted(b - a)]
        raise ValueError(f"params do not fit the spec: {'; '.join(diff[:20]) or 'lists and tuples differ'}")
    named, leaves = list(named_leaves(s)), jax.tree.leaves(x)
    wrong = [why for (path, p), x in zip(named, leaves, strict=True) for why in _unfit(path, p, x)]
    if wrong:
        raise ValueError("params do not fit the spec: " + "; ".join(wrong[:20]))
    return named, leaves


@dataclass(frozen=True)
class Contents:
    """The checkpoint tensors that params make up: their shapes and dtypes, the parts of each, and how to make one."""

    entries: dict[str, tuple[tuple[int, ...], np.dtype]]
    parts: Mapping[
        str, list[tuple[str, Param, tuple[int, ...]]]
    ]  # of each tensor: path, declaration, place in stacked axes
    tensor: Callable[[str], np.ndarray]
    spread: bool  # over several processes


def contents(spec: Tree, params: Tree) -> Contents:
    """Say what a checkpoint of these params holds; params that do not fit the spec are a ValueError."""
    named, items = _pair(spec, params)
    shares = _shares(named)
    entries = {name: (s[0].layout.file_shape, items[s[0].leaf].array.dtype) for name, s in shares.items()}
    mixed = [n for n, s in shares.items() if len({items[x.leaf].array.dtype for x in s}) > 1]
    if mixed:
        raise ValueError(f"the parts of a checkpoint tensor have different dtypes: {', '.join(mixed[:20])}")

    def tensor(name: str) -> np.ndarray:
        out = np.empty(*entries[name])
        for s in shares[name]:
            item = fetch(items[s.leaf].array, (*items[s.leaf].index, *s.index))
            if plain(s.layout):
                return item.reshape(out.shape)
            s.layout.write(out, item)
        return out

    parts = {name: [(*named[s.leaf], s.index) for s in group] for name, group in shares.items()}
    return Contents(entries, parts, tensor, any(not getattr(x.array, "is_fully_addressable", True) for x in items))


def save(
    spec: Tree, params: Tree, path: str | Path, *, shard_bytes: int = 5_000_000_000,
    metadata: Mapping[str, str] | None = None,
) -> None:  # fmt: skip
    """Write params as safetensors in hub layout into directory `path`, with an index if there are several files.

    Spec and params may be stacked or listed, each as it likes. Tensors are written one by one (the host holds one at
    a time) in the dtype of their array, to temporary names, then renamed; files of an earlier checkpoint in `path` are
    replaced. What lies in several processes is written by the first; all of them call this. `metadata` goes into each
    file's header; None is {"format": "pt"}, which transformers wants.
    Quantized or LowRank leaves, and params that do not fit the spec, are a ValueError.
    """
    x = contents(spec, params)
    writes = not x.spread or jax.process_index() == 0  # others fetch along: the first process cannot read it alone
    write_checkpoint(Path(path) if writes else None, x.entries, x.tensor, shard_bytes, metadata or {"format": "pt"})
