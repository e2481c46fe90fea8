"""Question answering: the first and the last token of an answer, as transformers' ForQuestionAnswering learns them.

Parameters are {"model": the family's, without its output projection, "question": its head}; see `models.heads`.
"""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import jax.numpy as jnp
from jax.nn import log_softmax
from jaxtyping import Array

from fdel.models import heads
from fdel.train.given import NOTHING, Given
from fdel.train.losses.forward import Batch, forward_pass, rows

STARTS, ENDS = 1, 2  # bits of a token's label


def question_answering(family: ModuleType, cfg: Any, *, remat: str | None = None) -> Callable:
    """Build `loss(params, batch, given) -> (sum, sums)` for `train.grads`: half of -log P(first) - log P(last token).

    The batch holds "labels", as tokens: 1 at an answer's first token, 2 at its last, 3 at one that is both. Both
    distributions are over all tokens of a row but padding. Rows without an answer marked count for nothing.
    """
    forward = forward_pass(family, cfg, remat=remat)

    def loss(params: Any, batch: Batch, given: Given = NOTHING) -> tuple[Array, dict[str, Any]]:
        tokens, packed, _ = rows(batch)
        x = forward(params["model"], tokens, packed).hidden
        real = (packed.segment_ids >= 0)[..., None]
        z = jnp.where(real, heads.outputs(params, x), -jnp.inf)
        labels = jnp.maximum(batch["labels"].reshape(tokens.shape), 0)
        marks = jnp.stack([labels & STARTS, labels & ENDS], -1) > 0
        there = (marks.sum(1) == 1).all(-1)
        each = -jnp.where(marks, log_softmax(z, 1), 0).sum((1, 2)) / 2
        right = jnp.take_along_axis(marks, z.argmax(1)[:, None], 1)[:, 0].all(-1)
        total = lambda x: jnp.where(there, x, 0).sum().astype(z.dtype)
        return total(each), {"weight": total(1), "exact_match": total(right)}

    return loss
