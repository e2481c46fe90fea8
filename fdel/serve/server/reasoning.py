"""Split what a model thinks from what it answers: families of markers, read as the text arrives."""

from collections.abc import Mapping
from dataclasses import dataclass

from fdel.serve.server.scan import Reader, Sink, Source


@dataclass(frozen=True)
class Thinking:
    """How a family marks its reasoning, which stands at the beginning of an output."""

    start: str
    end: str
    spaced: bool = True  # whether white space may follow


FAMILIES: Mapping[str, Thinking] = {
    "think": Thinking("<think>", "</think>"),  # deepseek r1, qwen3, glm 4.5, kimi k2, olmo3, minimax m2, nemotron
    "mistral": Thinking("[THINK]", "[/THINK]"),
    "seed_oss": Thinking("<seed:think>", "</seed:think>"),
    "cohere": Thinking("<|START_THINKING|>", "<|END_THINKING|>"),
    "granite": Thinking("Here is my thought process:", "Here is my response:"),
}
CHANNELS = Thinking("<|channel|>analysis<|message|>", "<|end|><|start|>assistant", spaced=False)  # of gpt-oss


def detect(template: str) -> Thinking | None:
    """Choose the family whose markers a chat template names."""
    return next((f for f in FAMILIES.values() if f.end in template or f.start in template), None)


def opened(family: Thinking | None, prompt: str) -> bool:
    """Say whether a prompt, or its end, ends inside of the reasoning, because the template wrote the first marker."""
    return family is not None and prompt.rstrip().endswith(family.start)


def think(family: Thinking, inside: bool, src: Source, sink: Sink) -> Reader[None]:
    """Read the reasoning at the beginning of an output, if there is any; `inside`: its first marker is in the prompt.

    Without an end, all of it is reasoning: the output was cut off.
    """
    src.keep()
    if inside:
        sink.begin("reasoning")
    yield from src.skip()
    if (yield from src.accept(family.start)) or inside:
        sink.begin("reasoning")
        yield from src.upto([family.end], sink.reasoning)
        sink.begin("")
    else:
        sink.content(src.raw())
