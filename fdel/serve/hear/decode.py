"""Write down windows of sounds: pure functions of a model that hears and its memory of them."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from fdel import ops, params
from fdel.models import Model
from fdel.serve.hear import rules
from fdel.serve.hear.tokens import Tokens

PAGE = 64


class Ask(NamedTuple):
    """What is asked of each row: its prompt, padded at the end, and how its transcript is drawn."""

    prompt: Int[Array, "B P"]
    length: Int[Array, " B"]  # of the prompt
    start: Int[Array, " B"]  # the place of `Tokens.start` in the prompt
    limit: Int[Array, " B"]  # tokens to write at most
    times: Bool[Array, " B"]
    temperature: Float[Array, " B"]  # 0 takes the likeliest token
    seed: Int[Array, " B"]


class Answer(NamedTuple):
    """What was written: `size` tokens of each row, the end among them; the sum of their log-probabilities under the rules.

    `no_speech` is the probability, at the transcript's beginning, that nobody speaks.
    """

    tokens: Int[Array, "B positions"]
    size: Int[Array, " B"]
    logprob: Float[Array, " B"]
    no_speech: Float[Array, " B"]


def write(model: Model, memory: Any, ask: Ask, tokens: Tokens) -> Answer:
    """Write each row's transcript until its end, or its limit; `memory` is what `model.family.remember` gives."""
    family, cfg, weights = model
    rows, width = ask.prompt.shape
    pages = -(-cfg.max_positions // PAGE)
    table = jnp.arange(rows * pages, dtype=jnp.int32).reshape(rows, pages)
    dtype = jax.tree.leaves(weights)[0].dtype
    spec = family.state_spec(cfg, pages=rows * pages, page=PAGE)
    state = params.init(spec, jax.random.key(0), dtype=dtype)

    def step(state: Any, new: Array, positions: Array, block: int) -> tuple[Array, Any]:
        batch = ops.Paged(positions, table, jnp.arange(rows), block, trace_once=True)
        x, state, _ = family.hidden(weights, new, cfg, memory, batch, state)
        return x.reshape(rows, block, -1), state

    logits = lambda x: ops.logits(x, family.head(weights, cfg))
    at = jnp.arange(width)
    positions = jnp.where(at < ask.length[:, None], at, -1)
    x, state = step(state, ask.prompt.reshape(-1), positions.reshape(-1), width)
    place = lambda i: jnp.take_along_axis(x, i[:, None, None], 1)[:, 0]
    silent = jax.nn.softmax(logits(place(ask.start)))[:, tokens.no_speech]

    def body(carry: tuple) -> tuple:
        state, scores, written, out, logprob, done = carry
        scores = rules.allowed(scores, written, ask.times, tokens)
        token = draw(scores, ask.temperature, ask.seed, written.size)
        gained = jnp.take_along_axis(jax.nn.log_softmax(scores), token[:, None], 1)[:, 0]
        logprob = logprob + jnp.where(done, 0.0, gained)
        out = out.at[jnp.arange(rows), jnp.where(done, out.shape[1], written.size)].set(token, mode="drop")
        after = written.add(token, tokens)
        written = jax.tree.map(lambda old, new: jnp.where(done, old, new), written, after)
        done = done | (token == tokens.end) | (written.size >= ask.limit)
        # What is written last stands at its place - 1: the place after it may be beyond the table of positions.
        x, state = step(state, token, jnp.where(done, -1, ask.length + written.size - 1), 1)
        return state, logits(x[:, 0]), written, out, logprob, done

    out = jnp.full((rows, cfg.max_positions), tokens.end, jnp.int32)
    nothing = rules.nothing(rows)
    begun = state, logits(place(ask.length - 1)), nothing, out, jnp.zeros(rows, jnp.float32), ask.limit <= 0
    _, _, written, out, logprob, _ = jax.lax.while_loop(lambda carry: ~carry[-1].all(), body, begun)
    return Answer(out, written.size, logprob, silent)


def draw(
    scores: Float[Array, "B V"], temperature: Float[Array, " B"], seed: Int[Array, " B"], count: Int[Array, " B"]
) -> Int[Array, " B"]:
    """Draw a token of each row; by its own seed and how many it has written, so that neighbours change nothing."""
    keys = jax.vmap(lambda s, n: jax.random.fold_in(jax.random.key(s), n))(seed, count)
    warm = scores / jnp.maximum(temperature, 1e-6)[:, None]
    drawn = jax.vmap(jax.random.categorical)(keys, warm)
    return jnp.where(temperature > 0, drawn, scores.argmax(-1)).astype(jnp.int32)


def detect(model: Model, memory: Any, rows: int, tokens: Tokens) -> Array:
    """Compute the log-probability of each of `tokens.languages`, float32[B languages]."""
    start = jnp.full((rows, 1), tokens.start, jnp.int32)
    logits, _ = model.family.forward(model.params, start, model.cfg, memory)
    return jax.nn.log_softmax(logits[:, 0, np.array([i for _, i in tokens.languages])])


def follow(model: Model, memory: Any, said: Int[Array, "B T"], tokens: Tokens) -> Any:
    """Compute the attention of the alignment's heads to the sound, float32[heads B T states], of whole transcripts."""
    return model.family.hidden(model.params, said, model.cfg, memory, watch=tokens.alignment)[2]
