"""Place arrays on devices: the mesh, and the rules that map axis names to mesh axes."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from fdel.ops.weights import LowRank, Quantized, cuts_inputs, device_rows, is_weight

from .spec import Param, named_leaves, path_name, unstack

Rules = Mapping[str, str | tuple[str, ...] | None]

# data, data with sharded parameters, experts, tensor (heads and hidden units), sequence
AXES = ("dp", "fsdp", "ep", "tp", "sp")

# The vocabulary of axis names. A family that needs a new one adds it here, and decides how it is sharded. `rep` are query
# heads per key head, or any repeat inside a group; `latent`: compressed keys and values (MLA); `inner`: channels of a
# recurrent mixer; `labels`: of a reward model's head; `scales`: of a token's keys or values in 8 bits;
# `index_heads`: of an indexer, which are scored one after the other; `frames`, `height`, `width`: of a patch of an image;
# `filters`: outputs of a convolution.
WHOLE = (
    "positions rep head_dim layers latent q_latent rope_dim state kernel labels groups channels pages page scales slots "
    "index_heads frames height width filters"
)
TRAIN: Rules = MappingProxyType(
    dict.fromkeys(WHOLE.split())
    | dict.fromkeys(("vocab", "heads", "kv_heads", "ffn", "shared_ffn", "inner"), "tp")
    | {"embed": "fsdp", "experts": "ep"}
)
# Serving reads every weight at each step: gathering shards over fsdp would cost more than the step itself.
SERVE: Rules = MappingProxyType({**TRAIN, "embed": None})
# Axes that may have fewer parts than their mesh axis has devices, which then hold each part several times: query heads are
# divided all the same, and each device has the keys and values that its own need; a vocabulary is as large as it is.
SHARED = ("kv_heads", "vocab")
COPIES = "_copies"  # ends the name of the half of a mesh axis along which devices hold the same


def parse_mesh(text: str) -> dict[str, int]:
    """Read "fsdp=2,tp=4" as {"fsdp": 2, "tp": 4}; one size may be -1. Malformed text is a ValueError.
    >>> params.parse_mesh("fsdp=2,tp=4")
    {'fsdp': 2, 'tp': 4}
    """
    shape: dict[str, int] = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        axis, _, size = (s.strip() for s in item.partition("="))
        if axis in shape or not size.removeprefix("-").isdecimal():
            raise ValueError(f"mesh {text!r}: cannot read {item!r}; write each axis once, as in fsdp=2,tp=4")
        shape[axis] = int(size)
    _check_shape(shape)
    return shape


def _check_shape(shape: Mapping[str, int]) -> None:
    unknown = [a for a in shape if a not in AXES]
    if unknown:
        raise ValueError(f"mesh axes {unknown} are unknown; the axes are {', '.join(AXES)}")
    wrong = {a: n for a, n in shape.items() if n < 1 and n != -1}
    if wrong or list(shape.values()).count(-1) > 1:
        raise ValueError(f"mesh {dict(shape)}: each size is at least 1, and at most one is -1 (the remaining devices)")


def make_mesh(
    shape: Mapping[str, int] | None = None, devices: Sequence[jax.Device] | None = None,
    slices: Mapping[str, int] | None = None,
) -> Mesh:  # fmt: skip
    """Make a mesh with all `AXES` (Auto axis types) over `devices`, by default every device.

    Axes that `shape` leaves out have size 1; one size may be -1 and takes the remaining devices. None is {"fsdp": -1}.
    Sizes that do not use exactly the devices given are a ValueError.

    `slices` gives the number of slices (of TPUs, joined by a data centre's network) along each axis, or of processes where
    devices have no slices; `shape` is then that of one slice, and neighbours along an axis are in one slice first.
    >>> params.make_mesh({"fsdp": 1}, jax.devices()[:1]).axis_names
    ('dp', 'fsdp', 'ep', 'tp', 'sp')
    """
    devices = jax.devices() if devices is None else list(devices)
    types, found = (AxisType.Auto,) * len(AXES), {getattr(d, "slice_index", None) for d in devices}
    if slices is not None:
        return Mesh(_hybrid(shape, slices, devices), AXES, axis_types=types)
    if len(found) > 1:
        raise ValueError(f"the devices lie in {len(found)} slices; give `slices`, in a run file sharding.dcn_axis_dims")
    sizes = _sizes(shape, len(devices))
    return jax.make_mesh(tuple(sizes.values()), AXES, axis_types=types, devices=devices)


def _sizes(shape: Mapping[str, int] | None, devices: int) -> dict[str, int]:
    """Give the size of every axis on so many devices."""
    shape = {"fsdp": -1} if shape is None else shape
    _check_shape(shape)
    sizes = {a: shape.get(a, 1) for a in AXES}
    free, fixed = [a for a in AXES if sizes[a] == -1], math.prod(n for n in sizes.values() if n != -1)
    if devices % fixed or (not free and fixed != devices):
        fix = "choose sizes whose product divides it" if free else f"set one axis to -1 or pass {fixed} devices"
        raise ValueError(f"mesh {dict(shape)} needs a multiple of {fixed} devices, found {devices}; {fix}")
    return sizes | {axis: devices // fixed for axis in free}


def _hybrid(shape: Mapping[str, int] | None, slices: Mapping[str, int], devices: Sequence[jax.Device]) -> np.ndarray:
    """Order devices for a mesh of `shape` in each slice, or process where devices have no slices."""
    _check_shape(slices)
    every, kinds = math.prod(slices.values()), {getattr(d, "slice_index", None) for d in devices}
    by_process = None in kinds or len(kinds) == 1
    found = len({d.process_index for d in devices}) if by_process else len(kinds)
    if found != every:
        what = "processes (these devices have no slices)" if by_process else "slices"
        raise ValueError(f"slices {dict(slices)} are {every}, found {found} {what}; their product must be that")
    sizes = _sizes(shape, len(devices) // found)
    return mesh_utils.create_hybrid_device_mesh(
        tuple(sizes.values()), tuple(slices.get(a, 1) for a in AXES), devices, process_is_granule=by_process,
        allow_split_physical_axes=True,
    )  # fmt: skip


def _mesh_axes(rule: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return (rule,) if isinstance(rule, str) else tuple(rule or ())


def _faults(p: Param, rules: Rules, mesh: Mesh | None) -> Iterator[str]:
    """Say what is wrong with the sharding of one array, each with its fix."""
    used: dict[str, str] = {}
    for axis, size in zip(p.axes.split(), p.shape, strict=True):
        if axis not in rules:
            yield f"axis {axis!r} has no rule; add it: rules | {{{axis!r}: None}}"
            continue
        names = _mesh_axes(rules[axis])
        fix = f"rules | {{{axis!r}: None}}, in a run file sharding.rules: {{{axis}: null}},"
        for name in names:
            if name in used:
                yield f"mesh axis {name!r} is used twice, by {used[name]!r} and {axis!r}; use {fix}"
            used[name] = axis
        if mesh is None:
            continue
        lacking = [name for name in names if name not in mesh.shape]
        if lacking:
            yield f"axis {axis!r} wants mesh axis {lacking[0]!r}, the mesh has {tuple(mesh.shape)}; use {fix}"
            continue
        count = math.prod(mesh.shape[name] for name in names)
        if size % count and not (axis in SHARED and len(names) == 1):
            over = " * ".join(f"{name}={mesh.shape[name]}" for name in names)
            yield f"axis {axis!r} of size {size} is not divisible by {over}; use {fix} or a smaller mesh axis"


def partition_spec(p: Param, rules: Rules) -> PartitionSpec:
    """Give the PartitionSpec of one array. An unknown axis, or a mesh axis used twice, is a ValueError.
    >>> tuple(params.partition_spec(spec["embed"], params.TRAIN))
    ('tp', 'fsdp')
    """
    faults = list(_faults(p, rules, None))
    if faults:
        raise ValueError(f"{p.hf or p.axes!r}: " + "; ".join(faults))
    return PartitionSpec(*(rules[a] for a in p.axes.split()))


def shardings(spec: Any, mesh: Mesh, rules: Rules = TRAIN) -> Any:
    """Give the tree of NamedSharding of a spec tree.

    One ValueError lists every fault with the arrays that have it: an axis without a rule, a mesh axis used twice on one
    array or missing in the mesh, a size that its mesh axes do not divide.
    """
    faults: dict[str, list[str]] = {}
    for path, p in named_leaves(spec):
        for fault in _faults(p, rules, mesh):
            faults.setdefault(fault, []).append(path)
    if faults:
        rest = lambda paths: f" and {len(paths) - 5} more" if len(paths) > 5 else ""
        lines = [f"  {fault}\n    at {', '.join(paths[:5])}{rest(paths)}" for fault, paths in faults.items()]
        raise ValueError("cannot shard:\n" + "\n".join(lines))
    return jax.tree.map(lambda p: _sharding(p, mesh, rules), spec)


def _parts(p: Param, mesh: Any, rules: Rules) -> Iterator[tuple[str, str, int, int]]:
    """Find axes with fewer parts than devices: (axis, mesh axis, size of the axis, its parts)."""
    for axis, size in zip(p.axes.split(), p.shape, strict=True):
        if axis in SHARED and len(names := _mesh_axes(rules[axis])) == 1 and size % mesh.shape[names[0]]:
            yield axis, names[0], size, math.gcd(size, mesh.shape[names[0]])


def _sharding(p: Param, mesh: Any, rules: Rules) -> NamedSharding:
    """Shard one array; where several devices hold each part, on a mesh whose axis is split in two, of the same devices."""
    for _, name, _, parts in _parts(p, mesh, rules):
        sizes = {a: n for axis, size in mesh.shape.items() for a, n in (
            ((name, parts), (name + COPIES, size // parts)) if axis == name else ((axis, size),)
        )}  # fmt: skip
        shape, names, types = tuple(sizes.values()), tuple(sizes), (AxisType.Auto,) * len(sizes)
        if isinstance(mesh, AbstractMesh):
            mesh = AbstractMesh(shape, names, axis_types=types)
        else:
            mesh = Mesh(mesh.devices.reshape(shape), names, axis_types=types)
    return NamedSharding(mesh, partition_spec(p, rules))


def spread(state: Any, mesh: Any) -> Any:
    """Give the spec of a cache as many heads as all devices along `tp` need, each those of its own query heads.

    Where neither the heads nor the devices divide the other, neighbours need the same heads and others beside them
    (`ops.weights.device_rows`), and a part that they share would have all of both. Without a mesh the spec as it is.
    """
    devices = 1 if mesh is None else mesh.shape[str(SERVE["kv_heads"])]

    def one(p: Param) -> Param:
        axes = p.axes.split()
        if not {"pages", "kv_heads"} <= {*axes}:
            return p
        at = axes.index("kv_heads")
        rows = device_rows(p.shape[at], devices) * devices or p.shape[at]
        return replace(p, shape=(*p.shape[:at], rows, *p.shape[at + 1 :]))

    return jax.tree.map(one, state)


def joined(mesh: Any) -> Mesh:
    """Give the mesh of which `shardings` split an axis; others as they are."""
    sizes: dict[str, int] = {}
    for axis, size in mesh.shape.items():
        name = axis.removesuffix(COPIES)
        sizes[name] = sizes.get(name, 1) * size
    if len(sizes) == len(mesh.shape):
        return mesh
    types = (AxisType.Auto,) * len(sizes)
    return Mesh(mesh.devices.reshape(tuple(sizes.values())), tuple(sizes), axis_types=types)


def shared(spec: Any, mesh: Any, rules: Rules = TRAIN) -> list[str]:
    """Say which axes have fewer parts than there are devices for them, and what that costs; mostly there are none."""
    found = sorted({x for p in jax.tree.leaves(spec) for x in _parts(p, mesh, rules)})

    def cost(axis: str, devices: int, size: int, parts: int) -> str:
        same = f"{devices // parts} devices hold the same {size // parts} of {size}"
        if axis == "kv_heads" and (own := device_rows(size, devices)):
            return f"{same} in weights, each has {own} of its own in the cache"
        return f"{same} in weights and cache"

    return [
        f"{axis}: {size} on {name}={mesh.shape[name]}: {cost(axis, mesh.shape[name], size, parts)}"
        for axis, name, size, parts in found
    ]


def of_parts(w: Quantized, s: NamedSharding) -> Quantized:
    """Give the shardings of a quantized matrix's parts, where `s` is that of the matrix: its first divided input counts.

    Where devices would get parts of groups, the last of the outputs is divided in the place of the inputs, if it can be:
    else each device would fetch the matrix, in numbers, for every product.
    """
    outer = len(w.values.shape) - 1
    axes = (*s.spec, *(None,) * (outer + len(w.inputs) - len(s.spec)))
    outs, inner = [*axes[:outer]], next((a for a in axes[outer:] if a is not None), None)
    count = lambda entry: math.prod(s.mesh.shape[a] for a in _mesh_axes(entry))
    if inner is not None and outs and not cuts_inputs(replace(w, order=None), count(inner)):
        both = *_mesh_axes(inner), *_mesh_axes(outs[-1])
        both = tuple(sorted(both, key="tp".__ne__))  # the others' parts are gathered where a product is computed
        if w.values.shape[-2] % count(both) == 0:
            outs[-1], inner = both, None

    def child(x: Any) -> NamedSharding:
        whole = x is w.order or inner is None or x.shape[-1] % count(inner)
        return NamedSharding(s.mesh, PartitionSpec(*outs[: len(x.shape) - 1], None if whole else inner))

    return jax.tree.map(child, w)


def reshard(params: Any, spec: Any, mesh: Mesh, rules: Rules = TRAIN, put: Callable = jax.device_put) -> Any:
    """Move parameters to where rules put them on a mesh; what lies there already stays, and is not copied.

    `params` may be stacked or listed, quantized (inputs of a matrix are one axis then, divided as the first of them that
    is) and adapted (low-rank factors are small, and go whole to every device). `put(tree, shardings)` moves a weight.
    """
    at = dict(named_leaves(shardings(spec, mesh, rules))) | dict(named_leaves(shardings(unstack(spec), mesh, rules)))

    def one(path: tuple, w: Any) -> Any:
        s = at[path_name(path)]
        if isinstance(w, LowRank):
            a, b, scale = put((w.a, w.b, w.scale), NamedSharding(mesh, PartitionSpec()))
            return replace(w, base=one(path, w.base), a=a, b=b, scale=scale)
        return put(w, of_parts(w, s) if isinstance(w, Quantized) else s)

    return jax.tree_util.tree_map_with_path(one, params, is_leaf=is_weight)


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Shard the rows of [B T] arrays over the data axes `dp`, `fsdp` and `ep` (those that the mesh has)."""
    return NamedSharding(mesh, PartitionSpec(tuple(a for a in ("dp", "fsdp", "ep") if a in mesh.axis_names)))
