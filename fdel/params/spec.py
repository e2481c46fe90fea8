"""Declare every array of a model once; read names, shapes, layouts and initialisers from that declaration.

A *spec tree* is a nested dict (lists and tuples are allowed) whose leaves are `Param`. `Param` is deliberately not a
registered pytree node, so `jax.tree.map` treats it as a leaf. A *params* tree has the same structure with arrays.
"""

import dataclasses
import itertools
import math
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

Init = Callable[[jax.Array, tuple[int, ...], Any], jax.Array]
Tree = Any


def normal(std: float) -> Init:
    """Initialise from a normal distribution of mean 0 and standard deviation `std`."""
    return lambda key, shape, dtype: (std * jax.random.normal(key, shape, jnp.float32)).astype(dtype)


def constant(value: float) -> Init:
    """Initialise every element to `value`."""
    return lambda key, shape, dtype: jnp.full(shape, value, dtype)


zeros, ones = constant(0.0), constant(1.0)


@dataclass(frozen=True)
class Param:
    """One array: names and sizes of its axes, initialiser, and where it lives in a Hugging Face checkpoint.

    `hf` is the tensor's name, with one `{axis}` placeholder per stacked axis ("model.layers.{layers}.mlp.up_proj.weight").
    `hf_axes` is the layout in the file, written with the same axis names: "(heads head_dim) embed" is a matrix whose rows
    are heads times head_dim; `1` is an axis of size one. If the array is a part of a fused tensor, square brackets enclose
    the axes of the fused dimension and `part` is (offset, total size) along it (see `parts`):
    "(kv_heads [rep head_dim]) embed". An axis of ours that is two in the file is written there as quotient and remainder:
    "(heads//2 [heads%2 head_dim]) embed" has the queries of two heads beside each head of keys.

    `dtype` fixes a dtype whatever the tree is cast to (router biases, decay rates). Arrays without `hf` (caches, recurrent
    state) exist in no checkpoint. `inputs` is how many of the last axes are a matrix's inputs, where the layout does not
    say it (see `hf_layout.matrix`); 0: the array is no matrix. `module` declares the same array as transformers' modules
    hold it, whose names adapters have, where that differs from the file.
    """

    axes: str
    shape: tuple[int, ...]
    init: Init
    hf: str = ""
    hf_axes: str = ""
    part: tuple[int, int] | None = None
    dtype: str | None = None
    stacked: tuple[tuple[str, range], ...] = ()
    inputs: int | None = None
    module: "Param | None" = None

    def __post_init__(self) -> None:
        names = self.axes.split()
        if len(names) != len(self.shape):
            raise ValueError(f"{self.hf or self.axes!r}: {len(names)} axis names ({self.axes}) for shape {self.shape}")
        if len(set(names)) != len(names):
            raise ValueError(f"{self.hf or self.axes!r}: an axis name occurs twice in {self.axes!r}")

    def renamed(self, change: Callable[[str], str]) -> "Param":
        """Change its name in files, and that of its module alike."""
        return dataclasses.replace(self, hf=change(self.hf), module=self.module and self.module.renamed(change))


def parts(**sizes: int) -> dict[str, tuple[int, int]]:
    """Name consecutive parts of a fused dimension: `parts(q=8, k=4)` is {"q": (0, 12), "k": (8, 12)}."""
    total, ends = sum(sizes.values()), list(itertools.accumulate(sizes.values()))
    return {name: (end - size, total) for (name, size), end in zip(sizes.items(), ends, strict=True)}


def stack(tree: Tree, axis: str, index: range) -> Tree:
    """Lift a spec tree along a new leading axis; each index of `index` is one checkpoint tensor."""

    def lift(p: Param) -> Param:
        axes, shape, stacked = f"{axis} {p.axes}".strip(), (len(index), *p.shape), ((axis, index), *p.stacked)
        return dataclasses.replace(p, axes=axes, shape=shape, stacked=stacked, module=p.module and lift(p.module))

    return jax.tree.map(lift, tree)


def runs(kinds: tuple, longest: int = 8) -> list[tuple[int, int, int]]:
    """Split a sequence of layer kinds into repeats: (start, period, count) with kinds[start:start+period] count times.

    Greedy: at each layer the period (up to `longest`) that covers most layers, the shortest on a tie.
    """
    out, i = [], 0
    while i < len(kinds):
        best = (1, 1)
        for period in range(1, min(longest, len(kinds) - i) + 1):
            n = 1
            while kinds[i + n * period : i + (n + 1) * period] == kinds[i : i + period]:
                n += 1
            if (n > 1 or period == 1) and n * period > best[0] * best[1]:
                best = (period, n)
        out.append((i, *best))
        i += best[0] * best[1]
    return out


def layers(layer: Callable[[Any], Tree], kinds: tuple) -> Tree:
    """Build the stacked spec of a layer pattern; `layer(kind)` is the spec of one layer.

    All kinds equal: one stacked tree (leaves [L, ...]). Otherwise a tuple of runs (see `runs`), each a tuple of `period`
    stacked trees (leaves [count, ...]). `ops.layers` walks all forms, and the list that `unstack` makes.
    """
    if len(set(kinds)) == 1:
        return stack(layer(kinds[0]), "layers", range(len(kinds)))
    one = lambda first, end, period: stack(layer(kinds[first]), "layers", range(first, end, period))
    return tuple(tuple(one(i + j, i + n * m, n) for j in range(n)) for i, n, m in runs(kinds))


def _slice(leaf: Any, i: int) -> Any:
    if not isinstance(leaf, Param):
        return leaf[i]
    (axis, index), *rest = leaf.stacked
    axes, hf = leaf.axes.partition(" ")[2], leaf.hf.replace(f"{{{axis}}}", str(index[i]))
    module = leaf.module and _slice(leaf.module, i)
    return dataclasses.replace(leaf, axes=axes, shape=leaf.shape[1:], hf=hf, stacked=tuple(rest), module=module)


def _unstack_layers(tree: Tree) -> list:
    if isinstance(tree, list):
        return tree
    if isinstance(tree, tuple):
        return [x for run in tree for group in zip(*map(_unstack_layers, run), strict=True) for x in group]
    first = jax.tree.leaves(tree)[0]
    return [jax.tree.map(lambda x, i=i: _slice(x, i), tree) for i in range(first.shape[0])]


def unstack(tree: Tree) -> Tree:
    """Turn each stacked subtree under a key `layers` into a list with one tree per layer (specs and params alike).

    Serving walks lists: a scan over stacked weights copies each layer's weights at each step (DESIGN section 4).
    """
    if not isinstance(tree, dict):
        return tree
    return {k: _unstack_layers(v) if k == "layers" else unstack(v) for k, v in tree.items()}


def restack(tree: Tree, like: Tree) -> Tree:
    """Undo `unstack`; `like` is a stacked tree (usually the spec) that gives the structure."""
    if not isinstance(tree, dict):
        return tree
    return {k: _restack_layers(v, like[k]) if k == "layers" else restack(v, like[k]) for k, v in tree.items()}


def _restack_layers(items: Tree, like: Tree) -> Tree:
    if not isinstance(items, list):
        return items
    join = lambda trees: jax.tree.map(lambda *xs: jnp.stack(xs), *trees)
    if not isinstance(like, tuple):
        return join(items)
    out, i = [], 0
    for run in like:
        n = len(run) * jax.tree.leaves(run[0])[0].shape[0]
        out.append(tuple(join(items[i + j : i + n : len(run)]) for j in range(len(run))))
        i += n
    return tuple(out)


def path_name(path: tuple) -> str:
    """Name a tree path with dots: `layers.q`, `layers.0.1.q`."""
    return ".".join(str(getattr(k, "key", getattr(k, "idx", getattr(k, "name", k)))) for k in path)


def named_leaves(tree: Tree, is_leaf: Callable[[Any], bool] | None = None) -> Iterator[tuple[str, Any]]:
    """Iterate over (dotted path, leaf)."""
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)[0]:
        yield path_name(path), leaf


def pformat(tree: Any) -> str:
    """Format a tree of declarations, arrays or shapes for reading: an array is its dtype and shape, `f32[8,32]`."""
    from equinox import tree_pformat  # here: its import takes as long as all of fdel's

    return tree_pformat(tree, width=110, struct_as_array=True)


def leaf_dtype(p: Param, dtype: Any) -> Any:
    """The dtype of one array when the tree is cast to `dtype`."""
    return jnp.dtype(p.dtype or dtype)


def init(spec: Tree, key: jax.Array, dtype: Any = jnp.float32) -> Tree:
    """Initialise parameters. Pure: wrap in `jax.jit(..., out_shardings=shardings(...))` to create them sharded.

    Each array's key is folded in from its path, so that adding an array changes no other one's values.
    >>> params.init(spec, jax.random.key(0), jnp.bfloat16)["embed"].shape
    (32, 8)
    """

    def one(path: tuple, p: Param) -> jax.Array:
        k = jax.random.fold_in(key, zlib.crc32(path_name(path).encode()))
        return p.init(k, p.shape, leaf_dtype(p, dtype))

    return jax.tree_util.tree_map_with_path(one, spec)


def abstract(spec: Tree, dtype: Any = jnp.float32, shardings: Tree | None = None) -> Tree:
    """Give shapes and dtypes (and shardings) as `jax.ShapeDtypeStruct`, without allocating anything."""
    shape = lambda p, s=None: jax.ShapeDtypeStruct(p.shape, leaf_dtype(p, dtype), sharding=s)
    return jax.tree.map(shape, spec, *[] if shardings is None else [shardings])


def count(tree: Tree) -> int:
    """Number of elements in a spec or params tree.
    >>> params.count(spec)
    1704
    """
    return sum(math.prod(x.shape) for x in jax.tree.leaves(tree))


def nbytes(tree: Tree, dtype: Any = jnp.float32, shardings: Tree | None = None) -> int:
    """Bytes of a spec tree in `dtype`, or of a params tree as it is; with shardings, those of one device."""
    size = lambda x: leaf_dtype(x, dtype).itemsize if isinstance(x, Param) else x.dtype.itemsize
    held = lambda x, s=None: math.prod(x.shape if s is None else s.shard_shape(x.shape)) * size(x)
    return sum(jax.tree.leaves(jax.tree.map(held, tree, *[] if shardings is None else [shardings])))
