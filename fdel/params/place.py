"""Build arrays from pieces of checkpoint tensors: in host memory that JAX takes over, or on the device."""

import dataclasses
import math
from collections.abc import Sequence
from concurrent.futures import Executor
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from .device_layout import laid
from .hf_layout import Layout
from .tensor import Tensor

CHUNK = 1 << 20  # bytes read at a time: small enough to stay in cache while they are cast or cut
ALIGN = 64  # JAX's CPU backend takes over host memory with this alignment; other memory it copies


def _aligned(shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
    size = math.prod(shape) * dtype.itemsize
    raw = np.empty(size + ALIGN, np.uint8)
    start = -raw.ctypes.data % ALIGN
    return raw[start : start + size].view(dtype).reshape(shape)


def _box(index: Any, shape: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    return tuple(s.indices(n)[:2] for s, n in zip(index, shape, strict=True))


def on_cpu(sharding: Sharding | None) -> bool:
    """Whether arrays with this sharding (None: on the default device) live in host memory."""
    devices: set[Any] = jnp.zeros(()).devices() if sharding is None else sharding.device_set
    return next(iter(devices)).platform == "cpu"


class Buffers:
    """Host memory of one array: one aligned buffer for each different shard that this process holds."""

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype, sharding: Sharding | None):
        self.shape, self.dtype, self.sharding = shape, dtype, sharding
        everything = [tuple(slice(0, n) for n in shape)]
        indices: Any = everything if sharding is None else sharding.addressable_devices_indices_map(shape).values()
        self.shards = {box: _aligned([b - a for a, b in box], dtype) for box in {_box(i, shape) for i in indices}}

    def put(self, piece: np.ndarray, start: tuple[int, ...]) -> None:
        """Write what lies at `start` into every shard that holds some of it, casting to our dtype."""
        for box, shard in self.shards.items():
            cuts = [(max(a, s), min(b, s + n)) for (a, b), s, n in zip(box, start, piece.shape, strict=True)]
            if all(lo < hi for lo, hi in cuts):
                ours = tuple(slice(lo - a, hi - a) for (lo, hi), (a, _) in zip(cuts, box, strict=True))
                theirs = tuple(slice(lo - s, hi - s) for (lo, hi), s in zip(cuts, start, strict=True))
                shard[ours] = piece[theirs]

    def array(self) -> jax.Array:
        """Hand the buffers to JAX; they must not be written after that (on CPU they are the array)."""
        if self.sharding is None:
            return jax.device_put(next(iter(self.shards.values())))
        return jax.make_array_from_callback(self.shape, self.sharding, lambda i: self.shards[_box(i, self.shape)])


class Leaf:
    """An array under construction: `begin` gives memory for a checkpoint tensor, `end` follows when that is filled.

    On the CPU all host memory becomes the array without a copy. On accelerators the host holds one tensor at a time, and
    stacked axes are filled by donated updates.
    """

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype, sharding: Sharding | None, stacked: int):
        self.shape, self.dtype, self.sharding, self.stacked = shape, dtype, sharding, stacked
        self.host = Buffers(shape, dtype, sharding) if on_cpu(sharding) else None
        self.whole: Any = None
        self.insert = jax.jit(_insert, donate_argnums=0, out_shardings=sharding)

    def begin(self, index: tuple[int, ...]) -> tuple[Buffers, tuple[int, ...]]:
        """Give memory, and where the tensor lies in it: all of it, or of one tensor, sharded without stacked axes."""
        if self.host is not None:
            return self.host, index
        sharding = self.sharding
        if isinstance(sharding, NamedSharding):
            inner = PartitionSpec(*sharding.spec[self.stacked :])
            sharding = NamedSharding(sharding.mesh, inner, memory_kind=sharding.memory_kind)
        return Buffers(self.shape[self.stacked :], self.dtype, sharding), ()

    def end(self, buffers: Buffers, index: tuple[int, ...]) -> None:
        """Move the tensor to the devices, into its place; on the CPU it lies where it belongs."""
        if self.host is not None:
            return
        item = buffers.array()
        if self.stacked and self.whole is None:
            self.whole = jax.jit(partial(jnp.zeros, self.shape, self.dtype), out_shardings=self.sharding)()
        self.whole = self.insert(self.whole, item, index) if self.stacked else laid(item)
        jax.block_until_ready(self.whole)  # else tensors under way pile up in host memory

    def array(self) -> jax.Array:
        """Give the array, once."""
        return self.whole if self.host is None else self.host.array()


def _insert(whole: jax.Array, item: jax.Array, index: tuple[Any, ...]) -> jax.Array:
    item = item.reshape((1,) * len(index) + item.shape)
    return jax.lax.dynamic_update_slice(whole, item, (*index, *(0 for _ in range(item.ndim - len(index)))))


Target = tuple[Layout, Buffers, tuple[int, ...]]  # how the tensor holds the array, the memory, the stacked index


def _rows(targets: list[Target], nbytes: int) -> tuple[int, int]:
    """Cut the tensor along its first axis: (rows, rows per chunk); (1, 1) if it has to be read as a whole."""
    units, totals = set(), set()
    for layout, _, _ in targets:
        length = layout.cut[0].stop - layout.cut[0].start if layout.cut else 0
        if length < 2 or layout.divided:
            return 1, 1
        units.add(length // layout.sizes[0])  # rows for one index of our axis: more than one if axes are fused
        totals.add(layout.flat[0])
    unit, total = math.lcm(*units), max(totals)
    if len(totals) > 1 or any(layout.cut[0].start % unit for layout, _, _ in targets):
        return 1, 1
    return total, max(1, CHUNK // (nbytes // total * unit)) * unit


def _put_rows(target: Target, chunk: np.ndarray, total: int, start: int) -> None:
    """Put rows start... of `total` of a tensor into the target's buffers."""
    layout, buffers, index = target
    at = [0] * len(layout.shape)
    if total > 1:
        cut = layout.cut[0]
        lo, hi = max(start, cut.start), min(start + len(chunk), cut.stop)
        if lo >= hi:
            return
        unit, chunk = (cut.stop - cut.start) // layout.sizes[0], chunk[lo - start : hi - start]
        at[layout.order.index(0)] = (lo - cut.start) // unit
        flat, sizes = (hi - lo, *layout.flat[1:]), ((hi - lo) // unit, *layout.sizes[1:])
        layout = dataclasses.replace(layout, flat=flat, cut=(slice(None), *layout.cut[1:]), sizes=sizes)
    buffers.put(layout.read(chunk)[(None,) * len(index)], (*index, *at))


def plain(layout: Layout) -> bool:
    """Whether the tensor in the file has the same bytes as our array."""
    return layout.order == tuple(range(len(layout.order))) and math.prod(layout.sizes) == math.prod(layout.flat)


def _direct(tensor: Tensor, targets: list[Target]) -> np.ndarray | None:
    """The bytes that the file's bytes can be read into as they are, if layout and dtype allow it."""
    layout, buffers, index = targets[0]
    shards = [*buffers.shards.values()]
    alone = len(targets) == len(shards) == 1 and shards[0].shape == buffers.shape
    if not alone or not plain(layout) or tensor.dtype != buffers.dtype:
        return None
    view: Any = (*index, ...)  # not a scalar, even if the index is complete
    return shards[0][view].reshape(-1).view(np.uint8)


def copy(tensor: Tensor, targets: list[Target], pool: Executor) -> None:
    """Read one checkpoint tensor once, in chunks, into all arrays that it holds a part of."""
    if not targets or not tensor.nbytes:
        return
    total, step = (1, 1) if tensor.whole else _rows(targets, tensor.nbytes)
    row, direct = tensor.nbytes // total, _direct(tensor, targets)

    def one(start: int) -> None:
        stop = min(start + step, total)
        if direct is not None:
            return tensor.readinto(direct[start * row : stop * row], start * row)
        raw = np.empty((stop - start) * row, np.uint8)
        tensor.readinto(raw, start * row)
        for target in targets:
            _put_rows(target, raw.view(tensor.dtype).reshape(stop - start, -1), total, start)

    starts = range(0, total, step)
    for _ in map(one, starts) if len(starts) == 1 else pool.map(one, starts):
        pass


def fetch(x: Any, index: tuple[int, ...]) -> np.ndarray:
    """Give one item of an array in host memory, and leave nothing behind on the devices or attached to the array."""
    if not isinstance(x, jax.Array):
        return np.asarray(x)[index]
    if not x.is_fully_addressable:  # all processes do this, in one order
        return np.asarray(multihost_utils.process_allgather(x[index] if index else x, tiled=True))
    host, n = on_cpu(x.sharding), len(index)
    if host and len(x.sharding.device_set) == 1:
        return np.asarray(x)[index]  # a view
    if n and not host:
        return fetch(x[index], ())
    out = np.empty(x.shape[n:], x.dtype)
    for shard in x.addressable_shards:
        start = [a for a, _ in _box(shard.index, x.shape)[:n]]
        held = all(a <= i < a + m for i, a, m in zip(index, start, shard.data.shape, strict=False))
        if held and shard.replica_id == 0:
            data = shard.data if host else jnp.copy(shard.data)  # np.asarray would keep a copy with the array
            out[shard.index[n:]] = np.asarray(data)[tuple(i - a for i, a in zip(index, start, strict=True))]
    return out
