"""Prompts with an image against transformers: one at a time, eight at once, images seen before; memory of a server.

    python benchmarks/see.py [--family llava] [--shape tiny] [--requests 2000] [--rounds 10] [--side 336] [--out FILE.md]

The models are random ones (seers.py), saved by transformers: no weights can be had here. Both sides get the same prepared
images (one of another content in each round) and the same prompt, and give its first token in float32. "Seen before" asks
about an image that the engine holds, behind other words, so that no page of the prompt's is shared. First of all, images
of sizes for which nothing is compiled come beside chats whose tokens are timed (LLaVA and Gemma have one size). Eight chats
have images of different sizes and texts of different lengths; transformers has them one by one, or as one batch, padded on
the left.
Set OMP_WAIT_POLICY=passive where processor time is to count: torch's idle threads spin. Memory is that of `fdel serve`
and of the process that forks its children, after a tenth of the requests and after all; each shows one of 64 images.
"""

import argparse
import asyncio
import base64
import io
import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import seers
from client import answer, exchange, free_port, post, process, resident
from model import publish
from seers import CONTEXT, WORDS

from fdel import ops, serve, text
from fdel.media import sight
from fdel.serve.engine import weights


class Chat(NamedTuple):
    """A prompt with an image: tokens, what stands beside them for an engine, and what transformers' processor gave."""

    tokens: list[int]
    media: Any
    seen: Any


def median(work: Callable[[int], Any], rounds: int) -> tuple[float, float, list[Any]]:
    """Milliseconds of the middle one of some rounds, by the clock and of processors, and what each gave."""
    took, gave = [], []
    for i in range(rounds):
        begin = np.array([time.perf_counter(), time.process_time()])
        gave.append(work(i))
        took.append(np.array([time.perf_counter(), time.process_time()]) - begin)
    clock, used = np.median(took, 0) * 1e3
    return float(clock), float(used), gave


class Sides:
    """A family's model in transformers and in an engine, and how either gives first tokens of the same prompts."""

    def __init__(self, directory: str, family: str, oracle: Any):
        self.family, self.oracle, self.tok = family, oracle, text.load(directory)
        found = sight.read(directory)
        assert found is not None
        self.sight, self.theirs = found, seers.processor(directory, family)
        settings = serve.Settings(rows=8, batches=(8,), max_length=CONTEXT)
        self.engine = serve.Engine(weights.load(directory), settings, tokenizer=self.tok, sight=self.sight)
        self.model = model = self.engine.model

        def bare(params: Any, tokens: Any, index: Any, values: Any, places: Any, rotary: Any) -> Any:
            media = ops.Media(index, inputs=ops.Patches(values, places))
            batch = replace(ops.packed(tokens), media=media, rotary=rotary)
            x = model.family.hidden(params, tokens, model.cfg, batch)[0]
            return ops.logits(x[0, -1:], model.family.head(params, model.cfg)).argmax()

        self.bare = jax.jit(bare)
        self.engine.start(wait=True)
        while self.engine.stats()["to compile"]:
            time.sleep(0.1)

    def prompt(self, rng: np.random.Generator, rgb: np.ndarray, words: int) -> Chat:
        """Make a prompt of an image and some tokens of text, of which the last stand behind the image; all are prepared."""
        picture, known = sight.prepare(self.sight, rgb), self.spell(WORDS)
        said = rng.choice(known, words).tolist()  # so that no page of two prompts is the same
        tokens = [*said[:-12], *self.spell(self.placed()), *said[-12:]]
        tokens, media = serve.prompt_media(self.sight, tokens, [picture])
        return Chat(tokens, media, self.theirs([rgb], return_tensors="np", input_data_format="channels_last"))

    def spell(self, said: str) -> list[int]:
        return text.encode(self.tok, said, special=False)

    def placed(self) -> str:
        """Write an image's place as a processor does."""
        around = "<start><image><end>" if self.family.startswith("qwen") else "<image>"
        return sight.written(self.sight, "<start>" if self.family == "gemma3" else around)

    def ours(self, chats: list[Chat]) -> tuple[list[int], list[float], list[float]]:
        """First tokens of chats that are asked at once, and when each was there: by the clock, and of processors."""
        begin, used = time.perf_counter(), time.process_time()
        ask = serve.SamplingParams(max_tokens=1, temperature=0)
        jobs = [self.engine.submit_all([c.tokens], ask, media=[c.media])[0] for c in chats]
        there: dict[int, tuple[float, float]] = {}

        def all_there() -> bool:
            for i, job in enumerate(jobs):
                if job.reply.finish_reason and i not in there:
                    there[i] = time.perf_counter() - begin, time.process_time() - used
            return len(there) == len(jobs)

        self.engine.wait(all_there)
        when = [there[i] for i in range(len(jobs))]
        return [job.reply.generation().tokens[0] for job in jobs], [a for a, _ in when], [b for _, b in when]

    def forward(self, chat: Chat) -> int:
        """The first token of a chat by fdel's forward alone, with the tower in it: what transformers' is compared with."""
        (item,), rotary = chat.media.items, chat.media.rotary
        seen = chat.media.index[None], item.values[None, None], item.places[None, None].astype(np.int32)
        return int(
            self.bare(
                self.model.params, np.array([chat.tokens], np.int32), *seen, None if rotary is None else rotary[None]
            )
        )

    def generated(self, chat: Chat) -> int:
        """The same by transformers' generate."""
        given = seers.inputs(self.family, [chat.tokens], [chat.seen], self.sight.entries[0])
        return int(self.oracle.generate(**given, max_new_tokens=1, do_sample=False)[0, -1])

    def one_by_one(self, chats: list[Chat]) -> tuple[list[int], list[float], list[float]]:
        """The same of transformers, one chat after the other."""
        begin, used, out = time.perf_counter(), time.process_time(), list[tuple[int, float, float]]()
        for c in chats:
            (token,) = self.batch([c])[0]
            out.append((token, time.perf_counter() - begin, time.process_time() - used))
        return [x[0] for x in out], [x[1] for x in out], [x[2] for x in out]

    def batch(self, chats: list[Chat]) -> tuple[list[int], list[float], list[float]]:
        """The same of transformers, as one padded batch."""
        import torch

        begin, used = time.perf_counter(), time.process_time()
        given = seers.inputs(self.family, [c.tokens for c in chats], [c.seen for c in chats], self.sight.entries[0])
        with torch.no_grad():
            logits = self.oracle(**given, logits_to_keep=1).logits[:, -1]
        n = len(chats)
        return logits.argmax(-1).tolist(), [time.perf_counter() - begin] * n, [time.process_time() - used] * n


NEW = ((1.0, 1.25), (0.75, 1.0), (1.5, 1.5))  # times the side of the family's images


def stalls(sides: Sides, side: int) -> list[str]:
    """How long a chat waits for its next token while images come of sizes that the engine has not seen."""
    rng, engine = np.random.default_rng(3), sides.engine
    sizes = [(max(8, int(side * a)), max(8, int(side * b))) for a, b in NEW]
    shown = [sides.prompt(rng, rng.integers(0, 256, (*size, 3), np.uint8), 24) for size in sizes]
    ask = lambda most: serve.SamplingParams(max_tokens=most, temperature=0, ignore_eos=True)

    def gaps(chats: list[Chat]) -> tuple[float, float, list[float]]:
        """Milliseconds between two tokens of a text, the middle one and the longest; until each image was answered."""
        text, before, times, took = None, 0, list[tuple[int, float]](), list[float]()

        def tokens() -> int:
            """Count those of all texts: another follows when one ends, until all images are answered."""
            nonlocal text, before
            if text is None or text.reply.finish_reason:
                before += 0 if text is None else len(text.reply.tokens)
                text = engine.submit(rng.integers(10, 200, 16).tolist(), ask(CONTEXT - 20))
            count = before + len(text.reply.tokens)
            if not times or count > times[-1][0]:
                times.append((count, time.perf_counter()))
            return count

        engine.wait(lambda: tokens() > 200)
        for c in chats:
            job, begin = engine.submit(c.tokens, ask(1), media=c.media), time.perf_counter()
            engine.wait(lambda job=job: tokens() and job.reply.finish_reason is not None)
            took.append((time.perf_counter() - begin) * 1e3)
        last = tokens()
        engine.wait(lambda: tokens() > last + 200)
        engine.abort(text)
        found = np.diff([t for _, t in times[1:]]) * 1e3
        return float(np.median(found)), float(found.max()), took

    alone, beside, again = gaps([]), gaps(shown), gaps(shown[:1])
    row = lambda name, x: f"| {name} | {x[0]:.1f} | {x[1]:.1f} | {', '.join(f'{t:.0f}' for t in x[2]) or 'none'} |"
    return [
        "| tokens of a chat, ms between two | median | longest | each image answered after |",
        "|---|---|---|---|", row("alone", alone),
        row(f"beside {len(shown)} images of new sizes, one after the other", beside), row("beside one seen before", again),
    ]  # fmt: skip


def prefill(sides: Sides, side: int, rounds: int) -> list[str]:
    """Time the first token of a prompt with an image."""
    rng, words = np.random.default_rng(0), 60
    chats = [sides.prompt(rng, rng.integers(0, 256, (side, side, 3), np.uint8), words) for _ in range(rounds + 1)]
    ways: dict[str, Callable[[Chat], int]] = {
        "transformers, forward": lambda c: sides.one_by_one([c])[0][0], "fdel, forward": sides.forward,
        "transformers, generate": sides.generated, "fdel, engine": lambda c: sides.ours([c])[0][0],
    }  # fmt: skip
    for work in ways.values():
        work(chats[-1])
    first = sides.engine.stats()
    took = {name: median(lambda i, work=work: work(chats[i]), rounds) for name, work in ways.items()}
    other = lambda i: Chat(chats[i].tokens[1 + i % 7 :], cut(chats[i].media, 1 + i % 7), None)
    took["fdel, engine, image seen before"] = median(lambda i: sides.ours([other(i)])[0][0], rounds)
    stats = {k: v - first[k] for k, v in sides.engine.stats().items() if k.startswith("pictures")}
    names, (forward, _, generate, *_) = list(took), ([*x[:2]] for x in took.values())
    same = [sum(a == b for a, b in zip(took[names[0]][2], took[n][2], strict=True)) for n in names[1:4]]
    cells = lambda said, numbers: " | ".join([f"| {said}", *(f"{n:.2f}" for n in numbers)]) + " |"
    row = lambda said, i: cells(said, (x[i] for x in took.values()))
    times = lambda said, i, by: cells(said, (by[i] / x[i] for x in took.values()))
    return [
        f"| the first token of {len(chats[0].tokens)}, ms | {' | '.join(names)} |",
        "|---" * (1 + len(names)) + "|",
        row(f"by the clock, median of {rounds}", 0), row("of processors", 1),
        times("times as fast as transformers' forward, clock", 0, forward), times("of processors", 1, forward),
        times("times as fast as its generate, clock", 0, generate), times("of processors", 1, generate), "",
        f"Same token as transformers' forward in {same} of {rounds}; images encoded {stats['pictures encoded']}, "
        f"found {stats['pictures found']}.",
    ]  # fmt: skip


def cut(media: Any, n: int) -> Any:
    """What stands beside a prompt that lost its first n tokens, which were text."""
    rotary = None if media.rotary is None else media.rotary[n:] - n
    return serve.PromptMedia(media.items, media.index[n:], rotary)


SIZES = ((224, 224), (336, 252), (448, 336), (280, 420), (336, 336), (196, 392), (504, 280), (252, 252))
TEXTS = (24, 120, 60, 200, 40, 90, 160, 30)


def several(sides: Sides, side: int, rounds: int) -> list[str]:
    """Eight chats at once, of images and texts of different sizes, each round with images of another content."""
    rng, scale = np.random.default_rng(2), side / 336
    image = lambda h, w: rng.integers(0, 256, (max(8, int(h * scale)), max(8, int(w * scale)), 3), np.uint8)
    asked = lambda: [sides.prompt(rng, image(*size), n) for size, n in zip(SIZES, TEXTS, strict=True)]
    every = [asked() for _ in range(rounds + 1)]
    ways = {"one by one": sides.one_by_one, "one padded batch": sides.batch, "fdel": sides.ours}
    took: dict[str, list[np.ndarray]] = {name: [] for name in ways}
    wrong = dict.fromkeys(ways, 0)
    firsts: list[list[int]] = []  # tokens of each round, by the first side
    for name, work in ways.items():  # one side after the other: torch's threads spin for a while after its turn
        for i, chats in enumerate(every):  # the first round, which compiles, is not counted
            tokens, clock, used = work(chats)
            firsts += [tokens] if name == "one by one" else []
            wrong[name] += sum(a != b for a, b in zip(tokens, firsts[i], strict=True))
            took[name].append(np.array([max(clock), np.mean(clock), max(used), np.mean(used)]))
    total = sum(len(c.tokens) for c in every[0])
    middle = {name: np.median(x[1:], 0) for name, x in took.items()}
    best = np.min([middle[n] for n in ("one by one", "one padded batch")], 0)
    row = lambda name, i: f"| {name} | " + " | ".join(f"{x[i] * 1e3:.1f}" for x in middle.values()) + " |"
    speed = lambda i: " | ".join(f"{total / x[i]:.0f}" for x in middle.values())
    times = lambda i: f"{best[i] / middle['fdel'][i]:.2f}"
    return [
        f"| eight chats of {total} tokens at once | transformers, one by one | transformers, one batch | fdel |",
        "|---|---|---|---|",
        f"| tokens a second | {speed(0)} |", f"| tokens a second of a processor | {speed(2)} |",
        row("mean time to the first token, ms", 1), row("the same, of processors", 3), "",
        f"{times(0)} times as many tokens a second as the better of the two, {times(2)} of a processor's; first tokens "
        f"{times(1)} times as soon ({times(3)} of processors). Medians of {rounds}. Other first tokens than one by one: "
        f"batch {wrong['one padded batch']}, fdel {wrong['fdel']} of {8 * len(every)}.",
    ]  # fmt: skip


def memory(directory: str, requests: int) -> list[str]:
    """Ask a server about images, and read its memory meanwhile."""
    from PIL import Image

    rng, port, files = np.random.default_rng(1), free_port(), []
    for _ in range(64):
        out = io.BytesIO()
        Image.fromarray(rng.integers(0, 256, (64, 48, 3), np.uint8)).save(out, "PNG")
        files.append("data:image/png;base64," + base64.b64encode(out.getvalue()).decode())

    def body(i: int) -> bytes:
        content = [{"type": "text", "text": WORDS[i % 40 : i % 40 + 20]},
                   {"type": "image_url", "image_url": {"url": files[i % 64]}}]  # fmt: skip
        asked = {"model": "m", "messages": [{"role": "user", "content": content}], "max_tokens": 4, "seed": i}
        return post("/v1/chat/completions", json.dumps(asked).encode())

    async def many(first: int, last: int) -> None:
        gate = asyncio.Semaphore(8)

        async def one(i: int) -> None:
            async with gate:
                status, said = answer(await exchange(port, body(i)) or b"")
            if status != 200:
                raise RuntimeError(f"request {i}: {status} {said[:500]!r}")

        await asyncio.gather(*(one(i) for i in range(first, last)))

    command = [
        "-m",
        "fdel",
        "serve",
        directory,
        "--name",
        "m",
        "--port",
        str(port),
        "--rows",
        "8",
        "--max-length",
        "256",
    ]
    with process(directory, *command) as server:
        children = Path(f"/proc/{server.pid}/task/{server.pid}/children")
        both = lambda: (resident(server.pid), sum(resident(int(pid)) for pid in children.read_text().split()))
        start, begin = both(), time.perf_counter()
        asyncio.run(many(0, requests // 10))
        early = both()
        asyncio.run(many(requests // 10, requests))
        late, seconds = both(), time.perf_counter() - begin
    return [
        f"| memory, MB | after start | after {requests // 10} | after {requests} |", "|---|---|---|---|",
        f"| the server | {start[0]:.0f} | {early[0]:.0f} | {late[0]:.0f} |",
        f"| what forks its children | {start[1]:.0f} | {early[1]:.0f} | {late[1]:.0f} |", "",
        f"{requests} chats with an image, {requests / seconds:.1f} a second, eight at a time.",
    ]  # fmt: skip


def main() -> None:
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("--family", choices=seers.SHAPES, default="llava")
    cli.add_argument("--shape", choices=("tiny", "125m"), default="tiny")
    cli.add_argument("--requests", type=int, default=2000, help="chats with an image, for memory; 0: none")
    cli.add_argument("--rounds", type=int, default=10, help="prompts to time")
    cli.add_argument("--side", type=int, help="pixels along a side of the images; default: the family's")
    cli.add_argument("--out", type=Path, help="also write the table here")
    args = cli.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        oracle = seers.make(directory, args.family, args.shape)
        side = args.side or seers.SHAPES[args.family][args.shape].image
        sides = Sides(directory, args.family, oracle)
        lines = [*stalls(sides, side), "", *prefill(sides, side, args.rounds)]
        print(*lines, sep="\n", flush=True)
        lines += ["", *several(sides, side, args.rounds)]
        sides.engine.close()
        lines += ["", *memory(directory, args.requests)] if args.requests else []
    size = sum(p.numel() for p in oracle.parameters()) / 1e6
    title = f"a random {args.family} ({args.shape}, {size:.0f}M parameters), images of {side} pixels"
    publish(f"{title}, `benchmarks/see.py`, 2 CPU cores", "\n".join(lines), args.out)


if __name__ == "__main__":
    main()
