"""Generate without a cache: the whole sequence through the model for each token. Slow, and the oracle for the rest."""

import functools
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fdel import ops
from fdel.models import Model
from fdel.serve.engine.reply import Generation
from fdel.serve.engine.step import mesh_of, on_mesh


def naive_generate(model: Model, prompt: Sequence[int], max_tokens: int, *, eos: Sequence[int] = ()) -> Generation:
    """Continue one prompt greedily; logprobs are log_softmax of the logits.
    >>> serve.naive_generate(model, [4, 5], 4).tokens
    [18, 15, 27, 5]
    """
    tokens, step = list(prompt), _program(model.family, model.cfg, mesh_of(model.params))
    logprobs: list[float] = []
    width = -(-(len(prompt) + max_tokens) // 64) * 64  # padding at the end; rounded, to share compiled programs
    while len(logprobs) < max_tokens and (not logprobs or tokens[-1] not in eos):
        padded = np.zeros((1, width), np.int32)
        padded[0, : len(tokens)] = tokens
        token, logprob = step(model.params, padded, np.array([len(tokens)], np.int32))
        tokens.append(int(token))
        logprobs.append(float(logprob))
    return Generation(tokens[len(prompt) :], logprobs, "stop" if tokens[-1] in eos else "length")


@functools.lru_cache(maxsize=16)
def _program(family: ModuleType, cfg: Any, mesh: Any) -> Callable[..., tuple[jax.Array, jax.Array]]:
    def step(params, padded: jax.Array, length: jax.Array) -> tuple[jax.Array, jax.Array]:
        logits, _ = family.forward(params, padded, cfg, ops.packed(padded, length))
        last = jax.nn.log_softmax(logits[0, length[0] - 1])
        return jnp.argmax(last), jnp.max(last)

    return jax.jit(on_mesh(mesh, step))
