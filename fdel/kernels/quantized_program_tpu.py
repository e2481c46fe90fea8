"""The program of `quantized_matmul_tpu`: what a step of its grid does with a block of outputs."""

import functools
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from fdel.kernels.quantized_formats_tpu import DIGITS, INTEGERS, LANES, PLAIN, Tiling, read_scales, read_values

BASE = 256  # of digits
UNROLL = 16  # products side by side
BY_ROWS, AS_READ = (((1,), (1,)), ((), ())), (((1,), (0,)), ((), ()))  # contract the last axes; inputs of a matrix


def program(about: Tiling, names: tuple[str, ...], steps: int, *refs: Any) -> None:
    """Compute a block of results; `refs` are the arguments, the result and the memory of the kernel, by `names`.

    Rows of x are others after so many `steps` of the grid; 0 stands for never.
    """
    from jax.experimental import pallas as pl

    r = SimpleNamespace(**dict(zip(names, refs, strict=True)))
    zero = scales_of(about, r)
    if about.few and (middle := INTEGERS.get(about.format, 0)):
        zero = (0 if zero is None else zero) - middle * r.scale[...]
    if about.few:
        at = pl.program_id(1)
        pl.when((at % steps if steps else at) == 0)(lambda: _digits(r, about))
        _of_few(about, r, zero)
    else:
        _of_many(about, r, zero)


def scales_of(about: Tiling, r: Any) -> Float[Array, "groups outputs"] | None:
    """Let `r.scale` be numbers [groups outputs], and give those that zero points stand for, if there are any."""
    if about.scale != "float":
        r.decoded[...] = read_scales(about, r)
        r.scale = r.decoded
    if not hasattr(r, "zero"):
        return None
    zero = r.zero[...]
    integers = jnp.issubdtype(zero.dtype, jnp.integer)
    zero = (zero.astype(jnp.int32) if integers else zero).astype(jnp.float32)
    return zero * -r.scale[...] if integers else zero


def _inputs(r: Any, about: Tiling, index: Any) -> Array:
    """Read what a chunk is multiplied with [rows, chunk], or [rows, 2 chunk] for its high nibbles and for its low ones."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    each, at = about.each, lambda first, width: r.x[:, pl.ds(pl.multiple_of(first, LANES), width)]
    if about.halves == 1 or each >= LANES:
        return jnp.concatenate([at(*place) for place in places(about, index)], 1)
    x = at(index * 2 * LANES, 2 * LANES)
    words = x if x.dtype == jnp.float32 else pltpu.bitcast(x, jnp.int32)
    tiles = words[:, :LANES], words[:, LANES:]
    group, found = jax.lax.broadcasted_iota(jnp.int32, tiles[0].shape, 1) // each, []
    for half in range(2):
        part = tiles[0]
        for p in range(about.beside):
            first = (2 * p + half) * each
            piece, shift = tiles[first // LANES], (p * each - first) % LANES
            piece = pltpu.roll(piece, shift, 1) if shift else piece
            part = piece if p == 0 else jnp.where(group == p, piece, part)
        found.append(part)
    words = jnp.concatenate(found, 1)
    return words if x.dtype == jnp.float32 else pltpu.bitcast(words, x.dtype)


def _digits(r: Any, about: Tiling) -> None:
    """Write x as digits to the base 256, lowest first, in steps of 2^-22 of the greatest of each row; or as it is.

    Rows of the product: for each of its groups, for each digit, those of x, which are zero outside of the group. With
    floats they are x itself, and have no digits.
    """
    from jax.experimental import pallas as pl

    width = about.chunk * about.halves
    chunks = r.x.shape[1] // width

    def most(i: Any, top: Array) -> Array:
        x = r.x[:, pl.ds(pl.multiple_of(i * width, LANES), width)]
        return jnp.maximum(top, jnp.max(jnp.abs(x.astype(jnp.float32)), 1, keepdims=True))

    unroll = next(n for n in (4, 2, 1) if chunks % n == 0)
    unit = jnp.full((about.rows, 1), about.unit, jnp.float32)
    if about.digits > 1:
        unit = jax.lax.fori_loop(0, chunks, most, 0 * unit, unroll=unroll) * 2.0 ** (2 - 8 * DIGITS)
    r.unit[...] = jnp.broadcast_to(unit, r.unit.shape)
    unit = jnp.where(unit == 0, 1, unit)
    group = jax.lax.broadcasted_iota(jnp.int32, (about.rows, width), 1) % about.chunk // about.each
    column = jax.lax.broadcasted_iota(jnp.int32, r.sums.shape, 1)

    def lay(i: Any, sums: Array) -> Array:
        x = _inputs(r, about, i).astype(jnp.float32)
        digits = [x]
        if about.digits > 1:
            whole, digits = jnp.round(x / unit).astype(jnp.int32), []
            for _ in range(about.digits):
                digits.append(((whole + BASE // 2) & (BASE - 1)) - BASE // 2)
                whole = (whole - digits[-1]) >> 8
        if about.beside > 1:
            digits = [jnp.where(group == p, d, 0) for p in range(about.beside) for d in digits]
        r.digits[:, pl.ds(pl.multiple_of(i * width, LANES), width)] = jnp.concatenate(digits).astype(r.digits.dtype)
        for p in range(about.beside):
            more = jnp.sum(jnp.where(group == p, x, 0) if about.beside > 1 else x, 1, keepdims=True)
            sums += jnp.where(column == _group(about, i) + p, more, 0)
        return sums

    r.sums[...] = jax.lax.fori_loop(0, chunks, lay, jnp.zeros(r.sums.shape, jnp.float32), unroll=unroll)


def _group(about: Tiling, index: Any) -> Any:
    """Give the first group of a chunk."""
    return index * about.beside if about.each <= about.chunk else index // (about.each // about.chunk)


def _of_few(about: Tiling, r: Any, zero: Any) -> None:
    """Multiply digits of x with integers, or x with floats, group by group."""
    from jax.experimental import pallas as pl

    rows, width = about.digits * about.rows, about.chunk * about.halves
    sums = jnp.int32 if about.digits > 1 else jnp.float32
    inner = max(1, about.each // about.chunk)  # chunks of a group
    shape = (r.digits.shape[0], r.values.shape[0])

    def product(i: Any) -> Array:
        x = r.digits[:, pl.ds(pl.multiple_of(i * width, LANES), width)]
        weight = jnp.concatenate(read_values(r, about, i, x.dtype), 1).astype(x.dtype)
        return jax.lax.dot_general(x, weight, BY_ROWS, preferred_element_type=sums).astype(jnp.float32)

    def step(g: Any, total: Array) -> Array:
        if inner == 1:
            y = product(g)
        else:
            add = lambda i, y: y + product(g * inner + i)
            y = jax.lax.fori_loop(0, inner, add, jnp.zeros(shape, jnp.float32), unroll=unrolled(inner))
        many = 1 if about.beside % 8 else 8
        for p in range(about.beside):
            if p % many == 0:
                scale = r.scale[pl.ds(pl.multiple_of(g * about.beside + p, many), many), :]
            total += y[p * rows : (p + 1) * rows] * scale[p % many : p % many + 1]
        return total

    groups = r.scale.shape[0]
    steps = groups // about.beside
    start = jnp.zeros((rows, shape[1]), jnp.float32)
    total = jax.lax.fori_loop(0, steps, step, start, unroll=unrolled(steps) if inner == 1 else 1)
    y = functools.reduce(
        lambda y, d: y * BASE + total[d * about.rows : (d + 1) * about.rows], reversed(range(about.digits)), 0.0
    )
    y = y * r.unit[:, :1]
    if about.format == "uint8":
        zero = 128 * r.scale[...] + (0 if zero is None else zero)
    if zero is not None:
        y += jnp.dot(r.sums[:, :groups], zero, preferred_element_type=jnp.float32, precision=jax.lax.Precision.HIGHEST)
    r.out[...] = y.astype(about.dtype)


def unrolled(steps: int) -> int:
    """Give how many steps of a loop are written out: the most up to `UNROLL` that divide them."""
    return next(n for n in range(min(UNROLL, steps), 0, -1) if steps % n == 0)


def places(about: Tiling, index: Any) -> list[tuple[Any, int]]:
    """Say where the inputs of a chunk begin and how many follow, in the order of its numbers."""
    chunk, each, halves = about.chunk, about.each, about.halves
    if halves == 1 or each <= chunk:
        return [(index * chunk * halves, chunk * halves)]
    first = index // (each // chunk) * 2 * each + index % (each // chunk) * chunk
    return [(first, chunk), (first + each, chunk)]


def scaled(about: Tiling, r: Any, index: Any, zeros: Any) -> Float[Array, "inputs outputs"]:
    """Read a chunk of the weight as numbers, less `about.unit`.

    Its bytes are turned before they are read: scales lie along outputs, as they are stored, and a group is some rows.
    """
    from jax.experimental import pallas as pl

    chunk, each, middle = about.chunk, about.each, INTEGERS.get(about.format, 0)
    parts, found = read_values(r, about, index, jnp.float32, turned=True), []
    for p in range(max(1, chunk // each)):
        group = pl.ds(index * (chunk // each) + p if each <= chunk else index // (each // chunk), 1)
        for part in parts:
            part = part[p * each : (p + 1) * each].astype(jnp.float32)
            part = (part - middle if middle else part) * r.scale[group, :]
            found.append(part if zeros is None else part + zeros[group, :])
    return jnp.concatenate(found)


def _of_many(about: Tiling, r: Any, zero: Any) -> None:
    """Scale and round a chunk of the weight, and add its product."""
    from jax.experimental import pallas as pl

    late = r.scale.shape[0] == 1 and zero is None  # one scale for an output: the result is scaled
    if zero is not None:
        r.zeros[...] = zero
    r.total[...] = jnp.zeros_like(r.total)

    def plain(i: Any) -> Array:
        dtype = r.x.dtype if about.format in PLAIN else jnp.float32
        part = jnp.concatenate(read_values(r, about, i, dtype), 1).astype(dtype)
        return part if about.format in PLAIN else part - INTEGERS.get(about.format, 0)

    def step(i: Any, _: None) -> None:
        part = plain(i) if late else scaled(about, r, i, None if zero is None else r.zeros)
        x = jnp.concatenate([r.x[:, pl.ds(pl.multiple_of(at, LANES), n)] for at, n in places(about, i)], 1)
        add = functools.partial(jax.lax.dot_general, preferred_element_type=jnp.float32)
        precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
        r.total[...] += add(x, part.astype(x.dtype), BY_ROWS if late else AS_READ, precision=precision)

    jax.lax.fori_loop(0, r.values.shape[1] // about.chunk, step, None)
    total = r.total[...] * r.scale[...] if late else r.total[...]
    r.out[...] = (total if about.unit == 1 else total * about.unit).astype(about.dtype)


def expand(about: Tiling, r: Any) -> None:
    """Write a block of a matrix as numbers `r.expanded` [1 inputs outputs], less `about.unit`."""
    from jax.experimental import pallas as pl

    zero = scales_of(about, r)
    if zero is not None:
        r.zeros[...] = zero

    def step(i: Any, _: None) -> None:
        part, begin = scaled(about, r, i, None if zero is None else r.zeros).astype(r.expanded.dtype), 0
        for at, n in places(about, i):
            r.expanded[0, pl.ds(pl.multiple_of(at, LANES), n), :] = part[begin : begin + n]
            begin += n

    jax.lax.fori_loop(0, r.values.shape[1] // about.chunk, step, None)
