"""Bytes of a GPU's registers as words of 32 bits, on which one instruction works on four bytes.

Pallas gives a type of 8 or 16 bits to each number and knows no byte permutation (PTX ISA, `prmt`), so four functions reach
below it: `joined`, `chosen`, `halves` and `floats`. What is computed between them is on uint32, as everywhere. Each has a
plain form, for devices and interpreters that have no such registers; of the first three it has another order of words,
which nothing between looks at.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, BFloat16, Int8, UInt8, UInt16, UInt32

WORD = 4  # bytes


def joined(raw: UInt8[Array, "... N"] | Int8[Array, "... N"], plain: bool) -> UInt32[Array, "... N//4"]:
    """Join a thread's bytes in words: two neighbours, and the two that a product's layout has after them."""
    if plain:
        return jax.lax.bitcast_convert_type(raw.reshape(*raw.shape[:-1], -1, WORD), jnp.uint32)
    from jax.experimental.mosaic.gpu import utils

    def join(ctx: Any, raw: Any) -> Any:
        words = np.empty((raw.registers.shape[0], raw.registers.shape[1] // WORD, *raw.registers.shape[2:]), object)
        for at in np.ndindex(words.shape):
            tiles = [raw.registers[at[0], at[1] * WORD + i, *at[2:]] for i in range(WORD)]
            words[at] = utils.bitcast(utils.vector_concat(tiles), _words())
        return _array(words, raw.layout, False)

    return _inline(join, (raw.shape[0], raw.shape[1] // WORD), jnp.uint32)(raw)


def chosen(a: Any, b: Any, choice: Any, plain: bool) -> UInt32[Array, "... W"]:
    """Make words of bytes of a (0 to 3) and b (4 to 7): which, say the four low digits of `choice`, of 4 bits and below 8.

    Each is an array of words, one word or an int.
    """
    given = (a, b, choice)
    if plain:
        a, b, choice = (jnp.uint32(x) for x in given)
        found = jnp.uint32(0)
        for i in range(WORD):
            which = choice >> jnp.uint32(4 * i)
            byte = jnp.where(which & 4 != 0, b, a) >> ((which & 3) << 3) & 255
            found = found | byte << jnp.uint32(8 * i)
        return found
    from jax.experimental.mosaic.gpu import utils

    arrays = [x for x in given if not isinstance(x, int)]
    shape = next(x.shape for x in arrays if x.shape)

    def choose(ctx: Any, *arrays: Any) -> Any:
        whole = next(x for x in arrays if x.shape)
        words = np.empty(whole.registers.shape, object)
        for at in np.ndindex(words.shape):
            left = iter(arrays)
            each = [[_constant(x)] * 2 if isinstance(x, int) else _both(next(left), at) for x in given]
            words[at] = _vector([utils.prmt(*one) for one in zip(*each, strict=True)])
        return _array(words, whole.layout, False)

    return _inline(choose, shape, jnp.uint32)(*arrays)


def halves(pairs: Sequence[Sequence[UInt32[Array, "... W"]]], plain: bool) -> BFloat16[Array, "... N"]:
    """Take pairs of words apart into bfloat16 numbers, those of a word's first two bytes and of its last two (`joined`).

    Numbers of a pair are columns beside those of the one before.
    """
    first = pairs[0][0]
    if plain:
        both = [jax.lax.bitcast_convert_type(jnp.stack(pair, -1), jnp.bfloat16) for pair in pairs]
        return jnp.concatenate([x.reshape(*first.shape[:-1], -1) for x in both], -1)
    from jax.experimental.mosaic.gpu import utils
    from jaxlib.mlir import ir

    def split(ctx: Any, *words: Any) -> Any:
        shape = words[0].registers.shape
        numbers = np.empty((shape[0], len(pairs) * shape[1] * WORD, *shape[2:]), object)
        half = ir.VectorType.get((2,), ir.BF16Type.get())
        for at in np.ndindex(shape):
            for i, each in enumerate(words):
                for j, word in enumerate(_both(each, at)):
                    column = (i // 2 * shape[1] + at[1]) * WORD + 2 * j + i % 2
                    numbers[at[0], column, *at[2:]] = utils.bitcast(word, half)
        return _array(numbers, words[0].layout, None)

    shape = (first.shape[0], len(pairs) * first.shape[1] * WORD)
    return _inline(split, shape, jnp.bfloat16)(*(word for pair in pairs for word in pair))


def floats(words: UInt16[Array, " M"] | UInt32[Array, " M"], plain: bool) -> list[BFloat16[Array, " M"]]:
    """Take a word of each row apart into its numbers in e4m3, which become bfloat16, two by one instruction."""
    count = words.dtype.itemsize
    if plain:
        each = [(words >> words.dtype.type(8 * i)).astype(jnp.uint8) for i in range(count)]
        return [jax.lax.bitcast_convert_type(x, jnp.float8_e4m3fn).astype(jnp.bfloat16) for x in each]
    from jax.experimental.mosaic.gpu import utils
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import arith, llvm, vector

    def split(ctx: Any, words: Any) -> Any:
        numbers = [np.empty(words.registers.shape, object) for _ in range(count)]
        short, word = (ir.IntegerType.get_signless(n) for n in (16, 32))
        f16, f32, bf16 = (ir.VectorType.get((2,), x.get()) for x in (ir.F16Type, ir.F32Type, ir.BF16Type))
        for at in np.ndindex(words.registers.shape):
            shorts = utils.bitcast(words.registers[at], ir.VectorType.get((count // 2,), short))
            for i in range(count // 2):
                two = [vector.extract(shorts, [], [i])]
                half: Any = llvm.inline_asm(word, two, "cvt.rn.f16x2.e4m3x2 $0, $1;", "=r,h")
                both = arith.truncf(bf16, arith.extf(f32, utils.bitcast(half, f16)))
                for j in range(2):
                    numbers[2 * i + j][at] = utils.vector_slice(both, slice(j, j + 1))
        return [_array(x, words.layout, None) for x in numbers]

    return _inline(split, words.shape, jnp.bfloat16, count)(words)


def _inline(body: Any, shape: tuple[int, ...], dtype: Any, count: int = 0) -> Any:
    """Put a function of Mosaic GPU's arrays, in the layout of products, or with `count` results of rows, into a kernel."""
    from jax.experimental.pallas import mosaic_gpu as gpu

    layout = gpu.Layout.WGMMA.reduce(1) if count else gpu.Layout.WGMMA

    def call(*arrays: Array) -> Any:
        given = tuple(layout if x.shape else gpu.Layout.WG_SPLAT(()) for x in arrays)
        result = gpu.ShapeDtypeStruct(shape, dtype, layout=layout)
        return gpu.inline_mgpu(arg_types=given, return_type=[result] * count or result)(body)(*arrays)

    return call


def _array(registers: Any, layout: Any, signed: bool | None) -> Any:
    from jax.experimental.mosaic.gpu import FragmentedArray

    return FragmentedArray(_registers=registers, _layout=layout, _is_signed=signed)


def _words() -> Any:
    from jaxlib.mlir import ir

    return ir.VectorType.get((2,), ir.IntegerType.get_signless(32))


def _constant(x: int) -> Any:
    from jax.experimental.mosaic.gpu import utils
    from jaxlib.mlir import ir

    return utils.c(x, ir.IntegerType.get_signless(32))


def _both(words: Any, at: tuple[int, ...]) -> list[Any]:
    from jaxlib.mlir.dialects import vector

    if not words.shape:
        return [words.registers.item()] * 2
    return [vector.extract(words.registers[at], [], [i]) for i in range(2)]


def _vector(words: list[Any]) -> Any:
    from jaxlib.mlir.dialects import vector

    return vector.from_elements(_words(), words)
