"""The specification of attention: what a query may see, its scores, their softmax, and the contract of an implementation.

Every implementation imports this file; none imports another one for it.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

NEG = -1e30  # finite, so that rows without a visible key stay free of NaN
HIDDEN = -3  # segment id of a key that no query sees; ids of queries are -2 (added to fill a block) or more

# What an implementation of attention takes and gives: N heads of queries over K heads of keys, S keys (T of the same rows).
Queries = Float[Array, "B T N H"]
Keys = Float[Array, "B S K H"]
Values = Float[Array, "B S K Hv"]
PerHead = Float[Array, " N"] | None
Attended = tuple[Float[Array, "B T N Hv"], Float[Array, "B T N"]]  # in the dtype of the queries; log-sum-exp, float32


@dataclass(frozen=True)
class Mask:
    """What a query may see, as a specification: hashable, so it is static under jit.

    `window` is the number of visible keys including the query's own; `softcap` bounds the scores: c tanh(s / c). With
    `chunk` a query sees keys of its own chunk of so many positions only (`attend` and `paged_attention` read it).
    """

    scale: float
    causal: bool = True
    window: int | None = None
    softcap: float | None = None
    chunk: int | None = None

    def __post_init__(self) -> None:
        for name, least in (("scale", -math.inf), ("window", 1), ("chunk", 1), ("softcap", 1e-30)):
            value = getattr(self, name)
            if value is not None and not least <= value < math.inf:
                wanted = "a finite number" + f" of at least {least}" * (least > 0)
                raise ValueError(f"Mask.{name}={value}: expected {wanted}")

    @property
    def reach(self) -> tuple[int | None, int | None]:
        """How many tokens back and how many ahead a query sees; None: all."""
        back = None if self.window is None else self.window - 1
        return back, 0 if self.causal else back


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Where:
    """Which tokens of a row queries and keys are: their segments, and the indices in the row of the first of each.

    Without `k_segments` keys have the segments of the queries, which may then not have two. Without starts both are the
    whole row: a kernel whose masks are static can serve that. Starts are arrays where a row is divided between devices.
    `single`: a row is one sequence, with padding at its end only; `full`: with none. `ahead`: how many tokens behind its
    own each query sees too under a causal mask, as those of an image see each other; a window bounds what is before it
    alone.
    """

    q_segments: Int[Array, "B T"] | Int[Array, "B T 2"]
    k_segments: Int[Array, "B S"] | None = None
    q_start: Int[Array, ""] | None = None
    k_start: Int[Array, ""] | None = None
    ahead: Int[Array, "B T"] | None = None
    single: bool = field(default=False, metadata={"static": True})
    full: bool = field(default=False, metadata={"static": True})

    # Segment ids of queries and those of keys; indices in the row of the first query and the first key.
    sides = property(lambda self: (self.q_segments, self.q_segments if self.k_segments is None else self.k_segments))
    starts = property(lambda self: tuple(0 if x is None else x for x in (self.q_start, self.k_start)))


def visible(
    m: Mask, qi: Array, ki: Array, qs: Array, ks: Array, look: Int[Array, "B q"] | None = None
) -> Bool[Array, "B q s"]:
    """Tell which keys each query sees, from indices in the row [q], [s] and segment ids [B q] or [B q 2], [B s].

    `look` is `Where.ahead` of the queries.
    """
    seen = qs[:, :, None] == ks[:, None, :] if qs.ndim == 2 else (qs[:, :, None] == ks[:, None, :, None]).any(-1)
    distance = ki[None, :] - qi[:, None]
    back, ahead = m.reach
    if ahead is not None:
        seen &= distance <= (look[:, :, None] if look is not None and m.causal else ahead)
    return seen if back is None else seen & (distance >= -back)


def grouped(x: Any, kv_heads: int) -> Any:
    """Lay queries [B T N H] out as [B K G T H], and one number per head [N] as [K G]; None stays None."""
    if x is None or x.ndim == 1:
        return x if x is None else x.reshape(kv_heads, -1)
    return x.reshape(*x.shape[:2], kv_heads, -1, x.shape[3]).transpose(0, 2, 3, 1, 4)


def ungrouped(x: Float[Array, "B K G T H"]) -> Float[Array, "B T N H"]:
    """Undo the layout of `grouped`."""
    x = x.transpose(0, 3, 1, 2, 4)
    return x.reshape(*x.shape[:2], -1, x.shape[-1])


def scores(m: Mask, q: Array, k: Array, alibi: Array | None, qi: Array, ki: Array) -> Float[Array, "B K G q s"]:
    """Compute softcap(scale q k) + alibi (key index - query index) in float32; qi is [q] or [B 1 1 q]."""
    s = jnp.einsum("bkgqh,bksh->bkgqs", q, k, preferred_element_type=jnp.float32) * m.scale
    if m.softcap is not None:
        s = m.softcap * jnp.tanh(s / m.softcap)
    return s if alibi is None else s + alibi[:, :, None, None] * (ki - qi[..., None])


def begin(shape: tuple, v_dim: int, sinks: Float[Array, "K G"] | None) -> tuple:
    """Start `online` for queries of shape (B, K, G, q): empty, or holding each head's sink."""
    rows = (*shape, 1)
    top = jnp.full(rows, NEG) if sinks is None else jnp.broadcast_to(sinks[..., None, None], rows).astype(jnp.float32)
    return top, jnp.full(rows, 0.0 if sinks is None else 1.0), jnp.zeros((*shape, v_dim), jnp.float32)


def online(carry: tuple, s: Array, seen: Array, v: Array) -> tuple:
    """Add keys to running (largest score, sum of exponentials, weighted values), each [B K G q ...]."""
    top, total, out = carry
    s = jnp.where(seen, s, NEG)
    new = jnp.maximum(top, s.max(-1, keepdims=True))
    p = jnp.exp(s - jnp.maximum(new, NEG / 2))  # of a hidden key 0, also where nothing is visible
    decay = jnp.exp(top - new)
    pv = jnp.einsum("bkgqs,bksh->bkgqh", p.astype(v.dtype), v, preferred_element_type=jnp.float32)
    return new, total * decay + p.sum(-1, keepdims=True), out * decay + pv


def finish(carry: tuple) -> tuple[Float[Array, "B K G q H"], Float[Array, "B K G q 1"]]:
    """Give the output and the log-sum-exp of all scores; a query that sees nothing has 0 and `NEG`."""
    top, total, out = carry
    total = jnp.where(total == 0, 1, total)
    return out / total, top + jnp.log(total)


def score_gradients(
    m: Mask, of_queries: tuple, k: Array, v: Array, seen: Array, alibi: Any, qi: Array, ki: Array
) -> tuple[Array, Array]:
    """Compute probabilities and score gradients, both [B K G q s], from (q, dout, lse, delta) of some queries.

    delta [B K G q 1] is dout . out less the cotangent of lse.
    """
    q, dout, lse, delta = of_queries
    s = scores(m, q, k, None, qi, ki)
    slope = 1.0 if m.softcap is None else 1 - jnp.square(s / m.softcap)
    if alibi is not None:
        s = s + alibi[:, :, None, None] * (ki - qi[:, None])
    p = jnp.where(seen, jnp.exp(s - lse), 0)
    dp = jnp.einsum("bkgqh,bksh->bkgqs", dout, v, preferred_element_type=jnp.float32)
    ds = p * (dp - delta) * slope * m.scale
    return p.astype(q.dtype), ds.astype(q.dtype)


class Passes(NamedTuple):
    """An implementation of attention in two passes, which `ring` composes too.

    forward(mask, q[B T N H], k[B S K H], v[B S K Hv], where, sinks[N]|None, alibi[N]|None) -> (out[B T N Hv] in q's
    dtype, lse[B T N] in float32: the log-sum-exp of each query's scores, sinks included, `NEG` if it sees nothing).
    backward(the same, out, lse, dout, dlse) -> (dq, dk, dv, dsinks|None). The keys may be some of those that out and
    lse come from: then these are their gradients, and their part of dq.
    """

    forward: Callable[..., tuple]
    backward: Callable[..., tuple]


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def attention(passes: Passes, m: Mask, q: Any, k: Any, v: Any, where: Any, sinks: Any, alibi: Any) -> tuple:
    """Attend by a pair of passes: (out, lse), differentiable in q, k, v and sinks (alibi slopes are constants)."""
    return passes.forward(m, q, k, v, where, sinks, alibi)


def _forward(passes: Passes, m: Mask, *args: Any) -> tuple:
    found = named(attention.fun(passes, m, *args))  # not attention: gradients are differentiated too
    return found, (*args, *found)


def _backward(passes: Passes, m: Mask, saved: tuple, cotangents: tuple) -> tuple:
    *_, where, _, alibi, _, _ = saved
    dq, dk, dv, dsinks = passes.backward(m, *saved, *cotangents)
    return dq, dk, dv, no_gradient(where), dsinks, None if alibi is None else jnp.zeros_like(alibi)


attention.defvjp(_forward, _backward)


def named(forward: tuple[Array, Array]) -> tuple[Array, Array]:
    """Mark what a backward pass needs of the forward one, for remat policies: with it no attention is computed twice."""
    out, lse = forward
    return checkpoint_name(out, "attn_output"), checkpoint_name(lse, "attn_output")


def no_gradient(integers: Any) -> Any:
    """Give the cotangents that JAX wants for a tree of integers."""
    return jax.tree.map(lambda x: np.zeros(x.shape, jax.dtypes.float0), integers)
