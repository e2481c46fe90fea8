"""Multi-head latent attention (arXiv:2405.04434, section 2.1): keys and values come from one small latent per token."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from fdel.ops.attention import attend
from fdel.ops.batch import Batch, Packed
from fdel.ops.carry import Carry
from fdel.ops.dispatch import operation, weight
from fdel.ops.einsum import einsum
from fdel.ops.mask import Mask
from fdel.ops.weights import Weight

_HEADS, _CARRY = "(rows) tokens heads", {"pages": "", "attention": "watched rows heads"}


@operation("(rows) tokens", _CARRY, "", _HEADS, "(rows) tokens", weight("heads"), weight("heads"), out=(_HEADS, _CARRY))
def mla(
    batch: Batch, carry: Carry | None, layer: Any,
    q: Float[Array, "... T N H"], kv: Float[Array, "... T C_R"], w_k: Weight, w_v: Weight, *, mask: Mask,
) -> tuple[Float[Array, "... T N Hv"], Carry]:  # fmt: skip
    """Attend with keys [w_k[n] latent, rope] and values w_v[n] latent of head n, where kv = [latent, rope].

    The latent has C channels and w_k is [N Hn C], w_v [N Hv C]. The rope part, the R last channels of keys and queries,
    is rotated already; in keys it is common to all heads (H = Hn + R). Packed: keys and values are expanded and go to
    `attend`. Paged: pages hold kv as it is, one head without `v`, and nothing is expanded: the products are taken in
    the other order, q (w_k latent) = (q w_k) latent, and the weighted sum of latents goes through w_v.
    Returns the output in q's dtype and the new carry.
    """
    _, nope, c = w_k.shape
    latent, shared = kv[..., :c], kv[..., None, c:]
    if isinstance(batch, Packed):
        k = einsum("...c,nhc->...nh", latent, w_k)
        k = jnp.concatenate([k, jnp.broadcast_to(shared, (*k.shape[:-1], shared.shape[-1]))], -1)
        return attend(batch, carry, layer, q, k, einsum("...c,nhc->...nh", latent, w_v), mask=mask)
    q = jnp.concatenate([einsum("...nh,nhc->...nc", q[..., :nope], w_k), q[..., nope:]], -1)
    sums, carry = attend(batch, carry, layer, q, kv[..., None, :], latent[..., None, :], mask=mask)
    return einsum("...nc,nhc->...nh", sums, w_v), carry
