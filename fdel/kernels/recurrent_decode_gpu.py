"""One token of each sequence through `ssd` or a scan on NVIDIA Hopper: Pallas Mosaic GPU kernels.

Of an engine's calls these are the decode steps; its prompts are others' (`ssd_slots_gpu`, `scan_slots_gpu`). A program
takes a part of one token's state, `ROWS` channels of so many states: it copies it from its slot to shared memory, changes
it as the operation's docstring has it, all in float32, and copies it back, once each; states are the result's memory, so
no other slot is touched. Nothing is multiplied by tensor cores. `delta_decode_gpu` is called as these are.

Bytes: states, twice; all else is small. What is waited for is hidden by the programs that share a multiprocessor, four to
eight of them.
Interpreted on CPU, and measured on an H100 (docs/kernels_hopper.md).
"""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from fdel.kernels import scan_tokens_gpu, slots, transfer_gpu
from fdel.kernels.slots_gpu import in_place
from fdel.ops.batch import Paged
from fdel.ops.carry import Carry

ROWS, COLUMNS = 64, 128  # of a part: channels, and their states at most
STATES = (256, 128, 64, 32, 16)  # of a channel: what copies can lay out for threads
GRID = ("token", "head", "block")
LOG2E = float(np.log2(np.e))


def unsupported_ssd(batch: Paged, carry: Carry | None, x: Array, b: Array, c: Array) -> str | None:
    """Say why `ssd` cannot serve a call, or None."""
    if x.shape[-2] % b.shape[-2]:
        return f"{x.shape[-2]} heads do not divide into {b.shape[-2]} groups"
    return unsupported(batch, carry, (*x.shape[-2:], b.shape[-1]), x, b, c) or _uneven(x.shape[-1], b.shape[-1])


def unsupported_scan(batch: Paged, carry: Carry | None, x: Array, a: Array) -> str | None:
    """Say why `scan` cannot serve a call, or None."""
    if a.shape[1] > COLUMNS:
        return f"{a.shape[1]} states of a channel; expected {COLUMNS} at most"
    return unsupported(batch, carry, a.shape, x) or _uneven(*a.shape)


def unsupported(batch: Paged, carry: Carry | None, shape: tuple[int, ...], *inputs: Array) -> str | None:
    """Say why states of this shape, or inputs that are multiplied, cannot be served, or None."""
    if len(found := {x.dtype for x in inputs}) > 1 or not found <= {jnp.dtype("bfloat16"), jnp.dtype("float32")}:
        return f"inputs are all bfloat16 or all float32; found {', '.join(sorted(map(str, found)))}"
    states = getattr(carry and carry.slots, "ssm", None)
    if states is None or states.shape[2:] != shape or states.dtype != jnp.float32:
        return f"it serves Paged batches with slots.ssm of shape (layers, slots, {str(shape)[1:-1]}), in float32"
    return None


def _uneven(channels: int, states: int) -> str | None:
    if channels % ROWS or states not in STATES:
        return f"{channels} channels of {states} states; expected a multiple of {ROWS}, and {STATES}"
    return None


def ssd(
    batch: Paged, carry: Carry, layer: Any, x: Float[Array, "T N H"], dt: Float[Array, "T N"], a: Float[Array, " N"],
    b: Float[Array, "T G S"], c: Float[Array, "T G S"], d: Float[Array, " N"],
) -> tuple[Float[Array, "T N H"], Carry]:  # fmt: skip
    """Compute as `ssd`, of heads of a multiple of `ROWS` channels."""
    channels, dt, share = x.shape[2], dt.astype(jnp.float32), x.shape[1] // b.shape[1]
    ins = {"x": x.reshape(len(x), -1), "dt": dt, "b": b, "c": c, "d": d.astype(jnp.float32)}
    ins["decay"] = jnp.exp(dt * a.astype(jnp.float32))

    def numbers(r: SimpleNamespace, block: Any) -> Callable:
        head = jax.lax.div(block, jnp.int32(channels // ROWS))
        group, skip = jax.lax.div(head, jnp.int32(share)), r.d[head]

        def of(t: Any, x: Array) -> tuple[Any, ...]:
            return (lambda _: r.decay[t, head]), r.dt[t, head] * x, skip * x, r.b.at[t, group], r.c.at[t, group]

        return of

    y, carry = _rows("ssd_decode", 1, numbers, batch, carry, layer, ins)
    return y.reshape(x.shape), carry


def scan(
    batch: Paged, carry: Carry, layer: Any, x: Float[Array, "T C"], dt: Float[Array, "T C"], a: Float[Array, "C S"],
    b: Float[Array, "T S"], c: Float[Array, "T S"], d: Float[Array, " C"],
) -> tuple[Float[Array, "T C"], Carry]:  # fmt: skip
    """Compute as `selective_scan`, of channels of so few states that they are one part; a program reads `a` once."""
    from jax.experimental import pallas as pl

    ins = {"x": x, "dt": dt, "b": b, "c": c, "d": d.astype(jnp.float32), "a": a.astype(jnp.float32) * LOG2E}

    def numbers(r: SimpleNamespace, block: Any) -> Callable:
        rows = pl.ds(block * ROWS, ROWS)
        rates, skip = _loaded(r.a.at[rows]), _loaded(r.d.at[rows], 1)

        def of(t: Any, x: Array) -> tuple[Any, ...]:
            step = _loaded(r.dt.at[t, rows], 1)
            decay = jnp.exp2(rates * _across(step, a.shape[1]))
            return (lambda _: decay), step * x, skip * x, r.b.at[t], r.c.at[t]

        return of

    return _rows(
        "selective_scan_decode", next(n for n in (4, 2, 1) if len(x) % n == 0), numbers, batch, carry, layer, ins
    )


def _rows(
    name: str, tokens: int, numbers: Callable, batch: Paged, carry: Carry, layer: Any, ins: dict[str, Array]
) -> tuple[Array, Carry]:
    """Run over `ROWS` channels of x [T C] in a program, and so many tokens.

    numbers(r, block)(t, x) gives the decays of a part of the states, what is added of b, what of the output, b and c.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as gpu

    x, states = ins["x"], ins["b"].shape[-1]
    parts, width = max(1, states // COLUMNS), min(states, COLUMNS)

    def program(r: SimpleNamespace) -> None:
        block, first = jax.lax.axis_index(GRID[1]), jax.lax.axis_index(GRID[0]) * tokens
        here = pl.ds(block * ROWS, ROWS)
        rows = lambda place: pl.ds(place * x.shape[1] + block * ROWS, ROWS)
        some = [pl.ds(p * width, width) for p in range(parts)]
        places = [r.places[0, first + i] for i in range(tokens)]

        def fetch(i: int) -> None:
            for p in range(parts):
                tile = r.states.at[rows(places[i]), some[p]]
                gpu.copy_gmem_to_smem(tile, r.state_s.at[i, p], r.full.at[i])

        def token(i: int, of: Callable) -> None:
            t, fresh = first + i, r.places[1, first + i]
            decay, adds, total, b, c = of(t, _loaded(r.x.at[t, here], 1))
            gpu.barrier_wait(r.full.at[i])
            for p in range(parts):
                state = transfer_gpu.load(r.state_s.at[i, p], layout=gpu.Layout.WGMMA)
                state = decay(p) * jnp.where(fresh == 0, state, 0.0) + _across(adds, width) * _along(b.at[some[p]])
                r.state_s.at[i, p][...] = state
                total = total + jnp.sum(state * _along(c.at[some[p]]), axis=1)
            gpu.commit_smem()
            for p in range(parts):
                gpu.copy_smem_to_gmem(r.state_s.at[i, p], r.states.at[rows(places[i]), some[p]])
            transfer_gpu.store(r.out.at[t, here], total.astype(x.dtype))

        def nothing(i: int) -> None:
            transfer_gpu.store(
                r.out.at[first + i, here], gpu.layout_cast(jnp.zeros(ROWS, x.dtype), gpu.Layout.WGMMA.reduce(1))
            )

        for i in range(tokens):
            pl.when(places[i] >= 0)(partial(fetch, i))
        of = numbers(r, block)
        for i in range(tokens):
            pl.when(places[i] >= 0)(partial(token, i, of))
            pl.when(places[i] < 0)(partial(nothing, i))
        gpu.wait_smem_to_gmem(0)

    lanes = min(width, 32)
    tiled = gpu.TilingTransform((8, lanes)), gpu.SwizzleTransform(4 * lanes)
    scratch = {
        "state_s": gpu.SMEM((tokens, parts, ROWS, width), jnp.float32, transforms=tiled),
        "full": gpu.Barrier(num_arrivals=parts, num_barriers=tokens),
    }
    return call(program, name, (len(x) // tokens, x.shape[1] // ROWS), batch, carry, layer, ins, x, scratch)


def call(
    program: Callable, name: str, grid: tuple[int, ...], batch: Paged, carry: Carry, layer: Any, ins: dict[str, Array],
    out: Array, scratch: dict[str, Any],
) -> tuple[Array, Carry]:  # fmt: skip
    """Call program(r) as `slots_gpu.in_place`; "places" [2 T] are tokens' places, or -1, and whether they are new."""
    given = {**ins, "places": _places(batch, carry.slots.ssm.shape[1], layer)}
    grid_of = dict(zip(GRID, grid, strict=False))
    run = partial(
        in_place, program, name, grid_of, given, out, scratch=scratch, parameters=scan_tokens_gpu.parameters()
    )
    y, states = run(states=carry.slots.ssm)
    return y, slots.remembered(carry, states)


def _places(batch: Paged, count: int, layer: Any) -> Int[Array, "2 T"]:
    used = (batch.positions >= 0) & (batch.rows >= 0) & (batch.rows < count)
    return jnp.stack([jnp.where(used, layer * count + batch.rows, -1), batch.positions == 0]).astype(jnp.int32)


def _loaded(ref: Any, axis: int | None = None) -> Array:
    """Load numbers in float32: a part of states, or with an axis what is left of one when that is summed over."""
    from jax.experimental.pallas import mosaic_gpu as gpu

    layout = gpu.Layout.WGMMA if axis is None else gpu.Layout.WGMMA.reduce(axis)
    return transfer_gpu.load(ref, layout=layout, optimized=False).astype(jnp.float32)


def _across(x: Float[Array, " rows"], n: int) -> Float[Array, "rows n"]:
    return jax.lax.broadcast_in_dim(x, (len(x), n), [0])


def _along(ref: Any) -> Float[Array, "rows n"]:
    x = _loaded(ref, 0)
    return jax.lax.broadcast_in_dim(x, (ROWS, len(x)), [1])
