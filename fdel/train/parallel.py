"""A training step on a mesh: where its arrays lie, and how often devices exchange gradients.

    mesh = params.make_mesh({"dp": 2, "fsdp": 4})
    shardings = params.shardings(spec, mesh)
    g = parallel.constrain(grads(loss), shardings)     # gradients lie as their parameters do
    g = parallel.reduce_once(accumulate(g, 8))         # one reduction over `dp` per step, not one per microbatch
    state_at = parallel.state_shardings(jax.eval_shape(init, params), shardings)
    with jax.set_mesh(mesh):                           # the forward lays its activations out on this mesh
        state = jax.jit(init, out_shardings=state_at)(params)
        step = jax.jit(update(normalize(g), optimizer), donate_argnums=0, out_shardings=(state_at, None))

Mesh axes are Auto: the compiler places what nobody has placed. docs/architecture.md says why.
"""

import contextlib
from typing import Any

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from fdel.ops.platform import context
from fdel.ops.shard import divided, require_mesh
from fdel.params.mesh import joined
from fdel.train.extremes import over_axis
from fdel.train.given import NOTHING, Given, fold
from fdel.train.steps import GradFn


def state_shardings(state: Any, shardings: Any) -> Any:
    """Give the shardings of a TrainState (or of any tree of arrays or shapes) from those of the parameters.

    An array lies as the parameter whose path its own path ends with, so moments and averages lie as their parameters.
    One of another rank than the parameter's, and everything else (counts, scales), is whole on every device.
    """
    like = dict(jax.tree_util.tree_flatten_with_path(shardings)[0])
    mesh = joined(jax.tree.leaves(shardings)[0].mesh)

    def one(path: tuple, x: Any) -> NamedSharding:
        found = next((like[path[i:]] for i in range(len(path) + 1) if path[i:] in like), None)
        if found is not None and len(found.spec) <= x.ndim:
            with contextlib.suppress(ValueError):  # it does not divide this shape
                found.shard_shape(x.shape)
                return found
        return NamedSharding(mesh, P())

    return jax.tree_util.tree_map_with_path(one, state)


def constrain(g: GradFn, shardings: Any) -> GradFn:
    """Lay gradients out as their parameters: otherwise the compiler may keep whole ones, and accumulate those.

    A ValueError where another mesh than that of the shardings is set, or none.
    Those of `params.mesh.SHARED` axes are whole along the mesh axis that their parameters share: `jax.shard_map` knows one
    mesh alone.
    """

    def unshared(s: NamedSharding) -> NamedSharding:
        mesh = joined(s.mesh)
        known = lambda a: None if isinstance(a, str) and s.mesh.shape[a] != mesh.shape[a] else a
        return s if s.mesh is mesh else NamedSharding(mesh, P(*map(known, s.spec)))

    shardings = jax.tree.map(unshared, shardings)

    def constrained(params: Any, batch: Any, given: Given = NOTHING) -> tuple[Any, Any]:
        require_mesh(shardings)
        grad, sums = g(params, batch, given)
        return jax.lax.with_sharding_constraint(grad, shardings), sums

    return constrained


def reduce_once(g: GradFn, axis: str = "dp") -> GradFn:
    """Compute `g` on each slice of the batch along a mesh axis, and add gradients and sums up over it at the end.

    They add up in float32. Put it outside of `accumulate`, whose sums then stay on their devices until the last
    microbatch. Parameters must be whole along the axis, and `g` a sum over rows: no `gradcache` over more than one
    microbatch, whose objective would see one slice only. Each slice gets a key of its own. Without that axis in the mesh,
    `g` itself. A ValueError where parameters lie on another mesh than the one set.
    """

    def reduced(params: Any, batch: Any, given: Given = NOTHING) -> tuple[Any, Any]:
        require_mesh(params)
        if not context(axis):
            return g(params, batch, given)

        def local(params: Any, batch: Any, given: Given) -> tuple[Any, Any]:
            found = g(params, batch, fold(given, jax.lax.axis_index(axis)))
            return over_axis(found, axis)

        return divided(local, {axis}, (P(), P(axis), P()), P())(params, batch, dict(given))

    return reduced
