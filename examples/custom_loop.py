"""A training loop of one's own on public functions: DPO on every device, with LoRA. Run: python examples/custom_loop.py"""

import jax
import jax.numpy as jnp

from fdel import ops, params, train
from fdel.models import llama
from fdel.train import losses, parallel

cfg = llama.Config(vocab=64, embed=32, ffn=64, layers=2, heads=4, kv_heads=2, head_dim=8, rope=ops.Rope(8, 1e4))
spec = llama.spec(cfg)
mesh = params.make_mesh({"dp": -1})
base = params.init(spec, jax.random.key(0), dtype=jnp.float32)
adapters, frozen = params.lora.split(params.lora.add(base, 4, 8.0, key=jax.random.key(1), spec=spec))

outputs, objective = losses.completion_logps(llama, cfg), losses.dpo_objective(beta=0.5)
g = train.gradcache(losses.on_adapters(outputs), objective, 1)  # the reference is the base without adapters
g = parallel.reduce_once(train.accumulate(g, 2))
optimizer = train.optim.adamw(train.schedules.cosine(2e-2, warmup=2, steps=20))
step = jax.jit(train.update(train.normalize(g), optimizer, skip_nonfinite=True), donate_argnums=0)

tokens = jax.random.randint(jax.random.key(2), (16, 2, 24), 0, cfg.vocab)  # [:, 0] chosen, [:, 1] rejected
batch = {"tokens": tokens, "mask": jnp.broadcast_to(jnp.arange(24) >= 8, tokens.shape)}  # prompts of 8 tokens
batch = jax.device_put(batch, params.batch_sharding(mesh))
with jax.set_mesh(mesh):
    whole = jax.sharding.NamedSharding(mesh, jax.P())
    state, frozen = jax.device_put((train.init_state(adapters, optimizer), frozen), whole)
    for i in range(20):
        state, metrics = step(state, batch, base=frozen)
        print(f"step {i}: loss {metrics['loss']:.4f}, margin {metrics['rewards/margins']:.3f}")
