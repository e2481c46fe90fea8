"""Training steps that a sampler's settings or a router's change: penalties on what was drawn, noise and a capacity."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from fdel import aot, models, params, train
from fdel.ops import platform
from fdel.train import parallel

ROWS, TOKENS, VOCAB, CHUNK = 8, 512, 32768, 128
EXPERTS = dict(model_type="mixtral", vocab_size=VOCAB, hidden_size=512, intermediate_size=1024, num_hidden_layers=2,
               num_attention_heads=4, num_key_value_heads=2, head_dim=128, num_local_experts=8, num_experts_per_tok=2,
               max_position_embeddings=TOKENS, sliding_window=None)  # fmt: skip
PENALTIES = dict(temperature=0.7, presence_penalty=0.5, frequency_penalty=0.2, repetition_penalty=1.3)
ROUTES = dict(jitter=0.1, capacity=1.25)


def step(
    target: aot.Target, mesh: str, route: dict[str, float], packed: bool = False, **penalties: float
) -> aot.Compiled:
    """Compile a step of a policy loss for a mixture of experts; `packed` rows hold several samples."""
    family = models.family("mixtral")
    cfg = family.Config.from_hf(EXPERTS)
    devices = params.make_mesh(params.parse_mesh(mesh), aot.devices(target))
    loss = train.losses.policy_gradient(family, cfg, chunk=CHUNK, remat="nothing_saveable", **penalties)
    spec, optimizer = family.spec(cfg), optax.sgd(1e-3)
    shardings = params.shardings(spec, devices)
    g = train.normalize(train.route(parallel.constrain(train.grads(loss), shardings), **route))
    with jax.set_mesh(devices), platform.tracing_for(target.facts.platform):
        shapes = jax.eval_shape(lambda p: train.init_state(p, optimizer), params.abstract(spec, jnp.float32))
        at = parallel.state_shardings(shapes, shardings)
        state = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, at)
        rows = lambda dtype, *shape: jax.ShapeDtypeStruct(shape, dtype, sharding=params.batch_sharding(devices))
        batch: dict[str, Any] = {"tokens": rows(jnp.int32, ROWS, TOKENS), "advantages": rows(jnp.float32, ROWS, TOKENS)}
        batch |= {"segment_ids": rows(jnp.int32, ROWS, TOKENS)} if packed else {"lengths": rows(jnp.int32, ROWS)}
        program = jax.jit(train.update(g, optimizer), donate_argnums=0, out_shardings=(at, None))
    return aot.compile(target, program, state, batch, mesh=devices)
