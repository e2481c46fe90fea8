"""Every family trains and serves the same when it is traced for a platform that is not here: the branches that
accelerators take are run on this CPU, and give the numbers of its own branches."""

from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import suite
import tiny

torch = pytest.importorskip("torch", reason="the checkpoints are made by transformers on torch (extra `test`)")

from fdel import train  # noqa: E402
from fdel.ops import dispatch, platform  # noqa: E402

CI = ("llama", "mixtral", "deepseek_v3", "mamba2")
NAMES = [
    n if n in CI else pytest.param(n, marks=pytest.mark.matrix)
    for n in tiny.TINY
    if ":" not in n and tiny.TINY[n].causal
]


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    return lru_cache(lambda name: suite.make_case(name, tmp_path_factory.mktemp(name)))


def both(run):
    """What run() gives traced for this platform, and for another."""
    found = []
    for target in ("cpu", "tpu"):
        with (
            platform.tracing_for(target),
            dispatch.use(grouped_glu="xla", grouped_matmul="xla", paged_attention="xla"),
        ):  # kernels do not run here
            found.append(run())
    return found


@pytest.mark.parametrize("name", NAMES)
def test_training_step(case, name):
    m, tokens = case(name).model, case(name).tokens
    loss = train.losses.sft(m.family, m.cfg)
    step = jax.jit(train.update(train.normalize(train.grads(loss)), optax.sgd(0.1)))
    batch = {"tokens": jnp.asarray(tokens), "lengths": jnp.array([suite.LENGTH, 23])}
    (here, one), (there, two) = both(lambda: step(train.init_state(m.params, optax.sgd(0.1)), batch))
    assert suite.error(two["loss"], one["loss"]) < 1e-5
    for a, b in zip(jax.tree.leaves(here.params), jax.tree.leaves(there.params), strict=True):
        assert suite.error(b, a) < 1e-5


@pytest.mark.parametrize("name", NAMES)
def test_serving_steps(case, name):
    c = case(name)
    here, there = both(lambda: suite.serving_logits(c.model, c.tokens[:, :10], [7, 1, 1, 1], 4))
    assert np.isfinite(there).all() and suite.error(there, here) < 1e-5
