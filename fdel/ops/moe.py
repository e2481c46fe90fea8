"""Mixture of experts: gated feed-forwards of the experts that a router chose, without dropping a token.

Rows are sorted by expert, and `grouped_matmul` multiplies each group with its expert's weight. `lax.ragged_dot` is not
used: on CPU it multiplies every row with every expert, and so does XLA:GPU, with a masked copy of all rows for each.
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

from fdel.ops import expert_parallel
from fdel.ops.contraction import wide, widen
from fdel.ops.cpu import expert_tiles, in_step
from fdel.ops.dispatch import Implementation, Table, kernel, operation, run, weight
from fdel.ops.einsum import einsum
from fdel.ops.glu import Activation
from fdel.ops.platform import context, target
from fdel.ops.shard import divided, partition
from fdel.ops.weights import Quantized, Weight

BLOCK = {"cpu": 32, "gpu": 512, "tpu": 512}  # most rows per step: larger ones waste work in the last block of a group
MATRICES = ("gate", "up", "down")
FEW = 128  # tokens for which an accelerator reads an expert longer than it multiplies them all with it


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


_EXPERTS, _MEGABLOX = weight("experts outputs inputs"), kernel("grouped_matmul_tpu")


@operation("tokens inputs", _EXPERTS, "experts", out="tokens outputs", megablox=_MEGABLOX)
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


def moe(
    x: Float[Array, "... D"], p: Mapping[str, Any], weights: Float[Array, "... k"], experts: Int[Array, "... k"],
    act: Activation, *, gated: Callable[[Array, Array], Array] | None = None, scale_inputs: bool = False,
) -> Float[Array, "... D"]:  # fmt: skip
    """Add up the chosen experts' gated feed-forwards: sum over j of weights[j] glu(x, expert experts[j]).

    `p` holds gate, up [E F D] and down [E D F], and where a family has them gate_bias, up_bias [E F] and down_bias
    [E D]; weights and experts come from a router. `gated(gate, up)` stands for act(gate) * up where a family has another
    product. With `scale_inputs` the weights multiply what goes into the experts: sum over j of
    glu(weights[j] x, expert experts[j]). No token is dropped here; an index that is no expert's (-1) adds nothing.

    `ops.use(moe=...)` names how a device computes its experts: "fused" (sorted rows, grouped products), "dense" (every
    expert, every token) or "standard" (one expert after another, every token). On a mesh (`jax.set_mesh`) every device
    sorts its own rows. With an axis `ep` it holds E / ep experts, and `ops.use(expert_parallel=...)` names how rows
    get to their experts and back: see `ops/expert_parallel.py`. `ops.explain` says what is chosen.
    >>> p = {"gate": jnp.ones((4, 8, 2)), "up": jnp.ones((4, 8, 2)), "down": jnp.ones((4, 2, 8))}
    >>> ops.moe(jnp.ones((3, 2)), p, *ops.route_softmax(jnp.zeros((3, 4)), 2, normalize=True), jax.nn.relu)[0]
    Array([32., 32.], dtype=float32)
    """
    product = gated or (lambda gate, up: act(gate) * up)
    names = [name + end for name in MATRICES for end in ("", "_bias")]
    p = {name: p[name] for name in names if name in p}
    local = lambda *args: run(METHODS, None, *args, gated=product, scale_inputs=scale_inputs)
    axes = set(context("dp", "fsdp", "ep", "sp"))
    if not axes:
        return local(x, p, weights, experts)
    rows = partition(x, "rows tokens embed") if x.ndim == 3 else P()
    if "ep" in axes:
        return expert_parallel.exchange(local, x, p, weights, experts, rows, scale_inputs=scale_inputs)
    return divided(local, axes, (rows, P(), rows, rows), rows)(x, p, weights, experts)


def _fused(
    x: Array, p: Mapping[str, Any], weights: Array, experts: Array, *, gated: Callable, scale_inputs: bool
) -> Array:
    """Compute `moe` for the experts 0 to E - 1 that `p` holds; others add nothing. Rows are sorted by expert."""
    *batch, k = experts.shape
    held = p["gate"].shape[0]
    chosen = experts.reshape(-1)
    chosen = jnp.where((chosen >= 0) & (chosen < held), chosen, held)
    order = jnp.argsort(chosen)
    sizes = jnp.bincount(chosen, length=held + 1)[:held]
    rows = x.reshape(-1, x.shape[-1])[order // k]
    if scale_inputs:
        rows, weights = rows * weights.reshape(-1)[order, None].astype(rows.dtype), jnp.ones_like(weights)

    def linear(rows: Array, name: str, saved: str) -> Array:
        y = grouped_matmul(rows, p[name], sizes)
        if f"{name}_bias" in p:  # rows past the last group get some expert's, and count for nothing below
            y = y + p[f"{name}_bias"].astype(y.dtype).at[chosen[order]].get(mode="fill", fill_value=0)
        return checkpoint_name(y, saved)

    gate, up = linear(rows, "gate", "moe_gate"), linear(rows, "up", "moe_up")
    down = linear(gated(gate, up), "down", "moe_expert_output")
    y = down[jnp.argsort(order)].reshape(*batch, k, x.shape[-1])
    return checkpoint_name(jnp.einsum("...kd,...k->...d", y, weights).astype(x.dtype), "moe_output")


def _shares(weights: Array, experts: Array, held: int) -> tuple[Array, Array]:
    """Give each held expert's weight of each token, and whether the token chose it: both [E T 1]."""
    chosen = experts[..., None] == jnp.arange(held)  # [... k E]
    by_expert = lambda c: c.reshape(-1, held).T[..., None]
    return by_expert(jnp.where(chosen, weights[..., None], 0).sum(-2)), by_expert(chosen.any(-2))


def _dense(
    x: Array, p: Mapping[str, Any], weights: Array, experts: Array, *, gated: Callable, scale_inputs: bool
) -> Array:
    """Compute `_fused` by all experts for every token, without a loop: of a few, nearly all are chosen, each read once."""

    def product(name: str, saved: str, text: str, rows: Array) -> Array:
        y = einsum(text, rows, p[name], out_dtype=jnp.float32)
        y = y + p[f"{name}_bias"][:, None].astype(y.dtype) if f"{name}_bias" in p else y
        return checkpoint_name(y.astype(x.dtype), saved)

    share, mine = _shares(weights, experts, p["gate"].shape[0])
    rows, text = x.reshape(-1, x.shape[-1]), "td,efd->etf"
    if scale_inputs:
        rows, text, share = (rows * share.astype(x.dtype)), "etd,efd->etf", jnp.ones_like(share)
    gate, up = (product(name, f"moe_{name}", text, rows) for name in ("gate", "up"))
    down = product("down", "moe_expert_output", "etf,edf->etd", gated(gate, up))
    y = jnp.where(mine, down * share, 0).sum(0)  # another expert's result may be infinite
    return checkpoint_name(y.astype(x.dtype).reshape(x.shape), "moe_output")


def _standard(
    x: Array, p: Mapping[str, Any], weights: Array, experts: Array, *, gated: Callable, scale_inputs: bool
) -> Array:
    """Compute `_fused` one expert after another, each for every token: nothing is sorted, and one expert's rows are held."""
    rows = x.reshape(-1, x.shape[-1])

    def expert(total: Array, each: tuple) -> tuple[Array, None]:
        p, share, mine = each

        def linear(rows: Array, name: str) -> Array:
            y = einsum("td,fd->tf", rows, p[name])
            return y + p[f"{name}_bias"].astype(y.dtype) if f"{name}_bias" in p else y

        inputs = rows * share.astype(rows.dtype) if scale_inputs else rows
        down = linear(gated(linear(inputs, "gate"), linear(inputs, "up")), "down")
        return total + jnp.where(mine, widen(down) if scale_inputs else down * share, 0), None

    each = (dict(p), *_shares(weights, experts, p["gate"].shape[0]))
    total, _ = lax.scan(expert, jnp.zeros(rows.shape, wide(jnp.float32)), each)
    return checkpoint_name(total.astype(x.dtype).reshape(x.shape), "moe_output")


def _not_dense(x: Array, p: Mapping[str, Any], *_: Any, **__: Any) -> str | None:
    arrays = all(isinstance(p[name], jax.Array) for name in MATRICES)
    return None if arrays else "its products of all experts are of arrays; some are quantized or have adapters"


def _not_few(x: Array, p: Mapping[str, Any], weights: Array, experts: Array, **_: Any) -> str | None:
    """Say why few tokens are no reason to compute all experts: where they are, reading them takes the time."""
    if target() == "cpu":
        return "a CPU takes as long as it multiplies"
    tokens, held = experts.size // experts.shape[-1], p["gate"].shape[0]
    return None if held <= 2 * experts.size and tokens <= FEW else f"{tokens} tokens for {held} experts"


METHODS = Table(
    "moe",
    {
        "dense": Implementation(_dense, _not_dense, passed_over=_not_few),
        "standard": Implementation(_standard, passed_over=lambda *_, **__: "it computes every expert for every token"),
        "fused": Implementation(_fused),
    },
    also={"fused_moe": "fused", "standard_moe": "standard", "dense_moe": "dense"},  # EasyDeL's names
)
