"""Perplexity and size of every format that `params.quantize` and the cache of keys and values know, in one run.

    python benchmarks/quantization.py DIR --tokens held_out.npy

DIR is a checkpoint, as `fdel demo --out DIR` leaves one; the tokens, int[N], are text that it has not learnt from. Without
them it is the tail of the demo's own text, which the demo's model has learnt from. A column says how far the scores are
from those of full precision: the mean of |log p - log p'| over tokens. `--speed` adds tokens per second of one sequence
that decodes.
"""

import argparse
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from fdel import bench, models, ops, params, text
from fdel.params.quantize import FORMATS
from fdel.serve.engine.step import quantized

CACHES, PAGE = ("int8", "fp8"), 64


def rows(tokens: np.ndarray, length: int, most: int) -> np.ndarray:
    """Cut tokens into `most` rows of `length` + 1 at most, without overlap; [B T]."""
    count = min(most, len(tokens) // (length + 1))
    return tokens[: count * (length + 1)].reshape(count, length + 1)


def scored(model: models.Model) -> jax.stages.Wrapped:
    """Make scores(params, int[B T + 1]) -> log-probabilities of each row's tokens but the first, [B T]."""

    def scores(weights: params.spec.Tree, batch: jax.Array) -> jax.Array:
        logits, _ = model.family.forward(weights, batch[:, :-1], model.cfg)
        return jnp.take_along_axis(jax.nn.log_softmax(logits), batch[:, 1:, None], -1)[..., 0]

    return jax.jit(scores)


def scored_from_cache(model: models.Model, format: str | None) -> jax.stages.Wrapped:
    """Make the same scores of rows whose keys and values go through a cache of pages in `format`."""

    def scores(weights: params.spec.Tree, batch: jax.Array) -> jax.Array:
        count, length = batch.shape[0], batch.shape[1] - 1
        width = -(-length // PAGE)
        spec = quantized(model.family.state_spec(model.cfg, pages=count * width, page=PAGE, rows=count), format)
        state = params.init(spec, jax.random.key(0))
        table = np.arange(count * width).reshape(count, width)
        _, paged = ops.paged([(i, 0, [0] * length) for i in range(count)], table, block=length)
        logits, _ = model.family.forward(weights, batch[:, :-1].reshape(-1), model.cfg, paged, state)
        logits = jax.nn.log_softmax(logits.reshape(count, length, -1))
        return jnp.take_along_axis(logits, batch[:, 1:, None], -1)[..., 0]

    return jax.jit(scores)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--tokens", type=Path)
    parser.add_argument("--rows", type=int, default=48)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--speed", action="store_true")
    o = parser.parse_args()
    if o.tokens is None:
        from pydoc_data.topics import topics

        words = "\n\n".join(topics[name] for name in sorted(topics))
        tokens = np.asarray(text.encode(text.load(o.directory), words), np.int32)[-o.rows * (o.length + 1) :]
    else:
        tokens = np.load(o.tokens)
    batch = rows(tokens, o.length, o.rows)
    model = models.load(o.directory, dtype=jnp.float32)
    spec = model.family.spec(model.cfg)
    whole = params.nbytes(model.params)
    matrices = params.nbytes(params.quantize(model.params, "int8", spec=spec))
    print(f"{o.directory}: {whole / 2**20:.1f} MiB in float32 ({matrices / 2**20:.1f} with layers in int8)")
    print(f"{batch.shape[0]} rows of {o.length} tokens\n")
    print(
        "| weights | cache | MiB | nats per token | perplexity | against full | mean difference |"
        + " tokens/s |" * o.speed
    )
    print("|---|---|---|---|---|---|---|" + "---|" * o.speed)
    full: np.ndarray | None = None

    def line(name: str, cache: str, weights: params.spec.Tree, found: np.ndarray) -> None:
        nonlocal full
        full = found if full is None else full
        nll, ppl, base = -found.mean(), np.exp(-found.mean()), np.exp(-full.mean())
        size = params.nbytes(weights) / 2**20
        figures = f"{size:.1f} | {nll:.4f} | {ppl:.3f} | {ppl / base - 1:+.2%} | {np.abs(found - full).mean():.4f}"
        speed = f" {bench.decode(model._replace(params=weights), 1):.1f} |" if o.speed else ""
        print(f"| {name} | {cache} | {figures} |{speed}", flush=True)

    scores = scored(model)
    line("float32", "-", model.params, np.asarray(scores(model.params, batch), np.float64))
    half = jax.tree.map(lambda w: w.astype(jnp.bfloat16).astype(w.dtype), model.params)
    line("bfloat16 weights", "-", half, np.asarray(scores(half, batch), np.float64))
    for format in FORMATS:
        weights = jax.jit(partial(params.quantize, format=format, spec=spec))(model.params)
        line(format, "-", weights, np.asarray(scores(weights, batch), np.float64))
    for cache in (None, *CACHES):
        found = scored_from_cache(model, cache)(model.params, batch)
        line("float32", cache or "float32", model.params, np.asarray(found, np.float64))


if __name__ == "__main__":
    main()
