"""The program of `quantized_matmul_tpu`: what a step of its grid does with a block of outputs."""

import functools
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int


LANES = 128
DIGITS, BASE = 3, 256
UNROLL = 16  # products side by side
INTEGERS = {"int8": 0, "uint8": 0, "uint4": 0, "int4": 8}  # and what is stored for zero
B11 = jnp.float8_e4m3b11fnuz  # what a TPU unpacks in one instruction: e4m3 with a bias of 11, and no zero but 0
FLOATS = {"fp8": (B11, 2.0**4), "e2m1": (B11, 2.0**10), "e5m2": (jnp.float8_e5m2, 1.0)}  # as such, times what
INDICES = ("nf4", "fp4")  # into a table that lies along lanes
NARROW = ("int8", *FLOATS, *INDICES)  # formats that are numbers of x's dtype before they are scaled
BY_ROWS = (((1,), (1,)), ((), ()))  # contract the last axes


class Tiling(NamedTuple):
    """How a call is cut: see `quantized_matmul_tpu`."""

    few: bool
    rows: int  # of x in a block
    outputs: int  # in a block
    each: int  # bytes of a group
    beside: int  # groups in a product
    chunk: int  # bytes of a product
    halves: int  # numbers in a byte
    format: str
    scale: str  # how scales are stored: "float", "exponent", or a format of `SCALES` with numbers for each output
    dtype: Any  # of the result

    @property
    def digits(self) -> int:
        """How many rows of the product a row of x becomes."""
        return DIGITS if self.format in INTEGERS else 1

    @property
    def unit(self) -> float:
        """What a number that is read from stored bits is a multiple of."""
        return FLOATS[self.format][1] if self.format in FLOATS else 1.0


def program(about: Tiling, names: tuple[str, ...], *refs: Any) -> None:
    """Compute a block of results; `refs` are the arguments, the result and the memory of the kernel, by `names`."""
    r = SimpleNamespace(**dict(zip(names, refs, strict=True)))
    if about.scale != "float":
        r.decoded[...] = _scales(about, r)
        r.scale = r.decoded
    zero, scale, middle = None, r.scale[...], INTEGERS.get(about.format, 0)  # what a stored 0 stands for [groups outputs]
    if hasattr(r, "zero"):
        zero = r.zero[...]
        integers = jnp.issubdtype(zero.dtype, jnp.integer)
        zero = (zero.astype(jnp.int32) if integers else zero).astype(jnp.float32)
        zero = zero * -scale if integers else zero
    if middle and about.few:
        zero = (0 if zero is None else zero) - middle * scale
    (_of_few if about.few else _of_many)(about, r, zero)


def _scales(about: Tiling, r: Any) -> Float[Array, "groups outputs"]:
    """Read scales that are stored in 8 bits as numbers."""
    from jax.experimental.pallas import tpu as pltpu

    bits = r.scale[...]
    if about.scale == "fp8":
        kind, unit = FLOATS["fp8"]
        number = pltpu.bitcast(bits, kind).astype(jnp.float32)
        number = jnp.where(jnp.isnan(number), 0, number * unit)  # bits of -0
    else:
        number = bits.astype(jnp.int32)
        if about.scale == "exponent":
            return jax.lax.bitcast_convert_type(number << 23, jnp.float32)
        number = number.astype(jnp.float32)
    return number * r.step[...] + (r.low[...] if hasattr(r, "low") else 0)


def _floats(words: Int[Array, "rows lanes"], about: Tiling) -> list[Array]:
    """Read bytes as floats that TPUs unpack, less a power of two; `B11` has no -0, which becomes 0."""
    from jax.experimental.pallas import tpu as pltpu

    each = lambda byte: jnp.int32(np.uint32(byte * 0x01010101).view(np.int32))
    if about.format == "e2m1":  # the sign stays, and the three bits below it go to the lowest of the exponent
        found = []
        for x in (words, words << 4):
            rest = x >> 2 & each(0x1C)
            found.append(rest | x & (rest + each(0x7C)) & each(0x80))
    else:
        found = [words & ((words & each(0x7F)) + each(0x7F) | each(0x7F))]
    return [pltpu.bitcast(x, FLOATS[about.format][0]) for x in found]


def _look_up(row: Float[Array, "1 128"], index: Int[Array, "rows lanes"]) -> Float[Array, "rows lanes"]:
    """Gather numbers from a table that lies along lanes."""
    table = jnp.broadcast_to(row, (len(index), LANES))
    find = functools.partial(jnp.take_along_axis, table, axis=1, mode="promise_in_bounds")
    return jnp.concatenate([find(index[:, i : i + LANES]) for i in range(0, index.shape[1], LANES)], 1)


def _stored(r: Any, about: Tiling, index: Any, dtype: Any) -> Array:
    """Read a chunk of the weight's bytes as numbers [outputs, chunk], or [outputs, 2 chunk]: high nibbles, then low ones.

    Unsigned bytes are lowered by 128 where they become int8.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    raw = r.values[:, pl.ds(pl.multiple_of(index * about.chunk, LANES), about.chunk)]
    if about.halves == 1 and about.format == "int8":
        return raw.astype(dtype)
    if about.format in INDICES:
        codes = raw.astype(jnp.int32)
        return jnp.concatenate([_look_up(r.table[...], x).astype(dtype) for x in (codes >> 4, codes & 15)], 1)
    words = pltpu.bitcast(raw, jnp.int32)
    if about.format in FLOATS:
        return jnp.concatenate([x.astype(dtype) for x in _floats(words, about)], 1)
    if about.halves == 1:
        if dtype == jnp.int8:
            return pltpu.bitcast(words ^ jnp.int32(-0x7F7F7F80), jnp.int8)
        return raw.astype(jnp.int32).astype(dtype)
    nibbles = (x & jnp.int32(0x0F0F0F0F) for x in (jax.lax.shift_right_logical(words, jnp.int32(4)), words))
    return jnp.concatenate([pltpu.bitcast(x, jnp.int8) for x in nibbles], 1).astype(dtype)


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
        digits = [] if about.digits > 1 else [x]
        whole = jnp.round(x / unit).astype(jnp.int32) if about.digits > 1 else None
        while len(digits) < about.digits:
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

    pl.when(pl.program_id(1) == 0)(lambda: _digits(r, about))  # all steps have the same rows
    rows, width = about.digits * about.rows, about.chunk * about.halves
    sums = jnp.int32 if about.digits > 1 else jnp.float32
    inner = max(1, about.each // about.chunk)  # chunks of a group
    shape = (r.digits.shape[0], r.values.shape[0])

    def product(i: Any) -> Array:
        x = r.digits[:, pl.ds(pl.multiple_of(i * width, LANES), width)]
        weight = _stored(r, about, i, x.dtype)
        return jax.lax.dot_general(x, weight, BY_ROWS, preferred_element_type=sums).astype(jnp.float32)

    def step(g: Any, total: Array) -> Array:
        if inner == 1:
            y = product(g)
        else:
            add = lambda i, y: y + product(g * inner + i)
            y = jax.lax.fori_loop(0, inner, add, jnp.zeros(shape, jnp.float32), unroll=unrolled(inner))
        for p in range(about.beside):
            total += y[p * rows : (p + 1) * rows] * r.scale[pl.ds(g * about.beside + p, 1), :]
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


def _of_many(about: Tiling, r: Any, zero: Any) -> None:
    """Scale and round a chunk of the weight, and add its product."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    groups, width = r.scale.shape[0], about.chunk * about.halves
    late = groups == 1 and zero is None  # one scale for an output: the result is scaled
    if not late:
        r.scales[:, :groups] = r.scale[...].T
    if zero is not None:
        r.zeros[:, :groups] = zero.T
    r.total[...] = jnp.zeros_like(r.total)
    lane = jax.lax.broadcasted_iota(jnp.int32, (1, width), 1) % about.chunk // about.each

    def columns(x: Any, g: Any) -> Array:
        """Give the numbers of groups g to g + beside for each input of a chunk."""
        tile = x[:, pl.ds(pl.multiple_of(g // LANES * LANES, LANES), LANES)]
        tile = pltpu.roll(tile, (LANES - g % LANES) % LANES, 1)
        found = tile[:, :1]
        for p in range(1, about.beside):
            found = jnp.where(lane == p, tile[:, p : p + 1], found)
        return found

    def step(i: Any, _: None) -> None:
        g = _group(about, i)
        part = _stored(r, about, i, r.x.dtype if late and about.format in NARROW else jnp.float32)
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
