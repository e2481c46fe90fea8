"""Perplexity and size of every format of weights, in memory and in files, and of the cache of keys and values, in one run.

    python benchmarks/quantization.py DIR --files

DIR is a checkpoint that `fdel demo --out DIR` left, or a directory to be made: then the demo's model is trained there, on
all but the last twentieth of the demo's text (`--steps`). What is scored is that last twentieth, or `--tokens`, int[N] in a
file of numpy's. A column says how far the scores are from those of full precision: the mean of |log p - log p'| over
tokens. `--files` has each format of `fdel quantize` written and read back too, rounded to the nearest and calibrated with
rows of the text before the last twentieth; `--group` is that of integers, of which the demo's 688 inputs have to be a
multiple. `--speed` adds tokens per second of one sequence that decodes.
"""

import argparse
import dataclasses
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from pydoc_data.topics import topics

import jax
import jax.numpy as jnp
import numpy as np

from fdel import bench, demo, models, ops, params, quantizing, text
from fdel.params import writers
from fdel.params.quantize import FORMATS
from fdel.serve.engine.step import quantized

CACHES, PAGE = ("int8", "fp8"), 64
LAST = 20  # part of the demo's text that is scored
SMOOTHED = "w8a8", 0.5


def written_out() -> str:
    """Give the demo's text."""
    return "\n\n".join(topics[name] for name in sorted(topics))


def trained(directory: Path, steps: int) -> None:
    """Train the demo's model on the first part of its text."""
    tok = dataclasses.replace(text.train_bpe([written_out()], demo.VOCAB), templates={"default": demo.TEMPLATE})
    tokens = np.asarray(text.encode(tok, written_out()), np.int32)
    seen = tokens[: len(tokens) - len(tokens) // LAST]
    model = demo.fit(seen, demo.VOCAB, steps=steps, seconds=float("inf"), out=directory)
    models.save(model, directory)
    text.save(tok, directory)


def in_files(model: models.Model, calibration: np.ndarray, group: int) -> Iterator[tuple[str, models.Model]]:
    """Write and read back each format, rounded to the nearest; calibrated; and smoothed before."""
    for name in writers.SCHEMES:
        scheme = writers.scheme(name)
        scheme = writers.scheme(name, group if scheme.group and scheme.calibrated else None)
        ways: list[tuple[str, np.ndarray | None, float | None]] = [("", None, None)]
        ways += [(", calibrated", calibration, None)] * scheme.calibrated
        ways += [(f", smoothed {SMOOTHED[1]} and calibrated", calibration, SMOOTHED[1])] * (name == SMOOTHED[0])
        for how, some, alpha in ways:
            with tempfile.TemporaryDirectory() as target:
                quantizing.save(model, target, scheme, some, alpha=alpha)
                yield name + how, models.load(target, dtype=jnp.float32)


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
    parser.add_argument("--steps", type=int, default=1000, help="of training, if DIR is to be made")
    parser.add_argument("--files", action="store_true")
    parser.add_argument("--group", type=int, default=16)
    parser.add_argument("--speed", action="store_true")
    o = parser.parse_args()
    if not o.directory.exists():
        trained(o.directory, o.steps)
    demos = np.asarray(text.encode(text.load(o.directory), written_out()), np.int32)
    cut = len(demos) - len(demos) // LAST
    tokens = demos[cut:] if o.tokens is None else np.load(o.tokens)
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
    if o.files:
        plain = models.load(o.directory, dtype=jnp.float32, stacked=False)
        for name, found in in_files(plain, rows(demos[:cut], o.length - 1, 128), o.group):
            line(f"file: {name}", "-", found.params, np.asarray(scored(found)(found.params, batch), np.float64))
    for cache in (None, *CACHES):
        found = scored_from_cache(model, cache)(model.params, batch)
        line("float32", cache or "float32", model.params, np.asarray(found, np.float64))


if __name__ == "__main__":
    main()
