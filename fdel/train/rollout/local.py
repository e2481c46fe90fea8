"""Several processes: each samples its own tasks with the whole model, which lies on its own devices."""

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding

from fdel.train.processes import most

ROW = 1 << 16  # bytes of a process's metrics
EMPTY = {"places": -1}  # what stands where nothing is shown, if it is not 0


def local(tree: Any, shardings: Any) -> Any:
    """Bring arrays that all processes hold together to this process's own devices.

    `shardings` are those that they get here: one for all, or a tree of NamedSharding, over the `local_mesh` of the mesh
    where they lie. All processes call it at the same time. Parts go straight to their devices: none holds more.
    """
    if isinstance(shardings, NamedSharding):
        return jax.tree.map(lambda x: _local(x, shardings), tree)
    return jax.tree.map(_local, tree, shardings)


def _local(x: jax.Array, here: NamedSharding) -> jax.Array:
    """One array: laid out over all processes alike, each one's part of which is a whole."""
    mine = list(here.mesh.devices.flat)
    order = {d: i for i, d in enumerate(sorted(mine, key=lambda d: d.id))}
    places = np.array([order[d] for d in mine]).reshape(here.mesh.devices.shape)
    each: dict[int, list[jax.Device]] = {}
    for d in sorted(jax.devices(), key=lambda d: d.id):
        each.setdefault(d.process_index, []).append(d)
    grid = np.stack([np.array(each[p], object)[places] for p in sorted(each)])
    every = Mesh(grid, ("process", *here.mesh.axis_names), axis_types=(jax.sharding.AxisType.Auto,) * grid.ndim)
    # One after the other: XLA:CPU runs programs that wait for others in no fixed order, and dozens take all of its threads.
    alike = jax.block_until_ready(jax.device_put(x, NamedSharding(every, here.spec)))
    return jax.make_array_from_single_device_arrays(x.shape, here, [s.data for s in alike.addressable_shards])


def even(batch: dict[str, Any]) -> dict[str, Any]:
    """Fill up a batch of packed rows with empty ones: all processes have as many rows, and places, as the one with most.

    They call it at the same time; what rows show has one shape on all already (`sight.shown`).
    """
    sizes = np.array([len(batch["tokens"]), batch["places"].shape[1]])
    rows, places = (most(sizes) - sizes).tolist()
    fill = lambda x, empty=0: np.pad(x, ((0, rows), *[(0, 0)] * (x.ndim - 1)), constant_values=empty)
    nowhere = batch["tokens"].shape[1]
    found = {k: fill(x) for k, x in batch.items() if k not in ("packed", "places", "media")}
    packed = batch["packed"]
    found["packed"] = replace(packed, positions=fill(packed.positions), segment_ids=fill(packed.segment_ids, -1))
    if (media := batch.get("media")) is not None:
        several = media.inputs if isinstance(media.inputs, tuple) else (media.inputs,)
        filled = tuple(replace(x, **{k: fill(y, EMPTY.get(k, 0)) for k, y in vars(x).items()}) for x in several)
        inputs = filled if isinstance(media.inputs, tuple) else filled[0]
        found["media"] = replace(media, index=fill(media.index, -1), inputs=inputs)
    return found | {"places": np.pad(batch["places"], ((0, rows), (0, places)), constant_values=nowhere)}


def mean(row: Mapping[str, float]) -> dict[str, float]:
    """Average metrics over all processes, each over those that have it. All processes call it at the same time."""
    text = json.dumps(dict(row)).encode()
    if len(text) > ROW:
        raise ValueError(f"{len(row)} metrics are {len(text)} bytes of JSON; expected at most {ROW}")
    sent = np.frombuffer(text.ljust(ROW), np.uint8)
    rows = [json.loads(bytes(x)) for x in np.asarray(multihost_utils.process_allgather(sent)).reshape(-1, ROW)]
    return {k: float(np.mean([r[k] for r in rows if k in r])) for k in {k: None for r in rows for k in r}}
