"""Reasoning and answer of models that mark their thoughts: any cut into pieces gives the same."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fdel.serve.server import reasoning
from fdel.serve.server.reasoning import FAMILIES
from fdel.serve.server.tools import FORMATS, Message, Output, message

NAMES = list(FAMILIES)
words = st.text(st.sampled_from(list("ab <>/[]tTkK|_H:\n ")), max_size=20)


def read(pieces, name: str, inside: bool = False, **options) -> Message:
    output = Output(thinking=FAMILIES[name], inside=inside, **options)
    return message([d for piece in pieces for d in output.push(piece)] + output.finish())


def markers(name: str) -> tuple[str, str]:
    return FAMILIES[name].start, FAMILIES[name].end


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("name", NAMES)
@given(thought=words, answer=words, at=st.integers(0, 80))
@example(thought="a", answer="b", at=3)
@example(thought="a", answer="", at=3)
def test_split_in_any_pieces(name: str, inside: bool, thought: str, answer: str, at: int) -> None:
    """The oracle: text up to the first end marker, and after it."""
    start, end = markers(name)
    said = ("" if inside else f"{start}\n") + f"{thought}\n{end}\n\n{answer}"
    before, _, after = said.removeprefix("" if inside else start).partition(end)
    want = Message(after.lstrip(), before.strip())
    assert read([said], name, inside) == want
    assert read(list(said), name, inside) == want
    assert read([said[:at], said[at:]], name, inside) == want


@pytest.mark.parametrize("name", NAMES)
@given(said=words)
def test_no_reasoning(name: str, said: str) -> None:
    if not said.lstrip().startswith(markers(name)[0]):
        assert read([said], name) == read(list(said), name) == Message(said)


@pytest.mark.parametrize("name", NAMES)
def test_cut_off(name: str) -> None:
    """Without its end, all is reasoning; a part of the end marker at the very end too."""
    start, end = markers(name)
    assert read(list(f"{start} so {end[:-1]}"), name) == Message("", f"so {end[:-1]}")
    assert read([f" so {end[:3]}"], name, inside=True) == Message("", f"so {end[:3]}")
    assert read(list(f"{start[:-1]}"), name) == Message(start[:-1])
    assert read([f"{start} so\n{end}"], name) == Message("", "so")
    assert read([], name) == read([], name, inside=True) == Message()


def test_streams_while_thinking() -> None:
    output = Output(thinking=FAMILIES["think"])
    assert output.push("<thi") == []
    assert [(d.kind, d.text) for d in output.push("nk>\nI think, the")] == [("reasoning", "I think, the")]
    assert [(d.kind, d.text) for d in output.push("refore </th")] == [("reasoning", "refore")]
    assert [(d.kind, d.text) for d in output.push("ink>I am")] == [("content", "I am")]


def test_with_calls() -> None:
    """A call inside the reasoning is none; one after it is."""
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    found = read([f"<think>{call}</think> now {call}"], "think", format=FORMATS["hermes"], tools={"f": {}})
    assert (found.reasoning, found.content, len(found.calls)) == (call, "now", 1)


@pytest.mark.parametrize("name", NAMES)
def test_detect_and_opened(name: str) -> None:
    start, end = markers(name)
    assert reasoning.detect(f"{{{{ x }}}} {start} y {end}") == FAMILIES[name]
    assert reasoning.opened(FAMILIES[name], f"<|assistant|>{start}\n")
    assert not reasoning.opened(FAMILIES[name], f"{start}\n{end}\n")
    assert reasoning.detect("{{ messages }}") is None
