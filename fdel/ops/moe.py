"""Mixture of experts: routers, and gated feed-forwards of the chosen experts without dropping a token.

Rows are sorted by expert, and `grouped_matmul` multiplies each group with its expert's weight. `lax.ragged_dot` is not
used: on CPU and GPU it multiplies every row with every expert.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from fdel.ops.einsum import einsum
from fdel.ops.glu import Activation
from fdel.ops.shard import collective, context, divided, partition, widen
from fdel.ops.weights import Quantized, Weight

BLOCK = 32  # most rows per step: larger ones waste work in the last block of a group, and are no faster
TILE = 1 << 20  # most elements of a weight that are copied at once on CPU, so that the copy stays in cache


# ---- routers -------------------------------------------------------------------------------------------------------


def route_softmax(
    logits: Float[Array, "... E"], k: int, *, normalize: bool
) -> tuple[Float[Array, "... k"], Int[Array, "... k"]]:
    """Choose the k experts of the greatest probability softmax(logits): float32 weights and expert indices.

    `normalize` divides the k probabilities by their sum (arXiv:2401.04088, where it is a softmax over the k logits).
    """
    logits = checkpoint_name(logits.astype(jnp.float32), "moe_router_logits")
    weights, experts = lax.top_k(jax.nn.softmax(logits), k)
    return weights / weights.sum(-1, keepdims=True) if normalize else weights, experts


def route_sigmoid(
    logits: Float[Array, "... E"],
    k: int,
    *,
    bias: Float[Array, " E"],
    groups: int,
    topk_groups: int,
    scale: float,
    normalize: bool,
) -> tuple[Float[Array, "... k"], Int[Array, "... k"]]:
    """Choose k experts out of the best groups by sigmoid(logits) + bias: float32 weights and expert indices.

    The experts form `groups` equal groups in order; the `topk_groups` groups with the greatest sum of their two best
    experts remain (arXiv:2412.19437, section 2.1.2). Weights are scale * sigmoid(logits), without the bias;
    `normalize` divides them by their sum first. Sizes that do not fit are a ValueError.
    """
    *batch, experts = logits.shape
    size = experts // groups
    if experts % groups or size < 2 or not k <= topk_groups * size <= experts:
        raise ValueError(
            f"cannot choose {k} of {experts} experts from {topk_groups} of {groups} groups; expected equal groups "
            "of at least 2 experts, and at least k experts in the groups that remain"
        )
    scores = jax.nn.sigmoid(checkpoint_name(logits.astype(jnp.float32), "moe_router_logits"))
    choice = (scores + bias.astype(jnp.float32)).reshape(*batch, groups, size)
    _, best = lax.top_k(lax.top_k(choice, 2)[0].sum(-1), topk_groups)
    kept = (best[..., None] == jnp.arange(groups)).any(-2)
    choice = jnp.where(kept[..., None], choice, -jnp.inf).reshape(*batch, experts)
    _, chosen = lax.top_k(choice, k)
    weights = jnp.take_along_axis(scores, chosen, -1)
    if normalize:
        weights = weights / (weights.sum(-1, keepdims=True) + 1e-20)
    return weights * scale, chosen


# ---- grouped matrix product ----------------------------------------------------------------------------------------


def _block(rows: int, experts: int) -> int:
    """Rows per step: about those of one expert, and one in decode, where most experts that have any have one."""
    return min(BLOCK, 1 << max(0, rows // experts - 1).bit_length())


def _tiles(w: Weight) -> int:
    """Into how many tiles of outputs to cut an expert's weight: large copies cost twice the product in decode."""
    _, n, k = w.shape
    tiles = 1
    if isinstance(w, jax.Array) and jax.default_backend() == "cpu":
        while n // tiles * k > TILE and n % (2 * tiles) == 0:
            tiles *= 2
    return tiles


def _pick(w: Any, e: Array, first: Any = 0, width: int | None = None) -> Any:
    """Read expert e's part of each array of `w`; of an array, `width` outputs from `first` on."""
    # Before jax 0.11, XLA:CPU would convert the half-precision weights of all experts to float32 ahead of the loop.
    w, e = lax.optimization_barrier((w, e))
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


def _forward(x: Array, w: Weight, sizes: Array) -> Array:
    block, tiles = _block(x.shape[0], sizes.shape[0]), _tiles(w)
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


@jax.custom_vjp
def _grouped(x: Array, w: Weight, sizes: Array) -> Array:
    return _forward(x, w, sizes)


def _grouped_fwd(x: Array, w: Weight, sizes: Array) -> tuple:
    return _forward(x, w, sizes), (x, w, sizes)


def _grouped_bwd(saved: tuple, dy: Array) -> tuple:
    x, w, sizes = saved
    block = _block(x.shape[0], sizes.shape[0])
    (busy, count), ends = _busy(sizes), jnp.cumsum(sizes)
    # The parts of a weight that learn: arrays, and of a LowRank weight its factors. A Quantized one gets no gradient.
    parts, structure = jax.tree.flatten(w, is_leaf=lambda c: isinstance(c, Quantized))
    rebuild = partial(jax.tree.unflatten, structure)
    learn = {i: c for i, c in enumerate(parts) if not isinstance(c, Quantized)}
    xs, dys = (jnp.pad(c, ((0, block), (0, 0))) for c in (x, dy))

    def expert(i: Any, carry: tuple) -> tuple:
        e = busy[i]
        mine = _pick(dict(enumerate(parts)), e)

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
    return dx[: x.shape[0]], rebuild([dw.get(i) for i in range(len(parts))]), None


_grouped.defvjp(_grouped_fwd, _grouped_bwd)


def grouped_matmul(x: Float[Array, "M K"], w: Weight, sizes: Int[Array, " E"]) -> Float[Array, "M N"]:
    """Multiply consecutive groups of rows each with its own matrix: rows of group e with w[e], w of shape [E N K].

    `sizes` counts the rows of each group; rows past their sum give 0. `w` is an array, Quantized (no gradient reaches
    it) or LowRank, each with a leading axis of groups. A group without rows costs nothing: its weight is not read.
    Shapes that do not fit are a ValueError.
    """
    if w.ndim != 3 or x.ndim != 2 or (*sizes.shape, x.shape[1]) != tuple(w.shape[::2]):
        raise ValueError(f"grouped_matmul: x {x.shape}, w {w.shape}, sizes {sizes.shape}; expected [M K], [E N K], [E]")
    return _grouped(x, w, sizes)


def moe(
    x: Float[Array, "... D"],
    p: Mapping[str, Any],
    weights: Float[Array, "... k"],
    experts: Int[Array, "... k"],
    act: Activation,
) -> Float[Array, "... D"]:
    """Add up the chosen experts' gated feed-forwards: sum over j of weights[j] glu(x, expert experts[j]).

    `p` holds gate, up [E F D] and down [E D F]; weights and experts come from a router. No token is dropped.

    On a mesh (`jax.set_mesh`) every device sorts its own rows. With an axis `ep` it holds E / ep experts, fetches the
    rows of the ep devices, and returns its experts' part of their sums: an all-gather and a reduce-scatter of [rows D].
    """
    local = partial(_local, act=act)
    axes = set(context("dp", "fsdp", "ep", "sp"))
    if not axes:
        return local(x, p, weights, experts)
    rows = partition(x, "rows tokens embed") if x.ndim == 3 else P()
    of_experts = P("ep") if "ep" in axes else P()
    per_device = partial(_divided, local, "ep" in axes, bool(rows) and "ep" in (rows[0] or ()))
    run = divided(per_device, axes, (rows, of_experts, rows, rows), rows)
    return run(x, {name: p[name] for name in ("gate", "up", "down")}, weights, experts)


def _divided(local: Callable, experts_divided: bool, rows_divided: bool, *args: Any) -> Array:
    """Run `local` on one device: with all rows of its `ep` group, for the experts that it holds."""
    x, p, weights, experts = args
    if not experts_divided:
        return local(x, p, weights, experts)
    if rows_divided:
        fetch = lambda c: lax.all_gather(c, "ep", axis=0, tiled=True)
        x, weights, experts = collective(fetch, x), collective(fetch, weights), fetch(experts)
    y = local(x, p, weights, experts - lax.axis_index("ep") * p["gate"].shape[0])
    y = widen(y)  # the experts' parts add up in float32, as they do on one device
    y = lax.psum_scatter(y, "ep", scatter_dimension=0, tiled=True) if rows_divided else lax.psum(y, "ep")
    return y.astype(x.dtype)


def _local(x: Array, p: Mapping[str, Any], weights: Array, experts: Array, *, act: Activation) -> Array:
    """Compute `moe` for the experts 0 to E - 1 that `p` holds; others add nothing."""
    *batch, k = experts.shape
    held = p["gate"].shape[0]
    chosen = experts.reshape(-1)
    chosen = jnp.where((chosen >= 0) & (chosen < held), chosen, held)
    order = jnp.argsort(chosen)
    sizes = jnp.bincount(chosen, length=held + 1)[:held]
    rows = x.reshape(-1, x.shape[-1])[order // k]
    gate = checkpoint_name(grouped_matmul(rows, p["gate"], sizes), "moe_gate")
    up = checkpoint_name(grouped_matmul(rows, p["up"], sizes), "moe_up")
    down = checkpoint_name(grouped_matmul(act(gate) * up, p["down"], sizes), "moe_expert_output")
    y = down[jnp.argsort(order)].reshape(*batch, k, x.shape[-1])
    return checkpoint_name(jnp.einsum("...kd,...k->...d", y, weights).astype(x.dtype), "moe_output")
