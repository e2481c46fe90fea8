"""Windows that come in one after the other: continuous batching against static batches, by `fdel.serve.hear`.

    python benchmarks/arrivals.py [--rows 4] [--windows 24] [--states 200] [--out benchmarks/results/FILE.md]

A Whisper of random weights (by default of whisper-tiny's layers, with windows of four seconds) writes transcripts whose
lengths are drawn, as random weights know no end: most are short, some long. Windows come in at random (a Poisson process),
at shares of the rate that static batches reach. A static batch takes who waits, up to `rows`, and ends with its longest.
The same programs run in both, in turn, and the better of two runs stands. Seconds are the processor's, of both cores
together, so that other work on the machine does not count; idle ones are skipped. Latency is from a window's arrival to its
transcript.
"""

import argparse
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from model import publish

from fdel import models, params
from fdel.models import whisper
from fdel.serve import hear
from fdel.serve.hear import batch, windows

END, START, NO_SPEECH, NO_TIMES = 50257, 50258, 50362, 50363


def made(layers: int, embed: int, states: int, rows: int) -> hear.Listener:
    """Give a model of random weights that never ends a transcript."""
    cfg = whisper.Config(
        embed=embed, heads=embed // 64, encoder_heads=embed // 64, ffn=4 * embed, encoder_ffn=4 * embed, layers=layers,
        encoder_layers=layers, states=states,
    )  # fmt: skip
    weights = params.init(whisper.spec(cfg), jax.random.key(0), dtype=jnp.float32)
    return hear.Listener(
        models.Model(whisper, cfg, weights), hear.Tokens(START, END, NO_TIMES, NO_SPEECH, never=(END,)), rows=rows
    )


def serve(
    listener: hear.Listener, come: Any, lengths: Any, features: Any, continuous: bool
) -> tuple[float, np.ndarray]:
    """Serve windows that come in at `come` seconds: seconds until the last is written, and the latency of each."""
    here, asks, latency, nxt = batch.Batch(), dict[int, Any](), np.zeros(len(come)), 0
    closed = False  # to who comes in: a static batch is being written
    begin = time.process_time()
    while nxt < len(come) or asks:
        now = time.process_time() - begin
        if not asks and come[nxt] > now:
            begin -= come[nxt] - now
            continue
        while nxt < len(come) and come[nxt] <= now and not closed and (continuous or len(asks) < listener.rows):
            asks[nxt], nxt = windows.Hear(features), nxt + 1
        closed = not continuous
        for i, answer in batch.turn(listener, here, asks).items():
            if isinstance(answer, Exception):
                raise answer
            if isinstance(asks.pop(i), windows.Hear):
                asks[i] = windows.Write(answer, [START, NO_TIMES], 0, int(lengths[i]), False, 0.0, 0)
            else:
                latency[i] = time.process_time() - begin - come[i]
        closed = closed and bool(asks)
    return time.process_time() - begin, latency


def main() -> None:
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("--rows", type=int, default=4)
    cli.add_argument("--windows", type=int, default=24)
    cli.add_argument("--states", type=int, default=200, help="of a window, 20 ms each; Whisper's own have 1500")
    cli.add_argument("--layers", type=int, default=4)
    cli.add_argument("--embed", type=int, default=384)
    cli.add_argument("--out", type=Path, help="also write the table here")
    args = cli.parse_args()
    listener, rng = made(args.layers, args.embed, args.states, args.rows), np.random.default_rng(0)
    lengths = np.minimum(rng.geometric(1 / 60, args.windows) + 5, 440)
    features = rng.standard_normal((listener.cfg.bins, listener.cfg.frames)).astype(np.float32)
    at_once = np.zeros(args.windows)
    for continuous in (False, True):  # compiles
        serve(listener, at_once, lengths, features, continuous)
        serve(listener, np.linspace(0, 1, args.windows), lengths, features, continuous)
    took, _ = serve(listener, at_once, lengths, features, False)
    said = f"transcripts of {lengths.min()} to {lengths.max()} tokens, {lengths.mean():.0f} in the mean"
    lines = [
        f"{args.windows} windows of {args.states / 50:g} s, {said}", "",
        "| windows come | batches | windows a second | latency, mean, s | 95th percentile, s |", "|---|---|---|---|---|",
    ]  # fmt: skip
    for load in (0.0, 0.7, 1.1):  # of what static batches serve at once
        come = np.cumsum(rng.exponential(took / args.windows / load, args.windows)) if load else at_once
        best: dict[bool, tuple[float, np.ndarray]] = {}
        for _ in range(2):
            for continuous in (False, True):
                found = serve(listener, come, lengths, features, continuous)
                best[continuous] = min(best.get(continuous, found), found, key=lambda f: f[1].mean())
        name = f"{args.windows * load / took:.2f} a second" if load else "all at once"
        for continuous, (seconds, late) in best.items():
            kind = "continuous" if continuous else "static"
            lines.append(
                f"| {name} | {kind} | {args.windows / seconds:.2f} | {late.mean():.2f} | {np.percentile(late, 95):.2f} |"
            )
    size = f"{args.layers} + {args.layers} layers of {args.embed}"
    publish(
        f"a Whisper of random weights ({size}), `benchmarks/arrivals.py`, 2 CPU cores, {args.rows} places",
        "\n".join(lines),
        args.out,
    )


if __name__ == "__main__":
    main()
