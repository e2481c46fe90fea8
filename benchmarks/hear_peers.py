"""Whisper at its real shapes: fdel, transformers, faster-whisper and whisper.cpp on the same weights, in the same run.

    python -m venv PEERS && PEERS/bin/pip install pywhispercpp faster-whisper transformers torch
    python benchmarks/hear_peers.py --peers PEERS/bin/python [--shape tiny|base] [--rounds 5] [--out FILE.md]

Weights are random ones that transformers makes at the shape of whisper-tiny or whisper-base (none can be downloaded here);
the rows of the embedding of all special tokens are zero, so that no transcript ends before the `--tokens` that every window
gets, on any side. Greedy, float32, two threads, from samples to tokens. CTranslate2's own converter makes
faster-whisper's files, `ggml` here those of whisper.cpp: its documented format, with matrices of float16, as its
convolutions take no others. Each side is a process that stays, and has its turn in every round, so that other load meets
all alike: medians of seconds, and of a round's ratios.
With `--passive` OpenMP's threads wait without spinning: many times faster on a machine with other work, and a fifth or so
slower on a quiet one. whisper.cpp has no batches: its sounds go one by one. transformers is given long sounds
window by window, as its own loop needs timestamps; no side here writes any.
"""

import argparse
import itertools
import json
import os
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

RATE, SECONDS, THREADS = 16_000, 30, 2
SHAPES = {"tiny": (384, 4, 6), "base": (512, 6, 8)}  # width, layers, heads: openai/whisper-tiny and -base
VOCAB, END, START, EN, TRANSLATE, TRANSCRIBE, PREVIOUS, NO_SPEECH, NO_TIMES = (
    51865, 50257, 50258, 50259, 50358, 50359, 50361, 50362, 50363
)  # fmt: skip
PROMPT = [START, EN, TRANSCRIBE, NO_TIMES]
CASES = {"one window": (1, 1), "eight sounds at once": (8, 1), "two minutes": (1, 4)}  # sounds, windows of each
SIDES = {"fdel": "", "transformers": "", "faster-whisper": "float32", "faster-whisper, int8": "int8", "whisper.cpp": ""}
Listen = Callable[[Sequence[np.ndarray]], list[list[int]]]  # sounds: the tokens of each


def sounds(case: str) -> list[np.ndarray]:
    """Give float32[samples] of noise whose loudness and pitch change."""
    count, windows = CASES[case]
    t = np.arange(windows * SECONDS * RATE) / RATE
    rng = np.random.default_rng(0)
    sung = (np.sin(2 * np.pi * (200 + 20 * i) * t + 3 * np.sin(5 * t)) * np.sin(t + i) for i in range(count))
    return [(0.2 * x + 0.02 * rng.normal(size=len(t))).astype(np.float32) for x in sung]


# ---- the checkpoint ------------------------------------------------------------------------------------------------


def checkpoint(directory: Path, shape: str) -> None:
    """Let transformers make and save the model, and write a tokenizer with a text for each id."""
    import tokenizers
    import torch
    import transformers

    embed, layers, heads = SHAPES[shape]
    width = {
        f"{part}_{k}": v for part in ("encoder", "decoder") for k, v in (("layers", layers), ("ffn_dim", 4 * embed))
    }
    torch.manual_seed(0)
    model = transformers.WhisperForConditionalGeneration(transformers.WhisperConfig(
        vocab_size=VOCAB, d_model=embed, encoder_attention_heads=heads, decoder_attention_heads=heads, init_std=0.06,
        suppress_tokens=None, begin_suppress_tokens=None, **width,
    ))  # fmt: skip
    model.model.decoder.embed_tokens.weight.data[END:] = 0
    names = (
        "<|endoftext|>",
        "<|startoftranscript|>",
        "<|en|>",
        *(f"<|{chr(97 + i // 26)}{chr(97 + i % 26)}x|>" for i in range(98)),
    )
    names = (*names, *(f"<|{n}|>" for n in "translate transcribe startoflm startofprev nospeech notimestamps".split()))
    languages = {n: END + i for i, n in enumerate(names) if 2 <= i <= 100}
    model.generation_config = transformers.GenerationConfig(
        is_multilingual=True, lang_to_id=languages, task_to_id={"transcribe": TRANSCRIBE, "translate": TRANSLATE},
        no_timestamps_token_id=NO_TIMES, prev_sot_token_id=PREVIOUS, decoder_start_token_id=START, eos_token_id=END,
        pad_token_id=END, bos_token_id=END, max_length=448, suppress_tokens=[], begin_suppress_tokens=[],
    )  # fmt: skip
    model.save_pretrained(directory)
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    words = [*letters, *(a + b for a in letters for b in letters)][: END - 1] + [""]  # as all multilingual ones have it
    tok = tokenizers.Tokenizer(tokenizers.models.BPE({w: i for i, w in enumerate(words)}, []))
    tok.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tok.decoder = tokenizers.decoders.ByteLevel()
    tok.add_special_tokens(list(names))
    tok.save(str(directory / "tokenizer.json"))
    made = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": names[0], "unk_token": names[0]}
    (directory / "tokenizer_config.json").write_text(json.dumps(made))


NAMES = {
    "model.": "", "layers.": "blocks.", "self_attn_layer_norm": "attn_ln", "encoder_attn_layer_norm": "cross_attn_ln",
    "final_layer_norm": "mlp_ln", "self_attn.": "attn.", "encoder_attn.": "cross_attn.", "q_proj": "query", "k_proj": "key",
    "v_proj": "value", "out_proj": "out", "fc1": "mlp.0", "fc2": "mlp.2", "embed_tokens": "token_embedding",
    "embed_positions.weight": "positional_embedding", "encoder.layer_norm": "encoder.ln_post",
    "decoder.layer_norm": "decoder.ln",
}  # fmt: skip


def ggml(directory: Path) -> None:
    """Write whisper.cpp's file: a magic number, sizes, mel filters, texts of tokens, then arrays by OpenAI's names."""
    from safetensors.numpy import load_file

    from fdel.media import sound

    c = json.loads((directory / "config.json").read_text())
    sizes = [VOCAB]
    for part, reach in (("encoder", "source"), ("decoder", "target")):
        sizes += [c[f"max_{reach}_positions"], c["d_model"], c[f"{part}_attention_heads"], c[f"{part}_layers"]]
    filters = np.ascontiguousarray(sound.mel_filters(c["num_mel_bins"]).T, np.float32)
    with open(directory / "ggml.bin", "wb") as file:
        ints = lambda *x: file.write(struct.pack(f"<{len(x)}i", *x))
        ints(0x67676D6C, *sizes, c["num_mel_bins"], 1, *filters.shape)  # 1: matrices of float16
        file.write(filters.tobytes())
        ints(END)
        for i in range(END):
            file.write(struct.pack("<i", len(text := f" w{i}".encode())) + text)
        for name, x in load_file(directory / "model.safetensors").items():
            if name == "proj_out.weight":
                continue
            for old, new in NAMES.items():
                name = name.replace(old, new)
            half = x.ndim > 1 and "positional" not in name
            x = x[:, None] if "conv" in name and x.ndim == 1 else x
            ints(x.ndim, len(name), half, *reversed(x.shape))
            file.write(name.encode() + x.astype("<f2" if half else "<f4").tobytes())


# ---- the sides: each is a process ------------------------------------------------------------------------------------


def fdel(directory: Path, tokens: int, _: str) -> Listen:
    """`fdel.serve.hear` as the server calls it."""
    import jax.numpy as jnp

    from fdel import models, text
    from fdel.media import sound
    from fdel.models import whisper
    from fdel.serve import hear
    from fdel.serve.hear import windows

    model = models.load(directory, dtype=jnp.float32, family=whisper)
    vocabulary = text.load(directory).backend.get_vocab(with_added_tokens=True)
    listener = hear.Listener(model, hear.tokens.of(directory, vocabulary, model.cfg), rows=8)

    def transcribe(x: np.ndarray) -> Any:
        features, said = sound.log_mel(x, model.cfg.bins), []
        for at in range(0, features.shape[1], model.cfg.frames):
            memory = yield windows.Hear(features[:, at : at + model.cfg.frames])
            draft = yield windows.Write(memory, PROMPT, 0, tokens, False, 0.0, 0)
            said += draft.tokens
        return said

    return lambda group: hear.run(listener, [transcribe(x) for x in group])


def transformers(directory: Path, tokens: int, _: str) -> Listen:
    """`generate` of one window or a batch of them."""
    import torch
    import transformers

    torch.set_num_threads(THREADS)
    model = transformers.WhisperForConditionalGeneration.from_pretrained(directory, dtype=torch.float32).eval()
    extract = transformers.WhisperFeatureExtractor(feature_size=model.config.num_mel_bins)

    def listen(group: Sequence[np.ndarray]) -> list[list[int]]:
        how = dict(truncation=False, return_tensors="pt", sampling_rate=RATE)
        features, said = extract(list(group), **how).input_features, [[] for _ in group]
        for part in features.split(100 * SECONDS, 2):
            with torch.no_grad():
                found = model.generate(part, language="en", task="transcribe", max_new_tokens=tokens, do_sample=False)
            for row, new in zip(said, found.tolist(), strict=True):
                row += [t for t in new if t < END]
        return said

    return listen


def faster_whisper(directory: Path, tokens: int, kind: str) -> Listen:
    """Its `transcribe` of one sound; of several its features, and CTranslate2's batch."""
    import ctranslate2
    from faster_whisper import WhisperModel

    made = directory / "ct2"
    if not made.exists():
        ctranslate2.converters.TransformersConverter(str(directory), copy_files=["tokenizer.json"]).convert(str(made))
    model = WhisperModel(str(made), device="cpu", compute_type=kind, cpu_threads=THREADS, local_files_only=True)
    most = 2 * tokens  # CTranslate2 writes half of it
    how: Any = dict(
        language="en", beam_size=1, temperature=0.0, without_timestamps=True, condition_on_previous_text=False,
        max_new_tokens=most - len(PROMPT), compression_ratio_threshold=None, log_prob_threshold=None,
        no_speech_threshold=None, suppress_blank=False, suppress_tokens=[],
    )  # fmt: skip

    def listen(group: Sequence[np.ndarray]) -> list[list[int]]:
        if len(group) == 1:
            segments, _ = model.transcribe(group[0], **how)
            return [[t for s in segments for t in s.tokens]]
        features = np.stack([model.feature_extractor(x)[:, : 100 * SECONDS] for x in group])
        encoded = model.encode(features)
        found = model.model.generate(
            encoded, [PROMPT] * len(group), beam_size=1, max_length=most, suppress_blank=False,
            suppress_tokens=[],
        )  # fmt: skip
        return [f.sequences_ids[0] for f in found]

    return listen


def whisper_cpp(directory: Path, tokens: int, _: str) -> Listen:
    """Its `whisper_full`, a sound at a time."""
    from pywhispercpp.model import Model

    model = Model(
        str(directory / "ggml.bin"), n_threads=THREADS, language="en", no_timestamps=True, max_tokens=tokens - 1,
        temperature=0.0, temperature_inc=0.0, suppress_blank=False, no_context=True, print_progress=False,
        print_timestamps=False, print_realtime=False, greedy={"best_of": 1},
    )  # fmt: skip
    words = lambda found: [int(w[1:]) for s in found for w in s.text.split()]
    return lambda group: [words(model.transcribe(x)) for x in group]


def side(name: str, directory: Path, tokens: int) -> None:
    """Answer each case that comes in by a line: seconds, and the tokens."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print goes to the log
    make = {"fdel": fdel, "transformers": transformers, "whisper.cpp": whisper_cpp}.get(name, faster_whisper)
    listen = make(directory, tokens, SIDES[name])
    asked = {case: sounds(case) for case in CASES}
    for line in itertools.chain([""], iter(sys.stdin.readline, "")):
        begin, cpu = time.perf_counter(), time.process_time()
        said = listen(asked[line.strip()]) if line else []
        found = {"seconds": time.perf_counter() - begin, "cpu": time.process_time() - cpu, "said": said}
        print(json.dumps(found), file=out, flush=True)


# ---- the comparison --------------------------------------------------------------------------------------------------


def asked(process: Any, case: str | None, log: Path) -> dict[str, Any]:
    """Send a case to a side and wait for its answer; RuntimeError with its log if it ended."""
    if case:
        process.stdin.write(case + "\n")
        process.stdin.flush()
    if not (line := process.stdout.readline()):
        raise RuntimeError(log.read_text()[-2000:])
    return json.loads(line)


def started(directory: Path, args: Any) -> tuple[dict[str, Any], list[str]]:
    """Start the sides: their processes, and what is said of those that do not work here."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:THREADS])  # of this process and those it starts
    env = os.environ | {"OMP_NUM_THREADS": str(THREADS), "HF_HUB_OFFLINE": "1"}
    env |= {"OMP_WAIT_POLICY": "PASSIVE"} if args.passive else {}
    here, missing = dict[str, Any](), list[str]()
    for name in SIDES:
        exe, log = sys.executable if name in ("fdel", "transformers") else args.peers, directory / f"{name}.log"
        if exe is None:
            continue
        # -P: kernels.py beside this file is not the package `kernels` that transformers looks for.
        command = [exe, "-P", __file__, "--side", name, "--folder", str(directory), "--tokens", str(args.tokens)]
        with open(log, "w") as err:
            process = subprocess.Popen(command, stdin=-1, stdout=-1, stderr=err, text=True, env=env)
        try:
            asked(process, None, log)
            here[name] = process
        except RuntimeError as e:
            missing.append(f"{name} is left out: {str(e).strip().splitlines()[-1]}")
    return here, missing


def row(case: str, name: str, found: dict[str, list[dict[str, Any]]]) -> str:
    """Write a line of the table from a side's answers, and those of the others, in each round."""
    (count, windows), middle = CASES[case], statistics.median
    flat = lambda name: [t for said in found[name][-1]["said"] for t in said]
    same = sum(a == b for a, b in zip(flat(name), flat("transformers"), strict=False)) / len(flat("transformers"))
    times = lambda what: [f[what] / (count * windows * SECONDS) for f in found[name]]
    over = lambda what: middle(f[what] / g[what] for f, g in zip(found[name], found["fdel"], strict=True))
    facts = [f"{x:.4f}" for x in (middle(times("seconds")), min(times("seconds")), middle(times("cpu")))]
    facts += [f"{over('seconds'):.2f}", f"{over('cpu'):.2f}", str(len(flat(name))), f"{same:.0%}"]
    return f"| {' | '.join([case, name, *facts])} |"


def measure(directory: Path, args: Any) -> Iterator[str]:
    """Give the sides their turns, and write the table."""
    begin, (here, missing) = os.getloadavg()[0], started(directory, args)
    lines = []
    for case in args.cases:
        found: dict[str, list[dict[str, Any]]] = {name: [] for name in here}
        for turn in range(args.rounds + 1):
            for name in list(here)[:: 1 if turn % 2 else -1]:
                found[name].append(asked(here[name], case, directory / f"{name}.log"))
        found = {name: rounds[1:] for name, rounds in found.items()}  # the first compiles
        lines += [row(case, name, found) for name in here]
        print("\n".join(lines[-len(here) :]), file=sys.stderr, flush=True)
    for process in here.values():
        process.stdin.close()
        process.wait()
    yield f"{args.tokens} tokens of each window of 30 s, greedy, {THREADS} threads; medians of {args.rounds} rounds; a"
    yield f"load of {begin:.1f} before and {os.getloadavg()[0]:.1f} after. Real-time factors are seconds for a second of"
    yield "sound; processor time is of all threads, and changes less with other work on the machine."
    yield from missing
    yield "\n| sounds | side | real-time factor | best | processor time | times fdel's | same, of it | tokens | same |"
    yield "|---|---|" + 7 * "---|"
    yield from lines


def main() -> None:
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("--shape", choices=tuple(SHAPES), default="tiny")
    cli.add_argument("--tokens", type=int, default=100, help="that each window gets; of speech there are about so many")
    cli.add_argument("--cases", nargs="+", choices=tuple(CASES), default=tuple(CASES))
    cli.add_argument("--rounds", type=int, default=5)
    cli.add_argument("--passive", action="store_true", help="for a machine with other work")
    cli.add_argument("--peers", help="a Python that has pywhispercpp, faster-whisper, transformers and torch")
    cli.add_argument("--out", type=Path, help="also write the table here")
    cli.add_argument("--side", choices=tuple(SIDES), help=argparse.SUPPRESS)
    cli.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = cli.parse_args()
    if args.side:
        side(args.side, args.folder, args.tokens)
        return
    from model import publish

    with tempfile.TemporaryDirectory() as folder:
        checkpoint(Path(folder), args.shape)
        ggml(Path(folder))
        lines = "\n".join(measure(Path(folder), args))
    publish(f"random weights of whisper-{args.shape}'s shape, `benchmarks/hear_peers.py`, 2 CPU cores", lines, args.out)


if __name__ == "__main__":
    main()
