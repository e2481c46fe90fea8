"""The gradient of Mamba's selective scan on TPUs, for `selective_scan_tpu`: chunks from the last to the first.

Algorithm: the states before each chunk are kept by the forward pass; within a chunk they are computed again, token by
token. With p = exp(dt a) h of the token before, h = p + dt x b, and G the gradient of h,
  G <- exp(dt' a) G' + c dy, of the token after;  u = G p
  dx = dt sum_s b G + d dy;  ddt = x sum_s b G + sum_s a u;  da = sum_t dt u
  db = sum_channels G dt x;  dc = sum_channels h dy;  dd = sum_t x dy
Sums over states and over channels are products, for `BLOCK` tokens at once, as in the forward pass: one of rows that are
zero but at their token's states, one whose other tokens are left out. In bfloat16 these products are of bfloat16 with
float32 sums; all else is float32. Where a sequence begins both p and what goes on to the token before are zeros.

Bytes: x, dt, dy, dx, ddt once, b and c once for each step's channels, db and dc in float32, and the kept states, 4 S / C
for each token and channel. For each token, channel and state: two exponentials, eleven products and sums, four products
of the multiplier.
Interpreted on CPU and compiled for v5p and v6e; it has not run on a TPU.
"""

import functools
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from fdel.kernels import chunks_tpu as chunks
from fdel.kernels.chunks_tpu import CHUNK, LANES, NN, NT, dot, places

BLOCK = 16  # tokens of a round


def run(
    width: int, tile: int, whole: Int[Array, " chunks"], begins: Int[Array, " blocks"], kept: Float[Array, "B steps S C"],
    inputs: list[Array],
) -> list[Array]:  # fmt: skip
    """Run over valid [B 8 T], x, dt, dy [B T C], a / log(2) [S C], b^T and c^T [B S T], b [B T S] and d [1 C].

    Gives dx, ddt, da [B S C], dd [B 8 C], db and dc [B groups T S] of each step's channels.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    valid, x, dt, *_ = inputs
    (rows, _, length), channels, states = valid.shape, x.shape[-1], kept.shape[2]
    steps, groups, blocks = length // CHUNK, channels // width, CHUNK // BLOCK
    block = pl.BlockSpec((None, CHUNK, width), lambda b, n, c, *_: (b, steps - 1 - c, n))
    turned = lambda size: pl.BlockSpec((None, size, CHUNK), lambda b, n, c, *_: (b, 0, steps - 1 - c))
    of_channels = lambda size: pl.BlockSpec((size, width), lambda b, n, c, *_: (0, n))
    sums = lambda size: pl.BlockSpec((None, size, width), lambda b, n, c, *_: (b, 0, n))
    shared = pl.BlockSpec((None, CHUNK, states), lambda b, n, c, *_: (b, steps - 1 - c, 0))
    parts = pl.BlockSpec((None, None, CHUNK, states), lambda b, n, c, *_: (b, n, steps - 1 - c, 0))
    of_states = pl.BlockSpec((None, None, states, width), lambda b, n, c, *_: (b, steps - 1 - c, 0, n))
    single = lambda *sizes: jax.ShapeDtypeStruct((rows, *sizes), jnp.float32)
    of_block, of_tile = (blocks, BLOCK * states, LANES), (blocks, tile // LANES, BLOCK * states, LANES)
    call = pl.pallas_call(
        functools.partial(_program, tile),
        out_shape=[
            *(jax.ShapeDtypeStruct(y.shape, y.dtype) for y in (x, dt)),
            *(single(size, channels) for size in (states, 8)),
            *[single(groups, length, states)] * 2,
        ],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(rows, groups, steps),
            in_specs=[
                turned(8), block, block, block, of_channels(states), turned(states), turned(states), shared,
                of_channels(1), of_states,
            ],
            out_specs=[block, block, sums(states), sums(8), parts, parts],
            scratch_shapes=[
                pltpu.VMEM((states, width), jnp.float32),
                *[pltpu.VMEM(of_block, jnp.float32)] * 2,
                pltpu.VMEM((blocks, BLOCK, BLOCK * states), x.dtype),
                *[pltpu.VMEM((BLOCK, tile), jnp.float32)] * 3,
                pltpu.VMEM(of_tile, jnp.float32),
                *[pltpu.VMEM(of_tile, x.dtype)] * 3,
                *[pltpu.VMEM((CHUNK, BLOCK * states), jnp.float32)] * 2,
            ],
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=chunks.VMEM
        ),
        name="selective_scan_backward",
    )  # fmt: skip
    return call(whole.reshape(rows, -1)[:, ::-1].reshape(-1), begins, *inputs, kept)


NAMES = (
    "whole begins valid x dt dy a b c rows d kept dx ddt da dd db dc "
    "state keys queries reads step add back passed states grads rates db_all dc_all"
)


def spread(source: Any, into: Any, dtype: Any) -> None:
    """Lay numbers [S CHUNK] as [blocks, BLOCK * S, LANES]: a token's, each in all lanes."""
    n = len(source)

    def block(at: Array, _: None) -> None:
        keys, lane = source[...], places((n, CHUNK))[1]
        keys = jnp.concatenate([jnp.where(lane == at * BLOCK + i, keys, 0.0) for i in range(BLOCK)])
        into[at] = dot(keys, jnp.ones((CHUNK, LANES)), NN, dtype)

    jax.lax.fori_loop(0, CHUNK // BLOCK, block, None)


def diagonal(x: Float[Array, "C S"], dtype: Any) -> Float[Array, "blocks block block*S"]:
    """Lay numbers of tokens as rows that are zero but at their token's states."""
    n = x.shape[1]
    row, lane = places((n, BLOCK * n))
    reads = dot(x, jnp.where(lane % n == row, 1.0, 0.0), NN, dtype)  # a token's, again and again
    row, lane = places(reads.shape)
    return jnp.where(row % BLOCK == lane // n, reads, 0).reshape(-1, BLOCK, BLOCK * n).astype(dtype)


def _program(tile: int, *refs: Any) -> None:
    """Compute a chunk of some channels, tile by tile; `state` is what goes on to the token before."""
    from jax.experimental import pallas as pl

    r = SimpleNamespace(**dict(zip(NAMES.split(), refs, strict=True)))
    dtype, (n, width) = r.x.dtype, r.state.shape
    chunks.begin(r, jnp.transpose(r.valid[...])[:, :1] > 0, ["x", "dt", "dy"])
    blocks, at_step, steps = CHUNK // BLOCK, pl.program_id(2), pl.num_programs(2)

    @pl.when(at_step == 0)
    def _() -> None:
        r.da[...], r.dd[...] = jnp.zeros_like(r.da), jnp.zeros_like(r.dd)

    spread(r.b, r.keys, dtype)
    spread(r.c, r.queries, dtype)
    r.reads[...] = diagonal(r.rows[...], dtype)
    r.db_all[...], r.dc_all[...] = jnp.zeros_like(r.db_all), jnp.zeros_like(r.dc_all)
    first = (pl.program_id(0) * steps + steps - 1 - at_step) * blocks

    def tiles(i: Array, _: None) -> None:
        here = pl.ds(pl.multiple_of(i * tile, tile), tile)

        def walk(f: Any, at: Array, carry: Any) -> Any:
            begins = r.begins[first + at]
            run = lambda begins: functools.partial(f, r, here, at, begins)
            return jax.lax.cond(begins != 0, run(begins), run(None), carry)

        jax.lax.fori_loop(0, blocks, functools.partial(walk, _onward), r.kept[:, here])
        carry = r.state[:, here], r.da[:, here]
        back = lambda at, carry: walk(_back, blocks - 1 - at, carry)
        r.state[:, here], r.da[:, here] = jax.lax.fori_loop(0, blocks, back, carry)
        for at in range(blocks):
            _sums(r, here, at)

    jax.lax.fori_loop(0, width // tile, tiles, None)
    row, lane = places(r.db_all.shape)
    select = jnp.where(places((BLOCK * n, n))[0] % n == places((BLOCK * n, n))[1], 1.0, 0.0)
    for found, out in ((r.db_all, r.db), (r.dc_all, r.dc)):
        out[...] = dot(jnp.where(row % BLOCK == lane // n, found[...], 0), select, NN, jnp.float32)


def _onward(r: SimpleNamespace, here: Any, at: Array, begins: Array | None, state: Float[Array, "S tile"]) -> Array:
    """Compute the states of a block of tokens again."""
    from jax.experimental import pallas as pl

    n, a = len(state), r.a[:, here]
    there = pl.ds(pl.multiple_of(at * BLOCK, BLOCK), BLOCK)
    r.step[...] = r.dt[there, here].astype(jnp.float32)
    r.add[...] = r.step[...] * r.x[there, here].astype(jnp.float32)
    parts = [slice(i, i + LANES) for i in range(0, state.shape[1], LANES)]
    now, keys = [state[:, part] for part in parts], r.keys.at[at]
    passed, states = r.passed.at[at], r.states.at[at]
    for i in range(BLOCK):
        token = slice(i * n, (i + 1) * n)
        key = keys[token]
        for j, part in enumerate(parts):
            last = now[j] if begins is None else jnp.where((begins >> i) & 1 > 0, 0.0, now[j])
            last = jnp.exp2(r.step[i : i + 1, part] * a[:, part]) * last
            passed[j, token] = last
            now[j] = last + r.add[i : i + 1, part] * key
            states[j, token] = now[j].astype(states.dtype)
    return jnp.concatenate(now, 1)


def _back(
    r: SimpleNamespace, here: Any, at: Array, begins: Array | None, carry: tuple[Array, Array]
) -> tuple[Array, Array]:
    """Walk back over a block of tokens: the gradients of their states, and a u; what goes on, and the sum of dt u."""
    from jax.experimental import pallas as pl

    n, a = len(carry[0]), r.a[:, here]
    there = pl.ds(pl.multiple_of(at * BLOCK, BLOCK), BLOCK)
    r.step[...] = r.dt[there, here].astype(jnp.float32)
    r.back[...] = r.dy[there, here].astype(jnp.float32)
    parts = [slice(i, i + LANES) for i in range(0, carry[0].shape[1], LANES)]
    now, da = ([x[:, part] for part in parts] for x in carry)
    queries, passed, grads, rates = r.queries.at[at], r.passed.at[at], r.grads.at[at], r.rates.at[at]
    for i in reversed(range(BLOCK)):
        token = slice(i * n, (i + 1) * n)
        query = queries[token]
        for j, part in enumerate(parts):
            grad = now[j] + query * r.back[i : i + 1, part]
            step, rate = r.step[i : i + 1, part], a[:, part]
            grads[j, token] = grad.astype(grads.dtype)
            through = grad * passed[j, token]
            rates[j, token] = (rate * through).astype(rates.dtype)
            da[j] = da[j] + step * through
            now[j] = jnp.exp2(step * rate) * grad
            if begins is not None:
                now[j] = jnp.where((begins >> i) & 1 > 0, 0.0, now[j])
    return jnp.concatenate(now, 1), jnp.concatenate(da, 1)


def _sums(r: SimpleNamespace, here: Any, at: int) -> None:
    """Sum over the states and the channels of a block of tokens in a tile of channels."""
    there, dtype, n = slice(at * BLOCK, (at + 1) * BLOCK), r.x.dtype, r.state.shape[0]
    x, dt, dy = (y[there, here].astype(jnp.float32) for y in (r.x, r.dt, r.dy))
    groups, shape = range(r.grads.shape[1]), (BLOCK, BLOCK * n)
    row, lane = places(shape)
    ones = jnp.where(row == lane // n, np.log(2), 0.0)
    of_add = jnp.concatenate([dot(r.reads[at], r.grads[at, j], NN, dtype) for j in groups], 1)
    of_step = jnp.concatenate([dot(ones, r.rates[at, j], NN, dtype) for j in groups], 1)
    r.dx[there, here] = (dt * of_add + r.d[:, here] * dy).astype(dtype)
    r.ddt[there, here] = (x * of_add + of_step).astype(r.ddt.dtype)
    r.dd[:, here] = r.dd[:, here] + (x * dy).reshape(-1, 8, x.shape[1]).sum(0)
    cut = lambda y, j: y[:, j * LANES : (j + 1) * LANES]
    db, dc = jnp.zeros(shape), jnp.zeros(shape)
    for j in groups:
        db = db + dot(cut(dt * x, j), r.grads[at, j], NT, dtype)
        dc = dc + dot(cut(dy, j), r.states[at, j], NT, dtype)
    r.db_all[there], r.dc_all[there] = r.db_all[there] + db, r.dc_all[there] + dc
