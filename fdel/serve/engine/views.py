"""Arrays that an engine is given: where they are, copies of them, and whether they can take the place of others."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from fdel import params as P
from fdel.models import heads
from fdel.ops.weights import LowRank
from fdel.params.device_layout import laid, placement

Cut = tuple[int, int | None, Any, Any]  # what a copy is: of which array, which layer of it, its dtype and its layout


@dataclass(frozen=True, eq=False)
class View:
    """An array that was given, or layer `at` of one. No node of trees: `unstack` makes views of layers from views."""

    array: Any
    at: int | None = None

    shape = property(lambda self: self.array.shape[self.at is not None :])
    ndim = property(lambda self: len(self.shape))
    dtype = property(lambda self: self.array.dtype)

    def __getitem__(self, i: int) -> "View":
        return View(self.array, i)

    @property
    def sharding(self) -> Any:
        """How it is laid out; None for an array of the host, and for one whose layers lie apart."""
        s = getattr(self.array, "sharding", None)
        if self.at is None or not isinstance(s, NamedSharding):
            return s
        return None if any(s.spec[:1]) else NamedSharding(s.mesh, PartitionSpec(*s.spec[1:]))

    def copy(self, dtype: Any = None, sharding: Any = None) -> jax.Array:
        """Copy it, to another dtype and layout if they are given."""
        if self.at is None or not isinstance(self.array, jax.Array):
            x = jnp.array(self.array if self.at is None else self.array[self.at], dtype)
        else:
            x = self.array[self.at].astype(dtype or self.dtype)
        return jax.device_put(x, x.sharding if sharding is None else sharding)


def host_copy(view: View, dtype: Any = None) -> np.ndarray:
    """Give its values to the host, in another dtype if that is given."""
    x = np.asarray(view.array if view.at is None else view.array[view.at])
    return x if dtype is None else x.astype(dtype, copy=False)


def spread(x: np.ndarray, sharding: Any) -> jax.Array:
    """Put this process's part of an array, which all processes have, on its devices; nothing of `x` is held."""
    return jax.make_array_from_callback(x.shape, sharding, lambda part: np.array(x[part]))


def layer_views(params: Any) -> Any:
    """List the layers of parameters without copying anything. ValueError for what is no tree of arrays."""
    if not all(hasattr(x, "shape") and hasattr(x, "dtype") for x in jax.tree.leaves(params)):
        raise ValueError("parameters must be a tree of arrays")
    try:
        return P.unstack(jax.tree.map(View, params))
    except (IndexError, ValueError) as e:
        raise ValueError(f"the layers of these parameters are neither a list nor stacked: {e}") from e


def listed(params: Any) -> bool:
    """Tell whether the layers of parameters are a list."""
    return isinstance(heads.inner(params)["layers"], list)


def owned(params: Any) -> Any:
    """List the layers of parameters: what was stacked is copied, all of it, and what was listed stays as it is, but for
    arrays that lie on TPUs in another order than kernels read.

    All is committed to its devices: programs are compiled once more for arrays that are not.
    """
    as_they_are = listed(params)
    held = lambda p: jax.device_put(p.array, p.sharding) if as_they_are and p.sharding is not None else p.copy()
    return jax.tree.map(lambda p: laid(held(p)), layer_views(params))  # one by one: copies are there once


def copies(
    given: Sequence[View], like: Sequence[jax.ShapeDtypeStruct], old: list[jax.Array] | None = None
) -> list[jax.Array]:
    """Copy arrays to the dtypes and layouts of others.

    One program cuts, casts and lays out all that are on the devices of these; others go array by array. With a list that
    program writes into `old`, arrays like these that are donated: fresh memory costs as much as the copying. An empty one
    stands for zeros, so that there is one program for a first update and those after it. Nothing stays in `old`.
    """
    lie = {devices(getattr(x, "sharding", None)) for x in (*(p.array for p in given), *like)}
    if len(lie) > 1 or None in lie:
        if old:
            old.clear()  # before there is another
        return [p.copy(x.dtype, placement(x)) for p, x in zip(given, like, strict=True)]
    arrays, where = cuts(given, like)
    zeros = lambda x: jax.device_put(jnp.zeros(x.shape, x.dtype, device=x.sharding), placement(x))
    spare = old or [zeros(x) for x in like if old is not None]
    return copier(where)(arrays, spare)


def cuts(given: Sequence[View], like: Sequence[jax.ShapeDtypeStruct]) -> tuple[list[Any], tuple[Cut, ...]]:
    """List whole arrays, and what `copier` makes of them."""
    whole = {id(p.array): p.array for p in given}
    number = {key: i for i, key in enumerate(whole)}
    where = tuple((number[id(p.array)], p.at, x.dtype, placement(x)) for p, x in zip(given, like, strict=True))
    return list(whole.values()), where


def devices(sharding: Any) -> tuple[Any, ...] | None:
    """The devices of an array, in their order; None where it is not known."""
    if isinstance(sharding, NamedSharding):
        return tuple(sharding.mesh.devices.flat)
    return tuple(sharding.device_set) if isinstance(sharding, SingleDeviceSharding) else None


@functools.lru_cache(maxsize=16)
def copier(where: tuple[Cut, ...]) -> Callable[[list[jax.Array], list[jax.Array]], list[jax.Array]]:
    """Make the program of `copies`: what it is given second is donated."""

    def copy(arrays: list[jax.Array], old: list[jax.Array]) -> list[jax.Array]:
        # What goes through jit as it is would not be copied.
        same = lambda i, at, dtype: at is None and arrays[i].dtype == dtype
        cut = lambda i, at, dtype: (arrays[i] if at is None else arrays[i][at]).astype(dtype)
        return [jnp.copy(arrays[i]) if same(i, at, dtype) else cut(i, at, dtype) for i, at, dtype, _ in where]

    return jax.jit(copy, out_shardings=[at for *_, at in where], donate_argnums=1, keep_unused=True)


@functools.cache
def finite() -> Callable[[Any], jax.Array]:
    """Make the jitted test whether all values of an array are finite."""
    return jax.jit(lambda x: jnp.isfinite(x).all())


@functools.cache
def finite_sums() -> Callable[[Any], jax.Array]:
    """Make one of a tree of arrays, four times as fast on CPU, and true only if all are finite: sums may overflow."""
    add = lambda x: x.sum(-1, dtype=jnp.promote_types(x.dtype, jnp.float32)) if x.ndim else x
    return jax.jit(lambda tree: jax.tree.map(lambda x: jnp.isfinite(add(x)).all(), tree))


def check_replacement(path: str, p: View, old: jax.ShapeDtypeStruct, reshard: bool, cast: bool) -> None:
    """Raise ValueError if an array cannot take the place of another."""
    if p.shape != old.shape:
        raise ValueError(f"{path} has shape {p.shape}; expected {old.shape}, of the model that is served")
    floats = all(jnp.issubdtype(x.dtype, jnp.floating) for x in (p, old))
    if p.dtype != old.dtype and not (cast and floats):
        raise ValueError(f"{path} is {p.dtype}; expected {old.dtype}" + ("; or give cast=True" if floats else ""))
    s = p.sharding
    if not reshard and (s is None or not s.is_equivalent_to(old.sharding, len(old.shape))):
        found = f"{path} is laid out as {s or 'an array of the host'}"
        raise ValueError(f"{found}; expected {old.sharding}; or give reshard=True")


def check_update(path: str, w: LowRank, most: int) -> None:
    """Raise ValueError if a low-rank update does not fit its weight, or is too large."""
    a, b, scale, base, batch = w.a.shape, w.b.shape, w.scale.shape, w.base.shape, w.batch
    rank = b[-1] if b else 0
    fits = 0 <= batch <= len(base) and a[: batch + 1] == (*base[:batch], rank) and scale == base[:batch]
    if not fits or (*b[:-1], *a[batch + 1 :]) != base or rank < 1:
        raise ValueError(f"{path}: factors {a} and {b} with scale {scale} are no low-rank update of shape {base}")
    if rank > most:
        raise ValueError(f"{path} has an adapter of rank {rank}; the most is {most} here, give max_lora_rank={rank}")
