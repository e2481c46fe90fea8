"""On a GPU (`pytest -m gpu`): kernels that were only compiled and interpreted give what the reference does.

One case of each operation; benchmarks/kernels.py has all, and times them. What an engine writes is the same with them.
"""

import importlib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fdel import models, params
from fdel.models import llama
from fdel.ops.dispatch import TABLES
from fdel.serve import Engine, SamplingParams, Settings

WAYS = [
    (op, name) for op, table in TABLES.items() for name in table.implementations if name == "cudnn" or "hopper" in name
]
# `attend_part` is `attend`'s, in a ring; hopper_ordered has a backward pass of its own alone.
KERNELS = [(op, name, "") for op, name in WAYS if op != "attend_part" and name != "hopper_ordered"]
KERNELS += [(op, name, ", backward") for op, name in WAYS if op == "attend"]


@pytest.fixture(autouse=True)
def real_programs():
    """The suite compiles quickly, with few optimizations; those are part of what is tried here."""
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)


@pytest.fixture
def timing(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    return importlib.import_module("kernel_timing")


@pytest.mark.gpu
@pytest.mark.parametrize(("op", "name", "part"), KERNELS)
def test_a_kernel_gives_what_the_reference_does(op, name, part, timing):
    """The first call of the benchmark's table that it serves; the reference is float32 on the CPU."""
    tried = []
    for case in importlib.import_module("kernels").cases():
        if case.op != op or not case.name.endswith(part):
            continue
        arrays, want = timing.expected(case)
        with timing.named(case, name):
            try:
                got = jax.jit(timing.checked(case.build(True)))(*jax.device_put(arrays))
            except ValueError as e:
                if "cannot serve this call" not in str(e):
                    raise
                tried.append(str(e))
                continue
        assert timing.error(got, want) <= case.tolerance
        return
    pytest.fail(f"{op}: {name} serves no case: {tried}")


def greedy(kernels: dict[str, str]) -> tuple[list[int], np.ndarray]:
    """Tokens that a small Llama with heads of 64 writes, and their log-probabilities."""
    cfg = llama.Config.from_hf(
        {"model_type": "llama", "vocab_size": 512, "hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2,
         "intermediate_size": 512, "num_hidden_layers": 2, "head_dim": 64, "max_position_embeddings": 256}
    )  # fmt: skip
    weights = params.init(params.unstack(llama.spec(cfg)), jax.random.key(0), jnp.bfloat16)
    engine = Engine(models.Model(llama, cfg, weights), Settings(rows=4, max_length=256, kernels=kernels))
    prompt = np.random.default_rng(0).integers(3, 512, 100).tolist()
    (done,) = engine.generate([prompt], SamplingParams(max_tokens=1, ignore_eos=True, logprobs=1))
    return list(done.tokens), np.asarray(done.logprobs, np.float64)


@pytest.mark.gpu
def test_an_engine_with_the_kernel_for_pages_writes_the_same():
    """In bfloat16: the log-probability of a token within 0.05."""
    (plain, want), (kernel, got) = (greedy({"paged_attention": name}) for name in ("xla", "hopper"))
    assert plain == kernel
    np.testing.assert_allclose(got, want, atol=0.05)
