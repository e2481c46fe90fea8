"""The tiny llama that tests of learning from own samples share: its engine, its tasks, and what it is to learn."""

import jax
import jax.numpy as jnp
import numpy as np

from fdel import models, ops, params
from fdel.models import llama
from fdel.serve import Engine, Settings
from fdel.train.rollout import Task

EOS, ASK = 4, 5
CFG = llama.Config(vocab=8, embed=32, ffn=64, layers=2, heads=2, kv_heads=2, head_dim=16, rope=ops.Rope(16, 1e4))


def weights(seed: int = 0, scale: float = 3.0):
    """Random weights, peaked enough that temperature and top-p matter."""
    made = params.init(llama.spec(CFG), jax.random.key(seed), dtype=jnp.float32)
    return jax.tree.map(lambda x: x * scale if x.ndim > 1 else x, made)


def engine(params, **settings) -> Engine:
    """An engine of few sizes."""
    settings = {"rows": 32, "max_length": 64, "decode_steps": 2} | settings
    return Engine(models.Model(llama, CFG, params), Settings(**settings), eos=[EOS])


def tasks(count: int, first: int = 0) -> list[Task]:
    """Seven tokens of four kinds each, then ASK: which of them was there most often?"""
    r = np.random.default_rng(first)
    return [Task(first + i, (*map(int, r.integers(0, 4, 7)), ASK)) for i in range(count)]


def reward(sample) -> float:
    """Half for the token that the prompt had most often, half for ending after it."""
    said = sample.completion
    return 0.5 * (said[0] == np.bincount(sample.prompt[:-1]).argmax()) + 0.5 * (said[1:] == [EOS])
