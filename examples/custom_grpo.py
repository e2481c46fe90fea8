"""GRPO from public functions: a tiny llama learns from its samples to reply with the token that it saw most often.

Run: python examples/custom_grpo.py [steps [seed]]. Each batch of samples gives two optimizer steps, so the second one's
ratios are not 1. Sampler and trainer are one model: their log-probabilities differ by rounding alone.
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np

from fdel import models, ops, params, train
from fdel.models import llama
from fdel.serve import Engine, SamplingParams, Settings
from fdel.train import losses
from fdel.train.rollout import Sample, Task, advantages, collate, rollout

EOS, QUESTION, PROMPTS, SAMPLES, TEMPERATURE = 4, 5, 32, 8, 0.8
CFG = llama.Config(vocab=8, embed=32, ffn=64, layers=2, heads=2, kv_heads=2, head_dim=16, rope=ops.Rope(16, 1e4))


def reward(s: Sample) -> float:
    """Half for the right token, half for ending after it."""
    return 0.5 * (s.completion[0] == np.bincount(s.prompt[:-1]).argmax()) + 0.5 * (s.completion[1:] == [EOS])


def old(params: dict, batch: dict, given: dict) -> dict:
    """Log-probabilities before the first step on a batch."""
    return {"old": losses.token_logps(llama, CFG, temperature=TEMPERATURE)(params, batch)}


steps, seed = [*map(int, sys.argv[1:]), *(30, 0)[len(sys.argv) - 1 :]]
optimizer, r = train.optim.adamw(3e-3), np.random.default_rng(seed)
state = train.init_state(params.init(llama.spec(CFG), jax.random.key(seed), dtype=jnp.float32), optimizer)
engine = Engine(models.Model(llama, CFG, state.params), Settings(rows=64, max_length=32, decode_steps=2), eos=[EOS])
loss = losses.policy_gradient(llama, CFG, losses.Policy(loss_type="dapo", epsilon_high=0.28), temperature=TEMPERATURE)
gradients = train.normalize(train.accumulate(train.grads(loss), 2))
step = train.minibatches(train.update(gradients, optimizer), 2, first=old)
step = jax.jit(step, donate_argnums=0)
ask = SamplingParams(max_tokens=3, temperature=TEMPERATURE)
for i in range(steps):
    tasks = [Task(i * PROMPTS + j, (*map(int, r.integers(0, 4, 7)), QUESTION)) for j in range(PROMPTS)]
    samples = rollout(engine, tasks, ask, samples=SAMPLES, seed=seed)
    rewards = np.array([reward(s) for s in samples])
    state, metrics = step(state, collate(samples, advantages.grouped(rewards, SAMPLES), length=16))
    engine.update_params(state.params)
    clipped = metrics["clip_ratio/region_mean"]
    print(f"step {i}: reward {rewards.mean():.3f}, entropy {metrics['entropy']:.2f}, clipped {clipped:.3f}", flush=True)
