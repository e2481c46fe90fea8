"""Products of consecutive groups of rows, each with its own matrix: what experts compute.

`lax.ragged_dot` is not used: on CPU it multiplies every row with every expert, and so does XLA:GPU, with a masked copy
of all rows for each.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int, Shaped

from fdel.ops.contraction import wide
from fdel.ops.cpu import expert_tiles, in_step
from fdel.ops.dispatch import kernel, operation, weight
from fdel.ops.einsum import einsum
from fdel.ops.platform import context, target
from fdel.ops.weights import Quantized, Weight

BLOCK = {"cpu": 32, "gpu": 512, "tpu": 512}  # most rows per step: larger ones waste work in the last block of a group


def _block(rows: int, experts: int) -> int:
    """Rows per step: about those of one expert, and one in decode, where most experts that have any have one."""
    return min(BLOCK[target()], 1 << max(0, rows // experts - 1).bit_length())


def _pick(w: Any, e: Array, first: Any = 0, width: int | None = None) -> Any:
    """Read expert e's part of each array of `w`; of an array, `width` outputs from `first` on."""
    w, e = in_step(w, e)
    if width is None:
        return jax.tree.map(lambda c: lax.dynamic_index_in_dim(c, e, keepdims=False), w)
    return lax.dynamic_slice(w, (e, first, 0), (1, width, w.shape[2]))[0]


def _rows(x: Array, start: Array, end: Array, block: int) -> Array:
    """Rows start to start + block, and zeros from `end` on: those rows are another expert's."""
    inside = start + jnp.arange(block) < end
    return jnp.where(inside[:, None], lax.dynamic_slice_in_dim(x, start, block), 0)


def _busy(sizes: Array) -> tuple[Array, Array]:
    """Experts that have rows, in order, and their number. Only their weights are read."""
    return jnp.argsort(sizes == 0, stable=True), (sizes > 0).sum()


def _rounds(count: int, sizes: Array, step: Callable, carry: Any) -> Any:
    """Run step(rows [E block], carry) until each expert had all its rows; `count` stands for a row that it lacks.

    Accelerators take all experts at once, since they would wait between products of single ones.
    """
    block, ends = _block(count, sizes.shape[0]), jnp.cumsum(sizes)

    def one(j: Any, carry: Any) -> Any:
        rows = (ends - sizes)[:, None] + j * block + jnp.arange(block)
        return step(jnp.where(rows < ends[:, None], rows, count), carry)

    return lax.fori_loop(0, -(-sizes.max() // block), one, carry)


def _forward_in_rounds(x: Array, w: Weight, sizes: Array) -> Array:
    padded = jnp.pad(x, ((0, 1), (0, 0)))

    def step(rows: Array, out: Array) -> Array:
        return out.at[rows].set(einsum("emk,enk->emn", padded[rows], w))

    return _rounds(len(x), sizes, step, jnp.zeros((len(padded), w.shape[1]), x.dtype))[: len(x)]


def _backward_in_rounds(x: Array, sizes: Array, dy: Array, learn: dict, rebuild: Callable) -> tuple:
    xs, dys = (jnp.pad(c, ((0, 1), (0, 0))) for c in (x, dy))

    def step(rows: Array, carry: tuple) -> tuple:
        dx, sums = carry
        _, vjp = jax.vjp(lambda x, some: einsum("emk,enk->emn", x, rebuild(some)), xs[rows], learn)
        mine, more = vjp(dys[rows])
        return dx.at[rows].set(mine), jax.tree.map(lambda a, b: a + b.astype(a.dtype), sums, more)

    sums = {i: jnp.zeros(c.shape, wide(c.dtype)) for i, c in learn.items()}
    dx, sums = _rounds(len(x), sizes, step, (jnp.zeros_like(xs), sums))
    return dx[: len(x)], {i: c.astype(learn[i].dtype) for i, c in sums.items()}


def _forward(x: Array, w: Weight, sizes: Array) -> Array:
    if target() != "cpu":
        return _forward_in_rounds(x, w, sizes)
    block, tiles = _block(x.shape[0], sizes.shape[0]), expert_tiles(w) if isinstance(w, jax.Array) else 1
    width = w.shape[1] // tiles
    (busy, count), ends = _busy(sizes), jnp.cumsum(sizes)
    padded = jnp.pad(x, ((0, block), (0, 0)))

    def expert(i: Any, out: Array) -> Array:
        e, first = busy[i // tiles], i % tiles * width
        weight = _pick(w, e) if tiles == 1 else _pick(w, e, first, width)

        def step(j: Any, out: Array) -> Array:
            start = ends[e] - sizes[e] + j * block
            y = einsum("mk,nk->mn", _rows(padded, start, ends[e], block), weight)
            return lax.dynamic_update_slice(out, y, (start, first))  # the next expert overwrites what is past its end

        return lax.fori_loop(0, -(-sizes[e] // block), step, out)

    out = jnp.zeros((x.shape[0] + block, w.shape[1]), x.dtype)
    return lax.fori_loop(0, count * tiles, expert, out)[: x.shape[0]]


def _grouped_bwd(saved: tuple, dy: Array) -> tuple:
    x, w, sizes = saved
    block = _block(x.shape[0], sizes.shape[0])
    (busy, count), ends = _busy(sizes), jnp.cumsum(sizes)
    # The parts of a weight that learn: arrays, and of a LowRank weight its factors. A Quantized one gets no gradient.
    parts, structure = jax.tree.flatten(w, is_leaf=lambda c: isinstance(c, Quantized))
    rebuild = partial(jax.tree.unflatten, structure)
    learn = {i: c for i, c in enumerate(parts) if not isinstance(c, Quantized)}
    every = dict(enumerate(parts))
    together = lambda dw: rebuild([dw.get(i) for i in every])
    if target() != "cpu":
        dx, sums = _backward_in_rounds(x, sizes, dy, learn, lambda some: rebuild((every | some).values()))
        return dx, together(sums), None
    xs, dys = (jnp.pad(c, ((0, block), (0, 0))) for c in (x, dy))

    def expert(i: Any, carry: tuple) -> tuple:
        e = busy[i]
        mine = _pick(every, e)

        def product(rows: Array, some: dict) -> Array:
            return einsum("mk,nk->mn", rows, rebuild((mine | some).values()))

        def step(j: Any, carry: tuple) -> tuple:
            dx, sums = carry
            start = ends[e] - sizes[e] + j * block
            _, vjp = jax.vjp(product, _rows(xs, start, ends[e], block), {i: mine[i] for i in learn})
            rows, more = vjp(_rows(dys, start, ends[e], block))
            return lax.dynamic_update_slice_in_dim(dx, rows, start, 0), jax.tree.map(jnp.add, sums, more)

        dx, dw = carry
        # Sums over one expert's rows are small and float32; each is written once, in place.
        sums = {i: jnp.zeros(c.shape[1:], jnp.promote_types(c.dtype, jnp.float32)) for i, c in learn.items()}
        dx, sums = lax.fori_loop(0, -(-sizes[e] // block), step, (dx, sums))
        return dx, {i: c.at[e].set(sums[i].astype(c.dtype)) for i, c in dw.items()}

    carry = jnp.zeros((x.shape[0] + block, x.shape[1]), x.dtype), jax.tree.map(jnp.zeros_like, learn)
    dx, dw = lax.fori_loop(0, count, expert, carry)
    return dx[: x.shape[0]], together(dw), None


_grouped = jax.custom_vjp(_forward)
_grouped.defvjp(lambda *args: (_forward(*args), args), _grouped_bwd)


_EXPERTS, _MOSAIC = weight("experts outputs inputs"), kernel("grouped_matmul_tpu")
_HOPPER = kernel("grouped_matmul_gpu", unproven=True)


def _few_bits(*weights: Weight) -> str | None:
    """Say why a mesh cannot divide products with these matrices, or None."""
    axes = context("tp") if any(isinstance(getattr(w, "base", w), Quantized) for w in weights) else None
    where = "where a weight may be divided along its inputs; each device would fetch all of it"
    return f"a mesh {axes}, {where}" if axes else None


_PRODUCT = ("tokens inputs", _EXPERTS, "experts"), "tokens outputs"
_BIAS = "experts outputs"
_GLU = ("tokens inputs", _EXPERTS, _EXPERTS, "experts", "", _BIAS, _BIAS), "tokens outputs"


@operation(lambda x, w, sizes: _few_bits(w) or _PRODUCT, mosaic=_MOSAIC, hopper=_HOPPER)
def grouped_matmul(x: Float[Array, "M K"], w: Weight, sizes: Int[Array, " E"]) -> Float[Array, "M N"]:
    """Multiply consecutive groups of rows each with its own matrix: rows of group e with w[e], w of shape [E N K].

    `sizes` counts the rows of each group; rows past their sum give 0. `w` is an array, Quantized (no gradient reaches
    it) or LowRank, each with a leading axis of groups. On CPU a group without rows costs nothing: its weight is not read.
    Shapes that do not fit are a ValueError.
    >>> ops.grouped_matmul(jnp.ones((3, 2)), jnp.array([[[1.0, 1.0]], [[2.0, 2.0]]]), jnp.array([1, 2]))[:, 0]
    Array([2., 4., 4.], dtype=float32)
    """
    if w.ndim != 3 or x.ndim != 2 or (*sizes.shape, x.shape[1]) != tuple(w.shape[::2]):
        raise ValueError(f"grouped_matmul: x {x.shape}, w {w.shape}, sizes {sizes.shape}; expected [M K], [E N K], [E]")
    return _grouped(x, w, sizes)


@operation(
    lambda x, gate, up, *_, **__: _few_bits(gate, up) or _GLU,
    mosaic=kernel("grouped_glu_tpu"),
    hopper=kernel("grouped_glu_gpu", unproven=True),
)
def grouped_glu(
    x: Float[Array, "M K"], gate: Weight, up: Weight, sizes: Int[Array, " E"],
    product: Callable[[Array, Array], Array], gate_bias: Float[Array, "E N"] | None = None,
    up_bias: Float[Array, "E N"] | None = None,
) -> Float[Array, "M N"]:  # fmt: skip
    """Compute product(x gate, x up) of consecutive groups of rows, each with its own matrices: the first half of experts.

    As two calls of `grouped_matmul`, whose errors it raises; biases are those of the groups. `product` is elementwise,
    as act(gate) * up is. Rows past the sum of `sizes` hold numbers that mean nothing.
    >>> w = jnp.array([[[1.0, 1.0]], [[2.0, 2.0]]])
    >>> ops.grouped_glu(jnp.ones((3, 2)), w, w, jnp.array([1, 2]), lambda gate, up: gate + up)[:, 0]
    Array([4., 8., 8.], dtype=float32)
    """
    group = jnp.searchsorted(jnp.cumsum(sizes), jnp.arange(len(x)), side="right", method="compare_all")

    def linear(w: Weight, bias: Array | None, saved: str) -> Array:
        y = grouped_matmul(x, w, sizes)
        return checkpoint_name(y if bias is None else y + of_groups(bias, group).astype(y.dtype), saved)

    return product(linear(gate, gate_bias, "moe_gate"), linear(up, up_bias, "moe_up"))


def of_groups(bias: Float[Array, "E N"], group: Int[Array, " M"]) -> Float[Array, "M N"]:
    """Give each row its group's bias; 0 to rows of group E, which is none."""
    return bias.at[group].get(mode="fill", fill_value=0)


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def in_order(
    x: Shaped[Array, "R ..."], order: Int[Array, " M"], back: Int[Array, " M"], each: int
) -> Shaped[Array, "M ..."]:
    """Give the rows of `x`, each so many times, in an order of the M = R each places: x[order // each].

    `back` is the order's inverse. Gradients are rows in that order, those of a row summed in float32: XLA's own gradient of
    a gather adds them up one by one, since it does not know that an order has each place once.
    """
    return x[order // each]


def _ordered(x: Array, order: Array, back: Array, each: int) -> tuple[Array, Array]:
    return x[order // each], back


def _unordered(each: int, back: Array, dy: Array) -> tuple[Array, None, None]:
    dx = dy[back].reshape(-1, each, *dy.shape[1:])
    return dx.sum(1, dtype=wide(dy.dtype)).astype(dy.dtype), None, None


in_order.defvjp(_ordered, _unordered)
