"""Prompts with an image: time to the first token against transformers, images seen before, memory over many requests.

    python benchmarks/see.py [--shape tiny] [--requests 2000] [--rounds 10] [--out benchmarks/results/FILE.md]

The model is a random LLaVA, saved by transformers: no weights can be had here. Both sides get the same prepared images (one
of another content in each round) and the same prompt, and give its first token in float32. "Seen before" asks about an
image that the engine holds, behind other words, so that no page of the prompt's is shared. Memory is that of `fdel serve`
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
from pathlib import Path
from typing import Any

import numpy as np
from client import answer, exchange, free_port, post, process, resident
from model import publish

from fdel import serve, text
from fdel.media import sight
from fdel.serve.engine import weights

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": dict(text=(64, 2, 4, 96), vision=(32, 2, 2, 48), image=32, patch=8),
    "125m": dict(text=(768, 12, 12, 2048), vision=(384, 12, 6, 1536), image=224, patch=16),
}  # width, layers, heads, ffn
VOCAB, CONTEXT = 512, 512
SHOWN = "{{ '<image>' if p.type == 'image' else p.text }}"
TEMPLATE = "{% for m in messages %}{% for p in m.content %}" + SHOWN + "{% endfor %}{% endfor %}"
WORDS = "the weather in Paris is fine, the music is not; a b c d e f g h i j k l m n o p q r s t u v w x y z"


def make(directory: str, shape: str) -> Any:
    """Save a random LLaVA with its processor and a tokenizer, and return it."""
    import torch
    from transformers import CLIPImageProcessor, LlavaConfig, LlavaForConditionalGeneration

    sizes, names = SHAPES[shape], ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
    tok = text.train_bpe([WORDS], 290, ["<image>"])
    token, side = tok.backend.token_to_id("<image>"), sizes["image"]
    vision = dict(zip(names, sizes["vision"], strict=True), model_type="clip_vision_model", image_size=side,
                  patch_size=sizes["patch"], projection_dim=64)  # fmt: skip
    inner = dict(zip(names, sizes["text"], strict=True), model_type="llama", vocab_size=VOCAB,
                 max_position_embeddings=CONTEXT, eos_token_id=VOCAB - 1)  # fmt: skip
    cfg = LlavaConfig(vision_config=vision, text_config=inner, image_token_index=token,
                      image_seq_length=(side // sizes["patch"]) ** 2)  # fmt: skip
    torch.manual_seed(0)
    oracle = LlavaForConditionalGeneration._from_config(cfg, dtype=torch.float32).eval()
    oracle.save_pretrained(directory)
    fields = {"templates": {"default": TEMPLATE}, "eos_ids": (VOCAB - 1,)}
    text.save(text.Tokenizer(**{**vars(tok), **fields}), directory)
    edge = dict(size={"shortest_edge": side}, crop_size={"height": side, "width": side})
    CLIPImageProcessor(**edge).save_pretrained(directory)
    return oracle


def median(work: Callable[[int], Any], rounds: int) -> tuple[float, list[Any]]:
    """Milliseconds of the middle one of some rounds, after one that compiles, and what each gave."""
    work(rounds)
    took, gave = [], []
    for i in range(rounds):
        begin = time.perf_counter()
        gave.append(work(i))
        took.append(time.perf_counter() - begin)
    return sorted(took)[rounds // 2] * 1e3, gave


def prefill(directory: str, oracle: Any, rounds: int) -> list[str]:
    """Time the first token of a prompt with an image."""
    import torch

    see, tok = sight.read(directory), text.load(directory)
    assert see is not None
    engine = serve.Engine(weights.load(directory), serve.Settings(rows=2, max_length=CONTEXT), tokenizer=tok, sight=see)
    engine.start(wait=True)
    rng = np.random.default_rng(0)
    side = int(oracle.config.vision_config.image_size)
    rgbs = [rng.integers(0, 256, (side, side, 3), np.uint8) for _ in range(rounds + 1)]
    pictures = [sight.prepare(see, x) for x in rgbs]
    pixels = [torch.tensor(sight.clip.pixels(see.settings, x).transpose(2, 0, 1))[None] for x in rgbs]
    before, behind = (text.encode(tok, WORDS[:n], special=False) for n in (48, 12))

    def prompt(i: int, shift: int = 0) -> tuple[list[int], Any]:
        turned = before[shift:] + before[:shift]
        return serve.prompt_media(see, [*turned, see.placeholder, *behind], [pictures[i]])

    def ours(i: int, shift: int = 0) -> int:
        tokens, media = prompt(i, shift)
        (found,) = engine.generate([tokens], serve.SamplingParams(max_tokens=1, temperature=0), media=[media])
        return int(found.tokens[0])

    def theirs(i: int) -> int:
        ids = torch.tensor([prompt(i)[0]])
        with torch.no_grad():
            return int(oracle(input_ids=ids, pixel_values=pixels[i], logits_to_keep=1).logits[0, -1].argmax())

    torch_ms, want = median(theirs, rounds)
    new_ms, got = median(ours, rounds)
    known_ms, _ = median(lambda i: ours(i, 1 + i % 7), rounds)
    stats = engine.stats()
    engine.close()
    tokens, same = len(prompt(0)[0]), sum(a == b for a, b in zip(want, got, strict=True))
    return [
        f"| the first token of {tokens}, ms | transformers | fdel | fdel, image seen before |", "|---|---|---|---|",
        f"| median of {rounds} | {torch_ms:.2f} | {new_ms:.2f} | {known_ms:.2f} |",
        f"| times as fast as transformers | 1 | {torch_ms / new_ms:.2f} | {torch_ms / known_ms:.2f} |", "",
        f"Same token in {same} of {rounds}; images encoded {stats['pictures encoded']}, found {stats['pictures found']}; "
        f"an image that was seen before saves {1 - known_ms / new_ms:.0%}.",
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
    cli.add_argument("--shape", choices=SHAPES, default="tiny")
    cli.add_argument("--requests", type=int, default=2000, help="chats with an image; 0: none")
    cli.add_argument("--rounds", type=int, default=10, help="prompts to time")
    cli.add_argument("--out", type=Path, help="also write the table here")
    args = cli.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        lines = prefill(directory, make(directory, args.shape), args.rounds)
        lines += ["", *memory(directory, args.requests)] if args.requests else []
    publish(f"a random LLaVA ({args.shape}), `benchmarks/see.py`, 2 CPU cores", "\n".join(lines), args.out)


if __name__ == "__main__":
    main()
