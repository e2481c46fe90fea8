"""The small llama that tests of generation and of the engine share, and what a full forward says of its outputs."""

from functools import lru_cache

import jax
import numpy as np

from fdel import models, params
from fdel.models import llama

VOCAB, CONTEXT, EOS = 300, 200, 7
CFG = llama.Config.from_hf(
    dict(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=CONTEXT, eos_token_id=EOS,
    )
)  # fmt: skip


def make_model(seed: int = 0) -> models.Model:
    """A llama with listed layers and weights large enough to make some tokens likely."""
    make = jax.jit(lambda key: params.unstack(params.init(llama.spec(CFG), key)))
    return models.Model(llama, CFG, jax.tree.map(lambda x: x * 10 if x.ndim > 1 else x, make(jax.random.key(seed))))


def scores(model: models.Model, prompt: list[int], output: list[int]) -> np.ndarray:
    """log_softmax of a full forward at the output's tokens."""
    tokens = np.zeros((1, CONTEXT), np.int32)
    tokens[0, : len(prompt + output)] = prompt + output
    logprobs = jax.nn.log_softmax(full_forward(model.family, model.cfg)(model.params, tokens)[0])
    return np.asarray(logprobs[np.arange(len(output)) + len(prompt) - 1, np.array(output)])


@lru_cache
def full_forward(family, cfg):
    return jax.jit(lambda p, tokens: family.forward(p, tokens, cfg)[0])
