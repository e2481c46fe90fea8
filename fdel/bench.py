"""Measure a checkpoint on this machine: prefill, decode, first token, a training step, loading. Used by `fdel bench`."""

import contextlib
import time
import timeit
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fdel import models, ops, params, serve, train
from fdel.ops.attention import ATTEND
from fdel.serve.engine import weights


def seconds(run: Callable[[], Any], repeats: int = 5) -> float:
    """Time a call: the median of several, after one to warm up."""
    run()
    return float(np.median(timeit.repeat(run, repeat=repeats, number=1)))


def prompts(model: models.Model, rows: int, length: int) -> list[list[int]]:
    """Make random prompts."""
    return np.random.default_rng(0).integers(3, model.cfg.vocab, (rows, length)).tolist()


def prefill(model: models.Model, length: int = 512) -> float:
    """Time the first token after a prompt of `length` tokens, in seconds."""
    return seconds(partial(serve.generate, model, prompts(model, 1, length), max_tokens=1, ignore_eos=True))


def decode(model: models.Model, rows: int, prompt: int = 128, new: int = 64) -> float:
    """Count output tokens per second of `rows` sequences after their prompts: time for 1 + `new` tokens less that for 1.

    Where other programs made one token take as long as all, the time for all: as many tokens at the least.
    """
    texts = prompts(model, rows, prompt)
    # Both calls have the same cache size, so that only the number of steps differs.
    run = lambda n: serve.generate(model, texts, max_tokens=n, ignore_eos=True, max_length=prompt + 1 + new)
    whole, first = seconds(lambda: run(1 + new), 3), seconds(lambda: run(1), 3)
    return rows * new / (whole - first if whole > first else whole)


def train_step(model: models.Model, rows: int = 4, length: int = 512) -> float:
    """Time one AdamW step on rows x length tokens, in seconds. The model's arrays are donated.

    The backward pass computes again what is between matrix products, which takes half the memory and no more time.
    """
    optimizer = train.optim.adamw(1e-4, weight_decay=0.1)
    loss = train.losses.sft(model.family, model.cfg, remat="dots_saveable", chunk=256)
    step = train.update(train.normalize(train.grads(loss)), optimizer)
    step = jax.jit(step, donate_argnums=0, compiler_options=train.compiler_options())
    state = jax.jit(lambda p: train.init_state(p, optimizer), donate_argnums=0)(model.params)
    batch = {"tokens": jnp.asarray(prompts(model, rows, length))}

    def run() -> None:
        nonlocal state
        state, metrics = step(state, batch)
        metrics["loss"].block_until_ready()

    return seconds(run, 3)


def attention(directory: Path, lengths: Sequence[int], *, dtype: Any = None) -> Iterator[str]:
    """Time each way to attend with a model's heads, forward and with gradients of q, k and v; a line for each in turn.

    Rows of each length (their tokens are 8192 together, or one row), in `dtype` or in float32 and bfloat16; needs only
    config.json. What does not serve a length says why.
    """
    family, cfg = models.read_config(directory)
    heads, kv_heads, dim = (getattr(cfg, name, None) for name in ("heads", "kv_heads", "head_dim"))
    if heads is None or kv_heads is None or dim is None:
        raise ValueError(f"{family.MODEL_TYPE} has no heads with keys and values of their own to attend with")
    mask, counts = ops.Mask(dim**-0.5), (heads, kv_heads, kv_heads)
    attend = lambda name, batch, *qkv: ops.attend(batch, None, 0, *qkv, mask=mask, impl=name)[0]

    def milliseconds(f: Callable, qkv: list[jax.Array]) -> float:
        f = jax.jit(f)
        return 1e3 * seconds(lambda: jax.block_until_ready(f(*qkv)), 3)

    for kind in (dtype,) if dtype else ("float32", "bfloat16"):
        for n in lengths:
            shape, keys = (max(1, 8192 // n), n), jax.random.split(jax.random.key(0), 3)
            qkv = [jax.random.normal(key, (*shape, c, dim), kind) for key, c in zip(keys, counts, strict=True)]
            batch = ops.packed(jnp.zeros(shape, jnp.int32))
            for name, way in ATTEND.implementations.items():
                where = f"{name:<9} {kind:<9} {shape[0]} x {n}"
                if why := way.unsupported(*qkv, batch.where, mask=mask, sinks=None, alibi=None, bias=None):
                    yield f"{where}: {why}"
                    continue
                run = partial(attend, name, batch)
                both = jax.grad(lambda *x, run=run: run(*x).astype(jnp.float32).sum(), (0, 1, 2))
                forward, backward = milliseconds(run, qkv), milliseconds(both, qkv)
                yield f"{where}: forward {forward:.1f} ms, with gradients {backward:.1f} ms"


def lines(directory: Path, *, dtype: Any = None, mesh: str | None = None, train: bool = True) -> Iterator[str]:
    """Measure a checkpoint and yield one line per measure as soon as it is known."""
    over, begin = weights.mesh_for(mesh), time.perf_counter()
    model = weights.load(directory, dtype=dtype, mesh=over)
    jax.block_until_ready(model.params)
    size = params.nbytes(model.params)
    where = f"{1 if over is None else over.size} x {jax.devices()[0].device_kind}"
    yield f"load: {time.perf_counter() - begin:.2f} s for {size / 1e6:,.0f} MB on {where}"
    longest = getattr(model.cfg, "max_positions", 1 << 30)
    yield f"prefill 512: {1e3 * prefill(model, min(512, longest - 1)):.0f} ms"
    for rows in (1, 8):
        yield f"decode batch {rows}: {decode(model, rows, *((128, 64) if longest > 192 else (8, 8))):.1f} tokens/s"
    if train:
        length = min(512, longest)
        spec = model.family.spec(model.cfg)
        stacked = model._replace(params=params.restack(model.params, spec))
        with contextlib.nullcontext() if over is None else jax.set_mesh(over):
            if over is not None:
                stacked = stacked._replace(params=params.reshard(stacked.params, spec, over))
            yield f"train step 4x{length}: {4 * length / train_step(stacked, 4, length):,.0f} tokens/s"
