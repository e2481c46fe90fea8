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
from fdel.train.rollout.advantages import grouped

EOS, ASK, PROMPTS, SAMPLES, LENGTH, TEMPERATURE = 4, 5, 32, 8, 12, 0.8
CFG = llama.Config(vocab=8, embed=32, ffn=64, layers=2, heads=2, kv_heads=2, head_dim=16, rope=ops.Rope(16, 1e4))


def reward(prompt: list[int], reply: list[int]) -> float:
    """Half for the right token, half for ending after it."""
    return 0.5 * (reply[0] == np.bincount(prompt[:-1]).argmax()) + 0.5 * (reply[1:] == [EOS])


def collate(prompts: list[list[int]], out: list, advantages: np.ndarray) -> dict[str, jax.Array]:
    """Pad samples to one length; each number stands at the token that it is about."""
    tokens, mask, a, old = np.zeros((4, len(out), LENGTH), np.float32)
    for i, (prompt, o) in enumerate(zip(prompts, out, strict=True)):
        n, m = len(prompt), len(prompt) + len(o.tokens)
        tokens[i, :m], mask[i, n:m], a[i, n:m], old[i, n:m] = prompt + o.tokens, 1, advantages[i], o.sampled_logprobs
    lengths = np.array([len(p) + len(o.tokens) for p, o in zip(prompts, out, strict=True)], np.int32)
    columns = {"tokens": tokens.astype(np.int32), "lengths": lengths, "mask": mask > 0, "advantages": a, "old": old}
    return jax.tree.map(jnp.asarray, columns)


steps, seed = [*map(int, sys.argv[1:]), *(30, 0)[len(sys.argv) - 1 :]]
optimizer, r = train.optim.adamw(3e-3), np.random.default_rng(seed)
state = train.init_state(params.init(llama.spec(CFG), jax.random.key(seed), dtype=jnp.float32), optimizer)
engine = Engine(models.Model(llama, CFG, state.params), Settings(rows=64, max_length=32, decode_steps=2), eos=[EOS])
loss = losses.policy_gradient(llama, CFG, losses.Policy(loss_type="dapo", epsilon_high=0.28), temperature=TEMPERATURE)
gradients = train.normalize(train.accumulate(train.grads(loss), 2))
step = jax.jit(train.update(gradients, optimizer), donate_argnums=0)
for i in range(steps):
    tasks = [[*map(int, r.integers(0, 4, 7)), ASK] for _ in range(PROMPTS)]
    out = engine.generate(tasks, SamplingParams(max_tokens=3, temperature=TEMPERATURE, n=SAMPLES, seed=i))
    prompts = [task for task in tasks for _ in range(SAMPLES)]
    rewards = np.array([reward(p, o.tokens) for p, o in zip(prompts, out, strict=True)])
    batch = collate(prompts, out, grouped(rewards, SAMPLES))
    for half in range(2):
        state, metrics = step(state, jax.tree.map(lambda x, half=half: x[half::2], batch))
    engine.update_params(state.params)
    clipped = metrics["clip_ratio/region_mean"]
    print(f"step {i}: reward {rewards.mean():.3f}, entropy {metrics['entropy']:.2f}, clipped {clipped:.3f}", flush=True)
