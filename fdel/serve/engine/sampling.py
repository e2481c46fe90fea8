"""Choose the next token on the device: a pure function of a batch of logits rows and of what each row's request asks.

Order: penalties, logit bias with bad words and stop ids, allowed tokens, temperature, top-k, top-p, min-p, draw. Every
option is an array input, and what no row asks for is skipped by `lax.cond`: there is one program for all requests.
"""

import secrets
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt

from fdel.ops import cpu
from fdel.serve.engine.request import BAD_LENGTH, BAD_WORDS, BIASES, STOPS, TOP, SamplingParams, check_ids

GROUP = 16  # rows that are processed at a time: so many of the logits' rows are what all the arrays between hold


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Sampling:
    """What a batch asks for, as arrays made by `sampling_rows`. Unused entries of id arrays are out of range."""

    temperature: Float[Array, " B"]
    top_k: Int[Array, " B"]
    top_p: Float[Array, " B"]
    min_p: Float[Array, " B"]
    repetition: Float[Array, " B"]
    presence: Float[Array, " B"]
    frequency: Float[Array, " B"]
    seed: UInt[Array, "B 2"]  # high and low word
    prompt: Int[Array, " B"]  # tokens of the prompt; later ones are output
    min_length: Int[Array, " B"]  # prompt and output tokens before a stop id may be drawn
    max_length: Int[Array, " B"]  # prompt and output tokens at which a row ends
    stop_ids: Int[Array, "B S"]
    bias_ids: Int[Array, "B K"]
    bias: Float[Array, "B K"]
    masked: Bool[Array, " B"]  # whether `allowed` counts
    allowed: UInt[Array, "B W"]  # one bit per token, the lowest first
    bad: Int[Array, "B M N"]  # bad words, at the end of their places; -1 before
    top: Int[Array, " B"]  # top log-probabilities wanted


class Sampled(NamedTuple):
    """Drawn tokens. `logprobs` and `top_logprobs` are of the unchanged logits, whatever was done to them before drawing;
    `sampled_logprobs` of what was drawn from, softmax(process(...)), and 0 where the draw is greedy. `kept` is the log of
    the probability that top-k, top-p and min-p left of what they were given: 0 where they cut nothing.
    """

    tokens: Int[Array, " B"]
    logprobs: Float[Array, " B"]  # NaN where the logits hold NaN or +inf
    sampled_logprobs: Float[Array, " B"]  # NaN where the request bans every token
    kept: Float[Array, " B"]
    top_ids: Int[Array, "B n"]
    top_logprobs: Float[Array, "B n"]  # 0 if no row asks for any


def sampling_rows(
    requests: Sequence[SamplingParams],
    prompts: Sequence[int],
    ends: Sequence[Collection[int]],
    room: Sequence[int],
    *,
    vocab: int,
    rows: int | None = None,
) -> Sampling:
    """Collect requests into numpy arrays of `rows` rows (the others are greedy).

    Per request: the length of its prompt, the ids that end it (see `stop_ids`), and the most tokens that it may get.
    Token ids outside the vocabulary and too many stop ids are a ValueError.
    >>> serve.sampling_rows([serve.SamplingParams(temperature=0.5)], [3], [()], [8], vocab=32).temperature
    array([0.5], dtype=float32)
    """
    n = len(requests) if rows is None else rows
    scalar = lambda dtype, fill=0: np.full(n, fill, dtype)
    s = Sampling(
        scalar(np.float32), scalar(np.int32), scalar(np.float32, 1), scalar(np.float32), scalar(np.float32, 1),
        scalar(np.float32), scalar(np.float32), np.zeros((n, 2), np.uint32), scalar(np.int32), scalar(np.int32),
        scalar(np.int32), np.full((n, STOPS), vocab, np.int32), np.full((n, BIASES), vocab, np.int32),
        np.zeros((n, BIASES), np.float32), scalar(bool), np.zeros((n, -(-vocab // 32)), np.uint32),
        np.full((n, BAD_WORDS, BAD_LENGTH), -1, np.int32), scalar(np.int32),
    )  # fmt: skip
    for i, (r, length, stops, most) in enumerate(zip(requests, prompts, ends, room, strict=True)):
        s.temperature[i], s.top_k[i], s.top_p[i], s.min_p[i] = r.temperature, min(r.top_k, vocab), r.top_p, r.min_p
        s.repetition[i], s.presence[i], s.frequency[i] = r.repetition_penalty, r.presence_penalty, r.frequency_penalty
        s.seed[i] = divmod(secrets.randbits(64) if r.seed is None else int(r.seed), 2**32)
        s.prompt[i], s.min_length[i], s.top[i] = length, length + min(r.min_tokens, most), r.logprobs
        s.max_length[i] = length + most
        if len(stops) > STOPS:
            raise ValueError(f"stop_token_ids and eos are {len(stops)} ids together; the most is {STOPS}")
        s.stop_ids[i, : len(stops)] = check_ids("stop_token_ids", stops, vocab)
        s.bias_ids[i, : len(r.logit_bias)] = check_ids("logit_bias", list(r.logit_bias), vocab)
        s.bias[i, : len(r.logit_bias)] = list(r.logit_bias.values())
        if r.allowed_tokens is not None:
            allowed = np.zeros(s.allowed.shape[1] * 32, np.uint8)
            allowed[check_ids("allowed_tokens", r.allowed_tokens, vocab)] = 1
            s.masked[i], s.allowed[i] = True, np.packbits(allowed, bitorder="little").view("<u4")
        for j, word in enumerate(r.bad_words):
            s.bad[i, j, BAD_LENGTH - len(word) :] = check_ids("bad_words", word, vocab)
    return s


def sample(
    logits: Float[Array, "B V"],
    s: Sampling,
    history: Int[Array, "R L"],
    length: Int[Array, " B"],
    rows: Int[Array, " B"],
) -> Sampled:
    """Draw one token per row. `history[rows[b]]` holds the `length[b]` tokens of row b so far, prompt first.

    The draw is the argmax of `process` plus Gumbel noise (arXiv:1411.0030) with the key fold_in(key(seed), length):
    it does not depend on the other rows, on their number, or on where a row stands, and rounding changes it only near
    a tie.
    >>> greedy = serve.sampling_rows([serve.SamplingParams()], [2], [()], [8], vocab=4)
    >>> history = jnp.array([[1, 2, 0, 0]])
    >>> serve.sample(jnp.array([[0.0, 3, 1, 2]]), greedy, history, jnp.array([2]), jnp.array([0])).tokens
    Array([1], dtype=int32)
    """
    logits = logits.astype(jnp.float32)

    def processed(logits: Array, s: Sampling, length: Array, rows: Array) -> tuple[Array, Array, Array]:
        (z, kept), hot = _process(logits, s, history, length, rows), s.temperature > 0
        # Beside the condition and not within: XLA:CPU computes noise slowly as a part of argmax.
        noisy = jax.lax.cond(jnp.any(hot), lambda z: z + _noise(z, s, length), lambda z: z, z)
        tokens = cpu.argmax(noisy)
        mass = jax.lax.cond(jnp.any(hot), lambda: jax.nn.logsumexp(z, -1), lambda: jnp.zeros(len(z), z.dtype))
        picked = jnp.take_along_axis(z, tokens[:, None], 1)[:, 0]
        return tokens, jnp.where(picked > -jnp.inf, jnp.where(hot, picked - mass, 0), jnp.nan), kept

    def grouped() -> tuple[Array, Array, Array]:
        if len(logits) <= GROUP or len(logits) % GROUP:
            return processed(logits, s, length, rows)
        groups = jax.tree.map(lambda x: x.reshape(-1, GROUP, *x.shape[1:]), (logits, s, length, rows))
        return jax.tree.map(jnp.ravel, jax.lax.map(lambda group: processed(*group), groups))

    def plain() -> tuple[Array, Array, Array]:
        none = jnp.zeros(len(logits))
        return cpu.argmax(logits), jnp.where(logits.max(-1) > -jnp.inf, none, jnp.nan), none

    tokens, sampled, kept = jax.lax.cond(jnp.stack(_asked(s, length)).any(), grouped, plain)
    total = jax.nn.logsumexp(logits, -1, keepdims=True)
    chosen = jnp.where(jnp.isfinite(total), jnp.take_along_axis(logits, tokens[:, None], 1) - total, jnp.nan)
    n = min(TOP, logits.shape[1])
    none = lambda: (jnp.zeros((len(logits), n)), jnp.zeros((len(logits), n), jnp.int32))
    best, ids = jax.lax.cond(jnp.any(s.top > 0), lambda: tuple(jax.lax.top_k(logits, n)), none)
    likely = ids, jnp.where(jnp.any(s.top > 0), best - total, 0)
    return Sampled(tokens.astype(jnp.int32), chosen[:, 0], sampled, kept, *likely)


def process(
    logits: Float[Array, "B V"],
    s: Sampling,
    history: Int[Array, "R L"],
    length: Int[Array, " B"],
    rows: Int[Array, " B"],
) -> Float[Array, "B V"]:
    """Change logits as each row asks: softmax of the result is what it draws from; argmax if its temperature is 0."""
    return _process(logits, s, history, length, rows)[0]


def _process(logits: Array, s: Sampling, history: Array, length: Array, rows: Array) -> tuple[Array, Array]:
    """Give what `process` gives, and the log of the probability that truncation left of each row."""
    stages = (
        lambda z: _penalise(z, s, history, length, rows),
        lambda z: _edit(z, s, history, length, rows),
        lambda z: jnp.where(_bits(s, z.shape[1]), z, -jnp.inf),
        lambda z: _temper(z, s),
    )
    for wanted, stage in zip(_asked(s, length), stages, strict=True):
        logits = jax.lax.cond(wanted, stage, lambda z: z, logits)
    cuts = (s.temperature > 0) & ((s.top_k > 0) | (s.top_p < 1) | (s.min_p > 0))
    return jax.lax.cond(jnp.any(cuts), lambda z: _cut(z, s), lambda z: (z, jnp.zeros(len(z))), logits)


def _asked(s: Sampling, length: Array) -> tuple[Bool[Array, ""], ...]:
    """Tell which stages of `process` before truncation any row asks for; none of them, none of that."""
    penalised = (s.repetition != 1) | (s.presence != 0) | (s.frequency != 0)
    edited = jnp.any(s.bias != 0) | jnp.any(s.bad[:, :, -1] >= 0) | jnp.any(length < s.min_length)
    return jnp.any(penalised), edited, jnp.any(s.masked), jnp.any(s.temperature > 0)


def _penalise(z: Array, s: Sampling, history: Array, length: Array, rows: Array) -> Array:
    here, n = jnp.arange(len(z))[:, None], jnp.arange(history.shape[1])
    tokens = jnp.where(n < length[:, None], history[rows], z.shape[1])
    output = jnp.where(n >= s.prompt[:, None], tokens, z.shape[1])
    # One array of the logits' size: how often each token is in the output, or a half if it is in the prompt alone.
    marks = jnp.zeros(z.shape).at[here, output].add(1, mode="drop").at[here, tokens].max(0.5, mode="drop")
    count, r = jnp.floor(marks), s.repetition[:, None]
    z = jnp.where(marks > 0, jnp.where(z > 0, z / r, z * r), z)
    return z - s.frequency[:, None] * count - s.presence[:, None] * (count > 0)


def _edit(z: Array, s: Sampling, history: Array, length: Array, rows: Array) -> Array:
    """Add biases, and -inf to the ends of bad words whose other tokens are the newest and to stop ids that come early."""
    before = length[:, None] - jnp.arange(s.bad.shape[2] - 1, 0, -1)
    newest = jnp.where(before < 0, -1, history.at[rows[:, None], before].get(mode="clip"))
    matches = ((s.bad[:, :, :-1] < 0) | (s.bad[:, :, :-1] == newest[:, None])).all(-1) & (s.bad[:, :, -1] >= 0)
    bad = jnp.where(matches, s.bad[:, :, -1], z.shape[1])
    early = jnp.where((length < s.min_length)[:, None], s.stop_ids, z.shape[1])
    banned = jnp.concatenate([bad, early], 1)
    added = jnp.concatenate([s.bias, jnp.full(banned.shape, -jnp.inf, z.dtype)], 1)
    return z.at[jnp.arange(len(z))[:, None], jnp.concatenate([s.bias_ids, banned], 1)].add(added, mode="drop")


def _bits(s: Sampling, vocab: int) -> Bool[Array, "B V"]:
    bits = (s.allowed[:, :, None] >> jnp.arange(32, dtype=jnp.uint32)) & 1 == 1
    return bits.reshape(len(bits), -1)[:, :vocab] | ~s.masked[:, None]


def _temper(z: Array, s: Sampling) -> Array:
    hot = s.temperature > 0
    # Subtracting the maximum first keeps a tiny temperature from making infinities of both signs.
    x = (z - z.max(-1, keepdims=True)) / jnp.where(hot, s.temperature, 1)[:, None]
    return jnp.where(hot[:, None], x, z)


def _cut(z: Array, s: Sampling) -> tuple[Array, Array]:
    """Truncate rows that draw: (what is left, the log of its probability)."""
    hot, total = s.temperature > 0, lambda z: jax.nn.logsumexp(z, -1)
    left = truncate(z, *(jnp.where(hot, value, off) for value, off in ((s.top_k, 0), (s.top_p, 1), (s.min_p, 0))))
    same = (left == z).all(-1)  # then 0 exactly: two sums of the same numbers may round differently
    return left, jnp.where(same, 0, jnp.minimum(total(left) - total(z), 0))


def _noise(z: Array, s: Sampling, length: Array) -> Array:
    keys = jax.vmap(jax.random.fold_in)(jax.random.wrap_key_data(s.seed, impl="threefry2x32"), length)
    noise = jax.vmap(lambda key: jax.random.gumbel(key, z.shape[1:]))(keys)
    return jnp.where((s.temperature > 0)[:, None], noise, 0)


def truncate(
    x: Float[Array, "B V"], top_k: Int[Array, " B"], top_p: Float[Array, " B"], min_p: Float[Array, " B"]
) -> Float[Array, "B V"]:
    """Set to -inf what top-k, then top-p of the rest, then min-p leave out; x are logits whose maximum is 0.

    Tokens that tie with the last one kept are kept. No sort: each filter is a lower bound, see `_threshold`.
    """
    low = jnp.full(len(x), -jnp.inf, x.dtype)
    k = jnp.where(top_k > 0, top_k, x.shape[1])
    low = jax.lax.cond(jnp.any(top_k > 0), lambda low: _threshold(x, 1.0, k), lambda low: low, low)

    def nucleus(low: Array) -> Array:
        p = jnp.where(x >= low[:, None], jnp.exp(x), 0)
        limit = _threshold(x, p, top_p * p.sum(-1))
        return jnp.where(top_p < 1, jnp.maximum(limit, low), low)  # at 1, rounding would cut the smallest

    low = jax.lax.cond(jnp.any(top_p < 1), nucleus, lambda low: low, low)
    return jnp.where((x >= jnp.maximum(low, jnp.log(min_p))[:, None]) | (x == 0), x, -jnp.inf)


def _threshold(x: Float[Array, "B V"], weight: Float[Array, "B V"] | float, target: Array) -> Float[Array, " B"]:
    """Find the largest t such that the weights where x >= t sum to at least `target`, one bit of t after the other.

    32 passes over the vocabulary are exact, need no array of its size and, on CPU, take a fortieth of one sort's time.
    """

    def value(bits: Array) -> Array:  # rises with its bits; they begin at -inf and end at inf, since beyond are NaN
        bits = jnp.clip(bits, jnp.uint32(0x007FFFFF), jnp.uint32(0xFF800000))
        return jax.lax.bitcast_convert_type(jnp.where(bits >> 31 == 1, bits ^ jnp.uint32(1 << 31), ~bits), jnp.float32)

    def step(i: Any, t: Array) -> Array:
        higher = t | (jnp.uint32(1) << (31 - i).astype(jnp.uint32))
        enough = jnp.where(x >= value(higher)[:, None], weight, 0).sum(-1) >= target
        return jnp.where(enough, higher, t)

    return value(jax.lax.fori_loop(0, 32, step, jnp.zeros(len(x), jnp.uint32)))
