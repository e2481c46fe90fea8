"""What every family must satisfy: checks over (model, oracle), shared by the suite and by its proof through mutations."""

from dataclasses import replace
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fdel import models, ops, params

LENGTH = 40  # past the windows, and past the original contexts of the scaled rotary embeddings


class Case(NamedTuple):
    """One checkpoint: where it is, the model that fdel loads from it, tokens int[2 T] and the oracle's logits."""

    directory: Any
    model: models.Model
    tokens: np.ndarray
    logits: np.ndarray


def make_case(name: str, directory: Any) -> Case:
    import tiny
    import torch

    oracle = tiny.checkpoint(name, directory)
    tokens = np.random.default_rng(0).integers(3, 110, (2, LENGTH))
    with torch.no_grad():
        logits = oracle(torch.tensor(tokens)).logits.numpy()
    return Case(directory, models.load(directory, dtype=jnp.float32), tokens, logits)


def error(got: Any, want: Any) -> float:
    """Largest difference over the largest magnitude."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    return float(np.abs(got - want).max() / np.abs(want).max())


@cache
def whole(family: Any, cfg: Any) -> Any:
    """Compile a family's forward once; what plants a mistake calls `whole.cache_clear()`."""
    return jax.jit(lambda p, t, b: family.forward(p, t, cfg, b)[0])


def full(model: models.Model, tokens: Any, batch: Any = None) -> jax.Array:
    """Logits of whole sequences."""
    return whole(model.family, model.cfg)(model.params, jnp.asarray(tokens), batch)


def logits_error(case: Case) -> float:
    return error(full(case.model, case.tokens), case.logits)


def serving_logits(
    model: models.Model, tokens: np.ndarray, chunks: list[int], block: int, media: ops.Media | None = None
) -> np.ndarray:
    """Logits of two interleaved sequences fed in chunks through Paged state; a chunk of 1 goes through block=1.

    `media` has the entries of both, with an index of each token.
    """
    page, rows = 4, 3  # rows 0 and 2 are used; every cache starts full of NaN
    width = -(-tokens.shape[1] // page)
    table = np.stack([np.arange(width) * 2 + 1, np.full(width, 2 * width + 5), np.arange(width) * 2])
    spec = model.family.state_spec(model.cfg, pages=2 * width, page=page, rows=rows)
    state = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), params.init(spec, jax.random.key(0)))
    listed = params.unstack(model.params)

    @partial(jax.jit, donate_argnums=3)
    def run(p: Any, new: Any, batch: Any, state: Any) -> Any:
        return model.family.forward(p, new, model.cfg, batch, state)

    out, start = [[], []], 0
    for n in chunks:
        n = min(n, tokens.shape[1] - start)
        b = 1 if n == 1 else block
        parts = [(row, start, tokens[i, start : start + n].tolist()) for i, row in enumerate((0, 2))]
        size = (2 * -(-n // b) + 1) * b  # one block of padding
        new, batch = ops.paged(parts, table, block=b, size=size)
        if media is not None:
            places = [(row, start, (media.index[i, start : start + n] + 1).tolist()) for i, row in enumerate((0, 2))]
            here = ops.paged(places, table, block=b, size=size)[0] - 1
            batch = replace(batch, media=replace(media, index=here))
        logits, state = run(listed, new, batch, state)
        stride = -(-n // b) * b
        for i in range(2):
            out[i].append(np.asarray(logits)[i * stride : i * stride + n])
        start += n
        if start == tokens.shape[1]:
            break
    return np.stack([np.concatenate(o) for o in out])


def serving_error(case: Case, first: int, block: int) -> float:
    """Chunked prefill of `first` tokens at a time for the first half, then decode, against the full forward."""
    half = LENGTH // 2
    chunks = [first] * -(-half // first)
    got = serving_logits(case.model, case.tokens, chunks + [1] * LENGTH, block)
    return error(got, full(case.model, case.tokens))


def packing_error(case: Case, prefixes: bool = True) -> float:
    """Three segments in a row against the first tokens of whole rows; without `prefixes` against calls of their own."""
    cuts = [(0, 13), (1, 17), (0, 10)]
    sequences = [case.tokens[r, :n].tolist() for r, n in cuts]
    tokens, batch = ops.pack(sequences, LENGTH)
    got, start, worst = np.asarray(full(case.model, tokens, batch))[0], 0, 0.0
    rows = full(case.model, case.tokens) if prefixes else None
    for (r, n), s in zip(cuts, sequences, strict=True):
        alone = full(case.model, np.asarray([s]))[0] if rows is None else rows[r, :n]
        worst = max(worst, error(got[start : start + n], alone))
        start += n
    return worst


def future_gradient(case: Case) -> tuple[float, float]:
    """Largest gradient of logits at position t with respect to embeddings after t, and least at t and just before."""
    table, t = jnp.asarray(case.model.params["embed"]), LENGTH // 2
    tokens = jnp.arange(LENGTH)[None]  # each position reads its own row of the table

    def loss(rows: jax.Array) -> jax.Array:
        p = case.model.params | {"embed": table.at[:LENGTH].set(rows)}
        if "head" not in p:  # keep the tied head out of the question
            p |= {"head": jax.lax.stop_gradient(table)}
        return jnp.sum(case.model.family.forward(p, tokens, case.model.cfg)[0][0, t] ** 2)

    g = np.abs(np.asarray(jax.jit(jax.grad(loss))(table[:LENGTH]))).max(-1)
    return float(g[t + 1 :].max()), float(g[t - 3 : t + 1].min())


def gradients(case: Case, p: Any) -> Any:
    """Gradient of the mean next-token log-likelihood."""

    def loss(p: Any) -> jax.Array:
        logits = case.model.family.forward(p, jnp.asarray(case.tokens[:, :-1]), case.model.cfg)[0]
        logp = jax.nn.log_softmax(logits)
        return -jnp.take_along_axis(logp, jnp.asarray(case.tokens[:, 1:, None]), -1).mean()

    return jax.jit(jax.grad(loss))(p)
