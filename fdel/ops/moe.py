"""Mixture of experts: gated feed-forwards of the experts that a router chose, without dropping a token."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from fdel.ops import expert_parallel
from fdel.ops.contraction import widen
from fdel.ops.cpu import collective
from fdel.ops.dispatch import Implementation, Table, run
from fdel.ops.einsum import einsum
from fdel.ops.glu import Activation
from fdel.ops.grouped import grouped_glu, grouped_matmul, in_order, of_groups
from fdel.ops.platform import context, target
from fdel.ops.shard import divided, partition
from fdel.ops.weights import LowRank, Observed, Quantized, Weight, cuts_inputs, of_part

MATRICES = ("gate", "up", "down")
FEW = 128  # tokens for which an accelerator reads an expert longer than it multiplies them all with it


def moe(
    x: Float[Array, "... D"], p: Mapping[str, Any], weights: Float[Array, "... k"], experts: Int[Array, "... k"],
    act: Activation, *, gated: Callable[[Array, Array], Array] | None = None, scale_inputs: bool = False,
) -> Float[Array, "... D"]:  # fmt: skip
    """Add up the chosen experts' gated feed-forwards: sum over j of weights[j] glu(x, expert experts[j]).

    `p` holds gate, up [E F D] and down [E D F], and where a family has them gate_bias, up_bias [E F] and down_bias
    [E D]; weights and experts come from a router. `gated(gate, up)` stands for act(gate) * up where a family has another
    product. With `scale_inputs` the weights multiply what goes into the experts: sum over j of
    glu(weights[j] x, expert experts[j]). No token is dropped here; an index that is no expert's (-1) adds nothing.
    ValueError for weights and experts of different shapes, or of other tokens than x.

    `ops.use(moe=...)` names how a device computes its experts: "fused" (sorted rows, grouped products), "dense" (every
    expert, every token) or "standard" (one expert after another, every token). On a mesh (`jax.set_mesh`) every device
    sorts its own rows. With an axis `ep` it holds E / ep experts, and `ops.use(expert_parallel=...)` names how rows
    get to their experts and back: see `ops/expert_parallel.py`. If ep does not divide E, each device has all experts, and
    computes its own rows. `ops.explain` says what is chosen.
    >>> p = {"gate": jnp.ones((4, 8, 2)), "up": jnp.ones((4, 8, 2)), "down": jnp.ones((4, 2, 8))}
    >>> ops.moe(jnp.ones((3, 2)), p, *ops.route_softmax(jnp.zeros((3, 4)), 2, normalize=True), jax.nn.relu)[0]
    Array([32., 32.], dtype=float32)
    """
    if weights.shape != experts.shape or experts.shape[:-1] != x.shape[:-1]:
        found = f"x {x.shape}, weights {weights.shape}, experts {experts.shape}"
        raise ValueError(f"moe: {found}; expected [... D] and twice [... k], of the same tokens")
    product = gated or (lambda gate, up: act(gate) * up)
    names = [name + end for name in MATRICES for end in ("", "_bias")]
    p = {name: p[name] for name in names if name in p}
    local = partial(_on_device, gated=product, scale_inputs=scale_inputs)
    axes = set(context("dp", "fsdp", "ep", "sp"))
    if not axes:
        return local(x, p, weights, experts)
    rows = partition(x, "rows tokens embed") if x.ndim == 3 else P()
    if "ep" in axes and p["gate"].shape[0] % context("ep")["ep"] == 0:
        return expert_parallel.exchange(local, x, p, weights, experts, rows, scale_inputs=scale_inputs)
    return divided(local, axes, (rows, P(), rows, rows), rows)(x, p, weights, experts)


def _on_device(x: Array, p: Mapping[str, Any], weights: Array, experts: Array, **how: Any) -> Array:
    """Compute `moe` for the experts 0 to E - 1 that `p` holds, by one of `METHODS`.

    Along `tp` each device computes its hidden units F of all experts, and what they add to a token is summed. Where it
    would have parts of groups of a quantized `down`, hidden units are exchanged, and it computes some numbers of a token.
    Where units cannot be divided either it fetches the matrices first and computes all: how often a loop over rows runs
    depends on the rows, so what the compiler would send inside of it, others along `dp` or `ep` would not answer.
    """
    compute, n = partial(run, METHODS, None, **how), context("tp").get("tp", 1)
    if n == 1 or any(isinstance(p[name], Observed) for name in MATRICES):  # whose sums would be added up over `tp`
        return compute(x, p, weights, experts)
    parts = {name: _of_units(p[name], 2 if name == "down" else 1, n) for name in MATRICES}
    summed = parts["down"] is not None
    parts["down"] = parts["down"] if summed else _of_units(p["down"], 1, n)
    if None in parts.values():
        return divided(compute, {"tp"}, P(), P())(x, p, weights, experts)

    def part(x: Array, p: dict[str, Any], weights: Array, experts: Array) -> Array:
        if not summed:
            joined = partial(collective, lambda h: lax.all_gather(h, "tp", axis=h.ndim - 1, tiled=True))
            return compute(x, p, weights, experts, joined=joined)
        p = p | {"down": _own(p["down"], n)}
        if "down_bias" in p:  # once
            p["down_bias"] = jnp.where(lax.axis_index("tp") == 0, p["down_bias"], 0)
        return collective(lambda y: lax.psum(y, "tp"), compute(x, p, weights, experts))

    whole = lambda name: name == "down_bias" and summed
    parts |= {name: P() if whole(name) else P(None, "tp") for name in p if name not in parts}
    out = P() if summed else P(*[None] * (x.ndim - 1), "tp")
    return divided(part, {"tp"}, (P(), parts, P(), P()), out)(x, p, weights, experts)


def _of_units(w: Weight, axis: int, n: int) -> Any:
    """Give the specs of a weight [E N K] of which n devices along `tp` share N (axis 1) or K (2); None if they cannot."""
    if isinstance(w, LowRank):
        base = _of_units(w.base, axis, n)
        a, b = (P(None, None, "tp"), P()) if axis == 2 else (P(), P(None, "tp"))
        factors: dict[str, Any] = {"a": a, "b": b, "scale": P()}
        return None if base is None else replace(w, base=base, **factors)
    if isinstance(w, Quantized):
        if w.order is not None or axis == 2 and not cuts_inputs(w, n):
            return None
    elif not isinstance(w, jax.Array):
        return None
    whole = lambda c: axis == 2 and c.shape[2] == 1  # one scale for all inputs
    if any(c.shape[axis] % n for c in jax.tree.leaves(w) if not whole(c)):
        return None
    return jax.tree.map(lambda c: P() if whole(c) else P(*[None] * axis, "tp"), w)


def _own(w: Any, n: int) -> Any:
    """Give a device's part of a weight, of 1 / n of its inputs, their number."""
    if isinstance(w, LowRank):
        return replace(w, base=_own(w.base, n))
    return of_part(w, (w.inputs[0] // n,)) if isinstance(w, Quantized) else w


def _fused(
    x: Array, p: Mapping[str, Any], weights: Array, experts: Array, *,
    gated: Callable, scale_inputs: bool, joined: Callable[[Array], Array] = lambda h: h,
) -> Array:  # fmt: skip
    """Compute `moe` for the experts 0 to E - 1 that `p` holds; others add nothing. Rows are sorted by expert.

    joined(h) gives all hidden units, of those that `p` has.
    """
    *batch, k = experts.shape
    held = p["gate"].shape[0]
    chosen = experts.reshape(-1)
    chosen = jnp.where((chosen >= 0) & (chosen < held), chosen, held)
    order = jnp.argsort(chosen)
    back = jnp.argsort(order)
    sizes = jnp.bincount(chosen, length=held + 1)[:held]
    rows = in_order(x.reshape(-1, x.shape[-1]), order, back, k)
    if scale_inputs:
        rows *= in_order(weights.reshape(-1), order, back, 1)[:, None].astype(rows.dtype)
        weights = jnp.ones_like(weights)

    h = grouped_glu(rows, p["gate"], p["up"], sizes, gated, p.get("gate_bias"), p.get("up_bias"))
    down = grouped_matmul(joined(h), p["down"], sizes)
    if "down_bias" in p:
        down = down + of_groups(p["down_bias"], chosen[order]).astype(down.dtype)
    down = checkpoint_name(down, "moe_expert_output")
    y = in_order(down, back, order, 1).reshape(*batch, k, down.shape[-1])
    return checkpoint_name(jnp.einsum("...kd,...k->...d", y, weights).astype(x.dtype), "moe_output")


def _shares(weights: Array, experts: Array, held: int) -> tuple[Array, Array]:
    """Give each held expert's weight of each token, and whether the token chose it: both [E T 1]."""
    chosen = experts[..., None] == jnp.arange(held)  # [... k E]
    by_expert = lambda c: c.reshape(-1, held).T[..., None]
    return by_expert(jnp.where(chosen, weights[..., None], 0).sum(-2)), by_expert(chosen.any(-2))


def _dense(
    x: Array, p: Mapping[str, Any], weights: Array, experts: Array, *,
    gated: Callable, scale_inputs: bool, joined: Callable[[Array], Array] = lambda h: h,
) -> Array:  # fmt: skip
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
    down = product("down", "moe_expert_output", "etf,edf->etd", joined(gated(gate, up)))
    y = jnp.where(mine, down * share, 0).sum(0)  # another expert's result may be infinite
    return checkpoint_name(y.astype(x.dtype).reshape(*x.shape[:-1], y.shape[-1]), "moe_output")


def _standard(
    x: Array, p: Mapping[str, Any], weights: Array, experts: Array, *,
    gated: Callable, scale_inputs: bool, joined: Callable[[Array], Array] = lambda h: h,
) -> Array:  # fmt: skip
    """Compute `_fused` one expert after another, each for every token: one expert's rows are held."""
    rows = x.reshape(-1, x.shape[-1])

    def expert(total: Array, each: tuple) -> tuple[Array, None]:
        p, share, mine = each

        def linear(rows: Array, name: str) -> Array:
            y = einsum("td,fd->tf", rows, p[name])
            return y + p[f"{name}_bias"].astype(y.dtype) if f"{name}_bias" in p else y

        inputs = rows * share.astype(rows.dtype) if scale_inputs else rows
        down = linear(joined(gated(linear(inputs, "gate"), linear(inputs, "up"))), "down")
        return total + jnp.where(mine, widen(down) if scale_inputs else down * share, 0), None

    each = (dict(p), *_shares(weights, experts, p["gate"].shape[0]))
    shape = len(rows), p["down"].shape[1]
    total, _ = lax.scan(expert, jnp.zeros(shape, jnp.promote_types(rows.dtype, jnp.float32)), each)
    return checkpoint_name(total.astype(x.dtype).reshape(*x.shape[:-1], shape[1]), "moe_output")


def _not_dense(x: Array, p: Mapping[str, Any], *_: Any, **__: Any) -> str | None:
    arrays = all(isinstance(p[name], jax.Array) for name in MATRICES)
    return None if arrays else "its products of all experts are of arrays; some are quantized or have adapters"


def _not_few(x: Array, p: Mapping[str, Any], weights: Array, experts: Array, **_: Any) -> str | None:
    """Say why few tokens are no reason to compute all experts: where they are, reading them takes the time.

    XLA's rounds read all as well, once or more; the kernel of TPUs only those with rows: six of seven of 2 choices each.
    """
    if target() == "cpu":
        return "a CPU takes as long as it multiplies"
    tokens, held = experts.size // experts.shape[-1], p["gate"].shape[0]
    enough = experts.size // 2 if target() == "tpu" else 2 * experts.size
    return None if held <= enough and tokens <= FEW else f"{tokens} tokens for {held} experts"


METHODS = Table(
    "moe",
    {
        "dense": Implementation(_dense, _not_dense, passed_over=_not_few),
        "standard": Implementation(_standard, passed_over=lambda *_, **__: "it computes every expert for every token"),
        "fused": Implementation(_fused),
    },
    also={"fused_moe": "fused", "standard_moe": "standard", "dense_moe": "dense"},  # EasyDeL's names
)
