"""The gradient of the gated delta rule on Hopper, for `gated_delta_rule_gpu`: chunks from the last to the first.

Algorithm: with the notation of `delta_program_gpu`, Q_ij = D_ij q_i^T k_j (j <= i), M_ij = D_ij k_i^T k_j (j < i), D'_j the
decay from token j to the chunk's end, r = v - D_i k S, w = T r, and G the gradient of the state after the chunk,
  dw = Q^T dy + D'_j k G;  dv = T^T dw;  G <- D G + sum_i D_i (q_i dy_i^T - k_i dv_i^T)
is what goes from chunk to chunk: `run`, the kernel, which keeps dv and each G. `others` is the rest, of all chunks at once,
in plain XLA, a row at a time:
  db_i = (dw - M^T dv)_i^T (r - M w)_i;  dQ_ij = dy_i^T w_j;  dM_ij = -dv_i^T w_j
  dq_i = D_i S dy_i + sum_j D_ij dQ_ij k_j
  dk_i = -D_i S dv_i + D'_i G w_i + sum_j D_ij dM_ij k_j + sum_j D_ji (dM_ji k_j + dQ_ji q_j)
A log decay of token t is in all D_ij with j < t <= i, so its gradient is a sum of their parts.

Bytes of the kernel for a chunk and head: q, k, dy, T, dv and G, 104 KiB; XLA's part reads and writes some 30 matrices of
64 x 64 and 64 x 128. The group of warps that prepares gives D_ij q_i^T k_j; two walk, as in the forward pass.
Interpreted on CPU, and measured on an H100 (docs/kernels_hopper.md).
"""

import functools
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from fdel.kernels import transfer_gpu
from fdel.kernels.delta_program_gpu import LAST, SINCE, VALID, decay_pairs
from fdel.kernels.delta_walk_gpu import (
    CHUNK,
    HALF,
    REGISTERS,
    WALKERS,
    WIDTH,
    across,
    clear,
    give,
    give_state,
    launch,
    number,
    parts,
    pipeline,
    products,
)


def run(
    q: Float[Array, "B T NH"], k: Float[Array, "B T NH"], dy: Float[Array, "B T NH"],
    numbers: Float[Array, "B N 5 T"], whole: Int[Array, "B chunks"], solve: Float[Array, "B N T 64"], *, interpreted: bool,
) -> tuple[Array, Array]:  # fmt: skip
    """Give dv [B T NH] and the gradients of the states after each chunk [B N chunks keys values].

    Arguments are those of `delta_program_gpu.run`, and T, which it keeps.
    """
    (b, t, _), heads = q.shape, numbers.shape[1]
    program = functools.partial(_program, interpreted=interpreted)
    results, own = (q.shape, (b, heads, t // CHUNK, WIDTH, WIDTH)), {"new_s": (WALKERS, 3, CHUNK, HALF)}
    wide = "q_s", "k_s", "dy_s"
    call = launch(program, results, q.dtype, (b, heads), wide, own, (VALID, CHUNK), copies=5)
    return call(q, k, dy, numbers, whole, solve)


def _program(*refs: Any, interpreted: bool, **memory: Any) -> None:
    """Walk the chunks of a head back; `refs` are the arguments and the results of `run`'s kernel."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as gpu

    q, k, dy, numbers, whole, solve, dv, kept = refs
    row, head = (jax.lax.axis_index(name) for name in ("row", "head"))
    s, count = SimpleNamespace(**memory), whole.shape[1]
    tokens = lambda i: pl.ds((count - 1 - i) * CHUNK, CHUNK)

    def fetch(i: Any, slot: Any) -> None:
        for x, to in ((q, s.q_s), (k, s.k_s), (dy, s.dy_s)):
            gpu.copy_gmem_to_smem(x.at[row, tokens(i), pl.ds(head * WIDTH, WIDTH)], to.at[slot], s.full.at[slot])
        gpu.copy_gmem_to_smem(numbers.at[row, head, pl.ds(0, VALID), tokens(i)], s.numbers_s.at[slot], s.full.at[slot])
        gpu.copy_gmem_to_smem(solve.at[row, head, tokens(i)], s.solve_s.at[slot], s.full.at[slot])

    def prepare(i: Any, slot: Any) -> None:
        wide, real = (s.q_s, s.k_s, s.dy_s), numbers.at[row, head, VALID, tokens(i)]
        pl.when(whole[row, count - 1 - i] == 0)(lambda: clear([x.at[slot] for x in wide], real))
        _prepare(s, slot)
        gpu.barrier_arrive(s.ready.at[slot])

    def walk(i: Any, slot: Any, own: Any, state: list[Array]) -> list[Array]:
        gpu.copy_smem_to_gmem(own.state, kept.at[row, head, count - 1 - i, :, own.columns])
        to = dv.at[row, tokens(i), pl.ds(head * WIDTH + own.mine * HALF, HALF)]
        state = _walk(s, own, slot, state, to)
        gpu.barrier_arrive(s.free.at[slot])
        return state

    pipeline(s, count, fetch, prepare, walk, None if interpreted else REGISTERS)


def _prepare(s: Any, slot: Any) -> None:
    """Give `pairs_s` D_ij q_i^T k_j."""
    pairs = products([(s.q_s.at[slot], s.k_s.at[slot].transpose((1, 0)))])[0]
    give(s.pairs_s.at[slot], pairs * decay_pairs(s.numbers_s.at[slot]))


def _walk(s: Any, own: Any, slot: Any, state: list[Array], to: Any) -> list[Array]:
    """Send dv of a chunk `to` memory, and give `own.state` the gradient of the state before, returned in float32."""
    from jax.experimental.pallas import mosaic_gpu as gpu

    q, k, dy = s.q_s.at[slot], s.k_s.at[slot], s.dy_s.at[slot, :, own.columns]
    turned = lambda ref: ref.transpose((1, 0))
    within, later = products([(turned(s.pairs_s.at[slot]), dy)], [(k, own.state)])
    since, last = (across(number(s.numbers_s.at[slot, which]), HALF) for which in (SINCE, LAST))
    gpu.wait_smem_to_gmem(0, wait_read_only=True)  # what is written over
    give(own.new.at[0], within + jnp.exp2(last - since) * later)
    dv = products([(turned(s.solve_s.at[slot]), own.new.at[0])])[0]
    gpu.commit_smem()  # all warps have read what is written over
    begin = jnp.exp2(since)
    own.new.at[0][...] = dv.astype(q.dtype)
    own.new.at[1][...] = (-begin * dv).astype(q.dtype)
    give(own.new.at[2], begin * transfer_gpu.load(dy, layout=gpu.Layout.WGMMA).astype(jnp.float32))
    gpu.copy_smem_to_gmem(own.new.at[0], to)
    both = zip(parts(q, 1), parts(k, 1), strict=True)
    written = products(*([(turned(a), own.new.at[2]), (turned(b), own.new.at[1])] for a, b in both))
    state = [jnp.exp2(last) * old + more for old, more in zip(state, written, strict=True)]
    gpu.wait_smem_to_gmem(0, wait_read_only=True)
    give_state(own, state)
    return state


def others(
    inputs: list[Float[Array, "B T NH"]], numbers: Float[Array, "B N 5 T"],
    solve: Float[Array, "B N T 64"], states: tuple[Array, Array],
) -> tuple[Array, ...]:  # fmt: skip
    """Give dq and dk [B T NH], and the gradients of log decays and of beta [B T N].

    `inputs` are q, k, v, dy and dv, `states` those before each chunk and the gradients of those after it.
    """

    def row(given: tuple) -> tuple[Array, ...]:
        wide, numbers, solve, (state, gradient) = given
        heads, chunks = state.shape[:2]
        of_tokens = lambda x: jnp.moveaxis(x, 0, 2).reshape(chunks * CHUNK, -1)
        real = numbers[0, VALID][:, None] > 0
        q, k, v, dy, dv = (
            jnp.moveaxis(jnp.where(real, x, 0).reshape(chunks, CHUNK, heads, -1), 2, 0) for x in wide
        )  # [N chunks C H]
        cut = jnp.moveaxis(numbers, 0, 1).reshape(-1, heads, chunks, CHUNK)
        sums = cut[SINCE][..., None], cut[LAST][..., None]
        found = _of_chunks(q, k, v, dy, dv, state, gradient, solve.reshape(heads, chunks, CHUNK, CHUNK), sums)
        return tuple(of_tokens(x) for x in found)

    return jax.lax.map(row, (inputs, numbers, solve, states))


def _of_chunks(
    q: Array, k: Array, v: Array, dy: Array, dv: Array, state: Array, gradient: Array, solve: Array,
    of_decays: tuple[Array, Array],
) -> tuple[Array, ...]:  # fmt: skip
    """Give dq, dk [N chunks C H], and the gradients of log decays and of beta [N chunks C 1]."""
    since, last = of_decays  # [N chunks C 1]
    half = lambda x: x.astype(q.dtype)
    dot = lambda a, b: jnp.matmul(half(a), half(b), preferred_element_type=jnp.float32)
    i, j = jnp.arange(CHUNK)[:, None], jnp.arange(CHUNK)
    decay = jnp.exp2(jnp.where(j <= i, since - since.mT, -jnp.inf))
    begin, end = jnp.exp2(since), jnp.exp2(last - since)
    kk, qk = jnp.where(j < i, decay * dot(k, k.mT), 0), decay * dot(q, k.mT)
    r = v - begin * dot(k, state)
    w = dot(solve, r)
    dw = dot(qk.mT, dy) + end * dot(k, gradient)
    dbeta = jnp.sum((dw - dot(kk.mT, dv)) * (r - dot(kk, w)), -1, keepdims=True)
    dqk, dkk = dot(dy, w.mT), jnp.where(j < i, -dot(dv, w.mT), 0)
    read_q, read_k = begin * dot(dy, state.mT), -begin * dot(dv, state.mT)
    write = end * dot(w, gradient.mT)
    weights = dqk * qk + dkk * kk
    of_q, of_k = decay * dqk, decay * dkk
    dq = read_q + dot(of_q, k)
    dk = read_k + write + dot(of_k, k) + dot(of_k.mT, k) + dot(of_q.mT, q)
    first, later = (jnp.sum(x, -1, keepdims=True) for x in (q * read_q + k * read_k, k * write))
    of_state = jnp.exp2(last[..., -1:, :]) * jnp.sum(
        state.astype(jnp.float32) * gradient.astype(jnp.float32), (-2, -1), keepdims=True
    )
    from_here = jnp.where(j >= i, 1.0, 0.0)  # sums over tokens from each on
    within = jnp.sum(jnp.where(j < i, jnp.matmul(from_here, weights, precision="highest"), 0), -1, keepdims=True)
    sums = jnp.matmul(from_here, first, precision="highest") + jnp.matmul(
        from_here.T - jnp.eye(CHUNK), later, precision="highest"
    )
    return half(dq), half(dk), within + sums + of_state, dbeta
