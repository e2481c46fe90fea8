"""Say where activations lie on the devices: the one place where the forward knows of a mesh."""

import math

import jax
from jax.sharding import AxisType, PartitionSpec
from jaxtyping import Array

# Mesh axes of each activation axis. Rows spread over every axis that does not divide a row's own work; `ep` is among
# them because only a mixture's experts lie on it, and they fetch their tokens (see `ops.moe`).
AXES: dict[str, tuple[str, ...]] = {
    "rows": ("dp", "fsdp", "ep"),
    "tokens": ("sp",),
    "heads": ("tp",),
    "ffn": ("tp",),
    "vocab": ("tp",),
}


def context(*axes: str) -> dict[str, int]:
    """Give the sizes of those mesh axes that the compiler may still use here, in `jax.set_mesh`'s mesh.

    Axes of size 1, and axes that an enclosing `jax.shard_map` has divided already, are left out.
    """
    mesh = jax.sharding.get_abstract_mesh()
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    return {a: mesh.shape[a] for a in axes if types.get(a) == AxisType.Auto and mesh.shape[a] > 1}


def partition(x: Array, axes: str) -> PartitionSpec:
    """Give the PartitionSpec of an activation whose axes are named, as in "rows tokens heads head_dim"."""

    def one(name: str, size: int) -> tuple[str, ...] | None:
        sizes = context(*AXES.get(name, ()))
        return tuple(sizes) if sizes and size % math.prod(sizes.values()) == 0 else None

    return PartitionSpec(*(one(n, s) for n, s in zip(axes.split(), x.shape, strict=True)))


def shard(x: Array, axes: str) -> Array:
    """Lay an activation out on the mesh of `jax.set_mesh`; without a mesh, or with other axes than named, it is x.

    Left to itself the compiler gathers the batch rather than the weights. Axes that a mesh axis does not divide stay
    whole. The names of axes: "rows tokens embed", or heads, ffn, vocab; others are not divided.
    """
    if x.ndim != len(axes.split()):
        return x
    spec = partition(x, axes)
    return x if all(s is None for s in spec) else jax.lax.with_sharding_constraint(x, spec)
