"""Dense feed-forwards and the activation functions that checkpoints name."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from fdel.ops.einsum import einsum

Activation = Callable[[jax.Array], jax.Array]


ACTIVATIONS: dict[str, Activation] = {
    "silu": jax.nn.silu,
    "swish": jax.nn.silu,
    "gelu": partial(jax.nn.gelu, approximate=False),
    "gelu_new": partial(jax.nn.gelu, approximate=True),
    "gelu_fast": partial(jax.nn.gelu, approximate=True),
    "gelu_pytorch_tanh": partial(jax.nn.gelu, approximate=True),
    "quick_gelu": lambda x: x * jax.nn.sigmoid(1.702 * x),
    "relu": jax.nn.relu,
    "relu2": lambda x: jax.numpy.square(jax.nn.relu(x)),
}


def linear(subscripts: str, x: Float[Array, "..."], w: Any, bias: Array | None = None) -> Float[Array, "..."]:
    """Apply a weight and, where the family has one, a bias (an absent key is None).
    >>> ops.linear("...d,fd->...f", jnp.array([1.0, 2.0]), jnp.eye(2), jnp.ones(2))
    Array([2., 3.], dtype=float32)
    """
    y = einsum(subscripts, x, w)
    return y if bias is None else y + bias.astype(y.dtype)


def glu(x: Float[Array, "... D"], p: Mapping[str, Any], act: Activation) -> Float[Array, "... D"]:
    """Gated feed-forward: (act(x gate) * (x up)) down; gate, up [F D], down [D F] (arXiv:2002.05202).

    `p` holds gate, up and down, and where the family has them gate_bias, up_bias and down_bias.
    >>> p = {"gate": jnp.ones((3, 2)), "up": jnp.ones((3, 2)), "down": jnp.ones((2, 3))}
    >>> ops.glu(jnp.ones(2), p, jax.nn.relu)
    Array([12., 12.], dtype=float32)
    """
    gate = checkpoint_name(linear("...d,fd->...f", x, p["gate"], p.get("gate_bias")), "mlp_gate")
    up = checkpoint_name(linear("...d,fd->...f", x, p["up"], p.get("up_bias")), "mlp_up")
    # A backward pass keeps these two and what is multiplied by down; what lies between it computes again.
    hidden = jax.checkpoint(lambda gate, up: act(gate) * up, prevent_cse=False)(gate, up)
    return checkpoint_name(linear("...f,df->...d", hidden, p["down"], p.get("down_bias")), "mlp_down")


def mlp(x: Float[Array, "... D"], p: Mapping[str, Any], act: Activation) -> Float[Array, "... E"]:
    """Plain feed-forward: act(x up + up_bias) down + down_bias; up [F D], down [E F]. E is D but in projectors.
    >>> ops.mlp(jnp.ones(2), {"up": jnp.ones((3, 2)), "down": jnp.ones((2, 3))}, jax.nn.relu)
    Array([6., 6.], dtype=float32)
    """
    up = checkpoint_name(linear("...d,fd->...f", x, p["up"], p.get("up_bias")), "mlp_up")
    return checkpoint_name(linear("...f,df->...d", act(up), p["down"], p.get("down_bias")), "mlp_down")
