"""Experts that are divided between devices (mesh axis `ep`): how the rows of tokens get to their experts and back.

With n devices along `ep` and R tokens on each, of which each chose k experts, a device sends, forward:

- all_gather: its R rows to all others, and what its experts make of the other devices' rows, summed, in float32.
- all_to_all: a row to each chosen expert's device and back, in the rows' dtype: k / n of the all-gather's rows. Rounds have
  a fixed size, a quarter more than even routing needs, where an all-gather leaves n R k rows to sort; only a router that is
  less even needs a second one. No row is ever dropped.
- ragged_all_to_all: as many rows as were chosen, in one exchange whose buffer is for the worst case. XLA:CPU lacks it.
- ring: as many bytes as all_gather; a device holds the rows of one other at a time.

The backward passes send the same once more. DeepSpeed-MoE (arXiv:2201.05596, section 5) describes the first two.
"""

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from fdel.ops.contraction import wide, widen
from fdel.ops.cpu import collective
from fdel.ops.dispatch import Implementation, Table, choose
from fdel.ops.grouped import in_order
from fdel.ops.platform import context, target
from fdel.ops.shard import divided

AXIS = "ep"
SLACK = 1.25  # rows in a round, for each that even routing sends
FEW = 128  # tokens of a device whose exchange is a matter of latency

Local = Callable[[Array, Mapping[str, Any], Array, Array], Array]


def exchange(
    local: Local, x: Array, p: Mapping[str, Any], weights: Array, experts: Array, rows: P, *, scale_inputs: bool
) -> Array:
    """Compute `ops.moe` on devices that hold E / ep experts each, by local(x, p, weights, experts) of those experts."""
    way = choose(TABLE, None, x, p, experts, rows)
    axes = set(context("dp", "fsdp", AXIS, "sp"))
    call = way.call if _divided(rows) else _all_gather  # where every device has all rows, none is sent
    sent = partial(call, local, divided=_divided(rows), scale_inputs=scale_inputs, axes=tuple(sorted(axes)))
    return divided(sent, axes, (rows, P(AXIS), rows, rows), rows)(x, p, weights, experts)


def _all_gather(
    local: Local, x: Array, p: Mapping[str, Any], weights: Array, experts: Array, *, divided: bool, **_: Any
) -> Array:
    """Fetch the rows of all devices for the experts that this one holds, and scatter their sums."""
    if divided:
        fetch = lambda c: lax.all_gather(c, AXIS, axis=0, tiled=True)
        x, weights, experts = collective(fetch, x), collective(fetch, weights), fetch(experts)
    y = local(x, p, weights, experts - lax.axis_index(AXIS) * p["gate"].shape[0])
    y = widen(y)  # the experts' parts add up in float32, as they do on one device
    y = lax.psum_scatter(y, AXIS, scatter_dimension=0, tiled=True) if divided else lax.psum(y, AXIS)
    return y.astype(x.dtype)


def _ring(local: Local, x: Array, p: Mapping[str, Any], weights: Array, experts: Array, **_: Any) -> Array:
    """Pass rows round all devices, each of which adds what its experts make of them, until they are home."""
    n, first = lax.axis_size(AXIS), lax.axis_index(AXIS) * p["gate"].shape[0]
    onwards = [(i, (i + 1) % n) for i in range(n)]
    pass_on = lambda c: lax.ppermute(c, AXIS, onwards)

    def hop(carry: Any, _: Any) -> tuple[Any, None]:
        x, weights, experts, total = carry
        total = pass_on(total + widen(local(x, p, weights, experts - first)))
        return (collective(pass_on, x), collective(pass_on, weights), pass_on(experts), total), None

    begin: Any = (x, weights, experts, jnp.zeros_like(widen(x)))
    return lax.scan(hop, begin, length=n)[0][-1].astype(x.dtype)


def _all_to_all(
    local: Local, x: Array, p: Mapping[str, Any], weights: Array, experts: Array, *,
    scale_inputs: bool, axes: tuple[str, ...], **_: Any,
) -> Array:  # fmt: skip
    """Send each row to the devices of its experts and back, in rounds of as many rows for each pair of devices.

    What is past the first round is computed again in the backward pass, so that nothing is held for it.
    """
    n, held, k = lax.axis_size(AXIS), p["gate"].shape[0], experts.shape[-1]
    sort = _Sorted(experts, n, held)
    width = x.shape[-1]
    given = x.reshape(-1, width)
    each = len(given) * k  # the most rows that one device may send to another
    size = min(each, max(1, math.ceil(SLACK * len(given) * k / n)))
    start, count = sort.start, sort.to
    swap = partial(collective, lambda c: lax.all_to_all(c, AXIS, 0, 0, tiled=True))
    incoming = sort.incoming.cumsum(1)

    def send(given: Array, weights: Array, p: Mapping[str, Any], j: Any) -> tuple[Array, Array]:
        """Rows of round j as their experts return them, and where they stand in the sorted order."""
        at = j * size + jnp.arange(size)
        places = jnp.where(at < count[:, None], start[:, None] + at, len(sort.order)).reshape(-1)
        chosen = sort.order.at[places].get(mode="fill", fill_value=k * len(given))
        rows = given.at[chosen // k].get(mode="fill", fill_value=0)
        if scale_inputs:
            rows = rows * weights.reshape(-1).at[chosen].get(mode="fill", fill_value=0)[:, None].astype(rows.dtype)
        expert = jax.vmap(lambda ends: _group(ends, at))(incoming).reshape(-1, 1)
        return swap(local(swap(rows), p, jnp.ones(expert.shape, weights.dtype), expert)), places

    def add(out: Array, j: Any, args: tuple) -> Array:
        given, weights, p = args
        back, places = send(given, weights, p, j)
        return out.at[places].add(back, mode="drop")

    args = given, weights, p
    out = add(jnp.zeros((len(sort.order), width), x.dtype), 0, args)
    if size < each:
        rounds = -(-lax.pmax(count.max(), axes) // size)  # of the busiest pair of devices
        again = jax.checkpoint(add)  # and once more around the condition, which else holds its arguments for each round

        def more(out: Array, args: tuple) -> Array:
            one = lambda out, j: (lax.cond(j < rounds, again, lambda out, *_: out, out, j, args), None)
            return lax.scan(jax.checkpoint(one, prevent_cse=False), out, jnp.arange(1, -(-each // size)))[0]

        out = lax.cond(rounds > 1, more, lambda out, _: out, out, args)
    return sort.combine(out, weights, scale_inputs).reshape(x.shape)


def _ragged(
    local: Local, x: Array, p: Mapping[str, Any], weights: Array, experts: Array, *, scale_inputs: bool, **_: Any
) -> Array:
    """Send each row to the devices of its experts and back, in two ragged exchanges."""
    n, held, k = lax.axis_size(AXIS), p["gate"].shape[0], experts.shape[-1]
    sort = _Sorted(experts, n, held)
    given = x.reshape(-1, x.shape[-1])
    rows = in_order(given, sort.order, sort.back, k)
    if scale_inputs:
        rows *= in_order(weights.reshape(-1), sort.order, sort.back, 1)[:, None].astype(rows.dtype)
    me, sizes = lax.axis_index(AXIS), sort.every.reshape(n, n, held).sum(-1)  # [from to]
    sent, received = sizes.cumsum(1) - sizes, sizes.cumsum(0) - sizes  # where a part begins with each of the two
    arriving = jnp.zeros((n * len(given) * k, x.shape[-1]), x.dtype)
    rows = lax.ragged_all_to_all(rows, arriving, sent[me], sizes[me], received[me], sizes[:, me], axis_name=AXIS)
    ends = sort.incoming.reshape(-1).cumsum()
    at = jnp.arange(len(rows))
    expert = jnp.where(at < ends[-1], _group(ends, at) % held, held)[:, None]
    rows = local(rows, p, jnp.ones(expert.shape, weights.dtype), expert)
    back = jnp.zeros((len(sort.order), x.shape[-1]), x.dtype)
    out = lax.ragged_all_to_all(rows, back, received[:, me], sizes[:, me], sent[:, me], sizes[me], axis_name=AXIS)
    return sort.combine(out, weights, scale_inputs).reshape(x.shape)


class _Sorted:
    """The choices of this device's tokens sorted by expert, hence by device, and how many there are on every device."""

    def __init__(self, experts: Array, n: int, held: int) -> None:
        chosen = experts.reshape(-1)
        chosen = jnp.where((chosen >= 0) & (chosen < n * held), chosen, n * held)
        counts = jnp.bincount(chosen, length=n * held + 1)[: n * held]
        self.experts, self.order = experts, jnp.argsort(chosen)
        self.back = jnp.argsort(self.order)
        self.every = lax.all_gather(counts, AXIS)  # [n E]
        self.incoming = lax.dynamic_slice_in_dim(self.every, lax.axis_index(AXIS) * held, held, 1)  # [n held]
        self.to = counts.reshape(n, held).sum(1)
        self.start = self.to.cumsum() - self.to

    def combine(self, out: Array, weights: Array, scaled: bool) -> Array:
        """Add up what came back [R k D] for each token, with its weights unless inputs had them; [R D]."""
        *_, k = self.experts.shape
        y = in_order(out, self.back, self.order, 1).reshape(-1, k, out.shape[-1])
        weights = weights.reshape(-1, k)
        return jnp.einsum("rkd,rk->rd", y, jnp.ones_like(weights) if scaled else weights).astype(out.dtype)


def _group(ends: Array, at: Array) -> Array:
    """Say in which group a place is: all ends are compared at once, where a search would be a loop of small steps."""
    return jnp.searchsorted(ends, at, side="right", method="compare_all")


def _divided(rows: P) -> bool:
    return bool(rows) and AXIS in (rows[0] or ())


def _no_ragged(*_: Any) -> str | None:
    return "XLA:CPU has no ragged all-to-all" if target() == "cpu" else None


def _more_bytes(x: Array, p: Any, experts: Array, rows: P) -> str | None:
    """Say why rows are gathered all the same, or None.

    Each device sorts n / SLACK times as many rows then, so two exchanges that send as much as one are worth it.
    """
    if not _divided(rows):
        return "every device along ep has all rows: ep does not divide them"
    n, k = context(AXIS)[AXIS], experts.shape[-1]
    names = [a for part in rows for a in ((part,) if isinstance(part, str) else part or ())]
    tokens = experts.size // k // math.prod(context(*names).values())
    if tokens < FEW:
        return f"a device has {tokens} tokens, fewer than {FEW}: one exchange is faster than two"
    size = x.dtype.itemsize
    share = SLACK * k / n * 2 * size / (size + wide(x.dtype).itemsize)  # there and back; there, and sums back
    why = f"with {k} experts for each token and ep={n} it sends {share:.2f} of all_gather's bytes, more than all"
    return None if share <= 1 else why


TABLE = Table(  # each takes (local, x, p, weights, experts), on each device, and is chosen by (x, p, experts, rows)
    "expert_parallel",
    {
        "ragged_all_to_all": Implementation(_ragged, _no_ragged, on_request=True),
        "all_to_all": Implementation(_all_to_all, passed_over=_more_bytes),
        "ring": Implementation(_ring, passed_over=lambda *_: "it sends as much as all_gather, in ep steps"),
        "all_gather": Implementation(_all_gather),
    },
    also={"ring_of_experts": "ring"},
)
