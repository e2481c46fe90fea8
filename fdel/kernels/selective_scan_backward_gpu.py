"""The gradient of Mamba's selective scan on Hopper, for `selective_scan_gpu`: chunks from the last to the first.

Algorithm: that of `selective_scan_backward_tpu`. The states before each chunk of `CHUNK` tokens were kept by the forward
pass. A program, of 128 channels of a row, first walks over the chunk and leaves the states before each group of `GROUP`
tokens in shared memory; then, from the last group to the first, it computes the states of a group again, which stay in
registers, and walks back. What db and dc are sums of over channels is laid in shared memory as rows, two tokens at a time,
and added up there in float32; XLA adds the sums of the programs.

Bytes: x, dt, dy, dx, ddt once (x, dt and dy are copied again from the second-level cache), the kept states, 4 * 16 / CHUNK
for each token and channel, and 128 for each token and 128 channels: sums for db and dc. For each token, channel and state
2.75 exponentials, 22 products and sums, and two numbers written to shared memory and read.
Interpreted on CPU, and measured on an H100 (docs/kernels_hopper.md).
"""

import functools
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from fdel.kernels import scan_tokens_gpu as scans
from fdel.kernels import transfer_gpu
from fdel.kernels.scan_tokens_gpu import CHANNELS, CHUNK, DEPTH, NUMBERS, STATES

GROUP, PAIR = 8, 2  # tokens whose states are in registers, and whose rows are added up at once
GROUPS = CHUNK // GROUP
STEPS = 2 * GROUPS - 1  # groups that a chunk's walks pass: all but the last, then all
ROWS, STRIDE = PAIR * 2 * STATES, CHANNELS + 8  # of numbers to be added up; rows begin in different banks


def run(laid: list[Array], dy: Float[Array, "B T C"], kept: Float[Array, "B chunks S C"]) -> list[Array]:
    """Run over what `prepared` laid out: dx, ddt, da [B S C], dd [B C], sums for db and dc [B programs T/2 2*2*S]."""
    from jax.experimental.pallas import mosaic_gpu as gpu

    x, dt = laid[:2]
    rows, length, channels = x.shape
    single = lambda *shape: jax.ShapeDtypeStruct((rows, *shape), jnp.float32)
    tile = lambda dtype: gpu.SMEM((DEPTH, GROUP, CHANNELS), dtype)
    call = gpu.kernel(
        _program,
        kernel_name="selective_scan_backward",
        out_type=[
            *(jax.ShapeDtypeStruct(y.shape, y.dtype) for y in (x, dt)),
            single(STATES, channels), single(channels), single(channels // CHANNELS, length // PAIR, ROWS),
        ],
        scratch_types={
            "x_s": tile(x.dtype), "dt_s": tile(jnp.float32), "dy_s": tile(x.dtype),
            "n_s": gpu.SMEM((DEPTH, GROUP, NUMBERS), jnp.float32), "full": gpu.Barrier(num_arrivals=4, num_barriers=DEPTH),
            "first_s": gpu.SMEM((STATES, CHANNELS), jnp.float32), "first": gpu.Barrier(),
            "states_s": gpu.SMEM((GROUPS, STATES, CHANNELS), jnp.float32),
            "rows_s": gpu.SMEM((ROWS, STRIDE), jnp.float32), "dx_s": tile(x.dtype), "ddt_s": tile(jnp.float32),
        },
        grid=(channels // CHANNELS, rows),
        grid_names=("block", "row"),
        compiler_params=scans.parameters(),
    )  # fmt: skip
    return call(*laid, dy, kept)


def _program(*refs: Any, **memory: Any) -> None:
    """Walk over a row's chunks from the last; `refs` are the arguments and results of `run`."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as gpu

    names = "x dt a numbers d dy kept dx ddt da dd sums".split()
    r = SimpleNamespace(**dict(zip(names, refs, strict=True)), **memory)
    block, row = (jax.lax.axis_index(name) for name in ("block", "row"))
    r.block, r.row, r.channels = block, row, pl.ds(block * CHANNELS, CHANNELS)
    r.rates, r.skip = [r.a[n, r.channels] for n in range(STATES)], r.d[r.channels]
    chunks = r.kept.shape[1]

    def step(work: Any, i: Any, carry: Any) -> Any:
        """Give work(slot, carry) the group of step i, then fetch another into its place."""
        slot = jax.lax.rem(i, jnp.int32(DEPTH))
        gpu.barrier_wait(r.full.at[slot])
        carry = work(slot, carry)
        gpu.commit_smem()
        _fetch(r, i + DEPTH)
        return carry

    def chunk(i: Any, carry: tuple) -> tuple:
        gpu.barrier_wait(r.first)
        for n in range(STATES):
            r.states_s.at[0, n][...] = r.first_s[n]
        gpu.commit_smem()
        _begin(r, i + 1)

        def onward(g: Any, states: tuple) -> tuple:
            states = step(functools.partial(_onward, r), i * STEPS + g, states)
            for n in range(STATES):
                r.states_s.at[g + 1, n][...] = states[n]
            return states

        def back(j: Any, carry: tuple) -> tuple:
            group, at = GROUPS - 1 - j, chunks - 1 - i
            work = functools.partial(_back, r, group, at * GROUPS + group)
            return step(work, i * STEPS + GROUPS - 1 + j, carry)

        jax.lax.fori_loop(0, GROUPS - 1, onward, tuple(r.states_s[0, n] for n in range(STATES)))
        return jax.lax.fori_loop(0, GROUPS, back, carry)

    for i in range(DEPTH):
        _fetch(r, jnp.int32(i))
    _begin(r, jnp.int32(0))
    zeros = lambda: tuple(scans.nothing() for _ in range(STATES))
    _, da, dd = jax.lax.fori_loop(0, chunks, chunk, (zeros(), zeros(), scans.nothing()))
    for n in range(STATES):
        r.da.at[row, n, r.channels][...] = da[n]
    r.dd.at[row, r.channels][...] = dd
    gpu.wait_smem_to_gmem(0)


def _fetch(r: SimpleNamespace, i: Any) -> None:
    """Copy the group of step i of all, if there is one."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as gpu

    step, slot = jax.lax.rem(i, jnp.int32(STEPS)), jax.lax.rem(i, jnp.int32(DEPTH))
    group = jnp.minimum(step, STEPS - 1 - step) + (r.kept.shape[1] - 1 - jax.lax.div(i, jnp.int32(STEPS))) * GROUPS
    tokens = pl.ds(group * GROUP, GROUP)

    @pl.when(i < r.kept.shape[1] * STEPS)
    def _() -> None:
        for name in ("x", "dt", "dy"):
            some = getattr(r, name).at[r.row, tokens, r.channels]
            gpu.copy_gmem_to_smem(some, getattr(r, name + "_s").at[slot], r.full.at[slot])
        gpu.copy_gmem_to_smem(r.numbers.at[r.row, tokens], r.n_s.at[slot], r.full.at[slot])


def _begin(r: SimpleNamespace, i: Any) -> None:
    """Copy the states before the chunk that is the i-th from the end, if there is one."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as gpu

    @pl.when(i < r.kept.shape[1])
    def _() -> None:
        gpu.copy_gmem_to_smem(r.kept.at[r.row, r.kept.shape[1] - 1 - i, :, r.channels], r.first_s, r.first)


def _onward(r: SimpleNamespace, slot: Any, states: tuple[Array, ...]) -> tuple[Array, ...]:
    """Walk over a group of tokens."""
    for k in range(GROUP):
        x, _, step, decay = scans.token(r, slot, k)
        states = scans.advance(r.n_s.at[slot, k], r.rates, decay, step * x, states)
    return states


def _back(r: SimpleNamespace, group: Any, at: Any, slot: Any, carry: tuple) -> tuple:
    """Walk back over a group of its chunk, the row's group `at`. `carry`: what goes on to the token before, da, dd."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as gpu

    out = jax.lax.rem(at, jnp.int32(DEPTH))
    before = lambda: tuple(r.states_s[group, n] for n in range(STATES))
    states = [before()]
    for k in range(GROUP):
        x, _, step, decay = scans.token(r, slot, k)
        states.append(scans.advance(r.n_s.at[slot, k], r.rates, decay, step * x, states[-1]))
    gpu.wait_smem_to_gmem(2 * (DEPTH - 1), wait_read_only=True)
    for k in reversed(range(GROUP)):
        carry = _token(r, slot, out, k, states[k] if k else before(), states[k + 1], carry)
        if k % PAIR == 0:
            gpu.commit_smem()
            some = transfer_gpu.load(r.rows_s.at[:, pl.ds(0, CHANNELS)], layout=gpu.Layout.WGMMA, optimized=False)
            r.sums.at[r.row, r.block, at * (GROUP // PAIR) + k // PAIR][...] = some.sum(axis=1)
            gpu.commit_smem()
    tokens = pl.ds(at * GROUP, GROUP)
    for source, into in ((r.dx_s, r.dx), (r.ddt_s, r.ddt)):
        gpu.copy_smem_to_gmem(source.at[out], into.at[r.row, tokens, r.channels])
    return carry


def _token(r: SimpleNamespace, slot: Any, out: Any, k: int, past: tuple, states: tuple, carry: tuple) -> tuple:
    """Walk back over one token, with the states before and after it; leave results, and rows of numbers to be added up."""
    now, da, dd = carry
    now, da = list(now), list(da)
    b, c = ([r.n_s[slot, k, first + n] for n in range(STATES)] for first in (0, STATES))  # before anything is written
    x, valid, step, decay = scans.token(r, slot, k)
    dy = jnp.where(valid, r.dy_s[slot, k].astype(jnp.float32), 0.0)
    add, of_add, of_step = step * x, scans.nothing(), scans.nothing()
    for n in range(STATES):
        grad = now[n] + dy * c[n]
        kept = jnp.exp2(decay * r.rates[n])
        now[n] = kept * grad
        through = now[n] * past[n]
        of_add, of_step = of_add + grad * b[n], of_step + through * r.rates[n]
        da[n] = da[n] + step * through
        at = k % PAIR * 2 * STATES + n
        r.rows_s[at, :CHANNELS] = grad * add
        r.rows_s[at + STATES, :CHANNELS] = states[n] * dy
    r.dx_s.at[out, k][...] = (step * of_add + r.skip * dy).astype(r.dx_s.dtype)
    r.ddt_s.at[out, k][...] = x * of_add + of_step * np.log(2)
    return tuple(now), tuple(da), dd + x * dy
