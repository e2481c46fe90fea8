"""The program of the gated delta rule on TPUs, for `gated_delta_rule_tpu`.

Algorithm: the chunked WY form (arXiv 2406.06484, with decays as in 2412.06464 and 2510.26692). A step of the grid takes a
chunk of C tokens of some heads; steps of a row follow each other, with the state [Hk Hv] of each head in fast memory. With
D_ij the decay from token j to token i, b = beta, and S the state before the chunk,
  w = (I + A)^-1 (v - D_i k S),  A_ij = D_ij k_i^T k_j b_j for j < i
  o_i = D_i q_i S + sum_{j<=i} D_ij q_i^T k_j b_j w_j;  S <- D S + sum_j D_Cj k_j b_j w_j^T
Diagonal blocks of 8 of I + A are inverted by substitution, in float32, those of all heads at once: block b lies in lanes
8 b to 8 b + 7. Neighbours X and Y with L below X become X, Y and -Y L X below X, until one block is left. Powers of A are
not taken: they grow and cancel. With decays of channels the chunk is cut in halves again and again: the decay from a token
of the first half to one of the second is a product of two factors <= 1, up to the border and from there, so a level of
halves is one product of matrices.

Bytes: q, k, v and o once, decays of channels too; where gradients are wanted, states and inverses, 2 (Hk Hv / C + C) for
each token and head in bfloat16, which `delta_backward_tpu` reads. FLOPs, for each token and head: 2 C (2 Hk + 2 Hv) of
pairs, of the solution and of outputs, 6 Hk Hv of the state, and products of the inverse that are small, but load C x C
weights. Decays of channels take log2(C) times the pairs.
"""

import functools
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from fdel.kernels import slots_tpu
from fdel.kernels.chunks_tpu import CHUNK, NEVER, NN, NT, begin, decay_pairs, dot, places

SMALL = 8  # rows of a diagonal block that is inverted by substitution


class Pairs(NamedTuple):
    """What a chunk prepares for a head: k_i^T k_j decay_ij for j < i, q_i^T k_j decay_ij for j <= i, and decays: from the
    start up to each token, from each token to the end, of all.
    """

    kk: Array
    qk: Array
    begin: Array
    end: Array
    decay: Array


class About(NamedTuple):
    """Heads of a step, their channels of keys and values, whether each channel has a decay."""

    heads: int
    keys: int
    values: int
    channels: bool


def run(
    about: About, whole: Int[Array, " chunks"], rows: Float[Array, "B groups numbers T"], inputs: list[Array],
    *, keep: bool, served: slots_tpu.Served | None = None,
) -> list[Array]:  # fmt: skip
    """Run over q, k, v [B T N*H], and decays of channels: o [B T N*Hv], and the states where a Paged batch is served.

    `rows`: beta, two sums of decays, valid, starts; see `_program`. `whole` tells which chunks have no padding. Inputs may
    end inside of the last chunk. With `keep` also the states before each chunk [B chunks Hk N*Hv] and the inverses of
    I + A [B T N*C], in the inputs' dtype.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    b, groups, numbers, t = rows.shape
    steps = t // CHUNK
    block = lambda width: pl.BlockSpec((None, CHUNK, about.heads * width), lambda b, n, c, *_: (b, c, n))
    of_rows = pl.BlockSpec((None, None, numbers, CHUNK), lambda b, n, c, *_: (b, n, 0, c))
    of_states = pl.BlockSpec((None, None, about.keys, about.heads * about.values), lambda b, n, c, *_: (b, c, 0, n))
    heads = groups * about.heads
    put = lambda *shape: jax.ShapeDtypeStruct(shape, inputs[0].dtype)
    outs = {"out": (put(b, t if served else inputs[2].shape[1], heads * about.values), block(about.values))}
    if keep:
        outs["kept"] = put(b, steps, about.keys, heads * about.values), of_states
        outs["inverse"] = put(b, t, heads * CHUNK), block(CHUNK)
    widths = zip("qkvg", (about.keys, about.keys, about.values, about.keys), strict=True)
    ins = {name: (x, block(width)) for (name, width), x in zip(widths, inputs, strict=False)}
    scratch = {"state": pltpu.VMEM((about.heads, about.keys, about.values), jnp.float32)}
    run = functools.partial(_program, about)
    scalars, ins = {"whole": whole}, {"rows": (rows, of_rows)} | ins
    return slots_tpu.call(run, "gated_delta_rule", (b, groups, steps), scalars, ins, outs, scratch, served)


def _program(about: About, r: SimpleNamespace) -> None:
    """Compute a chunk of some heads."""
    dtype, c, n, rows = r.q.dtype, CHUNK, about.heads, r.rows[...]
    numbers = (1 if about.channels else 3) * n
    columns = jnp.transpose(rows)  # [C numbers]
    valid, start = (columns[:, i : i + 1] > 0 for i in (numbers, numbers + 1))
    begin(r, valid, "qkvg" if about.channels else "qkv")
    beta = [rows[i : i + 1] for i in range(n)]
    cut = lambda ref, i, width: ref[:, i * width : (i + 1) * width]
    keys, queries = ([cut(x, i, about.keys) for i in range(n)] for x in (r.k, r.q))
    if about.channels:
        decays = [jnp.where(start, NEVER, cut(r.g, i, about.keys)) for i in range(n)]
        pairs = [channel_pairs(q, k, g)[0] for q, k, g in zip(queries, keys, decays, strict=True)]
    else:
        pairs = [head_pairs(q, k, rows, columns, n, i) for i, (q, k) in enumerate(zip(queries, keys, strict=True))]
    inverses = _inverses([pairs[i].kk * beta[i] for i in range(n)], dtype)
    for i in range(n if hasattr(r, "kept") else 0):
        r.kept[:, i * about.values : (i + 1) * about.values] = r.state[i].astype(dtype)
        r.inverse[:, i * c : (i + 1) * c] = inverses[i].astype(dtype)
    values = [cut(r.v, i, about.values).astype(jnp.float32) for i in range(n)]
    seen = [_seen(about, keys[i], queries[i], r.state[i], pairs[i].begin, dtype) for i in range(n)]
    new = [dot(inverses[i], values[i] - seen[i][:c], NN, dtype) for i in range(n)]
    for i in range(n):
        out = seen[i][c:] + dot(pairs[i].qk * beta[i], new[i], NN, dtype)
        r.out[:, i * about.values : (i + 1) * about.values] = out.astype(dtype)
    for i, pair in enumerate(pairs):
        end, decay = pair[3:]
        key: Array = keys[i].astype(jnp.float32)
        key = jnp.transpose(key * end) if about.channels else jnp.transpose(key) * end
        r.state[i] = decay * r.state[i] + dot(key * beta[i], new[i], NN, dtype)


def _seen(about: About, k: Array, q: Array, state: Array, begin: Array, dtype: Any) -> Array:
    """Read the state before the chunk with its keys and queries."""
    both = jnp.concatenate([k, q])
    if about.channels:
        return dot(both * jnp.concatenate([begin, begin]), state, NN, dtype)
    return dot(both, state, NN, dtype) * jnp.concatenate([jnp.concatenate([begin] * (about.values // len(k)), 1)] * 2)


def head_pairs(q: Array, k: Array, rows: Array, columns: Array, n: int, head: int) -> Pairs:
    """Prepare with one decay for all channels."""
    c = len(k)
    at = n + head, 2 * n + head
    decay, since, later = decay_pairs(*((columns[:, i : i + 1], rows[i : i + 1]) for i in at))
    both = dot(jnp.concatenate([k, q]), k, NT, k.dtype)
    i, j = places((c, c))
    return Pairs(jnp.where(j < i, both[:c] * decay, 0), both[c:] * decay, since, later, since[-1:, :1])


def channel_pairs(q: Array, k: Array, g: Float[Array, "C Hk"]) -> tuple[Pairs, list[Array]]:
    """Prepare with a decay for each channel; and the decays of each level of halves, to the border or from there."""
    c, dtype = len(k), k.dtype
    q, k = q.astype(jnp.float32), k.astype(jnp.float32)
    i, j = places((c, c))
    kk = jnp.zeros((c, c), jnp.float32)
    qk = jnp.where(i == j, jnp.sum(q * k, 1, keepdims=True), 0)
    since, later, total = g, jnp.zeros_like(g), g  # of blocks of `size`
    size, factors = 1, []
    while size < c:
        second = places(g.shape)[0] // size % 2 == 1
        factors.append(jnp.exp(jnp.where(second, since, later)))
        near = k * factors[-1]
        pairs = dot(jnp.concatenate([near, q * factors[-1]]), near, NT, dtype)
        here = halves(c, size)
        kk, qk = jnp.where(here, pairs[:c], kk), jnp.where(here, pairs[c:], qk)
        other = swapped(total, size)
        since, later = jnp.where(second, since + other, since), jnp.where(second, later, later + other)
        total, size = total + other, 2 * size
    decay = jnp.transpose(jnp.exp(total[:8]))[:, :1]
    return Pairs(kk, qk, jnp.exp(since), jnp.exp(later), decay), factors


def halves(c: int, size: int) -> Bool[Array, "C C"]:
    """Tell which pairs are of a token of a second block of `size` and one of the first before it."""
    i, j = places((c, c))
    return (i // size == j // size + 1) & (i // size % 2 == 1)


def swapped(x: Float[Array, "C H"], size: int) -> Float[Array, "C H"]:
    """Swap blocks of `size` tokens with their neighbours."""
    from jax.experimental.pallas import tpu as pltpu

    second = places(x.shape)[0] // size % 2 == 1
    return jnp.where(second, pltpu.roll(x, size, 0), pltpu.roll(x, len(x) - size, 0))


def _inverses(many: list[Float[Array, "C C"]], dtype: Any) -> list[Float[Array, "C C"]]:
    """Invert I + A for each strictly lower triangular A."""
    c, n = len(many[0]), len(many)
    row, lane = (x % SMALL for x in places((n * SMALL, c)))
    block = places((SMALL, c))[1] // SMALL
    sides = lambda a: sum(jnp.where(block == b // SMALL, a[b : b + SMALL], 0) for b in range(0, c, SMALL))
    small = jnp.concatenate([sides(a) for a in many])
    x = jnp.where(lane == row, 1.0, 0.0).reshape(n, SMALL, c)
    first = places(small.shape)[1] - lane
    for j in range(SMALL - 1):
        column = jnp.take_along_axis(small, first + j, 1).reshape(x.shape)  # of each block, in all of its lanes
        x = x - column * x[:, j : j + 1]
    found, size = [x[i] for i in range(n)], SMALL
    while size < c:
        found = [_joined(x, a, size, dtype) for x, a in zip(found, many, strict=True)]
        size *= 2
    return found


def _joined(x: Float[Array, "size C"], a: Float[Array, "C C"], size: int, dtype: Any) -> Float[Array, "2*size C"]:
    """Join inverses of neighbouring diagonal blocks, which lie side by side."""
    c = len(a)
    block = places((size, c))[1] // size
    nothing, odd = jnp.zeros((size, c)), block % 2 == 1
    below: Any = sum(jnp.where(block == b, a[(b + 1) * size : (b + 2) * size], 0) for b in range(0, c // size, 2))
    diagonal = [nothing if b % 2 else jnp.where(block == b, x, 0) for b in range(c // size)]
    product = dot(below, jnp.concatenate(diagonal), NN, dtype)
    spread = [jnp.where(block == b - 1, product, 0) if b % 2 else nothing for b in range(c // size)]
    product = dot(jnp.where(odd, x, 0), jnp.concatenate(spread), NN, dtype)
    return jnp.concatenate([jnp.where(odd, 0, x), jnp.where(odd, x, -product)])
