"""The parameters of one engine: the base's and each adapter's. Adapters that share the base's arrays run in one call."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fdel import models
from fdel import params as P
from fdel.models import Model, classifier
from fdel.ops.weights import Adapters, LowRank, is_weight
from fdel.params.quantize import change
from fdel.serve.step import mesh_of


def mesh_for(text: str | None) -> Mesh | None:
    """Make the mesh of `--mesh tp=4`, of the first devices that there are; None: one device. ValueError if it cannot be."""
    shape = P.parse_mesh(text or "")
    idle = [f"{a}={n}" for a, n in shape.items() if a not in ("tp", "ep") and n != 1]
    if idle:
        raise ValueError(
            f"mesh {text!r}: every device of {', '.join(idle)} would compute the same; serving divides weights and cache "
            "over tp, and experts over ep"
        )
    size, devices = math.prod(shape.values()), jax.devices()
    return None if size == 1 else P.make_mesh(shape, devices if size < 0 or size > len(devices) else devices[:size])


def load(
    path: str | Path, *, dtype: Any = None, mesh: Mesh | None = None, rules: P.Rules = P.SERVE,
    quantize: str | None = None, group: int | None = None, revision: str | None = None,
) -> Model:  # fmt: skip
    """Load a checkpoint as engines want it: layers listed, over a mesh by rules, matrices in few bits if `quantize`."""
    model = models.load(path, dtype=dtype, mesh=mesh, rules=rules, stacked=False, revision=revision)
    if reason := classifier.no_text(model.params):
        raise ValueError(f"{path}: {reason}")
    if quantize is not None:
        spec = P.unstack(model.family.spec(model.cfg))
        model = model._replace(params=P.quantize(model.params, quantize, spec=spec, group=group))
    return placed(model, rules)


def placed(model: Model, rules: P.Rules = P.SERVE) -> Model:
    """List the layers of a model and, where it lies on a mesh, lay it out by rules: those of training gather weights."""
    params, mesh = P.unstack(model.params), mesh_of(model.params)
    if mesh is not None:
        params = P.reshard(params, model.family.spec(model.cfg), mesh, rules)
    return model._replace(params=params)


class Weights:
    """Parameters with listed layers, by the name of their adapter, "" for the base.

    Adapters that differ from the base by low-rank updates of its layers alone have slots in one tree (`lora.stack`), in
    which every token finds its own: requests for them and for the base share their calls. Others (experts, embeddings,
    arrays of their own) are whole trees with calls of their own. Room for `slots` adapters of a `rank` is there from the
    start; whoever needs more doubles it, which makes the next steps compile again.
    """

    def __init__(self, model: Model, adapters: Mapping[str, Any], slots: int = 0, rank: int = 0):
        self.mesh: Any = mesh_of(model.params)
        self.base = model.params  # as it was given: adapters are compared with it
        self.trees = {"": P.unstack(model.params)}
        self.size, self.rank = slots, rank if slots else 0
        self.slots: dict[str, int] = {}
        self.room: list[Any] = []
        self.together: Any = None  # the base's parameters, with those of all slots
        if slots:  # what adapters may adapt: the matrices of layers, but for experts'
            spec = P.unstack(model.family.spec(model.cfg))
            add = lambda params: P.lora.add(params, 1, 1.0, key=jax.random.key(0), spec=spec)
            kept = lambda _, w: None if isinstance(w, LowRank) and w.batch else w
            self.room = [change(kept, jax.eval_shape(add, self.trees[""]))]  # shapes, which keep no old base alive
        for name, tree in adapters.items():
            self._put(name, *self._listed(tree))
        self._stack()

    def __contains__(self, name: str) -> bool:
        return name in self.trees

    def __iter__(self) -> Iterator[str]:
        return iter(self.trees)

    def __getitem__(self, name: str) -> Any:
        """Parameters of one adapter alone."""
        return self.trees[name]

    def __setitem__(self, name: str, params: Any) -> None:
        """Add an adapter, or replace its parameters or the base's; adapters of an old base keep it."""
        if name == "":
            self.base, self.slots = params, {}
            self.trees[""] = P.unstack(params)
        else:
            made = self._listed(params)  # may raise, before anything is changed
            self.pop(name)
            self._put(name, *made)
        self._stack()

    def pop(self, name: str, default: Any = None) -> Any:
        """Forget an adapter. What is computed for its slot has no effect until another one takes it."""
        self.slots.pop(name, None)
        return self.trees.pop(name, default)

    def slot(self, name: str) -> int:
        """The slot of an adapter in the common tree; -1 for the base, and for those with calls of their own."""
        return self.slots.get(name, -1)

    def call(self, name: str) -> Any:
        """Parameters for a call for this adapter, and for all others of its group."""
        return self.together if name == "" or name in self.slots else self.trees[name]

    def calls(self) -> list[Any]:
        """The parameters of all groups, the base's first."""
        return [self.together, *(tree for name, tree in self.trees.items() if name and name not in self.slots)]

    def _listed(self, params: Any) -> tuple[Any, bool]:
        """List the layers of an adapter's parameters; and tell whether it can share calls with the base."""
        if P.lora.unstackable(params, self.base) is not None:
            return P.unstack(params), False
        known = dict(P.named_leaves(self.trees[""], is_leaf=is_weight))  # no second copy of what is listed here
        own = lambda path, w: replace(w, base=known[path]) if isinstance(w, LowRank) else known[path]
        return change(own, P.unstack(params)), True

    def _put(self, name: str, listed: Any, shared: bool) -> None:
        self.trees[name] = listed
        if shared:
            self.slots[name] = next(i for i in range(len(self.slots) + 1) if i not in self.slots.values())

    def _stack(self) -> None:
        adapters = {slot: self.trees[name] for name, slot in self.slots.items()}
        leaves = [w for tree in adapters.values() for w in jax.tree.leaves(tree, is_leaf=is_weight)]
        ranks = [w.a.shape[0] for w in leaves if isinstance(w, LowRank)]
        self.size = grown(self.size, 1 + max(adapters, default=-1))
        self.rank = grown(self.rank, max(ranks, default=0))
        together = P.lora.stack(self.trees[""], adapters, self.size, self.rank, self.room)
        if self.mesh is not None:  # each device has all factors: they are small, and nothing moves at a step
            put = lambda x: jax.device_put(x, NamedSharding(self.mesh, PartitionSpec()))
            placed = lambda _, w: replace(w, a=put(w.a), b=put(w.b)) if isinstance(w, Adapters) else w
            together = change(placed, together)
        self.together = together


def grown(size: int, needed: int) -> int:
    """Double a size until it is large enough."""
    return size if size >= needed else grown(2 * size or 1, needed)
