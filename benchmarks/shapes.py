"""Models of published shapes with random weights, made on the device: what model.py and engine.py measure with --shape.

Weights are bfloat16, no checkpoint is read. One device. FLOPs are fractions of a product's, bytes of a copy's, measured
in the same run (kernel_timing). Processes with one --lock compile beside each other and measure in turn.
"""

import argparse
import sys
import time
import timeit
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from kernel_report import smi, versions
from kernel_timing import holding, measured

from fdel import models, ops, params, report, train
from fdel.models import llama

_LLAMA = dict(vocab_size=128256, num_attention_heads=32, num_key_value_heads=8, max_position_embeddings=131072,
              rms_norm_eps=1e-5, rope_theta=500000.0, hidden_act="silu")  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    "1b": _LLAMA | dict(hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, head_dim=64,
                        tie_word_embeddings=True),  # Llama-3.2-1B
    "8b": _LLAMA | dict(hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, head_dim=128,
                        tie_word_embeddings=False),  # Llama-3.1-8B
    "toy": dict(vocab_size=512, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512,
                hidden_size=64, intermediate_size=128, num_hidden_layers=2, head_dim=16, tie_word_embeddings=True),
}  # fmt: skip
RANK = 16  # of the adapters that a model of 8 billion parameters learns
# Rows and tokens of a training step; sequences that decode, tokens of their prompts, and new ones.
SIZES = {"1b": (8, 2048), "8b": (4, 2048), "toy": (2, 32)}
SERVED = {"1b": ((1, 8, 64), 1024, 64), "8b": ((1, 64), 1024, 64), "toy": ((1, 2), 16, 4)}


def config(shape: str) -> Any:
    """Give the model's Config."""
    return llama.Config.from_hf(SHAPES[shape] | {"model_type": "llama"})


def drawn(shape: str, listed: bool, dtype: Any = jnp.bfloat16) -> models.Model:
    """Make random weights on the device, in the layout of training, or in an engine's lists."""
    cfg = config(shape)
    mesh = params.make_mesh({}, jax.devices()[:1])
    spec = params.unstack(llama.spec(cfg)) if listed else llama.spec(cfg)
    at = params.shardings(spec, mesh, params.SERVE if listed else params.TRAIN)
    make = jax.jit(lambda key: params.init(spec, key, dtype), out_shardings=at)
    return models.Model(llama, cfg, make(jax.random.key(0)))


def adapted(shape: str) -> bool:
    """Say whether adapters learn, because a whole training state does not fit one device."""
    return shape == "8b"


def step(shape: str, cfg: Any) -> tuple[Callable, Callable, Callable]:
    """Give (begin, step, loss): `begin(weights, key)` makes the state and what is frozen; all layers are computed again."""
    optimizer = train.optim.adamw(1e-4, weight_decay=0.1)
    loss = train.losses.sft(llama, cfg, remat="nothing_saveable")

    def begin(weights: Any, key: jax.Array) -> tuple:
        if not adapted(shape):
            return train.init_state(weights, optimizer), None
        both = params.lora.add(weights, RANK, 32.0, key=key, spec=llama.spec(cfg))
        learnt, frozen = params.lora.split(both)
        return train.init_state(learnt, optimizer), frozen

    learn = train.losses.on_adapters(loss, reference=False) if adapted(shape) else loss
    update = train.update(train.normalize(train.grads(learn)), optimizer)

    def one(state: Any, base: Any, batch: Any) -> tuple:
        return update(state, batch, base=base) if adapted(shape) else update(state, batch)

    forward = lambda state, base, batch: learn(
        state.params, batch, {"base": base, "step": 0, "key": jax.random.key(0)}
    )[0]
    return begin, one, forward


def seconds(run: Callable[[], Any], lock: Path | None, repeats: int = 3) -> float:
    """Time a call: the median of several, after one to warm up."""
    with holding(lock, False):
        run()
    with holding(lock, True):
        return float(np.median(timeit.repeat(run, repeat=repeats, number=1)))


def trained(shape: str, lock: Path | None = None) -> Iterator[tuple[str, str]]:
    """Measure a forward pass and a training step: pairs of what, and the number."""
    cfg, (rows, length) = config(shape), SIZES[shape]
    begin, one, forward = step(shape, cfg)
    with holding(lock, False):
        state, base = jax.jit(begin, donate_argnums=0)(drawn(shape, False).params, jax.random.key(1))
    tokens = np.random.default_rng(0).integers(3, cfg.vocab, (rows, length))
    batch = {"tokens": jnp.asarray(tokens, jnp.int32)}
    flops = report.flops_per_token(llama, cfg, length // 2) * rows * length
    with holding(lock, True):
        most = measured(kinds=("dot",))["dot"] if shape != "toy" else 1e12
    part = lambda passes, spent: (
        f"{rows * length / spent:,.0f} tokens/s, {passes * flops / spent / most:.3f} of the product's FLOP/s"
    )
    program = jax.jit(forward)
    yield (
        f"loss alone, {rows} x {length}",
        part(1, seconds(lambda: jax.block_until_ready(program(state, base, batch)), lock)),
    )
    with holding(lock, False):
        program = jax.jit(one, donate_argnums=0).lower(state, base, batch).compile()

    def run() -> None:
        nonlocal state
        state, metrics = program(state, base, batch)
        jax.block_until_ready(metrics)

    passes = 2 if adapted(shape) else 3  # gradients of frozen weights are not computed
    name = f"LoRA step of rank {RANK}" if adapted(shape) else "training step, AdamW"
    yield f"{name}, {rows} x {length}", part(passes, seconds(run, lock))
    about = program.memory_analysis()
    yield (
        "its arguments and temporaries, GiB",
        f"{(about.argument_size_in_bytes + about.temp_size_in_bytes) / 2**30:.1f}",
    )


def served(shape: str, kernels: Mapping[str, str], lock: Path | None = None) -> Iterator[tuple[str, str]]:
    """Measure an engine: prefill, and decode of several batches."""
    from fdel.serve import Engine, SamplingParams, Settings

    batches, prompt, new = SERVED[shape]
    with holding(lock, False):
        model, length = drawn(shape, True), prompt + 2 * new
    with holding(lock, True):
        most = measured(kinds=("copy",))["copy"] if shape != "toy" else 1e11
    settings = Settings(
        rows=batches[-1], max_length=length, pages=batches[-1] * -(-length // 64), batches=batches, kernels=kernels,
        cache=False, budget=2048 if shape != "toy" else 32,
    )  # fmt: skip
    engine = Engine(model, settings)  # not started: its steps are those of `generate`, in this thread
    device = engine._core.device
    sizes = [("extend", n) for n in device.blocks] + [("decode", n) for n in device.batches]
    with holding(lock, False), ThreadPoolExecutor() as threads:
        list(threads.map(lambda size: device.compiler(*size)(), sizes))
    draw = lambda rows, seed: np.random.default_rng(seed).integers(3, model.cfg.vocab, (rows, prompt)).tolist()
    spent = lambda rows, n: seconds(
        lambda: engine.generate(draw(rows, n), SamplingParams(max_tokens=n, ignore_eos=True)),
        lock,
        3 if rows < 64 else 1,
    )
    once = {rows: spent(rows, 1) for rows in batches}
    yield f"prefill, {batches[-1]} x {prompt}, tokens/s", f"{batches[-1] * prompt / once[batches[-1]]:,.0f}"
    yield f"prefill of one prompt of {prompt}, ms", f"{1e3 * once[batches[0]]:.1f}"
    weights, (token, _) = params.nbytes(model.params), report.cache_bytes(llama, model.cfg, jnp.bfloat16)
    for rows in batches:
        each = (spent(rows, 1 + new) - once[rows]) / new
        read = weights + rows * token * (prompt + new / 2)
        yield f"decode, batch {rows}, tokens/s", f"{rows / each:,.1f}; {read / each / most:.3f} of a copy's bytes/s"
    engine.close()


def named(text: str) -> tuple[str, str]:
    """Read OPERATION=NAME."""
    op, sign, name = text.partition("=")
    if not sign:
        raise argparse.ArgumentTypeError(f"{text!r}: expected OPERATION=NAME, as paged_attention=hopper")
    return op, name


def compared(measure: Callable, shapes: list[str], kernels: list[tuple[str, str]], lock: Path | None = None) -> str:
    """Measure each model, as it is and with the kernels; what fails is a row."""
    lines = [
        "| model | measure | as it is |" + " with kernels |" * bool(kernels),
        "|---|---|---|" + "---|" * bool(kernels),
    ]
    for shape in shapes:
        found: dict[str, list[str]] = {}
        for i, chosen in enumerate([{}, dict(kernels)] if kernels else [{}]):
            begin = time.perf_counter()
            try:
                with ops.use(**chosen):
                    for what, number in measure(shape, chosen, lock):
                        found.setdefault(what, [""] * i).append(number)
                        print(f"{shape}, {what}: {number}", file=sys.stderr, flush=True)
            except Exception as e:  # out of memory, or a kernel's
                found.setdefault("failed", [""] * i).append(f"{type(e).__name__}: {' '.join(str(e).split())[:200]}")
            found.setdefault("all of it, with compiling, s", [""] * i).append(f"{time.perf_counter() - begin:.0f}")
        lines += [f"| {shape} | {what} | {' | '.join(numbers)} |" for what, numbers in found.items()]
    named = ", ".join(f"{op}={name}" for op, name in kernels)
    about = ", ".join(x for x in (versions(), jax.devices()[0].device_kind, smi()) if x)
    return "\n".join([about, *([f"Kernels: {named}."] if kernels else []), "", *lines])


def main(measure: Callable, about: str | None) -> None:
    """Print the table of the models that the command line names, and write it to --out."""
    cli = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("--shape", nargs="+", choices=tuple(SHAPES), required=True, help="with random weights")
    cli.add_argument("--kernels", nargs="*", type=named, default=[], metavar="OPERATION=NAME",
                     help="measure also with these implementations, as paged_attention=hopper")  # fmt: skip
    cli.add_argument("--lock", type=Path, help="a file: of processes that share it one measures at a time")
    cli.add_argument("--out", type=Path, help="also write the table here")
    args = cli.parse_args()
    try:
        with ops.use(**dict(args.kernels)):
            pass
    except ValueError as e:
        cli.error(f"--kernels: {e}")  # before all is measured without them
    if len(dict(args.kernels)) < len(args.kernels):
        cli.error("--kernels: an operation stands twice")
    for file in (args.lock, args.out):
        if file:
            file.parent.mkdir(parents=True, exist_ok=True)
    found = compared(measure, args.shape, args.kernels, args.lock)
    print(found)
    if args.out:
        args.out.write_text(found + "\n")
