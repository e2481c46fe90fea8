"""Make activations easier to round before a model is quantized to `w8a8`: SmoothQuant (arXiv 2211.10438) for any family."""

from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from fdel import calibration, models, params
from fdel.params.hf_layout import matrix
from fdel.params.quantize import targets

Leaves = dict[str, Any]
TOLERANCE = 1e-3  # of the greatest hidden number: what a fold that changes nothing may change by rounding in float32


def factors(
    x: Float[np.ndarray, " inputs"], w: Float[np.ndarray, " inputs"], alpha: float
) -> Float[np.ndarray, " inputs"]:
    """By what to divide each input, and multiply its weights: x^alpha / w^(1 - alpha), with 1 as their geometric mean.

    `x` and `w` are the sizes of an input and the greatest magnitude of its weights (section 4.2). Inputs or weights that
    are zero keep 1.
    """
    known = (x > 0) & (w > 0)
    log = np.where(known, alpha * np.log(np.where(known, x, 1)) - (1 - alpha) * np.log(np.where(known, w, 1)), 0)
    return np.exp(np.where(known, log - log[known].mean() if known.any() else 0, 0))


def smooth(model: models.Model, rows: Int[np.ndarray, "rows length"], alpha: float = 0.5) -> tuple[models.Model, int]:
    """Move the differences in size between inputs of matrices into these, where a norm precedes them; and count the norms.

    The size of an input is its root mean square while the model reads the rows. A norm, and the matrices that read what it
    gives, are found by what they do: matrices of a layer that see the same inputs, and a norm of it with which the fold
    leaves the model's hidden states as they are. Others stay. The model's layers come back listed, in the same dtypes.
    """
    if not 0 < alpha < 1:
        raise ValueError(f"alpha={alpha}; expected a number between 0 (all to activations) and 1 (all to weights)")
    spec = params.unstack(models.spec_of(model))
    like = params.unstack(model.params)
    tree = jax.tree.map(lambda w: w.astype(jnp.float32), like)
    declared, found = dict(params.named_leaves(spec)), targets(tree, spec, r"\blayers\b")
    seen = calibration.grams(model._replace(params=tree), rows, list(found))
    structure = jax.tree.structure(tree)
    build = lambda leaves: jax.tree.unflatten(structure, [leaves[path] for path, _ in params.named_leaves(tree)])
    run = jax.jit(lambda leaves, tokens: model.family.hidden(build(leaves), tokens, model.cfg)[0])
    tokens = jnp.asarray(rows[:1])
    leaves = dict(params.named_leaves(tree))
    want, count = np.asarray(run(leaves, tokens)), 0
    for paths in _readers(seen):
        size = np.sqrt(np.diagonal(seen[paths[0]]) / rows.size)
        flat = {path: np.asarray(leaves[path]).reshape(-1, len(size)) for path in paths}
        s = factors(size, np.max([np.abs(w).max(0) for w in flat.values()], 0), alpha)
        scaled = {path: jnp.asarray((w * s).reshape(leaves[path].shape)) for path, w in flat.items()}
        for folded in _folds(paths[0], leaves, declared, s):
            new = leaves | scaled | folded
            if np.abs(np.asarray(run(new, tokens)) - want).max() <= TOLERANCE * np.abs(want).max():
                leaves, count = new, count + 1
                break
    back = jax.tree.map(lambda new, old: new.astype(old.dtype), build(leaves), like)
    return model._replace(params=back), count


def _readers(seen: Mapping[str, np.ndarray]) -> Iterator[list[str]]:
    """Group the matrices of a layer that saw the same inputs; experts, which saw some of them, are left out."""
    groups: dict[tuple[str, bytes], list[str]] = {}
    for path, gram in seen.items():
        if gram.ndim == 2 and gram.any():
            groups.setdefault((".".join(path.split(".")[:2]), gram.tobytes()), []).append(path)
    yield from groups.values()


def _folds(path: str, leaves: Leaves, declared: Mapping[str, params.Param], s: np.ndarray) -> Iterator[Leaves]:
    """Divide each norm of a layer by s, its bias too; the norm's weight may be what is stored, or one more than that."""
    layer = ".".join(path.split(".")[:2]) + "."
    for name, p in declared.items():
        if name.startswith(layer) and p.shape == s.shape and matrix(p) is None and not name.endswith("bias"):
            bias = {key: leaves[key] / s for key in (f"{name}_bias",) if key in leaves}
            yield bias | {name: leaves[name] / s}
            yield bias | {name: (1 + leaves[name]) / s - 1}
