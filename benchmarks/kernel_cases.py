"""The calls that kernels.py measures: operations at the shapes of models, their inputs, bytes and FLOPs.

Shapes of Hopper kernels are those of tests/aot, which compiles them; here stand only those that no table there has. Each
case also exists at a small size, at which a kernel is compared with the reference in float32 before it is timed.
"""

import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
from fdel import ops
from fdel.ops.batch import Packed, Paged, Pages
from fdel.ops.paged import paged_attention
from fdel.ops.quantized_pages import FORMATS, encode, scales
from fdel.ops.weights import Quantized, dense
from tests.aot import hopper_products

PAGE = 64  # tokens
HALF = jnp.bfloat16
# Rows, tokens, query heads, key heads, channels (of keys and of values), mask, sequences of a row.
ATTEND: dict[str, tuple] = {
    "1 x 16,384, 16 heads of 128": (1, 16384, 16, 16, 128, {"causal": False}, 1),
    "1 x 16,384, 16 heads of 128, causal": (1, 16384, 16, 16, 128, {}, 1),
    "4 x 4,096, 32 heads over 8 of 128, causal": (4, 4096, 32, 8, 128, {}, 1),
    "16 x 1,024, 16 heads of 128, causal": (16, 1024, 16, 16, 128, {}, 1),
    "4 x 4,096, 32 heads over 8 of 64, causal": (4, 4096, 32, 8, 64, {}, 1),
    "4 x 4,096, 8 heads over 4 of 256, causal": (4, 4096, 8, 4, 256, {}, 1),
    "4 x 4,096, 16 heads of 192 and 128, causal": (4, 4096, 16, 16, (192, 128), {}, 1),
    "1 x 16,384, 16 heads of 128, window of 1,024": (1, 16384, 16, 16, 128, {"window": 1024}, 1),
    "1 x 16,384, 16 heads of 128, 8 sequences": (1, 16384, 16, 16, 128, {}, 8),
    "4 x 4,096, 16 heads of 128, softcap": (4, 4096, 16, 16, 128, {"softcap": 50.0}, 1),
}
LONGEST = [name for name in ATTEND if name.startswith("1 x 16,384, 16 heads of 128") and ATTEND[name][6] == 1][:2]
# Sequences, new tokens of each, tokens of each, query heads, key heads, channels, values that are a part of keys, mask,
# sinks, how the cache is stored.
PAGED: dict[str, tuple] = {
    "decode, 64 x 8,192, 32 heads over 8 of 128": (64, 1, 8192, 32, 8, 128, None, {}, False, None),
    "decode, 1 x 8,192, 32 heads over 8 of 128": (1, 1, 8192, 32, 8, 128, None, {}, False, None),
    "decode, 64 x 1,024, 32 heads over 8 of 128": (64, 1, 1024, 32, 8, 128, None, {}, False, None),
    "decode, 64 x 8,192, 64 heads over 8 of 64, window, softcap, sinks": (
        64, 1, 8192, 64, 8, 64, None, {"window": 4096, "softcap": 50.0}, True, None,
    ),
    "prefill, 512 of 4,096, 32 heads over 8 of 128": (1, 512, 4096, 32, 8, 128, None, {}, False, None),
    "decode, 64 x 8,192, 32 heads over 8 of 128, int8": (64, 1, 8192, 32, 8, 128, None, {}, False, "int8"),
    "decode, 64 x 8,192, 32 heads over 8 of 128, fp8": (64, 1, 8192, 32, 8, 128, None, {}, False, "fp8"),
    "prefill, 512 of 4,096, 32 heads over 8 of 128, int8": (1, 512, 4096, 32, 8, 128, None, {}, False, "int8"),
}  # fmt: skip
for name, (blocks, block, tokens, heads) in hopper_products.LATENTS.items():
    sequences, new = (blocks, 1) if block == 1 else (1, blocks * block)
    PAGED[name] = (sequences, new, tokens, heads, 1, 576, 512, {}, False, None)
PAGED["latents, decode, 64 x 8,192 tokens, 128 heads, int8"] = (64, 1, 8192, 128, 1, 576, 512, {}, False, "int8")


@dataclass(frozen=True)
class Problem:
    """Inputs and a call. `make(key)` draws them, `prepare` computes from them what `run` takes. `then(inputs, output)`
    gives the inputs of the next call, and what else is written. `flops`, `bytes` and `exps` are the least that it needs."""

    make: Callable[[jax.Array], tuple]
    run: Callable[..., Any]
    flops: float
    bytes: float
    exps: float = 0
    prepare: Callable[..., tuple] = lambda *x: x
    then: Callable[[tuple, Any], tuple] = lambda *both: both
    others: Mapping[str, "Problem"] = field(default_factory=dict)  # the same by what is no implementation of a table


@dataclass(frozen=True)
class Case:
    """A row of the table: `build(small)` gives its problem. The tolerance is of the largest number of each output."""

    name: str
    op: str
    build: Callable[[bool], Problem]
    tolerance: float
    target: float | None = None


def _normal(key: jax.Array, dtype: Any, *shape: int) -> jax.Array:
    return jax.random.normal(key, shape, jnp.float32).astype(dtype)


def _size(tree: Any) -> int:
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def _backward(call: Callable, which: tuple[int, ...]) -> tuple[Callable, Callable]:
    """Give (prepare, run): the forward pass is computed beforehand. The last array is what is sent back."""
    known: dict[str, Any] = {}  # how residuals are laid out: no two traces' functions are alike to jax 0.11

    def prepare(*arrays: Any) -> tuple:
        def of(*some: Any) -> Any:
            args = list(arrays[:-1])
            for i, x in zip(which, some, strict=True):
                args[i] = x
            return call(*args)

        residuals, known["back"] = jax.tree.flatten(jax.vjp(of, *(arrays[i] for i in which))[1])
        return residuals, arrays[-1]

    return prepare, lambda residuals, dy: jax.tree.unflatten(known["back"], residuals)(dy)


def attend(name: str, backward: bool, small: bool) -> Problem:
    """Rows of sequences, forward or backward."""
    rows, t, n, kv, channels, how, parts = ATTEND[name]
    h, hv = channels if isinstance(channels, tuple) else (channels, channels)
    rows, t, n, kv = (2, 256, 4, 4 * kv // n) if small else (rows, t, n, kv)
    mask = ops.Mask(h**-0.5, **({"window": 100} if small and "window" in how else how))

    def make(key: jax.Array) -> tuple:
        q, k, v, dy = jax.random.split(key, 4)
        segments = jnp.broadcast_to(jnp.arange(t) * parts // t, (rows, t)).astype(jnp.int32)
        wide = lambda key, heads, h=h: _normal(key, HALF, rows, t, heads, h)
        return segments, wide(q, n), wide(k, kv), wide(v, kv, hv), wide(dy, n, hv)

    def call(segments: Any, q: Any, k: Any, v: Any) -> Any:
        positions = jnp.broadcast_to(jnp.arange(t, dtype=jnp.int32), segments.shape)
        batch = Packed(positions, segments, single=parts == 1)
        return ops.attend(batch, None, 0, q, k, v, mask=mask)[0]

    past = np.arange(t) % (t // parts) + 1 if mask.causal else np.full(t, t)
    pairs = rows * int(np.minimum(past, mask.window or t).sum())
    product, moved = 2 * pairs * n, 2 * rows * t * (n + kv) * (h + hv)
    if not backward:
        return Problem(make, lambda segments, q, k, v, _: call(segments, q, k, v), product * (h + hv), moved)
    prepare, run = _backward(call, (1, 2, 3))
    return Problem(make, run, product * (3 * h + 2 * hv), 2 * moved, prepare=prepare)


def paged(name: str, small: bool) -> Problem:
    """Sequences with as many tokens as the table says; small ones of any length."""
    count, new, t, n, kv, h, part, how, with_sinks, form = PAGED[name]
    block = min(32, new)
    if small:
        count, new, t, n, kv = 1 if new > 1 else 3, 64 if new > 1 else 1, 192, 4 * max(1, n // kv // 4), min(kv, 2)
        n *= kv
    mask = ops.Mask(h**-0.5, **({"window": 70, "softcap": 5.0} if small and how else how))
    width = t // PAGE

    def make(key: jax.Array) -> tuple:
        keys = jax.random.split(key, 6)

        def pages(key: jax.Array) -> tuple:
            x = _normal(key, HALF, 1, count * width, kv, PAGE, h)
            if form is None:
                return x, None
            values, scale = encode(x, np.dtype(FORMATS[form][0]), scales(h))
            return values, scale.swapaxes(-1, -2)

        (k, ks), (v, vs) = pages(keys[0]), (None, None) if part else pages(keys[1])
        table = jax.random.permutation(keys[2], count * width).reshape(count, width).astype(jnp.int32)
        last = jax.random.randint(keys[3], (count,), new, t + 1) if small else jnp.full(count, t)
        positions = (last[:, None] - new + jnp.arange(new)).reshape(-1).astype(jnp.int32)
        of = jnp.repeat(jnp.arange(count, dtype=jnp.int32), new // block)
        q, sinks = _normal(keys[4], HALF, count * new, n, h), _normal(keys[5], jnp.float32, n) if with_sinks else None
        return Paged(positions, table[of], of, block), Pages(k, v, ks, vs), q, sinks

    def run(batch: Paged, cache: Pages, q: Any, sinks: Any) -> Any:
        return paged_attention(batch, cache, 0, q, mask=mask, sinks=sinks, v_dim=part)

    seen = min(t, mask.window or t)
    row = kv * (h if part else 2 * h) * (2 if form is None else 1)
    row += 0 if form is None else 4 * kv * (1 if part else 2) * scales(h)
    pairs = count * seen if new == 1 else count * new * (t - new / 2)
    tokens = count * (seen if new == 1 else min(t, seen + new))
    return Problem(make, run, 2 * pairs * n * (h + (part or h)), tokens * row + count * new * n * 2 * (h + (part or h)))


def _sizes(key: jax.Array, rows: int, groups: int) -> jax.Array:
    return jnp.bincount(jax.random.randint(key, (rows,), 0, groups), length=groups).astype(jnp.int32)


def _used(rows: int, groups: int) -> float:
    """How many groups have rows, on average."""
    return groups * (1 - (1 - 1 / groups) ** rows)


def _ragged_dot(x: Any, w: Any, sizes: Any) -> Any:
    """jax's own, of matrices that lie as here."""
    about = jax.lax.RaggedDotDimensionNumbers((((1,), (2,)), ((), ())), [0], [0])
    return jax.lax.ragged_dot_general(x, w, sizes, about, preferred_element_type=x.dtype)


def grouped(name: str, small: bool) -> Problem:
    """Groups of rows and their matrices: one of three passes, or gate and up together."""
    rows, groups, outputs, inputs, which = hopper_products.GROUPED[name]
    if small:
        rows, groups, outputs, inputs = 16 if rows < 100 else 198, 5, 256, 128
    matrices = 2 if which in ("glu", "kept") else 1

    def make(key: jax.Array) -> tuple:
        x, w, sizes, dy = jax.random.split(key, 4)
        draw = lambda key, *shape: (_normal(key, jnp.float32, *shape) * inputs**-0.5).astype(HALF)
        weights = [draw(key, groups, outputs, inputs) for key in jax.random.split(w, matrices)]
        return _normal(x, HALF, rows, inputs), *weights, _sizes(sizes, rows, groups), _normal(dy, HALF, rows, outputs)

    def single(product: Callable) -> Callable:
        def run(x: Any, w: Any, sizes: Any, dy: Any) -> Any:
            if which == "forward":
                return product(x, w, sizes)
            if which == "rows":
                return jax.vjp(lambda x: product(x, w, sizes), x)[1](dy)[0]
            return jax.vjp(lambda w: product(x, w, sizes), w)[1](dy)[0]

        return run

    def both(product: Callable | None) -> Callable:
        def run(x: Any, gate: Any, up: Any, sizes: Any, dy: Any) -> Any:
            join = lambda gate, up: jax.nn.silu(gate) * up
            each = lambda x: join(product(x, gate, sizes), product(x, up, sizes))
            call = each if product else lambda x: ops.grouped_glu(x, gate, up, sizes, join)
            if which == "glu":
                return call(x)
            y, back = jax.vjp(call, x)
            # What a backward pass reads is written, too; its inputs are there already.
            return (y, back(dy)) if small else (y, [a for a in jax.tree.leaves(back) if a.shape == dy.shape])

        return run

    run = both if matrices == 2 else single
    used = groups if which == "matrices" else _used(rows, groups)
    moved = 2 * (
        matrices * used * outputs * inputs + rows * (inputs + outputs) + 2 * rows * outputs * (which == "kept")
    )
    cost = dict(flops=2 * matrices * rows * outputs * inputs, bytes=moved)
    others = {"ragged_dot": Problem(make, run(_ragged_dot), **cost)}
    return Problem(make, run(None if matrices == 2 else ops.grouped_matmul), **cost, others=others)


def _weight(key: jax.Array, *about: Any) -> Quantized:
    """Draw what `hopper_products.weight` declares: any codes but NaN's, scales and exponents near one."""
    keys = iter(jax.random.split(key, 8))
    ints = lambda dtype, low, high, shape: jax.random.randint(next(keys), shape, low, high, jnp.int32).astype(dtype)
    w = hopper_products.weight(lambda dtype, *shape: jax.ShapeDtypeStruct(shape, dtype), *about)
    low, high = (-127, 128) if w.format == "int8" else (0, 256)
    values = ints(w.values.dtype, low, high, w.values.shape)
    values = values & 0xBF if w.format == "fp8" else values  # magnitudes below 2
    size = math.prod(w.inputs) ** -0.5 / {"int8": 64, "uint8": 64, "fp8": 1, "nf4": 0.5, "e2m1": 3}.get(w.format, 5)
    near = lambda shape: jax.random.uniform(next(keys), shape, jnp.float32, 0.5, 1.5) * size
    if isinstance(w.scale, Quantized):
        codes = ints(jnp.uint8, 0x30, 0x40, w.scale.values.shape)
        scale: Any = replace(w.scale, values=codes, scale=near(w.scale.scale.shape))
    elif w.scale.dtype == jnp.uint8:
        scale = ints(jnp.uint8, 119, 124, w.scale.shape)
    else:
        scale = near(w.scale.shape)
    zero = None if w.zero is None else ints(jnp.uint8, *((6, 10) if w.format == "uint4" else (120, 136)), w.zero.shape)
    return replace(w, values=values, scale=scale, zero=zero)


def quantized(name: str, small: bool) -> Problem:
    """Rows times a weight in few bits; others: the same weight in bfloat16."""
    rows, inputs, outputs, form, group, more = hopper_products.QUANTIZED[name]
    if small:
        whole = group == inputs
        rows, inputs, outputs = min(rows, 130), 320 if inputs % 128 else 512, 256
        group = inputs if whole else group

    def make(key: jax.Array) -> tuple:
        x, w = jax.random.split(key)
        return _normal(x, HALF, rows, inputs), _weight(w, (outputs,), inputs, form, group, more)

    def full(key: jax.Array) -> tuple:
        x, w = make(key)
        return x, dense(w, HALF)

    flops, around = 2 * rows * inputs * outputs, 2 * rows * (inputs + outputs)
    run = lambda x, w: ops.einsum("td,fd->tf", x, w)
    stored = _size(jax.eval_shape(lambda: make(jax.random.key(0)))[1])
    others = {"bfloat16": Problem(full, run, flops, 2 * inputs * outputs + around)}
    return Problem(make, run, flops, stored + around, others=others)


def experts(name: str, small: bool) -> Problem:
    """Groups of rows, each with a matrix in few bits."""
    rows, groups, outputs, inputs, form, group, more = hopper_products.EXPERTS[name]
    if small:
        whole = group == inputs
        rows, groups, outputs, inputs = 16 if rows < 100 else 150, 4, 256, 320 if inputs % 128 else 512
        group = inputs if whole else group

    def make(key: jax.Array) -> tuple:
        x, w, sizes = jax.random.split(key, 3)
        return (
            _normal(x, HALF, rows, inputs),
            _weight(w, (groups, outputs), inputs, form, group, more),
            _sizes(sizes, rows, groups),
        )

    stored = _size(jax.eval_shape(lambda: make(jax.random.key(0)))[1]) / groups * _used(rows, groups)
    moved = stored + 2 * rows * (inputs + outputs)
    return Problem(make, lambda *args: ops.grouped_matmul(*args), 2 * rows * inputs * outputs, moved)
