"""Optimizers and schedules, built from optax. `schedule(step)` is the learning rate of a step."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from fdel.params.spec import layout


def decay_mask(spec: Any) -> Any:
    """Tell which arrays of a spec tree decay: those stored with two axes or more, except norms.

    The axes that count are those in the checkpoint: a bias that we keep as [heads head_dim] is a vector there.
    """
    return jax.tree.map(lambda p: len(layout(p).file_shape) > 1 and "norm" not in p.hf, spec)


def adamw(
    learning_rate: optax.ScalarOrSchedule,
    *,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    clip: float | None = 1.0,
    mask: Any = None,
) -> optax.GradientTransformation:
    """AdamW (arXiv:1711.05101) after clipping the gradients' global norm to `clip`; torch's formula, HF's defaults.

    The moments are float32 whatever the parameters are: in bfloat16 the second one stops short of its value. `mask` is
    a tree of booleans, as from `decay_mask`; None decays everything.
    """
    adam = optax.adamw(learning_rate, b1, b2, eps, weight_decay=weight_decay, mask=mask)
    chain = adam if clip is None else optax.chain(optax.clip_by_global_norm(clip), adam)
    wide = lambda params: jax.tree.map(lambda x: x.astype(jnp.promote_types(x.dtype, jnp.float32)), params)
    return optax.GradientTransformation(lambda params: chain.init(wide(params)), chain.update)


def warmup_cosine(peak: float, *, warmup: int, steps: int, final: float = 0.0) -> optax.Schedule:
    """Rise linearly from 0 to `peak` over `warmup` steps, then fall along a half cosine to final * peak at `steps`."""
    return optax.warmup_cosine_decay_schedule(0.0, peak, warmup, steps, final * peak)
