"""Mamba's selective scan on NVIDIA Hopper: a Pallas Mosaic GPU kernel for Packed batches.

Algorithm: the recurrence itself (arXiv 2312.00752, eq. 2), token by token: h <- exp(dt a) h + dt x b^T; y = h c + d x, in
float32. A program is one group of warps and serves 128 channels of one row, one in each thread, whose 16 states stay in
registers from the first token to the last. Chunks of x and dt, and what all channels share (b, c, where sequences begin),
are copied to shared memory while the chunk before is computed; numbers of b and c are read there as scalars. A token that
begins a sequence has an endless step in its decay alone, which so is 0: a finite state leaves nothing. What is not finite
reaches the row's later sequences, as in the reference.

Bytes: x, dt and y once; b and c, 144 for each token, for each 128 channels, found in the second-level cache by all programs
but one. For each token, channel and state: one exponential, of which a multiprocessor computes 16 in a cycle, and four
products, two of them with sums, of 128 each. Where gradients are wanted, the states before each chunk of `CHUNK` tokens are
written for `selective_scan_backward_gpu`.
Interpreted on CPU, and measured on an H100 (docs/kernels_hopper.md).
"""

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from fdel.kernels import recurrent_decode_gpu as decode
from fdel.kernels import scan_slots_gpu as prompts
from fdel.kernels import scan_tokens_gpu as scans
from fdel.kernels import selective_scan_backward_gpu as backward
from fdel.kernels.device import no_hopper, unmeasured
from fdel.kernels.scan_tokens_gpu import CHANNELS, CHUNK, DEPTH, STATES
from fdel.ops.batch import Batch, Packed, Paged
from fdel.ops.carry import Carry


def unsupported(
    batch: Batch, carry: Carry | None, layer: Any, x: Array, dt: Array, a: Array, b: Array, c: Array, *,
    d: Array | None = None, chunk: int = 16,
) -> str | None:  # fmt: skip
    """Say why the kernel cannot serve this call, or None."""
    if why := no_hopper():
        return why
    if isinstance(batch, Paged):
        return decode.unsupported_scan(batch, carry, x, a) or prompts.unsupported(batch, a)
    if batch.key_segment_ids is not None or batch.prefix_ids is not None:
        return "it serves Packed batches without key_segment_ids and prefix_ids"
    if len(found := {y.dtype for y in (x, b, c)}) > 1 or not found <= {jnp.dtype("bfloat16"), jnp.dtype("float32")}:
        return f"inputs are all bfloat16 or all float32; found {', '.join(sorted(map(str, found)))}"
    if dt.dtype != jnp.float32:
        return f"dt is float32; found {dt.dtype}"
    channels, states = a.shape
    if channels % CHANNELS or states != STATES:
        return f"{channels} channels of {states} states; expected a multiple of {CHANNELS}, of {STATES}"
    return None


def unproven(batch: Batch, _: Carry | None, __: Any, x: Array, *___: Any, **____: Any) -> str | None:
    """Say why the kernel is taken only where it is named, or None."""
    return unmeasured(x)


def call(
    batch: Batch, carry: Carry | None, layer: Any,
    x: Float[Array, "... T C"], dt: Float[Array, "... T C"], a: Float[Array, "C S"],
    b: Float[Array, "... T S"], c: Float[Array, "... T S"], *, d: Float[Array, " C"] | None = None, chunk: int = 16,
) -> tuple[Float[Array, "... T C"], Carry]:  # fmt: skip
    """Compute as `selective_scan`, token by token; see `unsupported` for what it can serve."""
    d = jnp.zeros_like(a[:, 0]) if d is None else d
    if isinstance(batch, Paged):
        way = decode.scan if batch.block == 1 else prompts.call
        return way(batch, carry or Carry(), layer, x, dt, a, b, c, d)
    return _scan(batch, x, dt, a, b, c, d), carry or Carry()


@jax.custom_vjp
def _scan(batch: Packed, *inputs: Array) -> Array:
    return _run(batch, *inputs, keep=False)[0]


def _forward(batch: Packed, *inputs: Array) -> tuple[Array, tuple]:
    y, kept = _run(batch, *inputs, keep=True)
    return y, (batch, inputs, kept)


def _backward(saved: tuple[Packed, tuple, Array], dy: Array) -> tuple[Any, ...]:
    batch, inputs, kept = saved
    x, t = inputs[0], inputs[0].shape[1]
    fill = ((0, 0), (0, -t % CHUNK), (0, 0))
    dx, ddt, da, dd, sums = backward.run(scans.prepared(batch, inputs), jnp.pad(dy.astype(x.dtype), fill), kept)
    db, dc = jnp.moveaxis(sums.sum(1).reshape(len(x), -1, 2, STATES), 2, 0)
    found = dx[:, :t], ddt[:, :t], da.sum(0).T, db[:, :t], dc[:, :t], dd.sum(0)
    return None, *(y.astype(z.dtype) for y, z in zip(found, inputs, strict=True))


_scan.defvjp(_forward, _backward)


def _run(batch: Packed, *inputs: Array, keep: bool) -> list[Array]:
    """Give y [B T C]; with `keep` also the states before each chunk [B chunks S C], in float32."""
    from jax.experimental.pallas import mosaic_gpu as gpu

    (rows, t, channels), laid = inputs[0].shape, scans.prepared(batch, inputs)
    x, length = laid[0], laid[0].shape[1]
    out = [
        jax.ShapeDtypeStruct(x.shape, x.dtype),
        jax.ShapeDtypeStruct((rows, length // CHUNK, STATES, channels), jnp.float32),
    ]
    run = gpu.kernel(
        _program,
        kernel_name="selective_scan",
        out_type=out[: 1 + keep],
        scratch_types=scans.memory(x.dtype, CHUNK),
        grid=(channels // CHANNELS, rows),
        grid_names=("block", "row"),
        compiler_params=scans.parameters(),
    )
    y, *kept = run(*laid)
    return [y[:, :t], *kept]


def _program(*refs: Any, **memory: Any) -> None:
    """Walk over a row's tokens with the states of some channels; `refs` are the arguments and results of `_run`."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as gpu

    names = ["x", "dt", "a", "numbers", "d", "out", "kept"]
    r = SimpleNamespace(**dict(zip(names, refs, strict=False)), **memory)
    row, chunks = jax.lax.axis_index("row"), r.x.shape[1] // CHUNK
    channels = pl.ds(jax.lax.axis_index("block") * CHANNELS, CHANNELS)
    a, d = [r.a[n, channels] for n in range(STATES)], r.d[channels]

    def fetch(i: Any) -> None:
        slot, tokens = jax.lax.rem(i, jnp.int32(DEPTH)), pl.ds(i * CHUNK, CHUNK)
        gpu.copy_gmem_to_smem(r.x.at[row, tokens, channels], r.x_s.at[slot], r.full.at[slot])
        gpu.copy_gmem_to_smem(r.dt.at[row, tokens, channels], r.dt_s.at[slot], r.full.at[slot])
        gpu.copy_gmem_to_smem(r.numbers.at[row, tokens], r.n_s.at[slot], r.full.at[slot])

    def chunk(i: Any, states: tuple[Array, ...]) -> tuple[Array, ...]:
        slot = jax.lax.rem(i, jnp.int32(DEPTH))
        gpu.barrier_wait(r.full.at[slot])

        if hasattr(r, "kept"):
            for n in range(STATES):
                r.kept.at[row, i, n, channels][...] = states[n]

        gpu.wait_smem_to_gmem(DEPTH - 1, wait_read_only=True)
        states = scans.outputs(r, slot, a, d, states)
        gpu.commit_smem()
        gpu.copy_smem_to_gmem(r.y_s.at[slot], r.out.at[row, pl.ds(i * CHUNK, CHUNK), channels])
        pl.when(i + DEPTH < chunks)(lambda: fetch(i + DEPTH))
        return states

    for i in range(min(DEPTH, chunks)):
        fetch(jnp.int32(i))
    jax.lax.fori_loop(0, chunks, chunk, tuple(scans.nothing() for _ in range(STATES)))
    gpu.wait_smem_to_gmem(0)
