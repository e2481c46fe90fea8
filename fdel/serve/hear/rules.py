"""Which tokens a transcript may go on with (arXiv:2212.04356, section 4.5, and its authors' decoder): pure functions."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from fdel.serve.hear.tokens import Tokens


class Written(NamedTuple):
    """What each row has written of its transcript: how many tokens, the last two, and the last time; -1 for none."""

    size: Int[Array, " B"]
    last: Int[Array, " B"]
    before: Int[Array, " B"]
    time: Int[Array, " B"]

    def add(self, token: Int[Array, " B"], tokens: Tokens) -> "Written":
        """Write one more token."""
        time = jnp.where(token >= tokens.first_time, token, self.time)
        return Written(self.size + 1, token, self.last, time)


def nothing(rows: int) -> Written:
    """Begin `rows` transcripts."""
    none = jnp.full(rows, -1, jnp.int32)
    return Written(jnp.zeros(rows, jnp.int32), none, none, none)


def allowed(
    logits: Float[Array, "B V"], written: Written, times: Bool[Array, " B"], tokens: Tokens
) -> Float[Array, "B V"]:
    """Set the logits of tokens that may not follow to -inf; `times`: the row's transcript has timestamps.

    Some tokens are never written, some not as the first. With timestamps, the first token is one, not too late; they come
    in pairs (the end of a segment, the beginning of the next), but for the last; none is earlier than the one before, a
    segment has some length; and where all timestamps together are likelier than any other token, one of them is written.
    """
    ids, first = jnp.arange(logits.shape[-1]), tokens.first_time
    never, not_first = (_mask(of, logits.shape[-1]) for of in (tokens.never, tokens.not_first))
    out = never | (not_first & (written.size == 0)[:, None])
    logits = jnp.where(out, -jnp.inf, logits)

    column = lambda x: x[:, None]
    was_time, began = column(written.last >= first), column(written.size == 0)
    pair = was_time & column((written.before >= first) | (written.size < 2))
    half = was_time & ~pair
    earliest = jnp.where(column(written.time < 0), first, column(written.time) + jnp.where(half, 0, 1))
    out = (ids == tokens.no_times) | (pair & (ids >= first)) | (half & (ids < tokens.end))
    out |= (ids >= first) & (ids < earliest)
    out |= began & (ids < first)
    if tokens.latest_first is not None:
        out |= began & (ids > first + tokens.latest_first)
    timed = jnp.where(out, -jnp.inf, logits)
    likely = jax.nn.logsumexp(jnp.where(ids >= first, timed, -jnp.inf), -1, keepdims=True)
    best = jnp.max(jnp.where(ids < first, timed, -jnp.inf), -1, keepdims=True)
    timed = jnp.where((likely > best) & (ids < first), -jnp.inf, timed)
    return jnp.where(column(times), timed, logits)


def _mask(ids: tuple[int, ...], size: int) -> np.ndarray:
    mask = np.zeros(size, bool)
    mask[[i for i in ids if 0 <= i < size]] = True
    return mask
