"""What XLA:CPU does well: on other targets each function here is the plain formula. `ops` knows of no CPU but here."""

import itertools
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from fdel.ops.contraction import Plan, inputs_last, ordered, product, wide, widen
from fdel.ops.platform import context, target
from fdel.ops.weights import Quantized

CHUNK = 128  # prompt tokens that take about as long as three steps of 8 sequences that decode
ROWS = "+"  # an axis added here: no letter, so that it clashes with none
TILE = 1 << 18  # most elements of a quantised weight that are decoded at once, so that they stay in cache
COPY = 1 << 20  # most elements of an expert's weight that are copied at once: large copies cost twice the product
FEW = range(2, 64)  # numbers of float32 rows that are multiplied up to three times faster as w x than as x w
MANY = 256  # rows from which the gradient of a matrix is worth an order of its own
INT8_ROWS = 4  # most float32 rows that are multiplied with int8 by `_in_lanes`
LANES = 32  # sums of one output side by side
TERMS = 64  # most numbers that a lane adds up in one loop
FINE = 1 << 25  # numbers in a model's layers from which 32 tokens of padding take longer than 20 ms of a processor


def here() -> bool:
    """Tell whether what is traced here runs on CPU."""
    return target() == "cpu"


def alone() -> bool:
    """Tell whether what is traced here runs on one CPU, so that no mesh divides its arrays."""
    return here() and not context("dp", "fsdp", "ep", "tp", "sp")


def sizes_between(sizes: Sequence[int], weights: int) -> list[int]:
    """List numbers of blocks of 32 tokens between `sizes`, in eighths of the next one, that are worth a program here.

    So a sixth of a prefill's blocks is padding at most, and not a half. None for a model with fewer than `FINE` `weights`
    in its layers: there a program takes longer to compile than all that it saves. Of 2, 4, 8 and 16 these are 1, 3, 5, 6,
    7, 10, 12 and 14.
    """
    step = lambda high: max(1, high // 8)
    pairs = itertools.pairwise([0, *sizes]) if here() and weights >= FINE else ()
    return [n for low, high in pairs for n in range(low + step(high), high, step(high))]


def each_row(f: Callable, *arrays: Array, loop: bool, together: int = 1) -> Any:
    """Compute f(*arrays) for arrays [B ...], here with a `loop` over the rows: what a row needs stays in cache.

    At most `together` rows at a time, as many as divide B. Not where a mesh divides the rows: a loop over them
    would gather them first.
    """
    count = len(arrays[0])
    size = next(n for n in range(min(count, together), 0, -1) if count % n == 0)
    if not alone() or not loop or count == size:
        return f(*arrays)
    out = lax.map(lambda xs: f(*xs), tuple(x.reshape(-1, size, *x.shape[1:]) for x in arrays))
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), out)


def backward_block(block: int, length: int) -> int:
    """Give the size of a backward pass's blocks: here half of `block`, since more arrays are in use than forward."""
    return block // 2 if here() and block % 2 == 0 and length > block else block


def row_dots(x: Float[Array, "... H"], y: Float[Array, "... H"]) -> Float[Array, "... 1"]:
    """Sum x y over the last axis, in float32. Here as a product: XLA:CPU sums over short axes at a crawl."""
    products = x.astype(jnp.float32) * y.astype(jnp.float32)
    if not here():
        return products.sum(-1, keepdims=True)
    ones = jnp.ones((products.shape[-1], 1))
    return jnp.einsum("...h,hx->...x", products, ones, precision=lax.Precision.HIGHEST)


def argmax(z: Float[Array, "B V"]) -> Int[Array, " B"]:
    """Name the first largest of each row; of a row with NaN, some place.

    Here in two passes: XLA:CPU takes eight times as long for values with their places.
    """
    if not here():
        return jnp.argmax(z, -1)
    largest = (z == z.max(-1, keepdims=True)) | jnp.isnan(z)
    return jnp.where(largest, jnp.arange(z.shape[1]), z.shape[1]).min(-1)


def over_queries(x: Float[Array, "B K G T H"], y: Float[Array, "B K G T S"]) -> Float[Array, "B K H S"]:
    """Sum x y over queries, in float32.

    The smaller matrix is left, since XLA:CPU turns that one round with all that it is computed from. It cannot multiply
    half precision so: here the factors become float32 first.
    """
    if here():
        x, y = x.astype(jnp.float32), y.astype(jnp.float32)
    return jnp.einsum("bkgqh,bkgqs->bkhs", x, y, preferred_element_type=jnp.float32)


def dot(plan: Plan, x: Array, w: Array, dtype: jnp.dtype) -> Array:
    """Contract two arrays of one dtype with one dot product, as `contraction.product` does."""
    if not here():
        return product(plan, x, w, dtype)
    batch, inputs, outputs = plan.batch, plan.contracted, plan.outputs
    parts = next((p for p in ((batch, outputs, inputs), (batch, inputs, outputs)) if "".join(p) == plan.w), None)
    if parts is None or len(plan.w) < 3 or not outputs:
        return _rows(plan, x, w, dtype)
    # A weight of three axes would be copied before each product: make it a matrix.
    sizes = dict(zip(plan.w, w.shape, strict=True))
    w = w.reshape(*(sizes[c] for c in batch), *(math.prod(sizes[c] for c in part) for part in parts[1:]))
    plan, x = inputs_last(plan, x)
    rest = "".join(c for c in plan.out if c not in outputs)
    y = _rows(Plan(plan.x, plan.w.replace(outputs, outputs[0]), rest + outputs[0]), x, w, dtype)
    return ordered(y.reshape(*y.shape[:-1], *(sizes[c] for c in outputs)), rest + outputs, plan.out)


def _rows(plan: Plan, x: Array, w: Array, dtype: jnp.dtype) -> Array:
    """Choose how to multiply by the number of rows."""
    rows, outputs, inputs = plan.rows, plan.outputs, plan.contracted
    count, full = math.prod(x.shape[plan.x.index(c)] for c in rows), wide(x.dtype)
    if x.dtype == jnp.int8 and _has_lanes(plan, w, count, 1):
        return _in_lanes(plan, x, w).astype(dtype)
    if x.dtype.itemsize < 4 and count == 1:  # one row of less than 32 bits takes many times as long as a few
        more = 1 if jnp.issubdtype(x.dtype, jnp.integer) else 3
        padded = jnp.pad(x[None], ((0, more), *[(0, 0)] * x.ndim))
        return product(Plan(ROWS + plan.x, plan.w, ROWS + plan.out), padded, w, full).astype(dtype)[0]
    if x.dtype == jnp.float32 and count in FEW and plan.w.endswith(inputs):
        turned = plan.batch + outputs + rows
        y = lax.optimization_barrier(product(Plan(plan.w, plan.x, turned), w, x, full))  # else XLA swaps the operands
        return ordered(y.astype(dtype), turned, plan.out)
    matrix = len(outputs) == len(inputs) == 1 and plan.w == outputs + inputs and plan.x.endswith(inputs)
    matrix = matrix and x.dtype.itemsize >= 4 and w.shape[0] >= w.shape[1]
    if matrix and count >= MANY and alone():
        return ordered(_many_rows(x, w).astype(dtype), rows + outputs, plan.out)
    return product(plan, x, w, full).astype(dtype)


@jax.custom_vjp
def _many_rows(x: Array, w: Array) -> Array:
    """Multiply x [... D] with w [F D], of which F is not the smaller one; [... F].

    Only the gradient in w differs from JAX's own, dy^T x. XLA:CPU turns the left matrix of such a product round while it
    computes its elements, and so walks in strides through all that dy is made from, often the end of an activation's
    gradient. Here x, the smaller one, is left, and the result is turned round.
    """
    return lax.dot_general(x, w, (((x.ndim - 1,), (1,)), ((), ())))


def _many_rows_backward(saved: tuple[Array, Array], dy: Array) -> tuple[Array, Array]:
    x, w = saved
    flat = lambda a: a.reshape(-1, a.shape[-1])
    dw = lax.dot_general(flat(x), flat(dy), (((0,), (0,)), ((), ())))
    return lax.dot_general(dy, w, (((x.ndim - 1,), (0,)), ((), ()))), dw.T


_many_rows.defvjp(lambda x, w: (_many_rows.fun(x, w), (x, w)), _many_rows_backward)


def in_tiles(f: Callable[..., Array], plan: Plan, x: Array, w: Quantized) -> Array:
    """Give f(plan, x, w), which contracts x with a quantised weight; here of float32 and a tile of outputs at a time."""
    if not here():
        return f(plan, x, w)
    x = widen(x)
    count = math.prod(x.shape[plan.x.index(c)] for c in plan.rows)
    stored = w.format == "int8" and w.scale is None and w.zero is None  # so f multiplies with what is stored
    if stored and x.dtype == jnp.float32 and _has_lanes(plan, w.values, count, INT8_ROWS):
        return _in_lanes(plan, x, w.values)
    # Tiles are cut from the leading axes that x lacks; or from the first, if x has it.
    lead = "".join(itertools.takewhile(lambda c: c not in plan.x, plan.w)) or plan.w[0]
    sizes, size = w.values.shape[: len(lead)], math.prod(w.values.shape[: len(lead)])
    tiles = _tiles(size, w.values.size // size, TILE)
    if tiles == 1:
        return f(plan, x, w)
    cut = lambda c, n: c.reshape(tiles, size // tiles, *c.shape[n:])
    rest = "".join(c for c in plan.out if c not in lead)
    tile = Plan(plan.x, lead[0] + plan.w[len(lead) :], lead[0] + rest)
    w = jax.tree.map(lambda c: cut(c, len(lead)), w)
    if lead in plan.x:
        x = cut(jnp.moveaxis(x, plan.x.index(lead), 0), 1)
        tile = replace(tile, x=lead + plan.x.replace(lead, ""))
        y = lax.map(lambda xw: f(tile, *xw), (x, w))
    else:
        y = lax.map(lambda w: f(tile, x, w), w)
    return ordered(y.reshape(*sizes, *y.shape[2:]), lead + rest, plan.out)


def _has_lanes(plan: Plan, w: Array, rows: int, most: int) -> bool:
    """Tell whether `_in_lanes` serves a product with so many rows."""
    inputs = plan.contracted
    size = math.prod(w.shape[len(w.shape) - len(inputs) :])
    return w.dtype == jnp.int8 and rows <= most and plan.w == plan.outputs + inputs and size % LANES == 0 and alone()


def _in_lanes(plan: Plan, x: Array, w: Array) -> Array:
    """Contract a few rows x, float32 or int8, with int8 w, whose inputs are last; the sums are float32 or int32.

    Each output is `LANES` sums side by side, of every so manieth input, and then their sum. XLA:CPU makes the former one
    loop of vectors that reads w as it is stored. Its own program for products of 8 bits turns the matrix round in each
    call; one of floats would have it written as floats first. Sums of `TERMS` products of integers are exact in float32.
    """
    plan, x = inputs_last(plan, x)
    kept, outputs, shape = plan.x[:-1], plan.outputs, w.shape[: len(plan.outputs)]
    f32, size = jnp.float32, x.shape[-1] // LANES
    # A loop with all terms would grow with them.
    parts = next(n for n in range(-(-size // TERMS), size + 1) if size % n == 0)
    w = w.reshape(math.prod(shape), 1, parts, -1, LANES)
    rows = x.reshape(-1, parts, size // parts, LANES)
    terms = (rows[:, :, i].astype(f32) * w[:, :, :, i].astype(f32) for i in range(size // parts))
    y = lax.optimization_barrier(reduce(operator.add, terms)).reshape(len(w), len(rows), -1)
    exact = jnp.issubdtype(x.dtype, jnp.integer)
    y = y.astype(jnp.int32).sum(-1) if exact else y @ jnp.ones(y.shape[-1], f32)  # a sum of floats in order is slower
    sizes = dict(zip(plan.x, x.shape, strict=True))
    return ordered(y.reshape(*shape, *(sizes[c] for c in kept)), outputs + kept, plan.out)


def once(f: Callable[[Array], Any], x: Array) -> Any:
    """Give f(x), elementwise and dear; here as a loop, since XLA:CPU would compute it for each head of each layer again."""
    if not alone() or x.size % 2:
        return f(x)
    return jax.tree.map(lambda y: y.reshape(x.shape), lax.map(f, x.reshape(2, x.size // 2)))


def in_step(*trees: Any) -> tuple:
    """Give what a step of a loop reads; before jax 0.11, XLA:CPU would convert all of it to float32 ahead of the loop."""
    return lax.optimization_barrier(trees) if here() else trees


def expert_tiles(w: Array) -> int:
    """Into how many tiles of outputs to cut each matrix of w [E F D] when it is copied."""
    return _tiles(w.shape[1], w.shape[2], COPY) if here() else 1


def _tiles(size: int, width: int, most: int) -> int:
    """Into how many equal tiles to cut `size` rows of `width` elements: the least number that respects `most`."""
    n = next((n for n in range(1, size + 1) if size % n == 0 and size // n * width <= most), size)
    return n if size // n * width >= most // 16 else 1  # a size without divisors would make tiles of single rows


def bordered(run: Callable[[Callable], Callable], f: Callable) -> Callable:
    """Give run(f), where `run` puts f on each device's parts. On CPU floating arguments and results cross in float32.

    It is the sum of a gradient, say, of bfloat16 that does not compile, where not all mesh axes are divided.
    """
    if not here():
        return run(f)

    back = lambda x, dtype: x.astype(dtype) if jnp.issubdtype(dtype, jnp.floating) else x  # keys cannot be cast

    def on_cpu(*args: Any) -> Any:
        dtypes, returned = jax.tree.map(lambda x: x.dtype, args), []

        def local(*args: Any) -> Any:
            out = f(*jax.tree.map(back, args, dtypes))
            returned.append(jax.tree.map(lambda x: x.dtype, out))
            return jax.tree.map(widen, out)

        out = run(local)(*jax.tree.map(widen, args))
        return jax.tree.map(back, out, returned[0])

    return on_cpu


def collective(f: Callable[[Array], Array], x: Array) -> Array:
    """Give f(x), which sums or gathers over devices inside `shard.divided`; on CPU it is computed in float32."""
    return f(widen(x)).astype(x.dtype) if here() else f(x)
