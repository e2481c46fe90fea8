"""Sentence embeddings: one vector per row by pooling, and losses that tell a row's positive from all negatives.

The batch's tokens are int[B C T]: a query, its positive, and C - 2 hard negatives; `lengths` is 0 where a row has fewer.
In-batch negatives couple the rows, so that microbatches need `train.gradcache(*embedding(family, cfg), n)`.
"""

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from fdel.ops.contraction import wide, widen
from fdel.train.given import NOTHING, Given
from fdel.train.losses.forward import Batch, forward_pass, rows
from fdel.train.losses.stats import check_call, check_range

Embeddings = Float[Array, "B C D"]
Present = Bool[Array, "B C"]
RowLoss = Callable[[Embeddings, Present], Float[Array, " B"]]
ABSENT = -1e9  # the score of a document that is not there; with -inf a batch without any would give NaN
SMALLEST = 1e-12  # vectors shorter than that are not stretched to length one


# ---- one vector per row --------------------------------------------------------------------------------------------


def last_token(hidden: Float[Array, "R T D"], keep: Bool[Array, "R T"]) -> Float[Array, "R D"]:
    """Pool by taking the last token to be kept, the first one of all where none is.
    >>> losses.last_token(jnp.arange(3.0).reshape(1, 3, 1), jnp.array([[True, True, False]]))
    Array([[1.]], dtype=float32)
    """
    last = jnp.where(keep, jnp.arange(keep.shape[1]), 0).max(1)
    return jnp.take_along_axis(hidden, last[:, None, None], 1)[:, 0]


def first_token(hidden: Float[Array, "R T D"], keep: Bool[Array, "R T"]) -> Float[Array, "R D"]:
    """Pool by taking the first token, BERT's CLS."""
    return hidden[:, 0]


def mean_token(hidden: Float[Array, "R T D"], keep: Bool[Array, "R T"]) -> Float[Array, "R D"]:
    """Pool by averaging the tokens to be kept, in float32; 0 where there is none.
    >>> losses.mean_token(jnp.arange(3.0).reshape(1, 3, 1), jnp.array([[True, True, False]]))
    Array([[0.5]], dtype=float32)
    """
    total = jnp.einsum("rtd,rt->rd", hidden, keep.astype(hidden.dtype), preferred_element_type=wide(hidden.dtype))
    return total / jnp.maximum(keep.sum(1, keepdims=True), 1)


def sentence_embeddings(
    family: ModuleType, cfg: Any, *, pool: Callable = last_token, remat: str | None = None
) -> Callable:
    """Build `embeddings(params, batch, given) -> float32[... D]`: the final hidden states of each row of tokens, pooled.

    One sequence per row: a batch with several ("packed") is a ValueError. `remat` is that of `losses.forward`.
    """
    forward = forward_pass(family, cfg, remat=remat)
    check_call(lambda x: pool(x, x[..., 0] > 0), (2, 3, getattr(cfg, "embed", 4096)))

    def embeddings(params: Any, batch: Batch, given: Given = NOTHING) -> Float[Array, "... D"]:
        if "packed" in batch:
            raise ValueError("the batch has 'packed' rows; expected one sequence per row: give its 'lengths' instead")
        tokens, packed, _ = rows(batch)
        pooled = pool(forward(params, tokens, packed).hidden, packed.segment_ids >= 0)
        return widen(pooled).reshape(*batch["tokens"].shape[:-1], -1)

    return embeddings


def unit(x: Float[Array, "... D"]) -> Float[Array, "... D"]:
    """Scale vectors to length one."""
    return x * jax.lax.rsqrt(jnp.maximum((x * x).sum(-1, keepdims=True), SMALLEST**2))


# ---- losses per row ------------------------------------------------------------------------------------------------


def info_nce(x: Embeddings, present: Present, *, temperature: float = 0.05) -> Float[Array, " B"]:
    """Compute -log of the positive's share of exp(cosine / temperature) over all documents of the batch.

    Documents are every row's positive and hard negatives, as far as present (InfoNCE, arXiv:1807.03748, which
    sentence-transformers calls MultipleNegativesRankingLoss; its scale is 1 / temperature).
    >>> x = jnp.eye(4).reshape(2, 2, 4)  # each row: an anchor and its positive
    >>> losses.info_nce(x, jnp.ones((2, 2), bool))
    Array([0.6931472, 0.6931472], dtype=float32)
    """
    check_range(above=True, temperature=temperature)
    x = unit(x)
    scores = jnp.einsum("bd,acd->bac", x[:, 0], x[:, 1:]) / temperature
    scores = jnp.where(present[:, 1:], scores, ABSENT)
    return jax.nn.logsumexp(scores, axis=(1, 2)) - jnp.diagonal(scores[:, :, 0])


def cosine_distance(a: Float[Array, "... D"], b: Float[Array, "... D"]) -> Float[Array, "..."]:
    """Compute 1 - cosine.
    >>> cosine_distance(jnp.array([1.0, 0.0]), jnp.array([0.0, 2.0]))
    Array(1., dtype=float32)
    """
    return 1 - (unit(a) * unit(b)).sum(-1)


def euclidean_distance(a: Float[Array, "... D"], b: Float[Array, "... D"]) -> Float[Array, "..."]:
    """Compute the length of a - b, with gradient 0 where they are equal.
    >>> euclidean_distance(jnp.array([3.0, 0.0]), jnp.array([0.0, 4.0]))
    Array(5., dtype=float32)
    """
    square = ((a - b) ** 2).sum(-1)
    return jnp.where(square > 0, jnp.sqrt(jnp.where(square > 0, square, 1)), 0)


def triplet(
    x: Embeddings, present: Present, *, margin: float = 0.2, distance: Callable = cosine_distance
) -> Float[Array, " B"]:
    """Compute max(0, margin + distance to the positive - distance to a negative), summed over a row's hard negatives.
    >>> x = jnp.array([[[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]]])  # anchor, positive, negative
    >>> losses.triplet(x, jnp.ones((1, 3), bool), margin=1.5)
    Array([0.5], dtype=float32)
    """
    check_range(margin=margin)
    if x.shape[1] < 3:
        raise ValueError(f"embeddings {x.shape} hold no hard negatives; expected [B, 3 or more, D]")
    query, positive, negatives = x[:, 0], x[:, 1], x[:, 2:]
    near, far = distance(query, positive), distance(query[:, None], negatives)
    return (present[:, 2:] * jax.nn.relu(margin + near[:, None] - far)).sum(1)


def matryoshka(loss: RowLoss, dims: Sequence[int], weights: Sequence[float] | None = None) -> RowLoss:
    """Build the weighted sum of a loss over prefixes of the embeddings, each scaled to length one (arXiv:2205.13147)."""
    weights = [1.0] * len(dims) if weights is None else weights
    if not dims or len(weights) != len(dims):
        found = f"{len(weights)} weights for the dims {list(dims)}"
        raise ValueError(f"{found}; expected at least one, and a weight for each")

    def nested(x: Embeddings, present: Present) -> Float[Array, " B"]:
        if not all(0 < d <= x.shape[-1] for d in dims):
            raise ValueError(f"dims {tuple(dims)} for embeddings of {x.shape[-1]}; expected numbers from 1 to that")
        parts = zip(dims, weights, strict=True)
        return jnp.stack([w * loss(unit(x[..., :d]), present) for d, w in parts]).sum(0)

    return nested


def embedding(
    family: ModuleType, cfg: Any, *, loss: RowLoss = info_nce, pool: Callable = last_token, remat: str | None = None
) -> tuple[Callable, Callable]:
    """Build (outputs, objective) for `train.gradcache`: embeddings [B C D], and the sum of `loss` over their rows.

    A row without query or positive adds no loss, only its documents as negatives. Sums: "weight" (rows) and
    "positive_similarity" (cosine).
    """
    check_call(lambda x: loss(x, x[..., 0] > 0), (2, 3, getattr(cfg, "embed", 4096)))

    def objective(x: Embeddings, batch: Batch, given: Given = NOTHING) -> tuple[Array, dict[str, Array]]:
        present = batch["lengths"] > 0 if "lengths" in batch else jnp.ones(x.shape[:2], bool)
        weights = (present[:, 0] & present[:, 1]).astype(x.dtype)
        similarity = 1 - cosine_distance(x[:, 0], x[:, 1])
        total = lambda values: (weights * values).sum()
        return total(loss(x, present)), {"weight": weights.sum(), "positive_similarity": total(similarity)}

    return sentence_embeddings(family, cfg, pool=pool, remat=remat), objective
