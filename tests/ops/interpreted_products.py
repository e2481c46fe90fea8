"""A process that interprets the Hopper kernels for products: prints the largest errors against float64.

`quantized`, `floats`, `narrow`, `grouped`, `experts` or `glu`, with a detector of races, of which `race` plants one: see
`interpreted_pages`.
"""

import sys
from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.pallas.mosaic_gpu.interpret import params as interpreter
from jax.experimental.pallas import mosaic_gpu

from fdel.kernels import grouped_glu_gpu, grouped_matmul_gpu, grouped_program_gpu
from fdel.kernels import quantized_matmul_gpu as kernel
from fdel.ops.weights import Quantized
from tests.ops.codes import CODES
from tests.ops.test_grouped_tpu import Drawn as DrawnRows
from tests.ops.test_grouped_tpu import by_hand
from tests.ops.test_quantized_tpu import Drawn, floating, weight

WEIGHTS = [  # outputs, rows; parts of the inputs; dtype of the result
    (Drawn("uint4", "int", 256, 512, 128, 3), 2, jnp.float32),
    (Drawn("int4", None, 64, 128, 128, 70), 1, jnp.bfloat16),
    (Drawn("int8", None, 256, 256, 256, 3), 1, jnp.float32),
    (Drawn("uint8", "int", 64, 128, 128, 3), 2, jnp.float32),
    (Drawn("int8", None, 256, 256, 256, 3), 1, jnp.bfloat16),
]
FLOATS = [  # the same, of formats of floating point, and a table
    (Drawn("fp8", None, 256, 256, 128, 3), 1, jnp.float32),
    (Drawn("e2m1", None, 64, 128, 128, 3), 2, jnp.float32),
    (Drawn("nf4", None, 64, 192, 128, 70), 1, jnp.float32),
]
NARROW = [  # the same, with groups of 8 and 16 bytes: MXFP4 in rows of 160 bytes, NVFP4, GPTQ
    (("e2m1", 32, "exponent", 320, 192, 3), 2, jnp.float32),
    (("e2m1", 16, "fp8", 320, 128, 70), 1, jnp.bfloat16),
    (Drawn("uint4", "int", 32, 256, 128, 3), 1, jnp.float32),
]
GROUPED = [  # rows, outputs, inputs, sizes; whether tiles are of few rows
    (80, 208, 96, [0, 37, 0, 30], True),
    (140, 320, 192, [70, 0, 63, 3], False),
    (140, 96, 352, [70, 0, 63, 3], False),
    (80, 128, 128, [0, 37, 0, 30], True),
    (300, 256, 128, [150, 0, 140, 3], False),
    (16, 128, 256, [0, 16, 0], True),
]


EXPERTS = [  # matrices, outputs of each, and sizes; two more rows are of no group
    (("e2m1", 32, "exponent", 320, 192, 0), [2, 0, 9, 0, 1]),
    (Drawn("uint4", "int", 128, 256, 128, 0), [0, 5, 0, 1]),
    (Drawn("int8", None, 128, 128, 128, 0), [150, 0, 40]),
    (("nf4", 64, "float", 128, 128, 0), [0, 21, 30]),
    (("fp8", 128, "float", 128, 128, 0), [1, 0, 0, 1]),
    (Drawn("int4", None, 64, 128, 128, 0), [3]),
]


def interpreted() -> object:
    return interpreter.force_gpu_interpret_mode(interpreter.InterpretGPUParams(detect_races=True))


def quantized(c: Drawn | tuple, splits: int, dtype) -> float:
    """Relative to the magnitudes of a row of x and of the weight."""
    r = np.random.default_rng(0)
    if isinstance(c, Drawn):
        w, full = (floats if c.format in CODES else weight)(c, r)
    else:
        w, full = floating(*c, r)
    x = jnp.asarray(r.normal(size=(c.rows if isinstance(c, Drawn) else c[-1], full.shape[1])), jnp.bfloat16)
    exact = np.asarray(x, np.float64)
    how = replace(kernel.tiling(x, w), splits=splits, in_memory=True)
    with interpreted():
        got = np.asarray(kernel.matmul(x, w, jnp.dtype(dtype), how), np.float64)
    size = np.linalg.norm(exact, axis=1, keepdims=True) * np.linalg.norm(full, axis=1)
    return float((np.abs(got - exact @ full.T) / size).max())  # NaN if any number is


def floats(c: Drawn, r: np.random.Generator) -> tuple[Quantized, np.ndarray]:
    """Random bits of numbers, both signs, and the array that they stand for."""
    codes = CODES[c.format]
    value = r.choice(np.flatnonzero(np.isfinite(codes)), (c.outputs, c.inputs // c.group, c.group))
    scale = r.uniform(0.5, 1.5, value.shape[:2]).astype(np.float32)
    first, second = np.split(value, 2, -1)
    stored = jnp.asarray((first << 4 | second if len(codes) == 16 else value).reshape(c.outputs, -1), jnp.uint8)
    w = Quantized(stored, jnp.asarray(scale), None, c.format, (c.inputs,), np.dtype(np.float32))
    return w, (codes[value] * scale[..., None]).reshape(c.outputs, c.inputs)


def grouped(rows: int, outputs: int, inputs: int, sizes: list[int], few: bool) -> float:
    """Of the product and both gradients, relative to the largest number. Rows of no group are NaN."""
    r = np.random.default_rng(0)
    draw: Callable = lambda *shape: np.array(jnp.asarray(r.normal(size=shape), jnp.bfloat16), np.float64)
    x, w, dy = draw(rows, inputs), draw(len(sizes), outputs, inputs), draw(rows, outputs)
    x[sum(sizes) :] = dy[sum(sizes) :] = np.nan
    want = np.zeros((rows, outputs)), np.zeros_like(x), np.zeros_like(w)
    for e, size in enumerate(sizes):
        some = slice(sum(sizes[:e]), sum(sizes[:e]) + size)
        want[0][some], want[1][some], want[2][e] = x[some] @ w[e].T, dy[some] @ w[e], dy[some].T @ x[some]
    grouped_program_gpu.PROGRAMS, grouped_matmul_gpu.FEW = 2, rows + 1 if few else 0
    half = lambda a: jnp.asarray(a, jnp.bfloat16)
    with interpreted():
        call = lambda x, w: grouped_matmul_gpu.product(True, x, w, jnp.asarray(sizes, jnp.int32))
        got, vjp = jax.vjp(call, half(x), half(w))
        got = got, *vjp(half(dy))
    return max(
        float(np.abs(np.asarray(a, np.float64) - b).max() / np.abs(b).max()) for a, b in zip(got, want, strict=True)
    )


def experts(c: Drawn | tuple, sizes: list[int]) -> float:
    """Of quantized matrices and of the gradient in rows, relative to the magnitudes of a row and of a matrix's."""
    r, count, inside = np.random.default_rng(0), len(sizes), sum(sizes)
    if isinstance(c, Drawn):
        w, full = (floats if c.format in CODES else weight)(c._replace(outputs=count * c.outputs), r)
    else:
        w, full = floating(*c[:4], count * c[4], 0, r)
    w, full = jax.tree.map(lambda a: a.reshape(count, -1, a.shape[-1]), w), full.reshape(count, -1, full.shape[-1])
    draw: Callable = lambda *shape: np.array(jnp.asarray(r.normal(size=shape), jnp.bfloat16), np.float64)
    x, dy = draw(inside + 2, full.shape[2]), draw(inside + 2, full.shape[1])
    group = np.repeat(np.arange(count), sizes)
    want = np.einsum("mk,mnk->mn", x[:inside], full[group]), np.einsum("mn,mnk->mk", dy[:inside], full[group])
    size = [
        np.linalg.norm(a[:inside], axis=1)[:, None] * np.linalg.norm(full[group], axis=b) for a, b in ((x, 2), (dy, 1))
    ]
    x[inside:] = dy[inside:] = np.nan
    grouped_program_gpu.PROGRAMS = 2
    half = lambda a: jnp.asarray(a, jnp.bfloat16)
    with interpreted():
        got, vjp = jax.vjp(lambda x: grouped_matmul_gpu.frozen(True, x, w, jnp.asarray(sizes, jnp.int32)), half(x))
        got = np.asarray(got, np.float64), np.asarray(vjp(half(dy))[0], np.float64)
    if any(np.any(a[inside:]) for a in got):
        return np.nan  # rows of no group give 0
    off = [np.abs(a[:inside] - b) / (s + 1e-30) for a, b, s in zip(got, want, size, strict=True)]
    return float(np.max([a.max() for a in off]))


def glu(rows: int, outputs: int, inputs: int, sizes: list[int], few: bool) -> float:
    """Of silu(x gate) * (x up) and its gradients, relative to the largest number. Rows of no group are NaN."""
    r, inside = np.random.default_rng(0), sum(sizes)
    draw: Callable = lambda *shape: np.array(jnp.asarray(r.normal(size=shape), jnp.bfloat16), np.float64)
    x, gate, up, dy = (
        draw(rows, inputs),
        *(draw(len(sizes), outputs, inputs) / 16 for _ in range(2)),
        draw(rows, outputs),
    )
    biases = (np.zeros((len(sizes), outputs)),) * 2
    want = by_hand(x, gate, up, dy, DrawnRows(tuple(sizes), rows - inside, inputs, outputs, False), biases)
    x[inside:] = dy[inside:] = np.nan
    grouped_program_gpu.PROGRAMS, grouped_matmul_gpu.FEW = 2, rows + 1 if few else 0
    half = lambda a: jnp.asarray(a, jnp.bfloat16)
    with interpreted():
        join = lambda gate, up: gate * jax.nn.sigmoid(gate) * up
        call = lambda x, *w: grouped_glu_gpu.glu(True, join, x, w, jnp.asarray(sizes, jnp.int32))
        got, vjp = jax.vjp(call, half(x), half(gate), half(up))
        got = got, *vjp(half(dy))
    cut = lambda a, b: (a[:inside], b[:inside]) if b.ndim == 2 else (a, b)
    error = lambda a, b: float(np.abs(np.asarray(a, np.float64) - b).max() / np.abs(b).max())
    return max(error(*cut(a, b)) for a, b in zip(got, want, strict=True))


def plant_a_race() -> None:
    """Leave out the wait for a chunk."""
    wait, calls = mosaic_gpu.barrier_wait, []

    def some(barrier):
        calls.append(barrier)
        if len(calls) % 2:
            wait(barrier)

    mosaic_gpu.barrier_wait = some


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    if sys.argv[1] == "race":
        plant_a_race()
        print(experts(*EXPERTS[-1]) if "experts" in sys.argv else quantized(*WEIGHTS[2]))
    else:
        run, cases = {"quantized": (quantized, WEIGHTS), "floats": (quantized, FLOATS),
                      "narrow": (quantized, NARROW), "grouped": (grouped, GROUPED),
                      "experts": (experts, EXPERTS), "glu": (glu, GROUPED)}[sys.argv[1]]  # fmt: skip
        some = cases[: int(sys.argv[2])] if len(sys.argv) > 2 else cases
        print(*(run(*case) for case in some))
