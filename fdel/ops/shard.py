"""Say where activations lie on the devices: the one place where the forward knows of a mesh."""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec, Sharding
from jaxtyping import Array

from fdel.ops.cpu import bordered
from fdel.ops.platform import context

# Mesh axes of each activation axis. Rows spread over every axis that does not divide a row's own work; `ep` is among
# them because only a mixture's experts lie on it, and they get their tokens (see `ops/expert_parallel.py`).
AXES: dict[str, tuple[str, ...]] = {
    "rows": ("dp", "fsdp", "ep"),
    "tokens": ("sp",),
    "vocab": ("tp",),
    "attending": ("tp",),  # the heads of attention weights that are watched
}


def require_mesh(tree: Any) -> None:
    """Raise ValueError if arrays (or shardings) of the tree lie on several devices, and `jax.set_mesh` has not their mesh.

    The compiler would then divide the work by itself: it sends activations where it should fetch weights.
    """
    here = dict(jax.sharding.get_abstract_mesh().shape)
    for x in jax.tree.leaves(tree):
        at = x if isinstance(x, Sharding) else jax.typeof(x).sharding
        mesh = dict(at.mesh.shape) if isinstance(at, NamedSharding) else {}
        if here and set(mesh) > set(here):  # an axis in two, of the same devices: see `params.mesh.SHARED`
            for before, axis in [*itertools.pairwise(mesh)][::-1]:
                if axis not in here:
                    mesh[before] *= mesh.pop(axis)
        if math.prod(mesh.values()) > 1 and mesh != here:
            found = f"found arrays on {mesh} and {f'the mesh {here}' if here else 'no mesh'} set"
            raise ValueError(f"call the step in `with jax.set_mesh(mesh):` of its arrays' mesh; {found}")


def partition(x: Array | jax.ShapeDtypeStruct, axes: str) -> PartitionSpec:
    """Give the PartitionSpec of an activation whose axes are named, as in "rows tokens heads head_dim"."""

    def one(name: str, size: int) -> tuple[str, ...] | None:
        sizes = context(*AXES.get(name, ()))
        return tuple(sizes) if sizes and size % math.prod(sizes.values()) == 0 else None

    return PartitionSpec(*(one(n, s) for n, s in zip(axes.split(), x.shape, strict=True)))


def names(*parts: Any) -> list[str]:
    """List the mesh axes in parts of a PartitionSpec."""
    return [a for part in parts for a in ((part,) if isinstance(part, str) else part or ())]


def shard(x: Array, axes: str) -> Array:
    """Lay an activation out on the mesh of `jax.set_mesh`; without a mesh, or with other axes than named, it is x.

    Left to itself the compiler gathers the batch rather than the weights. Axes that a mesh axis does not divide stay
    whole. Axes that `AXES` does not name are not divided.
    """
    if x.ndim != len(axes.split()):
        return x
    spec = partition(x, axes)
    return x if all(s is None for s in spec) else jax.lax.with_sharding_constraint(x, spec)


def whole_rows(x: Array) -> Array:
    """Divide rows [T rows channels] of a cache between devices, if there are enough, and never a row's channels."""
    if not context(*AXES["attending"]):
        return x
    spec = partition(x, "new attending head_dim")
    return jax.lax.with_sharding_constraint(x, PartitionSpec(PartitionSpec.UNCONSTRAINED, *spec[1:]))


def by_rows(f: Callable, rows: Any, whole: Any, *beside: Any, total: bool, together: Sequence[str] = ()) -> Any:
    """Compute f(rows, whole, *beside) on each device with its own part of the arrays [B T ...] and with all of `whole`.

    `beside` are trees of arrays [B ...], of which a device has all that belongs to its rows, however T is divided. Devices
    along the mesh axes `together` compute f of all their rows together, and the compiler divides that between them.

    If `total`, the results are sums over rows, and are added up over devices once, at the end; so are gradients of
    `whole`. Otherwise they are arrays [B T ...] of rows. Without a mesh that divides the rows: f(rows, whole, *beside).
    """
    shape = jax.tree.leaves(rows)[0].shape
    spec = partition(jax.ShapeDtypeStruct(shape[:2], "bool"), "rows tokens") if len(shape) > 1 else PartitionSpec()
    spec = PartitionSpec(*(tuple(a for a in names(part) if a not in together) or None for part in spec))
    axes = {*names(*spec)}
    if not axes:
        return f(rows, whole, *beside)
    local = (lambda *mine: jax.lax.psum(f(*mine), tuple(axes))) if total else f
    out, apart = PartitionSpec() if total else spec, (PartitionSpec(*spec[:1]),) * len(beside)
    return divided(local, axes, (spec, PartitionSpec(), *apart), out)(rows, whole, *beside)


def row_lookup(f: Callable, *rows: Array) -> Any:
    """Compute f(*rows), which looks up or writes along rows, on each device for its rows [B ...].

    XLA's own division of such a gather ends the process where some mesh axes are divided by hand already.
    """
    axes = set(context(*jax.sharding.get_abstract_mesh().axis_names))
    if not axes:
        return f(*rows)
    spec = partition(jax.ShapeDtypeStruct(rows[0].shape[:1], "bool"), "rows")
    return divided(f, axes, (spec,) * len(rows), spec)(*rows)


def divided(f: Callable, axes: set[str], in_specs: Any, out_specs: Any) -> Callable:
    """Run f on each device's parts along some mesh axes; the compiler goes on to use the others (`jax.shard_map`)."""
    run = lambda f: jax.shard_map(f, in_specs=in_specs, out_specs=out_specs, axis_names=axes, check_vma=False)
    return bordered(run, f)
