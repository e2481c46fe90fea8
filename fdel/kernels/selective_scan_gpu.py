"""Mamba's selective scan on NVIDIA Hopper: a Pallas Mosaic GPU kernel for Packed batches.

Algorithm: the recurrence itself (arXiv 2312.00752, eq. 2), token by token: h <- exp(dt a) h + dt x b^T; y = h c + d x, in
float32. A program is one group of warps and serves 128 channels of one row, one in each thread, whose 16 states stay in
registers from the first token to the last. Tiles of x and dt, and what all channels share (b, c, where sequences begin),
are copied to shared memory while the tile before is computed; numbers of b and c are read there as scalars. A token that
begins a sequence has an endless step in its decay alone, which so is 0: a finite state leaves nothing.

Bytes: x, dt and y once; b and c once for each 128 channels, 144 for each token, which other programs of the row find in the
second-level cache. For each token, channel and state: one exponential, of which a multiprocessor computes 16 in a cycle, two
products and two products with sums, of 128 each. Where gradients are wanted, the states before each chunk of `CHUNK`
tokens are written for `selective_scan_backward_gpu`.
Interpreted on CPU and compiled for H100; it has not run on a GPU yet.
"""

import functools
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from fdel.kernels.device import no_hopper
from fdel.ops.batch import Batch, Packed
from fdel.ops.carry import Carry

CHANNELS, STATES = 128, 16  # of a program; with more states the gradient's do not fit in registers
CHUNK, TILE, UNROLL = 64, 32, 8  # tokens between kept states, of a copy, and of a round of the loop
DEPTH = 2  # tiles on their way, and of results
FLOOR, VALID, NUMBERS = 2 * STATES, 2 * STATES + 1, 2 * STATES + 4  # what a token's numbers are beside b and c
ENDLESS = 3e38  # a step after which nothing is left


def unsupported(
    batch: Batch, carry: Carry | None, layer: Any, x: Array, dt: Array, a: Array, b: Array, c: Array, *,
    d: Array | None = None, chunk: int = 16,
) -> str | None:  # fmt: skip
    """Say why the kernel cannot serve this call, or None."""
    if why := no_hopper():
        return why
    if not isinstance(batch, Packed) or batch.key_segment_ids is not None or batch.prefix_ids is not None:
        return "it serves Packed batches, without key_segment_ids and prefix_ids"
    if len(found := {y.dtype for y in (x, b, c)}) > 1 or not found <= {jnp.dtype("bfloat16"), jnp.dtype("float32")}:
        return f"inputs are all bfloat16 or all float32; found {', '.join(sorted(map(str, found)))}"
    if dt.dtype != jnp.float32:
        return f"dt is float32; found {dt.dtype}"
    channels, states = a.shape
    if channels % CHANNELS or states != STATES:
        return f"{channels} channels of {states} states; expected a multiple of {CHANNELS}, of {STATES}"
    return None


def call(
    batch: Packed, carry: Carry | None, layer: Any,
    x: Float[Array, "B T C"], dt: Float[Array, "B T C"], a: Float[Array, "C S"],
    b: Float[Array, "B T S"], c: Float[Array, "B T S"], *, d: Float[Array, " C"] | None = None, chunk: int = 16,
) -> tuple[Float[Array, "B T C"], Carry]:  # fmt: skip
    """Compute as `selective_scan`, token by token; see `unsupported` for what it can serve."""
    return _run(batch, x, dt, a, b, c, jnp.zeros_like(a[:, 0]) if d is None else d, keep=False)[0], carry or Carry()


def prepared(batch: Packed, inputs: tuple[Array, ...]) -> list[Array]:
    """Lay out x and dt in whole chunks, exponents to the base 2 [S C], the numbers of each token, and d, in float32.

    A token's numbers [NUMBERS] are b, c, the least step of its decay, and whether it is one: b and c of padding are 0.
    """
    x, dt, a, b, c, d = inputs
    fill = -x.shape[1] % CHUNK
    padded = lambda y: jnp.pad(y, ((0, 0), (0, fill), (0, 0))) if fill else y
    segments = jnp.pad(batch.segment_ids, ((0, 0), (0, fill)), constant_values=-1)
    starts = jnp.pad(segments[:, 1:] != segments[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    valid = (segments >= 0)[..., None]
    floor = jnp.where(starts, ENDLESS, -ENDLESS)[..., None]
    shared = jnp.concatenate([padded(y).astype(jnp.float32) for y in (b, c)], -1)
    rest = jnp.pad(jnp.concatenate([floor, valid], -1), ((0, 0), (0, 0), (0, NUMBERS - FLOOR - 2)))
    numbers = jnp.concatenate([jnp.where(valid, shared, 0), rest], -1)
    return [padded(x), padded(dt), a.T.astype(jnp.float32) * np.log2(np.e), numbers, d.astype(jnp.float32)]


def _run(batch: Packed, *inputs: Array, keep: bool) -> list[Array]:
    """Give y [B T C]; with `keep` also the states before each chunk [B chunks S C], in float32."""
    from jax.experimental.pallas import mosaic_gpu as gpu

    (rows, t, channels), laid = inputs[0].shape, prepared(batch, inputs)
    x, length = laid[0], laid[0].shape[1]
    out = [
        jax.ShapeDtypeStruct(x.shape, x.dtype),
        jax.ShapeDtypeStruct((rows, length // CHUNK, STATES, channels), jnp.float32),
    ]
    tile = (DEPTH, TILE, CHANNELS)
    run = gpu.kernel(
        _program,
        out_type=out[: 1 + keep],
        scratch_types={
            "x_s": gpu.SMEM(tile, x.dtype), "dt_s": gpu.SMEM(tile, jnp.float32), "y_s": gpu.SMEM(tile, x.dtype),
            "n_s": gpu.SMEM((DEPTH, TILE, NUMBERS), jnp.float32), "full": gpu.Barrier(num_arrivals=3, num_barriers=DEPTH),
        },
        grid=(channels // CHANNELS, rows),
        grid_names=("block", "row"),
        compiler_params=parameters(),
    )  # fmt: skip
    y, *kept = run(*laid)
    return [y[:, :t], *kept]


def parameters() -> Any:
    """Give the compiler's: a thread reads what it wrote itself, and what others read is committed by the programs."""
    from jax.experimental.pallas import mosaic_gpu as gpu

    lane = gpu.LoweringSemantics.Lane
    return gpu.CompilerParams(lowering_semantics=lane, approx_math=True, unsafe_no_auto_barriers=True)


def _program(*refs: Any, **memory: Any) -> None:
    """Walk over a row's tokens with the states of some channels; `refs` are the arguments and results of `_run`."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as gpu

    names = ["x", "dt", "a", "numbers", "d", "out", "kept"]
    r = SimpleNamespace(**dict(zip(names, refs, strict=False)), **memory)
    row, tiles = jax.lax.axis_index("row"), r.x.shape[1] // TILE
    channels = pl.ds(jax.lax.axis_index("block") * CHANNELS, CHANNELS)
    a, d = [r.a[n, channels] for n in range(STATES)], r.d[channels]

    def fetch(i: Any) -> None:
        slot, tokens = jax.lax.rem(i, jnp.int32(DEPTH)), pl.ds(i * TILE, TILE)
        gpu.copy_gmem_to_smem(r.x.at[row, tokens, channels], r.x_s.at[slot], r.full.at[slot])
        gpu.copy_gmem_to_smem(r.dt.at[row, tokens, channels], r.dt_s.at[slot], r.full.at[slot])
        gpu.copy_gmem_to_smem(r.numbers.at[row, tokens], r.n_s.at[slot], r.full.at[slot])

    def tile(i: Any, states: tuple[Array, ...]) -> tuple[Array, ...]:
        slot = jax.lax.rem(i, jnp.int32(DEPTH))
        gpu.barrier_wait(r.full.at[slot])

        if hasattr(r, "kept"):

            @pl.when(jax.lax.rem(i, jnp.int32(CHUNK // TILE)) == 0)
            def _() -> None:
                for n in range(STATES):
                    r.kept.at[row, jax.lax.div(i, jnp.int32(CHUNK // TILE)), n, channels][...] = states[n]

        gpu.wait_smem_to_gmem(DEPTH - 1, wait_read_only=True)

        def several(j: Any, states: tuple[Array, ...]) -> tuple[Array, ...]:
            for k in range(UNROLL):
                at = j * UNROLL + k
                x, _, step, decay = token(r, slot, at)
                states = advance(r.n_s.at[slot, at], a, decay, step * x, states)
                y = [d * x, jnp.zeros_like(x)]
                for n in range(STATES):
                    y[n % 2] = y[n % 2] + states[n] * r.n_s[slot, at, STATES + n]
                r.y_s.at[slot, at][...] = (y[0] + y[1]).astype(r.y_s.dtype)
            return states

        states = jax.lax.fori_loop(0, TILE // UNROLL, several, states)
        gpu.commit_smem()
        gpu.copy_smem_to_gmem(r.y_s.at[slot], r.out.at[row, pl.ds(i * TILE, TILE), channels])
        pl.when(i + DEPTH < tiles)(lambda: fetch(i + DEPTH))
        return states

    for i in range(min(DEPTH, tiles)):
        fetch(jnp.int32(i))
    jax.lax.fori_loop(0, tiles, tile, tuple(nothing() for _ in range(STATES)))
    gpu.wait_smem_to_gmem(0)


def nothing() -> Array:
    """Give a zero for each channel."""
    from jax.experimental.pallas import mosaic_gpu as gpu

    return gpu.layout_cast(jnp.zeros(CHANNELS, jnp.float32), gpu.Layout.WG_STRIDED((CHANNELS,), vec_size=1))


def token(r: SimpleNamespace, slot: Any, at: Any) -> tuple[Array, Array, Array, Array]:
    """Read x of a token, whether it is one, its step, and that of its decay, in float32; padding may hold anything."""
    valid = r.n_s[slot, at, VALID] > 0
    x = jnp.where(valid, r.x_s[slot, at].astype(jnp.float32), 0.0)
    step = jnp.where(valid, r.dt_s[slot, at], 0.0)
    return x, valid, step, jnp.maximum(step, r.n_s[slot, at, FLOOR])


def advance(numbers: Any, a: list[Array], decay: Array, add: Array, states: tuple[Array, ...]) -> tuple[Array, ...]:
    """Give the states after a token: `decay` is its step for them, `add` what b of its numbers is multiplied with."""
    return tuple(jnp.exp2(decay * a[n]) * states[n] + add * numbers[n] for n in range(STATES))
