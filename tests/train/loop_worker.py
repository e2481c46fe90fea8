"""One of several processes that run the training loop: python loop_worker.py ADDRESS COUNT INDEX DIRECTORY STEPS.

Each reads its own rows, and all stop at one step when one of them is told to. Process 0 prints the last step.
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np

from fdel import ops, params, train
from fdel.models import llama
from fdel.train import data as td
from fdel.train import parallel

CFG = llama.Config(vocab=48, embed=16, ffn=24, layers=1, heads=4, kv_heads=2, head_dim=4, rope=ops.Rope(4, 1e4))


def main(address: str, count: str, index: str, directory: str, steps: str) -> None:
    jax.distributed.initialize(address, int(count), int(index))
    spec, optimizer = llama.spec(CFG), train.optim.adamw(1e-2)
    mesh = params.make_mesh({"dp": 2, "fsdp": -1})
    init = lambda: train.init_state(params.init(spec, jax.random.key(0), dtype=jnp.float32), optimizer)
    at = parallel.state_shardings(jax.eval_shape(init), params.shardings(spec, mesh))
    g = train.normalize(parallel.reduce_once(train.grads(train.losses.sft(llama, CFG))))
    step = jax.jit(train.update(g, optimizer), donate_argnums=0, out_shardings=(at, None))
    tokens = [(np.arange(12) * (1 + i % 3) + i) % CFG.vocab for i in range(64)]
    example = lambda t: td.Example((t.astype(np.int32),), (np.ones(12, bool),))
    how = td.Settings(batch=8, length=12, epochs=None, seed=1)
    rows = td.store.store(td.store.arrays([example(t) for t in tokens], how), how, td.Report(64, 64, 768, 768))
    data = td.read_ahead(td.Batches([rows], None, how, (int(index), int(count))))
    chosen = train.Loop(steps=int(steps), directory=directory, log_every=1, save_every=5, progress_bar=False)
    with jax.set_mesh(mesh):
        start = jax.jit(init, out_shardings=at)
        state = train.fit(step, start, data, chosen, sharding=params.batch_sharding(mesh))
    print("ended at", int(state.step), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
