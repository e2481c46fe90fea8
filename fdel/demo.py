"""`fdel demo`: train a byte-level BPE and a small Llama on text that every Python carries, then let it speak.

The library in one page: a spec, a composed step, a checkpoint in hub layout, and a stream of tokens.
"""

import dataclasses
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from fdel import models, ops, params, plot, serve, text, train
from fdel.models import llama
from fdel.train import loop, metrics

VOCAB, LENGTH, ROWS = 2048, 128, 8
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"  # it has not learnt to chat, only to go on


def config(vocab: int) -> llama.Config:
    """Choose a Llama of about four million parameters."""
    return llama.Config(vocab=vocab, embed=256, ffn=688, layers=4, heads=8, kv_heads=4, head_dim=32, norm_eps=1e-5,
                        max_positions=1024, rope=ops.Rope(32, 10000.0))  # fmt: skip


def batches(tokens: np.ndarray, seed: int) -> Iterator[dict[str, np.ndarray]]:
    """Draw rows of LENGTH tokens at random places, for ever."""
    rng = np.random.default_rng(seed)
    while True:
        starts = rng.integers(0, len(tokens) - LENGTH, ROWS)
        yield {"tokens": tokens[starts[:, None] + np.arange(LENGTH)]}


def sparkline(losses: list[float], width: int = 60) -> str:
    """Draw a loss curve in one line of text."""
    means = [np.mean(part) for part in np.array_split(losses, min(width, len(losses)))]
    low, high = min(means), max(means)
    return "".join("▁▂▃▄▅▆▇█"[int(7.999 * (m - low) / ((high - low) or 1))] for m in means)


def fit(tokens: np.ndarray, vocab: int, steps: int, seconds: float, out: Path, seed: int = 0) -> models.Model:
    """Train from scratch for `steps` steps or about `seconds` seconds, whichever ends first; log to out/metrics.jsonl."""
    cfg = config(vocab)
    spec = llama.spec(cfg)
    rate = train.schedules.cosine(3e-3, warmup=min(10, steps // 10 + 1), steps=steps, final=0.1)
    optimizer = train.optim.adamw(rate, b2=0.98, weight_decay=0.1, mask=train.optim.decay_mask(spec))
    loss = train.losses.sft(llama, cfg)
    step = train.update(train.normalize(train.accumulate(train.grads(loss), 1)), optimizer)
    step = metrics.reporting(step, learning_rate=rate)
    step = jax.jit(step, donate_argnums=0, compiler_options=train.compiler_options())
    start = jax.jit(lambda key: train.init_state(params.init(spec, key), optimizer))
    begin = time.perf_counter()
    late = lambda event: time.perf_counter() - begin > seconds
    chosen = loop.Loop(steps=steps, directory=out, log_every=1)
    state = loop.fit(step, start(jax.random.key(seed)), batches(tokens, seed), chosen, callbacks=[late])
    return models.Model(llama, cfg, state.params)


def main(out: Path, prompt: str, steps: int, seconds: float, max_tokens: int, stay: bool = False) -> None:
    """Run the demo and leave tokenizer, checkpoint, losses and their curve in `out`; `stay` keeps the server running."""
    from pydoc_data.topics import topics  # what `help()` shows: about 700 kB of English in every Python's library

    words = "\n\n".join(topics[name] for name in sorted(topics))
    tok = text.train_bpe([words], VOCAB)
    tok = dataclasses.replace(tok, templates={"default": TEMPLATE})
    tokens = np.asarray(text.encode(tok, words), np.int32)
    size = params.count(llama.spec(config(VOCAB)))
    print(f"text: {len(words):,} characters, {len(tokens):,} tokens; model: llama, {size / 1e6:.1f} M parameters")
    model = fit(tokens, VOCAB, steps, seconds, out)
    rows = metrics.read(out)
    losses = [row["loss"] for row in rows]

    models.save(model, out)
    text.save(tok, out)
    curve = [(row["step"], row["loss"]) for row in rows]
    (out / "loss.svg").write_text(plot.svg("fdel demo: loss per token (nats)", {"demo": curve}))
    print(f"loss {losses[0]:.2f} {sparkline(losses)} {np.mean(losses[-10:]):.2f}   curve: {out / 'loss.svg'}")

    model, tok = models.load(out, stacked=False), text.load(out)
    print(f"checkpoint: {out} (saved and loaded back)\n\n{prompt}", end="")
    speak(model, tok, prompt, max_tokens=max_tokens, temperature=0.7, top_k=40, seed=0, ignore_eos=True)
    ask(out, prompt, max_tokens, stay)


def ask(out: Path, prompt: str, max_tokens: int, stay: bool) -> None:
    """Serve the checkpoint in a process of its own and ask it through OpenAI's client. Needs the extra `demo`."""
    try:
        import openai
    except ImportError:
        print("\nthe server was left out: it needs the extra `demo`, pip install 'fdel[demo]'")
        return
    command = [sys.executable, "-m", "fdel", "serve", str(out), "--port", "0", "--rows", "2", "--max-length", "256"]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    lines: Any = server.stderr or []
    try:
        address = next((found[0] for line in lines if (found := re.search(r"http://\S+", line))), None)
        if address is None:
            raise OSError(f"the server ended with exit code {server.wait()}; run it alone: {' '.join(command)}")
        threading.Thread(target=lambda: [*lines], daemon=True).start()  # a full pipe would stop the server
        client = openai.OpenAI(base_url=address, api_key="none", max_retries=0)
        more = {"ignore_eos": True, "top_k": 40}
        options: Any = {"max_tokens": max_tokens, "temperature": 0.7, "seed": 0, "extra_body": more}
        answer = client.completions.create(model=out.resolve().name, prompt=prompt, **options)
        print(f"\nOpenAI's client, from {address}:\n{prompt}{answer.choices[0].text}")
        print(f"playground: {address.removesuffix('/v1')}/" + ("" if stay else "   (while it runs: fdel demo --serve)"))
        if stay:
            server.wait()
    finally:
        server.terminate()
        server.wait()


def speak(model: models.Model, tok: text.Tokenizer, prompt: str | list[int], **options: Any) -> None:
    """Stream a completion to standard output, and its speed to standard error."""
    ids = text.encode(tok, prompt) if isinstance(prompt, str) else prompt
    first = last = time.perf_counter()
    count = 0
    for delta in serve.stream(model, ids, tokenizer=tok, **options):
        last = time.perf_counter()
        first = first if count else last
        count += len(delta.tokens)
        print(delta.text, end="", flush=True)
    print(flush=True)
    if count > 1:
        print(f"{count} tokens, {(count - 1) / (last - first):.0f} tokens/s after the first", file=sys.stderr)
