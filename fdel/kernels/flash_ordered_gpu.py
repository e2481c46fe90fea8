"""Attention on NVIDIA Hopper as `flash_attention_gpu` has it, with gradients that are the same, to the bit, in every call.

The other adds the gradients of queries up in memory, in no fixed order, where heads have 128 channels; here a kernel of
their own gives them, for two more products of five (`flash_backward_gpu`).
"""

import functools
from typing import Any

from fdel.kernels import flash_backward_gpu
from fdel.kernels.device import unmeasured
from fdel.kernels.flash_attention_gpu import forward, unsupported
from fdel.ops import mask as M
from fdel.ops.mask import Attended, Keys, Mask, Passes, PerHead, Queries, Values, Where

__all__ = ["backward", "call", "forward", "unsupported"]
backward = functools.partial(flash_backward_gpu.backward, ordered=True)


def unproven(q: Queries, *_: Any, **__: Any) -> str | None:
    """Say why the kernel is taken only where it is named, or None."""
    return unmeasured(q)


def call(
    q: Queries, k: Keys, v: Values, where: Where, *, mask: Mask, sinks: PerHead, alibi: None, bias: None
) -> Attended:
    """Attend within segments: (output, log-sum-exps in float32)."""
    return M.attention(Passes(forward, backward), mask, q, k, v, where, sinks, alibi)
