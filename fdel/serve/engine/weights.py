"""The parameters of one engine: the base's and each adapter's. Adapters that share the base's arrays run in one call."""

import math
import threading
import weakref
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from fdel import models
from fdel import params as P
from fdel.models import Model
from fdel.ops.weights import Adapters, LowRank, is_weight
from fdel.params.device_layout import laid, placement
from fdel.params.quantize import change
from fdel.serve.engine.step import compute_dtype, mesh_of
from fdel.serve.engine.views import (
    View,
    check_replacement,
    check_update,
    copies,
    finite,
    finite_sums,
    layer_views,
    listed,
    owned,
)


def mesh_for(text: str | None) -> Mesh | None:
    """Make the mesh of `--mesh tp=4`, of the first devices that there are; None: one device. ValueError if it cannot be."""
    shape = P.parse_mesh(text or "")
    idle = [f"{a}={n}" for a, n in shape.items() if a not in ("tp", "ep") and n != 1]
    if idle:
        found = f"mesh {text!r}: every device of {', '.join(idle)} would compute the same"
        raise ValueError(f"{found}; serving divides weights and cache over tp, and experts over ep")
    size, devices = math.prod(shape.values()), jax.devices()
    return None if size == 1 else P.make_mesh(shape, devices if size < 0 or size > len(devices) else devices[:size])


def load(
    path: str | Path, *, dtype: Any = None, mesh: Mesh | None = None, rules: P.Rules = P.SERVE,
    quantize: str | None = None, group: int | None = None, revision: str | None = None,
) -> Model:  # fmt: skip
    """Load a checkpoint as engines want it: layers listed, over a mesh by rules, matrices in few bits if `quantize`."""
    model = models.load(path, dtype=dtype, mesh=mesh, rules=rules, stacked=False, revision=revision)
    if quantize is not None:
        spec = P.unstack(models.spec_of(model))
        model = model._replace(params=P.quantize(model.params, quantize, spec=spec, group=group))
    return placed(model, rules)


def placed(model: Model, rules: P.Rules = P.SERVE) -> Model:
    """List the layers of a model and, where it lies on a mesh, lay it out by rules: those of training gather weights.

    On TPUs the axes of its arrays get the order in which kernels read them (`params.device_layout`), as engines do.
    """
    params, mesh = P.unstack(model.params), mesh_of(model.params)
    if mesh is not None:
        params = P.reshard(params, models.spec_of(model), mesh, rules)
    return model._replace(params=laid(params))


class Weights:
    """Parameters with listed layers, by the name of their adapter, "" for the base.

    Adapters that differ from the base by low-rank updates of its layers alone have slots in one tree (`lora.stack`), in
    which every token finds its own: requests for them and for the base share their calls. Others (experts, embeddings,
    arrays of their own) are whole trees with calls of their own. Room for `slots` adapters of a `rank` is there from the
    start; whoever needs more doubles it, which makes the next steps compile again. When adapters go, the smallest tree
    that has been there before and holds the others takes its place: nothing compiles. Ranks above `most` are refused.

    All arrays belong to the engine, so that a trainer may donate its own: stacked ones are copied, and all that come
    later. Only a listed tree that is there from the start is held as it is: do not donate that.
    """

    def __init__(self, model: Model, adapters: Mapping[str, Any], slots: int = 0, rank: int = 0, most: int = 64):
        self.mesh: Any = mesh_of(model.params)
        self.dtype, self.most = compute_dtype(model.params), most
        self.lock = threading.Lock()  # held while the base is replaced
        self.trees: dict[str, Any] = {"": owned(model.params)}
        self.copied = not listed(model.params)  # the base's arrays are copies, which nobody else has
        (first, *_) = jax.tree.leaves(self.trees[""])[0].sharding.device_set  # a mesh of one device is no mesh
        alone = SingleDeviceSharding(first)
        self.everywhere: Any = alone if self.mesh is None else NamedSharding(self.mesh, PartitionSpec())
        shape = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
        self.like = laid(jax.tree.map(shape, self.trees[""]))
        self._remember(layer_views(model.params))
        self.slots: dict[str, int] = {}
        self.kinds: dict[str, LowRank] = {}  # shapes of an update of what may be adapted, by path
        self.together: Any = None  # the base's parameters, with those of all slots
        if slots:  # what adapters may adapt: the matrices of layers, but for experts'
            spec = P.unstack(models.spec_of(model))
            add = lambda params: P.lora.add(params, 1, 1.0, key=jax.random.key(0), spec=spec)
            self._know(jax.eval_shape(add, self.trees[""]))
        # Which paths have updates, how many, of which rank: the least, and all that there have been.
        self.least = frozenset(self.kinds), slots, rank if slots else 0
        self.sizes: list[tuple[frozenset[str], int, int]] = []
        for name, tree in adapters.items():
            self._put(name, self.checked(name, tree))
        self._stack()

    def __contains__(self, name: str) -> bool:
        return name in self.trees

    def check(self, name: str, *, there: bool = True) -> None:
        """Raise ValueError for an adapter that is not loaded ("" is the base); RuntimeError for one that is not `there`."""
        if not isinstance(name, str) or name not in self.trees:
            known = ", ".join(filter(None, self.trees))
            raise ValueError(f"adapter {name!r} is not loaded; loaded are: {known or 'none'}")
        if there:
            self[name]  # raises if they are gone

    def check_alone(self) -> None:
        """Raise ValueError if there are adapters, which hold the base's arrays too."""
        if adapters := ", ".join(filter(None, self.trees)):
            raise ValueError(f"adapters ({adapters}) share the base's arrays; remove them, or sleep with weights=False")

    def release(self) -> None:
        """Let go of the base's arrays, until there is another base."""
        with self.lock:
            self.together, self.trees[""] = None, None
            self.base_arrays.clear()

    def __getitem__(self, name: str) -> Any:
        """Parameters of one adapter alone."""
        with self.lock:
            return _there(self.trees[name])

    def __setitem__(self, name: str, new: Any) -> None:
        """Add an adapter, or replace one or the base, by what `checked` gave. Adapters of an old base keep it."""
        self.put(name, new)

    def put(self, name: str, new: Any, *, reuse: bool = False) -> None:
        """Do that; with `reuse` a new base is written over the old one if that is a copy that nothing here shares."""
        if name == "":
            self._replace(new, reuse)
        else:
            self.slots.pop(name, None)
            self.trees.pop(name, None)  # before there is another
            self._put(name, new)
        self._stack()

    def pop(self, name: str, default: Any = None) -> Any:
        """Forget an adapter, and clear its slot."""
        self.slots.pop(name, None)
        dropped = self.trees.pop(name, default)
        self._stack()
        return dropped

    def slot(self, name: str) -> int:
        """The slot of an adapter in the common tree; -1 for the base, and for those with calls of their own."""
        return self.slots.get(name, -1)

    def call(self, name: str) -> Any:
        """Parameters for a call for this adapter, and for all others of its group."""
        return _there(self.together if name == "" or name in self.slots else self.trees[name])

    def calls(self) -> list[Any]:
        """The parameters of all groups, the base's first."""
        return [self.together, *(tree for name, tree in self.trees.items() if name and name not in self.slots)]

    def checked(self, name: str, params: Any, *, reshard: bool = False, cast: bool = False) -> Any:
        """Compare new parameters with the base's; what `weights[name] = ...` takes. Nothing is copied.

        With `reshard` they may lie elsewhere, with `cast` be of other floating-point types. ValueError names the first
        array that does not fit, or whose values are not finite, with what was found and expected.
        """
        if name:
            self.check("")  # its arrays are compared with the base's
        new = layer_views(params)
        bare: Any = P.lora.unload(new) if name else new
        want, have = dict(P.named_leaves(self.like)), dict(P.named_leaves(bare))
        if wrong := sorted(want.keys() ^ have.keys()):
            fault = "is missing" if wrong[0] in want else "has no place in the model that is served"
            others = f"({len(wrong)} such arrays)"
            raise ValueError(f"{wrong[0]} {fault} {others}; expected parameters of the same structure")
        kinds: list[Any] = [jax.tree.structure(tree) for tree in (bare, self.like)]
        if kinds[0] != kinds[1]:
            raise ValueError("weights are quantised in another way than those that are served; quantize them alike")
        for path, p in have.items():
            check_replacement(path, p, want[path], reshard, cast)
        low = {path: w for path, w in P.named_leaves(new, is_leaf=is_weight) if name and isinstance(w, LowRank)}
        for path, w in low.items():
            check_update(path, w, self.most)
        all_finite, sums = finite(), finite_sums()
        base = {path: p for path, p in have.items() if not (name and self.is_base(path, p))}
        of_array = {id(p.array): path for path, p in base.items() if jnp.issubdtype(p.dtype, jnp.inexact)}
        # One program for all that lies on the same devices: of hundreds XLA:CPU's devices would wait for different ones.
        together: dict[Any, dict[str, jax.Array]] = {}
        for path in of_array.values():
            x = base[path].array
            together.setdefault(frozenset(x.devices()) if isinstance(x, jax.Array) else None, {})[path] = x
        good: dict[Any, Any] = {path: x for some in together.values() for path, x in jax.device_get(sums(some)).items()}
        good = {key: good[path] for key, path in of_array.items()}
        bad = [path for path, p in base.items() if not good.get(id(p.array), True) and not all_finite(p.copy())]
        for path, w in low.items():
            factors = P.lora.factors(jax.tree.map(View.copy, _factors(w)), self.dtype)
            bad += [f"{path}.{part}" for part, x in zip("ab", factors, strict=True) if not all_finite(x)]
        if bad:
            fault = f"{bad[0]} has values that are not finite in {self.dtype}, scaled as they are used"
            raise ValueError(f"{fault} ({len(bad)} arrays have such values); nothing was changed")
        return new

    def is_base(self, path: str, p: View) -> bool:
        """Tell whether an array is the base's: the engine's own, or what that was copied from."""
        source, at = self.sources[path]
        return p.array is self.base_arrays.get(path) or (p.array is source() and p.at == at)

    def arrays(self) -> set[int]:
        """Identify the base's arrays, and those that it was made of."""
        return {id(x) for x in (*self.base_arrays.values(), *(source() for source, _ in self.sources.values()))}

    def _remember(self, sources: Any) -> None:
        """Know the arrays of the base, and those that it was made of as long as somebody else has them."""
        self.base_arrays = dict(P.named_leaves(self.trees[""]))
        self.sources = {path: (weakref.ref(p.array), p.at) for path, p in P.named_leaves(sources)}

    def _replace(self, new: Any, reuse: bool) -> None:
        """Copy another base; the old one is let go of before, so that nothing is there twice."""
        with self.lock:
            fresh, structure = jax.tree.flatten(new)
            old, like = self._spare(fresh) if reuse else None, jax.tree.leaves(self.like)
            self.together, self.trees[""], self.base_arrays, self.slots = None, None, {}, {}
            self.trees[""] = jax.tree.unflatten(structure, copies(fresh, like, old))
            self.copied = True
            self._remember(new)

    def _spare(self, fresh: list[View]) -> list[jax.Array]:
        """Give the base's arrays if their memory can be written: they are copies, and neither given nor an adapter's."""
        arrays = jax.tree.leaves(self.trees[""])
        alone = {id(x) for x in arrays} - {id(p.array) for p in fresh}
        return arrays if self.copied and len(self.trees) == 1 and len(alone) == len(arrays) else []

    def _put(self, name: str, new: Any) -> None:
        """Hold an adapter's parameters; where they are the base's, its own arrays."""
        named = dict(P.named_leaves(P.lora.unload(new)))
        shared = all(self.is_base(path, p) for path, p in named.items())
        take = lambda path, p, x: self.base_arrays[path] if self.is_base(path, p) else p.copy(x.dtype, placement(x))
        arrays = [take(path, p, x) for (path, p), x in zip(named.items(), jax.tree.leaves(self.like), strict=True)]
        base = jax.tree.unflatten(jax.tree.structure(self.like), arrays)

        def joined(w: Any, b: Any) -> Any:
            update = lambda: jax.tree.map(lambda p: p.copy(None, self.everywhere), _factors(w))
            return replace(update(), base=b) if isinstance(w, LowRank) else b

        self.trees[name] = tree = jax.tree.map(joined, new, base, is_leaf=is_weight)
        if shared and all(path.startswith("layers.") and not w.batch for path, w in _updates(tree)):
            self.slots[name] = next(i for i in range(len(self.slots) + 1) if i not in self.slots.values())
            self._know(tree)

    def _know(self, tree: Any) -> None:
        shape = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype)
        self.kinds |= {path: jax.tree.map(shape, _factors(w)) for path, w in _updates(tree) if not w.batch}

    def _stack(self) -> None:
        adapters = {slot: self.trees[name] for name, slot in self.slots.items()}
        updates = [update for tree in adapters.values() for update in _updates(tree)]
        paths, rank = frozenset(path for path, _ in updates), max((w.b.shape[-1] for _, w in updates), default=0)
        count = 1 + max(adapters, default=-1)
        fits = [s for s in self.sizes if s[0] >= paths and s[1] >= count and s[2] >= rank]
        if not fits:
            least, size, width = self.least
            fits = [(least | paths, grown(size, count), grown(width, rank))]
            self.sizes += fits
        paths, self.size, self.rank = min(fits, key=lambda s: len(s[0]) * s[1] * s[2])
        also = [{path: self.kinds[path] for path in paths}]
        together = P.lora.stack(self.trees[""], adapters, self.size, self.rank, also, self.dtype)
        put = lambda x: jax.device_put(x, self.everywhere)  # factors are small, and nothing moves at a step
        placed = lambda _, w: replace(w, a=put(w.a), b=put(w.b)) if isinstance(w, Adapters) else w
        self.together = change(placed, together)


def grown(size: int, needed: int) -> int:
    """Double a size until it is large enough."""
    return size if size >= needed else grown(2 * size or 1, needed)


def _factors(w: LowRank) -> LowRank:
    """A low-rank update without its weight."""
    absent: Any = None
    return replace(w, base=absent)


def _updates(tree: Any) -> list[tuple[str, LowRank]]:
    return [(path, w) for path, w in P.named_leaves(tree, is_leaf=is_weight) if isinstance(w, LowRank)]


def _there(tree: Any) -> Any:
    if tree is None:
        why = "the engine sleeps without them, or an update failed half-way"
        raise RuntimeError(f"there are no weights: {why}; call update_params")
    return tree
