"""What calibration data tells of a model: the tokens of a data file, and what each matrix is multiplied with."""

import logging
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from fdel import models, ops, params, text
from fdel.ops.weights import Observed
from fdel.params.quantize import change, targets

Gram = Float[np.ndarray, "*batch inputs inputs"]


def read(file: str | Path, tok: text.Tokenizer, rows: int = 128, length: int = 2048) -> Int[np.ndarray, "rows length"]:
    """Read the first texts of a data file (see `train.data.Source`) as at most `rows` rows of `length` tokens.

    Texts follow each other without padding; fewer tokens than one row has make one shorter row. What could not be read is
    logged as a warning.
    """
    from fdel.train import data

    if min(rows, length) < 1:
        raise ValueError(f"{rows} rows of {length} tokens: both must be positive")
    settings = data.Settings(packing="wrapped", length=length, learn="all")
    built = data.build(data.Source(str(file)), tok, settings)
    tokens = built.tokens
    if built.report.notes:
        logging.getLogger(__name__).warning("%s: %s", file, built.report)
    if not len(tokens):
        raise ValueError(f"{file} holds no text to calibrate with; expected rows with text, messages or a prompt")
    length = min(length, len(tokens))
    return tokens[: len(tokens) // length * length].reshape(-1, length)[:rows]


def grams(
    model: models.Model, rows: Int[np.ndarray, "rows length"], where: Sequence[str], batch: int = 1
) -> dict[str, Gram]:
    """Add up x^T x over the inputs x of the matrices at these paths of a listed tree, while the model reads the rows.

    Experts see the tokens that were sent to them. Inputs are those of the model as it is. `batch` rows are read at once.
    A matrix that is multiplied otherwise than by `ops.einsum` with its inputs gets zeros. float32.
    """
    spec, tree = params.unstack(models.spec_of(model)), params.unstack(model.params)
    found = {path: m for path, m in targets(tree, spec, "").items() if path in set(where)}
    zeros = {}
    for path, p in params.named_leaves(spec):
        if path in found:
            outer, _, inputs = found[path].cut(p.shape)
            zeros[path] = jnp.zeros((*outer, math.prod(inputs), math.prod(inputs)))

    def anything(sums: dict, tree: Any, tokens: Any) -> Any:
        """Depend on all products: which number it is does not matter (see `ops.weights.Observed`)."""
        watched = change(lambda path, w: Observed(w, sums[path]) if path in sums else w, tree)
        return model.family.hidden(watched, tokens, model.cfg)[0].astype(jnp.float32).sum()

    def step(sums: dict, tree: Any, tokens: Any) -> dict:
        return jax.tree.map(jnp.add, sums, jax.grad(anything)(sums, tree, tokens))

    run, sums = jax.jit(ops.tracing_once()(step), donate_argnums=0), zeros
    for i in range(0, len(rows), batch):
        sums = run(sums, tree, jnp.asarray(rows[i : i + batch]))
    return {path: np.asarray(x) for path, x in sums.items()}
