"""A small Whisper that learns spoken digits here, served and asked for digits that it never heard; and its speed.

    python benchmarks/hear.py [--directory DIR] [--out benchmarks/results/FILE.md]

Sounds are made by espeak-ng (a Debian package): one to six digits, by eight voices at many speeds and pitches, with
noise. The model (0.7 million parameters, windows of four seconds) is trained by `fdel.train` from random weights,
first on sounds of one digit, then on longer ones (all at once it learns where to listen only after thousands of
steps), saved as a checkpoint in Hugging Face layout and served by `fdel serve`; OpenAI's client sends sequences that
were not learnt, then those of two voices that were not. Digits count as wrong by edit distance. Speed: of the same
checkpoint in transformers, in the same run: work for a second of sound, sound by sound, eight side by side, and two
minutes in one file.
"""

import argparse
import functools
import io
import itertools
import json
import subprocess
import sys
import tempfile
import time
import wave
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from model import publish
from peers import running

from fdel import models, params, text, train
from fdel.media import sound
from fdel.models import whisper
from fdel.serve import hear

WORDS = "zero one two three four five six seven eight nine".split()
VOICES, OTHERS = ("m1", "m2", "m3", "m4", "f1", "f2", "f3", "f4"), ("m6", "f5")
# What is learnt in turn: at most so many digits, in a window of so many states, steps, sounds of a step.
STAGES = ((1, 60, 110, 64), (2, 80, 150, 48), (3, 100, 150, 32), (6, 160, 300, 32))
END, START, EN, DE, TRANSLATE, TRANSCRIBE, PREVIOUS, NO_SPEECH, NO_TIMES = range(20, 29)
STATES, BINS, LONGEST = 200, 80, 24  # of a window, four seconds; tokens of a transcript
CFG = whisper.Config(
    vocab=NO_TIMES + 1 + STATES + 1, embed=96, ffn=384, layers=2, heads=4, max_positions=64, encoder_ffn=384,
    encoder_layers=3, encoder_heads=4, states=STATES, bins=BINS, source=json.dumps({
        "decoder_start_token_id": START, "pad_token_id": END, "bos_token_id": END, "eos_token_id": END,
        "is_encoder_decoder": True,
    }),
)  # fmt: skip
GENERATION = dict(
    is_multilingual=True, lang_to_id={"<|en|>": EN, "<|de|>": DE}, no_timestamps_token_id=NO_TIMES,
    task_to_id={"transcribe": TRANSCRIBE, "translate": TRANSLATE}, prev_sot_token_id=PREVIOUS, max_length=64,
    decoder_start_token_id=START, eos_token_id=END, pad_token_id=END, bos_token_id=END, max_initial_timestamp_index=50,
    suppress_tokens=[START, EN, DE, TRANSLATE, TRANSCRIBE, PREVIOUS, NO_SPEECH], begin_suppress_tokens=[END],
    alignment_heads=[[1, 0]],
)  # fmt: skip


def spoken(digits: Sequence[int], voice: str, rng: np.random.Generator) -> np.ndarray:
    """Give float32[samples] at 16 kHz of digits as a voice says them, with noise."""
    said = " ".join(WORDS[d] for d in digits)
    speed, pitch = int(rng.integers(150, 231)), int(rng.integers(30, 71))
    command = ["espeak-ng", "-v", f"en-us+{voice}", "-s", str(speed), "-p", str(pitch), "--stdout", said]
    raw = bytearray(subprocess.run(command, capture_output=True, check=True).stdout)
    raw[4:8], raw[40:44] = (
        (len(raw) - 8).to_bytes(4, "little"),
        (len(raw) - 44).to_bytes(4, "little"),
    )  # of a pipe: unknown
    x = sound.decode(bytes(raw), most=60)
    return (x * rng.uniform(0.3, 1.0) + rng.normal(size=len(x)) * rng.uniform(0, 0.005)).astype(np.float32)


def made(count: int, voices: Sequence[str], seed: int) -> list[tuple[list[int], np.ndarray]]:
    """Give digits and sounds of at most a window."""
    rng = np.random.default_rng(seed)
    seeds = rng.integers(0, 2**31, count)
    asked = [(rng.integers(0, 10, rng.integers(1, 7)).tolist(), str(rng.choice(voices)), s) for s in seeds]
    with ThreadPoolExecutor(2) as pool:
        found = pool.map(lambda a: (a[0], spoken(a[0], a[1], np.random.default_rng(a[2]))), asked)
        return [(d, x) for d, x in found if len(x) < STATES * 320]


def features(x: np.ndarray) -> np.ndarray:
    """Give a window as `fdel serve` does: the sound's features, then zeros."""
    found = sound.log_mel(np.pad(x, (0, 400)), BINS, least=0)[:, : len(x) // sound.HOP]
    return np.pad(found, ((0, 0), (0, CFG.frames - found.shape[1])))


def transcript(digits: Sequence[int], x: np.ndarray) -> list[int]:
    """Give the tokens of a window: digits between two times."""
    last = NO_TIMES + 1 + min(STATES, len(x) // 320)
    return [START, EN, TRANSCRIBE, NO_TIMES + 1, *digits, last, END]


def batches(
    sounds: Sequence[tuple[list[int], np.ndarray]], most: int, states: int, steps: int, size: int
) -> Iterator[dict[str, np.ndarray]]:
    """Draw batches of sounds of at most so many digits at random, with the window's first states alone."""
    here = [(d, x) for d, x in sounds if len(d) <= most and len(x) <= states * 320]
    kept = [(features(x)[:, : 2 * states], transcript(d, x)) for d, x in here]
    rng = np.random.default_rng(most)
    for _ in range(steps):
        rows = [kept[i] for i in rng.integers(0, len(kept), size)]
        tokens = np.full((size, LONGEST), -1, np.int32)
        for row, (_, said) in zip(tokens, rows, strict=True):
            row[: len(said)] = said
        yield {"features": np.stack([f for f, _ in rows]), "tokens": tokens}


def loss(p: Any, batch: Any, given: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Sum the cross entropy of what follows the three tokens that begin a transcript."""
    tokens, states = batch["tokens"], batch["features"].shape[2] // 2
    p = p | {"encoder": p["encoder"] | {"positions": p["encoder"]["positions"][:states]}}
    memory = whisper.remember(p, whisper.encode(p, batch["features"], replace(CFG, states=states)))
    logits, _ = whisper.forward(p, jnp.maximum(tokens[:, :-1], 0), CFG, memory)
    learnt = (tokens[:, 1:] >= 0) & (jnp.arange(LONGEST - 1) >= 2)
    logp = jnp.take_along_axis(jax.nn.log_softmax(logits), jnp.maximum(tokens[:, 1:], 0)[..., None], -1)[..., 0]
    return -(logp * learnt).sum(), {"weight": learnt.sum()}


def learn(directory: Path) -> str:
    """Train the model and save it with its tokenizer; say how it went."""
    begin = time.perf_counter()
    sounds = made(4000, VOICES, seed=0)
    there, steps = time.perf_counter() - begin, sum(stage[2] for stage in STAGES)
    weights = params.init(whisper.spec(CFG), jax.random.key(0), dtype=jnp.float32)
    optimizer = train.optim.adamw(train.schedules.cosine(2e-3, warmup=100, steps=steps))
    step = jax.jit(train.update(train.normalize(train.grads(loss)), optimizer), donate_argnums=0)
    state, first, metrics = train.init_state(weights, optimizer), None, {}
    for i, batch in enumerate(itertools.chain.from_iterable(batches(sounds, *stage) for stage in STAGES)):
        state, metrics = step(state, batch)
        first = float(metrics["loss"]) if first is None else first
        if i % 50 == 0:
            print(f"step {i}: loss {float(metrics['loss']):.4f}, {time.perf_counter() - begin:.0f} s", flush=True)
    models.save(models.Model(whisper, CFG, state.params), directory)
    (directory / "generation_config.json").write_text(json.dumps(GENERATION))
    tokenizer().save(str(directory / "tokenizer.json"))
    took = time.perf_counter() - begin - there
    return f"{len(sounds)} sounds, {steps} steps in {took:.0f} s: loss {first:.2f} -> {float(metrics['loss']):.4f}"


def tokenizer() -> Any:
    """One token for each of twenty characters, and the special tokens behind them."""
    from tokenizers import Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE

    tok = Tokenizer(BPE({c: i for i, c in enumerate("0123456789Ġ.,!?'-:;$")}, []))
    tok.pre_tokenizer, tok.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    named = "endoftext startoftranscript en de translate transcribe startofprev nospeech notimestamps".split()
    tok.add_special_tokens([f"<|{n}|>" for n in (*named, *(f"{i * 0.02:.2f}" for i in range(STATES + 1)))])
    return tok


def wav(x: np.ndarray) -> bytes:
    """Give a file of a sound."""
    out = io.BytesIO()
    with wave.open(out, "wb") as file:
        file.setparams((1, 2, sound.RATE, 0, "NONE", ""))
        file.writeframes((np.clip(x, -1, 1) * 32767).astype("<i2").tobytes())
    return out.getvalue()


def distance(a: Sequence[Any], b: Sequence[Any]) -> int:
    """Count the insertions, deletions and replacements that turn a into b."""
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        before, row[0] = row[0], i
        for j, y in enumerate(b, 1):
            before, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, before + (x != y))
    return row[-1]


def served(directory: Path, tests: dict[str, list[tuple[list[int], np.ndarray]]]) -> list[str]:
    """Ask the server for each sound; say how many digits it wrote down rightly."""
    import openai

    lines = [
        "| heard by the server | sounds | digits | right digits | sounds without a fault |",
        "|---|---|---|---|---|",
    ]
    with running("fdel", sys.executable, str(directory)) as (port, _, _):
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none")
        for name, sounds in tests.items():
            ask = functools.partial(client.audio.transcriptions.create, model=str(directory), language="en")
            with ThreadPoolExecutor(4) as pool:
                said = list(pool.map(lambda s: ask(file=("a.wav", wav(s[1]))).text, sounds))  # noqa: B023
            pairs = zip(said, sounds, strict=True)
            wrong = [distance([c for c in w if c.isdigit()], [*map(str, d)]) for w, (d, _) in pairs]
            total, fine = sum(len(d) for d, _ in sounds), sum(w == 0 for w in wrong)
            lines.append(
                f"| {name} | {len(sounds)} | {total} | {1 - sum(wrong) / total:.2%} | {fine / len(sounds):.2%} |"
            )
    return lines


def speed(directory: Path, sounds: Sequence[tuple[list[int], np.ndarray]]) -> list[str]:
    """Time transformers and fdel on the same sounds: seconds of work for a second of sound; and compare what they write."""
    import torch
    import transformers

    torch.set_num_threads(2)
    oracle = transformers.WhisperForConditionalGeneration.from_pretrained(directory).eval()
    oracle.generation_config.update(**GENERATION)
    model = models.load(directory, dtype=jnp.float32, family=whisper)
    vocabulary = text.load(directory).backend.get_vocab(with_added_tokens=True)
    listener = hear.Listener(model, hear.tokens.of(directory, vocabulary, model.cfg), rows=8)
    options = hear.Options(language="en", temperatures=(0.0,), compression=None, logprob=None, no_speech=None)
    long = np.concatenate([np.pad(x, (0, STATES * 320 - len(x))) for _, x in sounds[:30]])
    cut = lambda x: sound.log_mel(np.pad(x, (0, 400)), BINS, least=0)[:, : len(x) // sound.HOP]

    def theirs(group: Sequence[np.ndarray]) -> list[list[int]]:
        rows = torch.tensor(np.stack([np.pad(f, ((0, 0), (0, max(0, CFG.frames - f.shape[1])))) for f in group]))
        how: Any = dict(return_timestamps=True, language="en", task="transcribe", temperature=0.0)
        if rows.shape[2] > CFG.frames:
            how |= dict(condition_on_prev_tokens=True)
        with torch.no_grad():
            found = oracle.generate(rows, **how)
        return [[t for t in row if t < 10] for row in found.tolist()]

    def ours(group: Sequence[np.ndarray]) -> list[list[int]]:
        found = hear.run(listener, [hear.transcribe(f, model.cfg, listener.tokens, options) for f in group])
        return [[t for s in one.segments for t in s.tokens if t < 10] for one in found]

    lines = [
        "| work for a second of sound, ms | transformers | fdel | times as fast | same digits |",
        "|---|" + 4 * "---|",
    ]
    short = [cut(x) for _, x in sounds[:32]]
    groups = {
        "one by one": ([[f] for f in short], sum(f.shape[1] for f in short)),
        "eight side by side": ([short[i : i + 8] for i in range(0, 32, 8)], sum(f.shape[1] for f in short)),
        "two minutes in one file": ([[cut(long)]], len(long) // sound.HOP),
    }
    for name, (asked, frames) in groups.items():
        took: dict[Any, float] = {}
        for f in (theirs, ours):
            said = [f(g) for g in asked]  # compiles
            rounds = []
            for _ in range(3):
                begin = time.perf_counter()
                said = [f(g) for g in asked]
                rounds.append(time.perf_counter() - begin)
            took[f] = min(rounds) / frames * 1e5
            took[f, "said"] = [row for g in said for row in g]  # type: ignore[assignment]
        pairs: Any = itertools.zip_longest(took[theirs, "said"], took[ours, "said"])
        equal = sum(a == b for a, b in pairs) / len(took[ours, "said"])  # type: ignore[arg-type]
        lines.append(
            f"| {name} | {took[theirs]:.1f} | {took[ours]:.1f} | {took[theirs] / took[ours]:.2f} | {equal:.0%} |"
        )
    return lines


def main() -> None:
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("--directory", type=Path, help="keep the checkpoint here; one that is there is not trained again")
    cli.add_argument("--out", type=Path, help="also write the table here")
    args = cli.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        directory = args.directory or Path(temporary) / "digits"
        directory.mkdir(parents=True, exist_ok=True)
        trained = [] if (directory / "config.json").is_file() else [learn(directory), ""]
        known, others = made(200, VOICES, seed=1), made(100, OTHERS, seed=2)
        tests = {"voices that were learnt, other digits": known, "two other voices": others}
        lines = [*trained, *served(directory, tests), "", *speed(directory, known)]
    publish("a Whisper of spoken digits, `benchmarks/hear.py`, 2 CPU cores", "\n".join(lines), args.out)


if __name__ == "__main__":
    main()
