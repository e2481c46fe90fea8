"""Rows to tokens, against transformers' tokenizer and chat template, under the rules of TRL's trainers."""

import dataclasses
import json
import re
from pathlib import Path

import numpy as np
import pytest

from fdel import text
from fdel.text.chat import RESERVED
from fdel.train.data import Settings, encode_rows

transformers = pytest.importorskip("transformers", reason="the oracle")

USER, SAID = {"role": "user", "content": "what is 2 + 2 ?"}, {"role": "assistant", "content": "it is four é"}
OTHER, THEN = {"role": "assistant", "content": "it is good"}, {"role": "user", "content": "and so ?"}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"a": "é"}}}]


@pytest.fixture(scope="module")
def theirs(folder: Path):
    """transformers' tokenizer from the same folder."""
    return transformers.AutoTokenizer.from_pretrained(folder)


def one(tok: text.Tokenizer, row: dict, **settings):
    """The only example of a row."""
    (example,), report = encode_rows([("here:1", row)], tok, Settings(**settings))
    assert report.kept == 1 and report.tokens == sum(map(len, example.ids))
    assert report.learnt == (0 if settings.get("kind") == "prompt" else sum(int(m.sum()) for m in example.masks))
    return example


def equal(example, *expected: tuple[list[int], int]) -> None:
    """Compare sequences with (ids, where the completion begins)."""
    for ids, mask, (want, start) in zip(example.ids, example.masks, expected, strict=True):
        assert (ids.dtype, mask.dtype) == (np.int32, bool)
        assert ids.tolist() == want
        assert mask.tolist() == [i >= start for i in range(len(want))]


def prefix(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def chat(theirs, messages: list, **options) -> list[int]:
    return theirs.apply_chat_template(messages, return_dict=True, **options)["input_ids"]


# ---- what is learnt ------------------------------------------------------------------------------------------------


def test_text(tok: text.Tokenizer, theirs) -> None:
    equal(one(tok, {"text": "the cat sat é"}), (theirs("the cat sat é<|im_end|>").input_ids, 0))
    equal(one(tok, {"text": "it is<|im_end|>"}), (theirs("it is<|im_end|>").input_ids, 0))  # not twice


@pytest.mark.parametrize(("learn", "share"), [("auto", 1), ("completion", 1), ("all", 0)])
@pytest.mark.parametrize("prompt", ["the cat ", "the cat", "the ca", ""])
def test_prompt_and_completion(tok: text.Tokenizer, theirs, learn: str, share: int, prompt: str) -> None:
    """A prompt that ends inside a token loses that token: its completion begins where the tokens differ."""
    whole, before = theirs(prompt + "t sat on a mat<|im_end|>").input_ids, theirs(prompt).input_ids
    equal(
        one(tok, {"prompt": prompt, "completion": "t sat on a mat"}, learn=learn),
        (whole, share * prefix(before, whole)),
    )


def test_warning_about_the_boundary(tok: text.Tokenizer) -> None:
    rows = [("a:1", {"prompt": "the ca", "completion": "t"}), ("a:2", {"prompt": "the", "completion": " mat"})]
    _, report = encode_rows([*rows, rows[0]], tok, Settings())
    (reason, found), *others = report.notes.items()
    assert "the prompt's tokens are not the first" in reason and found == (2, ("a:1", "a:1")) and not others
    assert report.kept == 3


@pytest.mark.parametrize("tools", [None, TOOLS, json.dumps(TOOLS)], ids=["none", "list", "json"])
def test_messages(tok: text.Tokenizer, theirs, tools) -> None:
    messages, row_tools = [USER, SAID, THEN, OTHER], TOOLS if tools else None
    expected = theirs.apply_chat_template(
        messages, tools=row_tools, return_dict=True, return_assistant_tokens_mask=True
    )
    row = {"messages": messages, "tools": tools}
    equal(one(tok, row), (expected["input_ids"], 0))
    example = one(tok, row, learn="assistant")
    assert example.ids[0].tolist() == expected["input_ids"]
    assert example.masks[0].tolist() == [x == 1 for x in expected["assistant_masks"]]
    assert 0 < example.masks[0].sum() < len(example.masks[0])
    end = theirs.convert_tokens_to_ids("<|im_end|>")
    assert end in example.ids[0][example.masks[0]]


def test_conversational_completion(tok: text.Tokenizer, theirs) -> None:
    row = {"prompt": [USER, SAID, THEN], "completion": [OTHER, THEN, SAID]}
    whole = chat(theirs, row["prompt"] + row["completion"])
    start = prefix(chat(theirs, row["prompt"], add_generation_prompt=True), whole)
    equal(one(tok, row), (whole, start))
    equal(one(tok, row, learn="all"), (whole, 0))
    masks = theirs.apply_chat_template(
        row["prompt"] + row["completion"], return_dict=True, return_assistant_tokens_mask=True
    )["assistant_masks"]
    found = one(tok, row, learn="assistant").masks[0].tolist()
    assert found == [m == 1 and i >= start for i, m in enumerate(masks)] and sum(found) < sum(masks)


def test_template_variables(tok: text.Tokenizer, theirs) -> None:
    template = "{% for m in messages %}{{ m.content }}{% endfor %}{{ 'so' if thinking else 'it' }}"
    row = {"messages": [USER], "chat_template_kwargs": {"thinking": True}}
    tok = dataclasses.replace(tok, templates={"default": template})
    equal(one(tok, row), (chat(theirs, [USER], thinking=True, chat_template=template), 0))


@pytest.mark.parametrize("name", sorted(RESERVED) + ["no name", "1"])
def test_a_row_may_not_bring_its_template(tok: text.Tokenizer, name: str) -> None:
    """Nor what else is not its own: the names that the server refuses too."""
    bad = {"messages": [USER], "chat_template_kwargs": {name: "PWNED {{ 7 * 7 }}"}}
    found, report = encode_rows([("a:1", bad), ("a:2", {"messages": [USER]})], tok, Settings())
    assert len(found) == 1 and "49" not in text.decode(tok, found[0].ids[0].tolist())
    assert list(report.notes) == [f"chat_template_kwargs: the name {name!r} cannot be set there"]


def test_tokenized(tok: text.Tokenizer) -> None:
    ids = [5, 6, 7, 8]
    equal(one(tok, {"input_ids": ids}), (ids, 0))
    equal(one(tok, {"input_ids": ids, "labels": [-100, -100, 7, 8]}), (ids, 2))
    masks = {"completion_mask": [0, 1, 1, 1], "assistant_masks": [1, 1, 0, 1]}
    assert one(tok, {"input_ids": ids, **masks}).masks[0].tolist() == [False, True, False, True]


# ---- preferences ---------------------------------------------------------------------------------------------------


def test_pairs(tok: text.Tokenizer, theirs) -> None:
    row = {"prompt": "the ca", "chosen": "t sat", "rejected": " is", "margin": 0.5}
    chosen, rejected = theirs("the cat sat<|im_end|>").input_ids, theirs("the ca is<|im_end|>").input_ids
    before = theirs("the ca").input_ids
    start = min(prefix(before, chosen), prefix(before, rejected))
    assert prefix(before, chosen) < prefix(before, rejected)
    example = one(tok, row, kind="pairs")
    equal(example, (chosen, start), (rejected, start))
    assert example.numbers == {"margin": 0.5}
    unpaired, _ = encode_rows([("a:1", row)], tok, Settings(kind="unpaired"))
    assert [e.numbers["label"] for e in unpaired] == [True, False]
    equal(unpaired[0], (chosen, prefix(before, chosen)))
    equal(unpaired[1], (rejected, prefix(before, rejected)))


def test_implicit_prompt(tok: text.Tokenizer, theirs) -> None:
    """What both begin with is the prompt; of texts without the space at its end, as in TRL."""
    example = one(tok, {"chosen": [USER, SAID], "rejected": [USER, OTHER]}, kind="pairs")
    start = len(chat(theirs, [USER], add_generation_prompt=True))
    equal(example, (chat(theirs, [USER, SAID]), start), (chat(theirs, [USER, OTHER]), start))
    row = {"chosen": "the cat sat on", "rejected": "the cat is"}
    (example,), report = encode_rows([("a:1", row)], tok, Settings(kind="pairs"))
    assert not report.notes
    before = theirs("the cat").input_ids
    wanted = [theirs(s + "<|im_end|>").input_ids for s in ("the cat sat on", "the cat is")]
    equal(example, *((w, len(before)) for w in wanted))


@pytest.mark.parametrize(("label", "wanted"), [(True, True), (0, False), ("True", True), ("0", False), (1.0, True)])
def test_unpaired(tok: text.Tokenizer, theirs, label, wanted: bool) -> None:
    example = one(tok, {"prompt": "so", "completion": " it is", "label": label}, kind="unpaired")
    equal(example, (theirs("so it is<|im_end|>").input_ids, len(theirs("so").input_ids)))
    assert example.numbers == {"label": wanted, "prompt": len(theirs("so").input_ids)}


def test_prompts(tok: text.Tokenizer, theirs) -> None:
    equal(one(tok, {"prompt": "the cat"}, kind="prompt"), (theirs("the cat").input_ids, 0))
    equal(one(tok, {"prompt": [USER]}, kind="prompt"), (chat(theirs, [USER], add_generation_prompt=True), 0))


# ---- lengths -------------------------------------------------------------------------------------------------------


def reasons(tok: text.Tokenizer, row: dict, **settings) -> list[str]:
    found, report = encode_rows([("a:1", row)], tok, Settings(**settings))
    assert not found and report.kept == report.tokens == 0
    return list(report.notes)


def test_truncation(tok: text.Tokenizer, theirs) -> None:
    """A sequence loses its end; what has no token to learn left is dropped; packing that splits cuts later."""
    row, whole = (
        {"prompt": "the cat sat", "completion": " on a mat and saw"},
        theirs("the cat sat on a mat and saw<|im_end|>"),
    )
    ids, start = whole.input_ids, len(theirs("the cat sat").input_ids)
    equal(one(tok, row, length=start + 2), (ids[: start + 2], start))
    equal(one(tok, row, length=start + 1), (ids[: start + 1], start))
    assert reasons(tok, row, length=start) == [f"no token to learn within length={start}"]
    equal(one(tok, row, length=start, packing="wrapped"), (ids, start))
    assert reasons(tok, row, length=start + 1, overlong="drop") == [f"longer than length={start + 1}"]
    assert reasons(tok, {"prompt": "the cat sat"}, kind="prompt", length=2) == ["longer than length=2"]
    pair = {"prompt": "the cat sat", "chosen": " on a mat and saw", "rejected": " it"}
    example = one(tok, pair, kind="pairs", length=start + 1)
    equal(example, (ids[: start + 1], start), (theirs("the cat sat it").input_ids, start))


def test_first_token_cannot_be_learnt(tok: text.Tokenizer) -> None:
    assert reasons(tok, {"input_ids": [3, 4], "completion_mask": [1, 0]}) == ["no token to learn within length=1024"]
    assert reasons(tok, {"input_ids": []}) == ["no tokens"]


# ---- bad rows ------------------------------------------------------------------------------------------------------


def nested(depth: int) -> list:
    """A message whose content is a list in a list in a list."""
    value: list = []
    for _ in range(depth):
        value = [value]
    return [{"role": "user", "content": value}]


BAD = [
    ({}, {"content": "x", "n": None}, r"no column 'text' \(found content\); rename one"),
    ({}, {"text": 3}, "expected a string, found int"),
    ({}, {"text": "\ud800"}, "lone surrogate"),
    ({}, {"prompt": "x"}, "no column 'completion'"),
    ({}, {"prompt": "x", "completion": [SAID]}, "both as strings, or both as lists"),
    ({}, {"messages": "x"}, "expected a list of messages, found 'x'"),
    ({}, {"messages": ["x"]}, "expected messages to be dicts"),
    ({}, {"input_ids": [1, 2], "labels": [1]}, "differ in length"),
    ({}, {"input_ids": ["a", "b"]}, "list of whole numbers"),
    ({}, {"input_ids": [1, 2], "labels": [1, None]}, "list of whole numbers"),
    ({}, {"messages": [USER], "chat_template_kwargs": "x"}, "chat_template_kwargs as a dict, found 'x'"),
    ({"learn": "completion"}, {"text": "x"}, "no column 'text'|needs the columns prompt and completion"),
    ({"learn": "assistant"}, {"text": "x"}, "needs messages, found texts"),
    ({"learn": "assistant"}, {"messages": [USER]}, "no token to learn within"),
    ({"kind": "pairs"}, {"chosen": "x"}, "no column 'rejected'"),
    ({"kind": "pairs"}, {"chosen": "x", "rejected": [SAID]}, "both as strings"),
    ({"kind": "unpaired"}, {"prompt": "x", "completion": "y", "label": "good"}, "label 'good'; expected true or false"),
    ({}, ValueError("not JSON"), "not JSON"),
    ({}, {"input_ids": 5}, "list of whole numbers"),
    ({}, {"input_ids": [1.5, 2]}, "list of whole numbers"),
    ({}, {"input_ids": [2**31, 1]}, "list of whole numbers of 32 bits"),
    ({}, {"input_ids": [2**70, 1]}, "list of whole numbers of 32 bits"),
    ({}, {"input_ids": [[1, 2], [3, 4]]}, "list of whole numbers"),
    ({}, {"input_ids": [-1, 2]}, "input_ids hold -1; expected ids from 0"),
    ({"vocab": 400}, {"input_ids": [3, 400]}, "input_ids hold 400; the model has the ids 0 to 399"),
    ({}, {"messages": nested(10_000)}, "RecursionError"),
    ({"kind": "pairs"}, {"chosen": "x", "rejected": "y", "margin": 10**400}, "OverflowError: int too large"),
    ({"kind": "pairs"}, {"chosen": "x", "rejected": "y", "margin": [1]}, "TypeError: float"),
    (
        {"kind": "pairs"},
        {"chosen": "x", "rejected": "y", "margin": float("nan")},
        "margin nan; expected a finite number",
    ),
    ({}, {"text": "é" * 2**24 + "a"}, "a text of 16,777,217 characters, the most is 16,777,216; split the row"),
]


PAIR = {"prompt": "the", "chosen": " cat", "rejected": " mat"}
GOOD = {
    "sft": {"prompt": "the", "completion": " cat"},
    "pairs": PAIR,
    "unpaired": {"prompt": "a", "completion": " b", "label": 1},
}


@pytest.mark.parametrize(("settings", "row", "match"), BAD)
def test_bad_row(tok: text.Tokenizer, settings: dict, row, match: str) -> None:
    """It is counted and shown with its place; or raised, unless it is good but too long or has nothing to learn."""
    good = {"messages": [USER, SAID]} if settings.get("learn") == "assistant" else GOOD[settings.get("kind", "sft")]
    rows = [("a:1", good), ("a:2", row), ("b:7", row)]
    found, report = encode_rows(rows, tok, Settings(**settings))
    assert len(found) == report.kept == 1 and report.read == 3
    ((reason, (count, places)),) = report.notes.items()
    assert count == 2 and places == ("a:2", "b:7")
    assert re.search(match, reason)
    if "no token to learn" not in match:
        with pytest.raises(ValueError, match=f"^a:2: .*({match})"):
            encode_rows(rows, tok, Settings(**settings, bad_rows="raise"))


class PanicException(BaseException):  # noqa: N818 (as tokenizers' is called, which is no Exception either)
    """What a tokenizer raises whose Rust code panics."""


class Panicking:
    """A tokenizer's backend that panics over some texts; the rest is the other's."""

    def __init__(self, backend, error: BaseException) -> None:
        self.backend, self.error, self.calls = backend, error, 0

    def __getattr__(self, name: str):
        return getattr(self.backend, name)

    def encode_batch_fast(self, texts: list[str], **options):
        self.calls += 1
        if any("?" in t for t in texts):
            raise self.error
        return self.backend.encode_batch_fast(texts, **options)


@pytest.mark.parametrize("error", [PanicException("at line 7"), MemoryError(), Exception("odd")])
def test_a_text_that_the_tokenizer_fails_on_is_a_bad_row(tok: text.Tokenizer, error: BaseException) -> None:
    """The others come as they would alone, and it is found by halves; what is no fault of a row ends the run."""
    rows = [(f"a:{i}", {"text": f"the cat {i}" + "?" * (i == 37)}) for i in range(64)]
    expected, _ = encode_rows([r for r in rows if r[0] != "a:37"], tok, Settings())
    backend = Panicking(tok.backend, error)
    found, report = encode_rows(rows, dataclasses.replace(tok, backend=backend), Settings())
    assert [e.ids[0].tolist() for e in found] == [e.ids[0].tolist() for e in expected] and backend.calls <= 14
    ((reason, (count, places)),) = report.notes.items()
    assert re.match(rf"the tokenizer fails on 'the cat 37\?' \({type(error).__name__}", reason)
    assert (count, places) == (1, ("a:37",))
    with pytest.raises(KeyboardInterrupt):
        encode_rows(rows, dataclasses.replace(tok, backend=Panicking(tok.backend, KeyboardInterrupt())), Settings())


def test_texts_are_tokenized_in_bounded_lists(tok: text.Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [(f"a:{i}", {"text": f"the cat {i} " + "a" * i}) for i in range(40)]
    whole, _ = encode_rows(rows, tok, Settings())
    monkeypatch.setattr("fdel.train.data.encode.TOGETHER", 30)
    backend = Panicking(tok.backend, KeyError())
    parts, _ = encode_rows(rows, dataclasses.replace(tok, backend=backend), Settings())
    assert [e.ids[0].tolist() for e in parts] == [e.ids[0].tolist() for e in whole] and backend.calls > 20


@pytest.mark.parametrize("row", [
    {"text": "the cat"}, {"messages": [USER, SAID]}, {"prompt": "the", "completion": " cat"},
])  # fmt: skip
@pytest.mark.parametrize("learn", ["auto", "assistant"])
def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(tok: text.Tokenizer, row: dict, learn: str) -> None:
    """Where a token occurs that the model does not have, by its place, text and id; not where none occurs."""
    if learn == "assistant" and "messages" not in row:
        row = {"messages": [USER, SAID]}
    example = one(tok, row, learn=learn)
    most = max(int(x.max()) for x in example.ids)
    assert one(tok, row, learn=learn, vocab=most + 1).ids[0].tolist() == example.ids[0].tolist()
    found = rf"here:1: token {most}, {re.escape(repr(tok.backend.id_to_token(most)))}, is none of the model's {most};"
    with pytest.raises(ValueError, match=found):
        one(tok, row, learn=learn, vocab=most)


@pytest.mark.parametrize("kind", ["pairs", "unpaired"])
def test_prompts_keep_their_end_and_completions_their_start(tok: text.Tokenizer, kind: str) -> None:
    """As TRL's max_prompt_length and max_completion_length, before max_length cuts what is left."""
    row = {"prompt": "so what is 2 + 2 ?", "chosen": " it is four é", "rejected": " it", "completion": " it is four é"}
    row |= {"label": True} if kind == "unpaired" else {}
    row = row if kind == "pairs" else {k: v for k, v in row.items() if k not in ("chosen", "rejected")}
    whole = one(tok, row, kind=kind)
    start = int(np.flatnonzero(whole.masks[0])[0])
    for prompt, completion, length in ((3, None, 99), (None, 2, 99), (3, 2, 99), (1, 9, 4), (99, 99, 99)):
        cut = one(tok, row, kind=kind, max_prompt=prompt, max_completion=completion, length=length)
        for ids, mask, full in zip(cut.ids, cut.masks, whole.ids, strict=True):
            kept = full[:start][-(prompt or 99) :], full[start:][:completion]
            assert ids.tolist() == np.concatenate(kept)[:length].tolist()
            assert mask.tolist() == ([False] * len(kept[0]) + [True] * len(kept[1]))[:length]
        assert kind == "pairs" or cut.numbers["prompt"] == min(start, prompt or 99)
    with pytest.raises(
        ValueError, match="max_prompt and max_completion are for kind='pairs', 'triples' and 'unpaired', not 'sft'"
    ):
        Settings(max_prompt=3)


def test_report_adds_up(tok: text.Tokenizer) -> None:
    """Few places of each complaint, few different complaints, all of them counted."""
    rows = [(f"a:{i}", {"prompt": "x", "completion": "y", "label": f"odd {i}"}) for i in range(50)]
    _, report = encode_rows([*rows, *[("b:1", None)] * 9], tok, Settings(kind="unpaired"))
    assert sum(n for n, _ in report.notes.values()) == 59 and len(report.notes) == 21
    assert report.notes["other complaints"][0] == 50 - 20 + 9 and len(report.notes["other complaints"][1]) == 5
    assert str(report).startswith("59 rows read, 0 examples, 0 tokens, 0 of them to be learnt\n  1 x label 'odd 0'")
