"""Documents to embed against transformers' tokenizer, and judged steps against TRL's PRMTrainer (`make_process.py`)."""

import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers

from fdel import text
from fdel.train.data import Settings, Source, dataset, encode_rows, in_order, key, with_columns
from fdel.train.evaluation import per_example

pytest.importorskip("grain", reason="the extra train")
FOUND = json.loads((Path(__file__).parent / "fixtures" / "process.json").read_text())
JUDGED = {"prompt": "so what", "completions": ["it was", "good"], "labels": [True, False]}
NAMED = {"anchor": "the cat", "positive": "a mat", "negative": ["so", "it was good"]}


@pytest.fixture(scope="module")
def trl(tok: text.Tokenizer) -> text.Tokenizer:
    """The fixture's tokenizer."""
    made = tokenizers.Tokenizer.from_str(json.dumps(FOUND["tokenizer"]))
    return dataclasses.replace(tok, backend=made, special={"bos_token": "<s>", "eos_token": "</s>"}, json=made.to_str())


def encoded(tok: text.Tokenizer, rows: list[dict], **settings) -> tuple:
    return encode_rows([(f"a:{i}", r) for i, r in enumerate(rows)], tok, Settings(**settings))


# ---- judged steps --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FOUND["cases"])
def test_judged_steps_are_trls(trl: text.Tokenizer, name: str) -> None:
    """Ids and labels of each row: a bos, separators, truncation, the last step alone (which TRL evaluates in full)."""
    asked, rows = FOUND["cases"][name]["settings"], FOUND["cases"][name]["rows"]
    how = dict(kind="process", separator=asked["step_separator"], length=asked["max_length"] or 1024)
    how["last_only"] = asked["train_on_last_step_only"] and not asked["is_eval"]
    examples, report = encoded(trl, FOUND["rows"], **how)
    assert [e.ids[0].tolist() for e in examples] == [r["input_ids"] for r in rows]
    assert [e.masks[0].tolist() for e in examples] == [r["labels"] for r in rows]
    assert report.learnt == sum(label >= 0 for r in rows for label in r["labels"]) > 0


@pytest.mark.parametrize("stream", [False, True])
def test_batches_of_judged_steps(write: Callable, tmp_path, trl: text.Tokenizer, stream: bool) -> None:
    """Labels stand with their tokens, -100 elsewhere; the loss reads as many as there are; the cache keeps them."""
    source = Source(write("a.jsonl", FOUND["rows"] * 2))
    how = Settings(kind="process", batch=4, length=48, shuffle=False, partial="pad", stream=stream)
    batches = list(dataset(source, how, trl, cache_directory=None if stream else tmp_path / "c"))
    wanted = FOUND["cases"]["plain"]["rows"] * 2
    assert [set(b) for b in batches] == [{"tokens", "labels", "lengths"}] * 2
    for i in range(8):
        tokens, labels, n = (batches[i // 4][k][i % 4] for k in ("tokens", "labels", "lengths"))
        row = wanted[i] if i < 6 else {"input_ids": [], "labels": []}
        assert n == len(row["labels"]) and tokens[:n].tolist() == row["input_ids"] and not tokens[n:].any()
        assert labels[:n].tolist() == row["labels"] and (labels[n:] == -100).all() and labels.dtype == np.int32
    if not stream:
        assert all(
            (x == y).all()
            for a, b in zip(batches, dataset(source, how, trl, cache_directory=tmp_path / "c"), strict=True)
            for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
        )


# ---- documents -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [4, 6, 64])
def test_documents_are_tokenized_as_transformers_does(folder: Path, tok: text.Tokenizer, length: int) -> None:
    """With special tokens on both sides, which truncation spares; the end of sequence that generation has is not added."""
    transformers = pytest.importorskip("transformers", reason="the oracle")
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    both = [(t, tok.backend.token_to_id(t)) for t in ("<s>", "<|im_end|>")]
    ends = tokenizers.processors.TemplateProcessing("<s> $A <|im_end|>", None, both)
    theirs.backend_tokenizer.post_processor = ends
    ours = tokenizers.Tokenizer.from_str(tok.json)
    ours.post_processor = ends
    said = ["the cat sat on a mat and saw", "so", "it is é good", "was that it"]
    row = {"query": said[0], "positive": said[1], "negative": said[2], "negative_2": said[3], "negative_1": None}
    (example,), report = encoded(
        dataclasses.replace(tok, backend=ours), [row], kind="embedding", negatives=3, length=length
    )
    want = [theirs(t, truncation=True, max_length=length)["input_ids"] for t in said]
    assert [x.tolist() for x in example.ids] == [*want, []] and not report.notes
    assert max(map(len, want)) <= length and all(x[0] == both[0][1] and x[-1] == both[1][1] for x in want)


@pytest.mark.parametrize("stream", [False, True])
def test_batches_of_documents(write: Callable, tok: text.Tokenizer, stream: bool) -> None:
    """A query, its positive and two hard negatives, of length 0 where a row has fewer; more are left out and told."""
    rows = [
        NAMED,
        {"anchor": "it", "positive": "is", "negative": None},
        {"query": "so", "positive": "it", "negative": "a"},
    ]
    rows.append(NAMED | {"negative_1": "four", "negative_0": "2"})
    how = Settings(kind="embedding", negatives=2, batch=4, length=16, shuffle=False, stream=stream)
    data = dataset(Source(write("a.jsonl", rows)), how, tok)
    (batch,) = data
    ids = lambda t: text.encode(tok, t)
    wanted = [[ids(t) for t in ("the cat", "a mat", "so", "it was good")], [ids("it"), ids("is"), [], []]]
    wanted += [[ids("so"), ids("it"), ids("a"), []], wanted[0]]
    assert set(batch) == {"tokens", "lengths"} and batch["tokens"].shape == (4, 4, 16)
    for row, want in zip(range(4), wanted, strict=True):
        for side in range(4):
            n = batch["lengths"][row, side]
            assert batch["tokens"][row, side, :n].tolist() == want[side] and not batch["tokens"][row, side, n:].any()
    ((reason, (count, _)),) = data.report.notes.items()
    assert "more hard negatives than negatives=2" in reason and count == 1


# ---- bad rows, settings, keys --------------------------------------------------------------------------------------

BAD = [
    (
        "embedding",
        {"positive": "x", "text": "y"},
        r"expected the columns anchor \(or query\) and positive, found positive, text",
    ),
    ("embedding", {"anchor": "x", "positive": 3}, "expected a string, found int"),
    ("embedding", {"anchor": "x", "positive": "y", "negative": [4]}, "expected a string, found int"),
    (
        "process",
        {"prompt": "x", "completions": "y", "labels": [True]},
        r"completions and labels, lists; found prompt \(str\)",
    ),
    ("process", JUDGED | {"labels": [True]}, "2 completions and 1 labels; expected one label for each"),
    ("process", JUDGED | {"completions": [], "labels": []}, "at least one"),
    ("process", JUDGED | {"labels": [True, "good"]}, "label 'good'; expected true or false"),
    ("process", JUDGED | {"prompt": "cat " * 40}, "no token to learn within length=32"),
]


@pytest.mark.parametrize(("kind", "row", "match"), BAD)
def test_bad_rows(tok: text.Tokenizer, kind: str, row: dict, match: str) -> None:
    good = NAMED if kind == "embedding" else JUDGED
    examples, report = encoded(tok, [good, row], kind=kind, length=32, negatives=2)
    assert len(examples) == 1
    ((reason, (count, places)),) = report.notes.items()
    assert re.search(match, reason) and (count, places) == (1, ("a:1",))
    if "learn" not in match:
        with pytest.raises(ValueError, match=match):
            encoded(tok, [row], kind=kind, length=32, bad_rows="raise")


def test_long_rows_are_dropped_if_asked(tok: text.Tokenizer) -> None:
    for kind, row in (("embedding", NAMED), ("process", JUDGED)):
        examples, report = encoded(tok, [row], kind=kind, length=4, overlong="drop", negatives=2)
        assert not examples and list(report.notes) == ["longer than length=4"]


def test_wrong_settings_and_keys(write: Callable, tok: text.Tokenizer) -> None:
    for how in ({"negatives": -1}, {"separator": ""}):
        with pytest.raises(ValueError, match="expected 0 or more, and a text"):
            Settings(**how)
    source = Source(write("a.jsonl", [NAMED]))
    of = lambda **how: key(source, tok, Settings(**how))
    assert of(kind="embedding") != of(kind="embedding", negatives=2)
    assert len({of(kind="process"), of(kind="process", last_only=True), of(kind="process", separator=";")}) == 3
    assert of() == of(negatives=2, last_only=True)
    with pytest.raises(ValueError, match="packing is for kind='sft'"):
        Settings(kind="process", packing="best_fit")


# ---- columns that are computed -------------------------------------------------------------------------------------


def test_columns_follow_their_examples(write: Callable, tok: text.Tokenizer) -> None:
    """Through shuffling, epochs, mixtures and processes; what fills up a batch has zeros."""
    rows = [{"prompt": "the", "chosen": " cat" * (i + 1), "rejected": " mat"} for i in range(9)]
    sources = [Source(write("a.jsonl", rows[:4]), weight=0.5), Source(write("b.jsonl", rows[4:]), weight=0.5)]
    how = Settings(kind="pairs", batch=4, length=16, partial="pad", epochs=2, stop="longest")
    wanted = np.array([[len(text.encode(tok, "the" + " cat" * (i + 1))) + 1, i] for i in range(9)], np.float32)
    for count in (1, 2):
        for index in range(count):
            data = dataset(sources, how, tok, process_index=index, process_count=count)
            given, seen = with_columns(data, extra=wanted), 0
            for batch in given:
                assert (batch["extra"][:, 0] == batch["lengths"][:, 0]).all() and batch["extra"].dtype == np.float32
                seen += (batch["extra"][:, 1] > 0).sum()
            assert seen > 8 // count and given.shared and len(list(given)) == data.total
    with pytest.raises(ValueError, match=r"columns of {'extra': 8} rows for 9 examples"):
        with_columns(data, extra=wanted[:8])
    stream = dataset(sources, dataclasses.replace(how, stream=True), tok)
    assert not stream.shared
    with pytest.raises(ValueError, match="a stream forgets its examples"):
        in_order(stream, 4)


def test_each_example_is_computed_once_in_order(write: Callable, tok: text.Tokenizer) -> None:
    rows = [{"prompt": "the", "chosen": " cat" * (i + 1), "rejected": " mat" * (9 - i)} for i in range(9)]
    data = dataset(Source(write("a.jsonl", rows)), Settings(kind="pairs", batch=2, length=16, buckets=(8,)), tok)
    found = per_example(jax.jit(lambda b: jnp.where(b["mask"], b["tokens"], 0).sum(-1)), data, 4)
    at = len(text.encode(tok, "the"))
    ids = lambda t: sum([*text.encode(tok, t), tok.ids["eos"]][at:])
    assert found.tolist() == [[ids("the" + r["chosen"]), ids("the" + r["rejected"])] for r in rows]
