"""Write down windows of sounds: pure functions of a model that hears and its memory of them."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from fdel import ops, params
from fdel.models import Model
from fdel.ops import cpu
from fdel.serve.hear import rules
from fdel.serve.hear.tokens import Tokens

PAGE = 64


class How(NamedTuple):
    """How each row's transcript is drawn."""

    limit: Int[Array, " B"]  # tokens to write at most
    times: Bool[Array, " B"]
    temperature: Float[Array, " B"]  # 0 takes the likeliest token
    seed: Int[Array, " B"]


class Prompt(NamedTuple):
    """What each row's transcript goes on from, padded at the end."""

    tokens: Int[Array, "B P"]
    length: Int[Array, " B"]
    start: Int[Array, " B"]  # the place of `Tokens.start` in it


class Slots(NamedTuple):
    """Transcripts in the making, a window in each slot; the memory of the windows is kept beside them, row by row.

    A slot that is done writes no more. `tokens` are what was written, the end among them; `logprob` is the sum of their
    log-probabilities under the rules; `no_speech` the probability, at the transcript's beginning, that nobody speaks.
    """

    state: ops.State  # pages of the decoder's own tokens, as many for each slot
    scores: Float[Array, "B V"]  # logits of what comes next
    written: rules.Written
    tokens: Int[Array, "B positions"]
    logprob: Float[Array, " B"]
    no_speech: Float[Array, " B"]
    length: Int[Array, " B"]  # of the prompt
    how: How
    done: Bool[Array, " B"]


def begin(model: Model, memory: Any, prompt: Prompt, how: How, tokens: Tokens) -> Slots:
    """Read each row's prompt; `memory` is what `model.family.remember` gives."""
    rows, width = prompt.tokens.shape
    pages = -(-model.cfg.max_positions // PAGE)
    dtype = jax.tree.leaves(model.params)[0].dtype
    spec = model.family.state_spec(model.cfg, pages=rows * pages, page=PAGE)
    state = params.init(spec, jax.random.key(0), dtype=dtype)
    at = jnp.arange(width)
    x, state = _step(model, memory, state, prompt.tokens, jnp.where(at < prompt.length[:, None], at, -1))
    place = lambda i: _logits(model, jnp.take_along_axis(x, i[:, None, None], 1)[:, 0])
    silent = jax.nn.softmax(place(prompt.start))[:, tokens.no_speech]
    out = jnp.full((rows, model.cfg.max_positions), tokens.end, jnp.int32)
    scores, logprob = place(prompt.length - 1), jnp.zeros(rows, jnp.float32)
    return Slots(state, scores, rules.nothing(rows), out, logprob, silent, prompt.length, how, how.limit <= 0)


def write(model: Model, memory: Any, slots: Slots, most: Int[Array, ""], tokens: Tokens) -> Slots:
    """Write `most` tokens of each transcript that is not done, or fewer: until the first is."""
    how, begun = slots.how, slots.done

    def body(carry: tuple) -> tuple:
        count, s = carry
        scores = rules.allowed(s.scores, s.written, how.times, tokens)
        token = draw(scores, how.temperature, how.seed, s.written.size)
        gained = jnp.take_along_axis(jax.nn.log_softmax(scores), token[:, None], 1)[:, 0]
        at = jnp.where(s.done, s.tokens.shape[1], s.written.size)
        out = s.tokens.at[jnp.arange(len(token)), at].set(token, mode="drop")
        written = jax.tree.map(lambda old, new: jnp.where(s.done, old, new), s.written, s.written.add(token, tokens))
        done = s.done | (token == tokens.end) | (written.size >= how.limit)
        # What is written last stands at its place - 1: the place after it may be beyond the table of positions.
        positions = jnp.where(done, -1, s.length + written.size - 1)
        x, state = _step(model, memory, s.state, token[:, None], positions[:, None])
        logprob = s.logprob + jnp.where(s.done, 0.0, gained)
        return count + 1, s._replace(
            state=state, scores=_logits(model, x[:, 0]), written=written, tokens=out, logprob=logprob, done=done
        )

    going = lambda carry: (carry[0] < most) & (carry[1].done == begun).all() & ~begun.all()
    return jax.lax.while_loop(going, body, (0, slots))[1]


def pick(parts: Sequence[tuple[Any, Slots]], order: Int[Array, " B"]) -> tuple[Any, Slots]:
    """Put slots of several (memory, slots) side by side, numbered through, in this order; -1 is an empty one."""
    at, total = jnp.maximum(order, 0), sum(len(s.done) for _, s in parts)
    rows = lambda *x: jnp.concatenate(x)[at]
    # Pages are counted through all slots, behind the axis of layers.
    pages = lambda *x: jnp.concatenate(x, 1).reshape(x[0].shape[0], total, -1, *x[0].shape[2:])[:, at]
    state = jax.tree.map(lambda *x: pages(*x).reshape(len(x[0]), -1, *x[0].shape[2:]), *(s.state for _, s in parts))
    slots = Slots(state, *jax.tree.map(rows, *(s[1:] for _, s in parts)))
    return jax.tree.map(rows, *(m for m, _ in parts)), slots._replace(done=slots.done | (order < 0))


def _step(
    model: Model, memory: Any, state: Any, new: Int[Array, "B T"], positions: Int[Array, "B T"]
) -> tuple[Float[Array, "B T D"], Any]:
    """Run the decoder on new tokens of each slot; those at position -1 are none."""
    rows, width = new.shape
    pages = -(-model.cfg.max_positions // PAGE)
    table = jnp.arange(rows * pages, dtype=jnp.int32).reshape(rows, pages)
    batch = ops.Paged(positions.reshape(-1), table, jnp.arange(rows), width)
    x, state, _ = model.family.hidden(model.params, new.reshape(-1), model.cfg, memory, batch, state)
    return x.reshape(rows, width, -1), state


def _logits(model: Model, x: Float[Array, "B D"]) -> Float[Array, "B V"]:
    return ops.logits(x, model.family.head(model.params, model.cfg))


def draw(
    scores: Float[Array, "B V"], temperature: Float[Array, " B"], seed: Int[Array, " B"], count: Int[Array, " B"]
) -> Int[Array, " B"]:
    """Draw a token of each row; by its own seed and how many it has written, so that neighbours change nothing."""

    def noisy() -> Array:
        keys = jax.vmap(lambda s, n: jax.random.fold_in(jax.random.key(s), n))(seed, count)
        warm = temperature[:, None]
        noise = jax.vmap(lambda key: jax.random.gumbel(key, scores.shape[1:]))(keys)
        return jnp.where(warm > 0, scores / jnp.maximum(warm, 1e-6) + noise, scores)

    return cpu.argmax(jax.lax.cond((temperature > 0).any(), noisy, lambda: scores)).astype(jnp.int32)


def detect(model: Model, memory: Any, rows: int, tokens: Tokens) -> Array:
    """Compute the log-probability of each of `tokens.languages`, float32[B languages]."""
    start = jnp.full((rows, 1), tokens.start, jnp.int32)
    logits, _ = model.family.forward(model.params, start, model.cfg, memory)
    return jax.nn.log_softmax(logits[:, 0, np.array([i for _, i in tokens.languages])])


def follow(model: Model, memory: Any, said: Int[Array, "B T"], tokens: Tokens) -> Any:
    """Compute the attention of the alignment's heads to the sound, float32[heads B T states], of whole transcripts."""
    return model.family.hidden(model.params, said, model.cfg, memory, watch=tokens.alignment)[2]
