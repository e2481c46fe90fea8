"""Sparse attention (arXiv:2512.02556, section 2.1): a small indexer scores all keys, and a query attends to the best ones.

Work and memory of attention go with tokens times chosen keys; only the indexer, which has few channels, reads all keys.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from fdel.ops import quantized_pages
from fdel.ops.batch import Batch, Packed, Pages
from fdel.ops.carry import Carry
from fdel.ops.einsum import einsum
from fdel.ops.mask import NEG, Mask, visible
from fdel.ops.paged import write_pages
from fdel.ops.weights import Weight

QUERIES = 64  # tokens of a row whose keys are gathered at a time
BLOCKS = 8  # blocks of a Paged batch whose index keys are read at a time: all of their sequences


class Chosen(NamedTuple):
    """The keys that each query attends to: their places in the row (Packed) or in the sequence (Paged)."""

    keys: Int[Array, "... T k"]
    seen: Bool[Array, "... T k"]  # False where there are fewer to choose from


def none_chosen(batch: Batch, carry: Carry, count: int) -> Chosen:
    """Give a `Chosen` of no keys, of the shapes that `choose_keys` gives in this call."""
    total = batch.positions.shape[-1] if isinstance(batch, Packed) else batch.page_table.shape[1] * _page(carry)
    shape = (*batch.positions.shape, min(count, total))
    return Chosen(jnp.zeros(shape, jnp.int32), jnp.zeros(shape, bool))


def choose_keys(
    batch: Batch, carry: Carry, pool: int, layer: Any, q: Float[Array, "... T N H"], k: Float[Array, "... T H"],
    weights: Float[Array, "... T N"], *, count: int,
) -> tuple[Chosen, Carry]:  # fmt: skip
    """Choose the `count` visible keys s of query t with the greatest sum_n weights[t, n] relu(q[t, n] . k[s]), in float32.

    Paged: the index keys are written to layer `layer` of the pages `carry.pages[pool]` first, which have no values. There
    is no gradient through the choice.
    """
    q, k, weights = (jax.lax.stop_gradient(x) for x in (q, k, weights))
    if isinstance(batch, Packed):
        i, (segments, of_keys) = jnp.arange(k.shape[1]), batch.where.sides

        def some(q: Array, w: Array, places: Array, segments: Array) -> Chosen:
            seen = visible(Mask(1.0), places[0], i, segments, of_keys)
            return _best(_index_scores(q, k, w), seen, count)

        return _in_parts(some, q, weights, jnp.broadcast_to(i, segments.shape), segments), carry
    pages = write_pages(batch, carry.pages[pool], layer, k[:, None], None)
    carry = carry.remember(pages=(*carry.pages[:pool], pages, *carry.pages[pool + 1 :]))

    def block(of: tuple) -> Chosen:
        q, w, positions, table = of
        keys = _read(pages, layer, table[:, None], jnp.arange(pages.k.shape[3]), q).reshape(-1, q.shape[-1])
        seen = jnp.arange(len(keys)) <= positions[:, None]
        return _best(_index_scores(q[None], keys[None], w[None])[0], seen, count)

    cut = lambda x: x.reshape(-1, batch.block, *x.shape[1:])
    chosen = jax.lax.map(block, (cut(q), cut(weights), cut(batch.positions), batch.page_table), batch_size=BLOCKS)
    return jax.tree.map(lambda x: x.reshape(-1, x.shape[-1]), chosen), carry


def sparse_mla(
    batch: Batch, carry: Carry, pool: int, layer: Any, q: Float[Array, "... T N H"], kv: Float[Array, "... T C_R"],
    w_k: Weight, w_v: Weight, chosen: Chosen, *, scale: float,
) -> tuple[Float[Array, "... T N Hv"], Carry]:  # fmt: skip
    """Attend as `mla` does, each query to its chosen keys alone; products in the order of `mla`'s Paged calls.

    Paged: latents are written to layer `layer` of the pages `carry.pages[pool]` first. Returns (output, carry).
    """
    _, nope, c = w_k.shape
    q = jnp.concatenate([einsum("...nh,nhc->...nc", q[..., :nope], w_k), q[..., nope:]], -1)

    def attend(q: Array, chosen: Chosen, x: Array) -> Array:
        s = jnp.einsum("...nc,...kc->...nk", q, x, preferred_element_type=jnp.float32) * scale
        p = jax.nn.softmax(jnp.where(chosen.seen[..., None, :], s, NEG), -1).astype(q.dtype)
        values = jnp.where(chosen.seen[..., None], x[..., :c], 0)  # stale NaN times 0 would be NaN
        return jnp.einsum("...nk,...kc->...nc", p, values)

    if isinstance(batch, Packed):
        rows = jax.vmap(lambda x, keys: x[keys])
        some: Callable = lambda q, keys, seen: attend(q, Chosen(keys, seen), rows(kv, keys))
        sums = _in_parts(jax.checkpoint(some), q, *chosen)
    else:
        pages = write_pages(batch, carry.pages[pool], layer, kv[:, None], None)
        carry = carry.remember(pages=(*carry.pages[:pool], pages, *carry.pages[pool + 1 :]))
        size, table = pages.k.shape[3], jnp.repeat(batch.page_table, batch.block, 0)

        def some(q: Array, keys: Array, seen: Array, table: Array) -> Array:
            ids = jnp.take_along_axis(table, keys // size, -1)
            return attend(q, Chosen(keys, seen), _read(pages, layer, ids, keys % size, q))

        sums = _in_parts(some, *(x[None] for x in (q, *chosen, table)))[0]
    return einsum("...nc,nhc->...nh", sums, w_v), carry


def _page(carry: Carry) -> int:
    """Tokens of a page."""
    return carry.pages[0].k.shape[3]


def _read(pages: Pages, layer: Any, ids: Array, offsets: Array, like: Array) -> Array:
    """Read single tokens of pages with one head, [... channels], as numbers and as many of them as queries `like` have."""
    x = pages.k.at[layer, ids, 0, offsets].get(mode="clip")
    if pages.k_scale is not None:
        n, (rows, _) = quantized_pages.scales(x.shape[-1]), pages.k_scale.shape[3:]
        row, first = quantized_pages.scale_places(n, pages.k.shape[3], rows)
        each = lambda x: x[..., None]
        scale = pages.k_scale.at[layer, each(ids), 0, row, first + each(offsets)].get(mode="clip")
        x = quantized_pages.decode(x, scale, like.dtype)
    return x[..., : like.shape[-1]].astype(like.dtype)


def _index_scores(q: Float[Array, "B q N H"], k: Float[Array, "B S H"], w: Float[Array, "B q N"]) -> Array:
    """Score keys [B q S], one head after the other: of all heads at once they would be the largest array of a model."""

    def head(total: Array, of: tuple) -> tuple[Array, None]:
        q, w = of
        s = jnp.einsum("bqh,bsh->bqs", q, k, preferred_element_type=jnp.float32)
        return total + w[..., None] * jax.nn.relu(s), None

    start = jnp.zeros((*q.shape[:2], k.shape[1]), jnp.float32)
    return jax.lax.scan(head, start, (jnp.moveaxis(q, 2, 0), jnp.moveaxis(w.astype(jnp.float32), 2, 0)))[0]


def _best(scores: Float[Array, "... q S"], seen: Bool[Array, "... q S"], count: int) -> Chosen:
    best, keys = jax.lax.top_k(jnp.where(seen, scores, -jnp.inf), min(count, scores.shape[-1]))
    return Chosen(keys, best > -jnp.inf)


def _in_parts(f: Callable, *xs: Array) -> Any:
    """Apply f to parts of QUERIES tokens of xs [B T ...], one after the other."""
    t = xs[0].shape[1]
    if t <= QUERIES:
        return f(*xs)
    parts = -(-t // QUERIES)
    whole = lambda x: jnp.pad(x, [(0, 0), (0, parts * QUERIES - t), *[(0, 0)] * (x.ndim - 2)])
    pieces = lambda x: jnp.moveaxis(whole(x).reshape(x.shape[0], parts, QUERIES, *x.shape[2:]), 1, 0)
    out = jax.lax.map(lambda part: f(*part), tuple(map(pieces, xs)))
    return jax.tree.map(lambda y: jnp.moveaxis(y, 0, 1).reshape(y.shape[1], -1, *y.shape[3:])[:, :t], out)
