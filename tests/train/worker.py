"""One of several processes that train together on one machine: python worker.py ADDRESS COUNT INDEX DIRECTORY.

Trains three steps, saves, restores into a new state and trains three more; process 0 prints the losses as JSON.
"""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np

from fdel import params as fp
from fdel import train
from fdel.models import llama
from fdel.train import parallel

CONFIG = dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
              num_key_value_heads=2)  # fmt: skip
ROWS, LENGTH = 8, 16


def batch_of(step: int) -> dict:
    """The whole batch of a step; every process can make it, and puts its own rows on its devices."""
    r = np.random.default_rng(step)
    walk = np.cumsum(r.integers(1, 3, (ROWS, LENGTH)), 1) + r.integers(0, 64, (ROWS, 1))
    return {"tokens": np.int32(walk % 64), "lengths": r.integers(2, LENGTH, ROWS, np.int32)}


def main(address: str, count: str, index: str, directory: str) -> None:
    if int(count) > 1:
        jax.distributed.initialize(address, int(count), int(index))
    cfg = llama.Config.from_hf(CONFIG)
    spec, optimizer = llama.spec(cfg), train.optim.adamw(3e-2)
    mesh = fp.make_mesh({"dp": 2, "fsdp": -1} if len(jax.devices()) > 1 else {"fsdp": 1})
    shardings = fp.shardings(spec, mesh)
    init = lambda: train.init_state(fp.init(spec, jax.random.key(0), dtype=jnp.float32), optimizer)
    at = parallel.state_shardings(jax.eval_shape(init), shardings)
    g = parallel.reduce_once(
        train.accumulate(parallel.constrain(train.grads(train.losses.sft(llama, cfg)), shardings), 2)
    )
    step = jax.jit(train.update(train.normalize(g), optimizer), donate_argnums=0, out_shardings=(at, None))
    rows = fp.batch_sharding(mesh)
    place = lambda x: jax.make_array_from_callback(x.shape, rows, lambda i: x[i])
    losses = []

    def run(state: train.TrainState, steps: range) -> train.TrainState:
        for i in steps:
            state, metrics = step(state, jax.tree.map(place, batch_of(i)))
            losses.append(float(metrics["loss"]))
        return state

    with jax.set_mesh(mesh):
        state = run(jax.jit(init, out_shardings=at)(), range(3))
        fp.store.save(directory, state)
        del state
        abstract = jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), jax.eval_shape(init), at
        )
        run(fp.store.restore(directory, abstract), range(3, 6))
    if jax.process_index() == 0:
        print(json.dumps(losses))


if __name__ == "__main__":
    main(*sys.argv[1:])
