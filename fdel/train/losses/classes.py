"""Classes of texts and of tokens: a linear head on the hidden states, learnt from labels as transformers' classes learn it.

Parameters are {"model": the family's, without its output projection, "sequence": its head for texts, or "token": that for
tokens}; see `models.heads`.
"""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import jax.numpy as jnp
from jax.nn import log_sigmoid, log_softmax
from jaxtyping import Array, Float, Num

from fdel import ops
from fdel.models import heads
from fdel.train.given import NOTHING, Given
from fdel.train.losses.contrastive import first_token, last_token, sentence_embeddings
from fdel.train.losses.forward import Batch, forward_pass, rows
from fdel.train.losses.head import CHUNK, token_sum
from fdel.train.losses.stats import IGNORE, check_range
from fdel.train.losses.supervised import nll

Sums = dict[str, Any]
Scores = Float[Array, "B labels"]
PerRow = Float[Array, " B"]


def score_rows(
    family: ModuleType, cfg: Any, remat: str | None = None
) -> Callable[[Any, Batch], Float[Array, "... labels"]]:
    """Build `scores(params, batch)`: the head on the last real token of each row, float32, as tokens without T.

    A family whose own head for sequences (`models.heads`) reads the first token has that.
    """
    own = getattr(family, "HEADS", {}).get("sequence")
    pooled = first_token if own is not None and own.pool == "first" else last_token
    embeddings = sentence_embeddings(family, cfg, pool=pooled, remat=remat)

    def scores(params: Any, batch: Batch) -> Float[Array, "... labels"]:
        return heads.outputs(params, embeddings(params["model"], batch))

    return scores


def one_label(z: Scores, labels: Num[Array, "B 1"]) -> tuple[PerRow, Sums]:
    """Compute -log softmax(z)[label] per row, and whether the label is the most likely one."""
    label = labels.astype(int)
    logp = jnp.take_along_axis(log_softmax(z, -1), jnp.maximum(label, 0), 1)[:, 0]
    return -logp, {"accuracy": z.argmax(-1) == label[:, 0]}


def some_labels(z: Scores, labels: Scores) -> tuple[PerRow, Sums]:
    """Compute the mean over labels of -y log sigmoid(z) - (1 - y) log sigmoid(-z) per row, and the share of right ones."""
    each = -labels * log_sigmoid(z) - (1 - labels) * log_sigmoid(-z)
    return each.mean(-1), {"accuracy": ((z > 0) == (labels > 0.5)).mean(-1)}


def numbers(z: Scores, labels: Scores) -> tuple[PerRow, Sums]:
    """Compute the mean over labels of (z - y)^2 per row, and that of |z - y|."""
    return ((z - labels) ** 2).mean(-1), {"mean_absolute_error": jnp.abs(z - labels).mean(-1)}


PROBLEMS: dict[str, Callable[[Scores, Scores], tuple[PerRow, Sums]]] = {  # by transformers' problem_type
    "single_label_classification": one_label, "multi_label_classification": some_labels, "regression": numbers,
}  # fmt: skip


def classification(
    family: ModuleType, cfg: Any, *, problem: str = "single_label_classification", remat: str | None = None
) -> Callable:
    """Build `loss(params, batch, given) -> (sum, sums)` for `train.grads`: a key of `PROBLEMS` on the scores of rows.

    The batch holds "labels": the number of a row's label [B], negative where there is none, or numbers for each label
    [B labels]. Rows without tokens or label count for nothing. As transformers' ForSequenceClassification computes it.
    """
    if problem not in PROBLEMS:
        raise ValueError(f"problem={problem!r}; expected one of {', '.join(PROBLEMS)}")
    scores = score_rows(family, cfg, remat=remat)

    def loss(params: Any, batch: Batch, given: Given = NOTHING) -> tuple[Array, Sums]:
        z = scores(params, batch)
        labels = batch["labels"].reshape(len(z), -1).astype(z.dtype)
        weights = batch["lengths"] > 0 if "lengths" in batch else jnp.ones(len(z), bool)
        if problem == "single_label_classification":
            weights &= labels[:, 0] >= 0
        losses, metrics = PROBLEMS[problem](z, labels)
        total = lambda x: jnp.where(weights, x, 0).sum()
        return total(losses), {"weight": weights.sum().astype(z.dtype)} | {k: total(v) for k, v in metrics.items()}

    return loss


def token_classification(family: ModuleType, cfg: Any, *, chunk: int = CHUNK, remat: str | None = None) -> Callable:
    """Build `loss(params, batch, given) -> (sum, sums)` for `train.grads`: the cross-entropy of the label of each token.

    The batch holds "labels", as tokens, negative where there is none. Nothing is shifted: the score at a token is for that
    token. As transformers' ForTokenClassification computes it.
    """
    check_range(1, chunk=chunk)
    forward = forward_pass(family, cfg, remat=remat)

    def loss(params: Any, batch: Batch, given: Given = NOTHING) -> tuple[Array, Sums]:
        tokens, packed, _ = rows(batch)
        x = forward(params["model"], tokens, packed).hidden
        labels = jnp.where(packed.segment_ids >= 0, batch["labels"].reshape(tokens.shape), IGNORE)
        head = ops.Head(params["token"]["weight"], bias=params["token"].get("bias"))
        total, sums = token_sum(nll, x, head, labels, (labels >= 0).astype(jnp.float32), chunk=chunk)
        return total, {"weight": sums["weight"], "accuracy": sums["mean_token_accuracy"]}

    return loss
