"""Divide a call between the devices of a mesh: each computes with its part of the arrays, along axes that have names.

For what XLA cannot partition, as a `pallas_call`. A `table` here is a `dispatch.Table`, which names these axes.
"""

import functools
import math
from collections.abc import Callable, Mapping
from itertools import zip_longest
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from fdel.ops.cpu import collective
from fdel.ops.platform import context
from fdel.ops.shard import AXES, divided

TOGETHER = ("heads", "kv_heads", "groups")  # all are divided, or none
# Axes that `divide` may divide; "each" are tokens that are computed one by one, for which others need whole sequences;
# over "summed" ones the results of the devices are added up.
MESH = {
    "rows": AXES["rows"], "each": AXES["tokens"], "outputs": AXES["vocab"], "summed": AXES["vocab"],
    **dict.fromkeys(TOGETHER, AXES["attending"]),
}  # fmt: skip
ONE = ("summed", "groups")  # an array with one of these is whole on each device
FEW = ("kv_heads", "groups")  # where devices are a multiple of them, several devices have the same one


class Cut(NamedTuple):
    """How the arrays of a call are divided."""

    given: list[tuple[Any, Any]]  # each argument's axes beside it
    outs: Any  # the axes of the results
    leaves: list[Any]
    tree: Any
    texts: list[str | None]  # the axes of each leaf
    arrays: dict[int, tuple[Any, str]]  # those that a local implementation gets, with their axes
    names: Callable[[str], list[str]]  # reads axes
    over: dict[str, tuple[str, ...]]  # the mesh axes of each name
    times: dict[str, int]  # how many devices share each thing of `FEW`, if several

    def over_of(self, name: str, size: int = 0) -> tuple[str, ...] | None:
        """Give the mesh axes over which an axis of an array goes."""
        return None if name in ONE and size == 1 else self.over.get(name) or None

    def spec(self, text: str, *shape: tuple[int, ...]) -> P:
        """Give where an array with these axes lies, of a shape if it is known."""
        return P(*map(self.over_of, self.names(text), *shape))

    def part(self, x: Any, text: str) -> jax.ShapeDtypeStruct:
        """Give the shape of a device's part of an array."""
        sizes = [*x.shape]
        for i, name in enumerate(self.names(text)[: x.ndim]):
            size = sizes[i] * self.times.get(name, 1)
            sizes[i] = size // math.prod(context(*self.over_of(name, size) or ()).values())
        return jax.ShapeDtypeStruct(tuple(sizes), x.dtype)


def of_device(
    table: Any, args: tuple, kwargs: Mapping[str, Any]
) -> tuple[tuple, Mapping[str, Any], str | None]:  # fmt: skip
    """Give the arguments of the call that each device makes, of shapes; and why its results would not do, or None.

    Without a mesh, and where a mesh cannot divide the call, the arguments as they are.
    """
    if not jax.sharding.get_abstract_mesh().auto_axes:
        return args, kwargs, None
    cut = _cut(table, None, args, kwargs)
    if isinstance(cut, str):
        return args, kwargs, cut
    parts = {i: cut.part(x, text) for i, (x, text) in cut.arrays.items()}
    args, kwargs = jax.tree.unflatten(cut.tree, _of_parts(cut, parts))
    found = [name for text in jax.tree.leaves(cut.outs) for name in cut.names(text) if name in cut.times]
    why = (
        f"{cut.times[found[0]]} devices have the same {found[0]}: results would have to be exchanged" if found else None
    )
    return args, kwargs, why


def divide(call: Callable, table: Any, out: Any = None) -> Callable:
    """Call with each device's part of the arrays (`jax.shard_map`), along those axes in `MESH` that all sizes allow.

    Arrays without such axes are whole on each device. Arguments without arrays are passed on. `out` replaces the table's.
    """

    def divided_call(*args: Any, **kwargs: Any) -> Any:
        mesh = set(jax.sharding.get_abstract_mesh().auto_axes)  # all: the compiler cannot divide these calls
        if not mesh:
            return call(*args, **kwargs)
        cut = _cut(table, out, args, kwargs)
        if isinstance(cut, str):
            raise ValueError(f"{table.op}: a mesh cannot divide this call: {cut}")
        arrays = {i: (_repeated(x, cut.names(text), cut.times), text) for i, (x, text) in cut.arrays.items()}
        total = cut.over["summed"] if any("summed" in text for _, text in arrays.values()) else ()

        def local(parts: dict[int, Any]) -> Any:
            args, kwargs = jax.tree.unflatten(cut.tree, _of_parts(cut, parts))
            y = call(*args, **kwargs)
            return jax.tree.map(functools.partial(collective, lambda y: jax.lax.psum(y, total)), y) if total else y

        def specs(entry: Any) -> Any:
            if isinstance(entry, str):
                return cut.spec(entry)
            carry = argument(entry)
            each = [text if text is None else cut.spec(text) for text in _texts(entry, carry)]
            return P() if carry is None else jax.tree.unflatten(jax.tree.structure(carry), each)

        def complete(entry: Any, new: Any) -> Any:
            keep, absent = lambda new, old: old if new is None else new, lambda x: x is None
            return new if isinstance(entry, str) else jax.tree.map(keep, new, argument(entry) or new, is_leaf=absent)

        mapping = lambda entry: isinstance(entry, Mapping)
        argument = lambda entry: next(
            x for e, x in cut.given if e is entry
        )  # that a mapping among the results stands for
        outs_at = jax.tree.map(specs, cut.outs, is_leaf=mapping)
        parts = {i: cut.spec(text, x.shape) for i, (x, text) in arrays.items()}
        found = divided(local, mesh, (parts,), outs_at)({i: x for i, (x, _) in arrays.items()})
        return jax.tree.map(complete, cut.outs, found, is_leaf=mapping)

    return divided_call


def _cut(table: Any, out: Any, args: tuple, kwargs: Mapping[str, Any]) -> Cut | str:
    """Say how a call is divided, with results as in `out` or the table's; or why a mesh cannot divide it."""
    of_call = table.axes(*args, **kwargs) if callable(table.axes) else (table.axes, out or table.out)
    if isinstance(of_call, str):
        return of_call
    axes, outs = of_call
    of_keywords = ((table.named.get(name, ""), kwargs[name]) for name in sorted(kwargs))
    given = [*zip_longest(axes[: len(args)], args, fillvalue=""), *of_keywords]
    leaves, tree = jax.tree.flatten((args, kwargs))
    texts = [text for entry, x in given for text in _texts(entry, x)]
    both = enumerate(zip(leaves, texts, strict=True))
    arrays = {i: (x, text) for i, (x, text) in both if is_array(x) and text is not None}
    rows = next((x.ndim >= len(text.split()) for x, text in arrays.values() if text.startswith("(rows)")), True)
    names = lambda text: text.replace("(rows)", "rows" if rows else "").split()
    places = _places([(names(text), x.shape) for x, text in arrays.values()])
    return Cut(given, outs, leaves, tree, texts, arrays, names, *places)


def _of_parts(cut: Cut, parts: Mapping[int, Any]) -> list[Any]:
    """Give the leaves of the arguments with parts in place of arrays; None where a local implementation gets none."""
    return [parts.get(i, None if cut.texts[i] is None else x) for i, x in enumerate(cut.leaves)]


def _places(arrays: list[tuple[list[str], tuple[int, ...]]]) -> tuple[dict[str, tuple[str, ...]], dict[str, int]]:
    """Say over which mesh axes the named axes of arrays go, and how many devices share each thing of `FEW`, if several."""
    over, times = {name: tuple(context(*axes)) for name, axes in MESH.items()}, dict[str, int]()
    for names, shape in arrays:
        for name, size in zip(names, shape, strict=False):
            count = math.prod(context(*over.get(name, ())).values())
            if size % count and name in FEW and size > 1 and count % size == 0:
                times[name] = count // size
            elif size % count and not (name in ONE and size == 1):
                over[name] = ()
    return (over, times) if all(over[name] for name in TOGETHER) else (over | dict.fromkeys(TOGETHER, ()), {})


def _repeated(x: Any, names: list[str], times: Mapping[str, int]) -> Any:
    """Repeat what devices share, once for each: no copy where each has its own already (`params.mesh.SHARED`)."""
    for axis, name in enumerate(names[: x.ndim]):
        x = jnp.repeat(x, times[name], axis) if name in times else x
    return x


def _texts(entry: Any, x: Any) -> list[str | None]:
    """Give the axes of each array in an argument; None: a local implementation does not get it."""
    fields = entry if isinstance(entry, Mapping) else {"": entry}
    paths = [[getattr(key, "name", None) for key in path] for path, _ in jax.tree_util.tree_leaves_with_path(x)]
    return [next((fields[name] for name in path if name in fields), fields.get("")) for path in paths]


def is_array(x: Any) -> bool:
    """Tell whether x is an array, or the shape of one."""
    return hasattr(x, "shape") and hasattr(x, "dtype")
