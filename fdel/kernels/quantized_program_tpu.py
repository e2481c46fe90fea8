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
NARROW = 4  # groups beside each other whose scales the multiplier copies to their inputs
PARTS = 3  # bfloat16 numbers whose sum is one of float32
BY_ROWS = (((1,), (1,)), ((), ()))  # contract the last axes


def program(about: Tiling, names: tuple[str, ...], steps: int, *refs: Any) -> None:
    """Compute a block of results; `refs` are the arguments, the result and the memory of the kernel, by `names`.

    Rows of x are others after so many `steps` of the grid; 0 stands for never.
    """
    from jax.experimental import pallas as pl

    r = SimpleNamespace(**dict(zip(names, refs, strict=True)))
    if about.scale != "float":
        r.decoded[...] = read_scales(about, r)
        r.scale = r.decoded
    zero, scale, middle = (
        None,
        r.scale[...],
        INTEGERS.get(about.format, 0),
    )  # what a stored 0 stands for [groups outputs]
    if hasattr(r, "zero"):
        zero = r.zero[...]
        integers = jnp.issubdtype(zero.dtype, jnp.integer)
        zero = (zero.astype(jnp.int32) if integers else zero).astype(jnp.float32)
        zero = zero * -scale if integers else zero
    if middle and about.few:
        zero = (0 if zero is None else zero) - middle * scale
    if about.few:
        at = pl.program_id(1)
        pl.when((at % steps if steps else at) == 0)(lambda: _digits(r, about))
        _of_few(about, r, zero)
    else:
        _of_many(about, r, zero)


def _inputs(r: Any, about: Tiling, index: Any) -> Array:
    """Read what a chunk is multiplied with [rows, chunk], or [rows, 2 chunk] for its high nibbles and for its low ones."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    chunk, each = about.chunk, about.each
    at = lambda first, width: r.x[:, pl.ds(pl.multiple_of(first, LANES), width)]
    if about.halves == 1:
        return at(index * chunk, chunk)
    if each >= LANES:
        inner = each // chunk
        first = index // inner * 2 * each + index % inner * chunk
        return jnp.concatenate([at(first, chunk), at(first + each, chunk)], 1)
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
        weight = read_values(r, about, i, x.dtype)
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


def _lay_parts(to: Any, x: Float[Array, "groups outputs"]) -> None:
    """Write numbers as three of bfloat16 that sum to them, in columns."""
    x, each = x.T, to.shape[1] // PARTS
    to[...] = jnp.zeros_like(to)
    for i in range(PARTS):
        part = jax.lax.bitcast_convert_type(x, jnp.int32) & jnp.int32(-(2**16))
        part = jax.lax.bitcast_convert_type(part, jnp.float32)
        to[:, i * each : i * each + x.shape[1]] = part.astype(to.dtype)
        x = x - part


def _of_many(about: Tiling, r: Any, zero: Any) -> None:
    """Scale and round a chunk of the weight, and add its product."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    groups, width = r.scale.shape[0], about.chunk * about.halves
    late = groups == 1 and zero is None  # one scale for an output: the result is scaled
    given = [] if late else [(r.scales, r.scale[...])]
    for to, x in given if zero is None else [*given, (r.zeros, zero)]:
        if about.beside >= NARROW:
            _lay_parts(to, x)
        else:
            to[:, :groups] = x.T
    r.total[...] = jnp.zeros_like(r.total)
    lane = jax.lax.broadcasted_iota(jnp.int32, (LANES, width), 1) % about.chunk // about.each
    sublane = jax.lax.broadcasted_iota(jnp.int32, (LANES, width), 0)

    def columns(x: Any, g: Any) -> Array:
        """Give the numbers of groups g to g + beside for each input of a chunk; if many, the multiplier copies them."""
        each, first = x.shape[1] // PARTS, g // LANES * LANES
        if about.beside < NARROW:
            tile = pltpu.roll(x[:, pl.ds(pl.multiple_of(first, LANES), LANES)], (LANES - g % LANES) % LANES, 1)
            return tile[:, :1] if about.beside == 1 else jnp.where(lane[:1] == 0, tile[:, :1], tile[:, 1:2])
        found = [x[:, pl.ds(pl.multiple_of(first + i * each, LANES), LANES)] for i in range(PARTS)]
        chosen = jnp.where(sublane == lane + (g - first), 1.0, 0.0)
        chosen = jnp.concatenate([chosen] * PARTS).astype(jnp.bfloat16)
        return jnp.dot(jnp.concatenate(found, 1), chosen, preferred_element_type=jnp.float32)

    def step(i: Any, _: None) -> None:
        g = _group(about, i)
        part = read_values(r, about, i, r.x.dtype if late and about.format in PLAIN else jnp.float32)
        if middle := INTEGERS.get(about.format, 0):
            part = part - middle
        if not late:
            part = part * columns(r.scales, g)
        part = (part if zero is None else part + columns(r.zeros, g)).astype(r.x.dtype)
        x = _inputs(r, about, i)
        precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
        r.total[...] += jax.lax.dot_general(x, part, BY_ROWS, preferred_element_type=jnp.float32, precision=precision)

    jax.lax.fori_loop(0, r.values.shape[1] // about.chunk, step, None)
    total = r.total[...] * r.scale[...] if late else r.total[...]
    r.out[...] = (total if about.unit == 1 else total * about.unit).astype(about.dtype)
