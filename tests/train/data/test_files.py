"""Readers give back the rows that others wrote, by number, with the line; which files are found."""

import csv
import gzip
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from fdel import text
from fdel.train.data import Settings, Source, dataset, find, open_table

pa = pytest.importorskip("pyarrow", reason="writes the files")
pq = pytest.importorskip("pyarrow.parquet")

ROWS = [
    {"id": str(i), "text": t}
    for i, t in enumerate(["a", "é\n2nd line", 'say "x, y"', "", "[1]", "tab\there", "z " * 9])
]


def lines(rows: list[dict], end: str = "\n") -> str:
    return "".join(json.dumps(r) + end for r in rows)


def delimited(path: Path, delimiter: str) -> None:
    with open(path, "w", newline="") as f:
        writer = csv.writer(f, delimiter=delimiter)
        writer.writerows([list(ROWS[0]), *(list(r.values()) for r in ROWS)])


def ipc(path: Path, new: Callable) -> None:
    table = pa.Table.from_pylist(ROWS)
    with pa.OSFile(str(path), "wb") as sink, new(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=2)


WRITERS = {
    "a.jsonl": lambda p: p.write_text(lines(ROWS)),
    "crlf.jsonl": lambda p: p.write_bytes(lines(ROWS, "\r\n\r\n").encode()),  # every second line is empty
    "open.jsonl": lambda p: p.write_text(lines(ROWS).rstrip()),
    "a.jsonl.gz": lambda p: p.write_bytes(gzip.compress(lines(ROWS).encode())),
    "lines.json": lambda p: p.write_text(lines(ROWS)),
    "list.json": lambda p: p.write_text(json.dumps(ROWS, indent=1)),
    "inside.json": lambda p: p.write_text(json.dumps({"version": 1, "data": ROWS})),
    "a.csv": lambda p: delimited(p, ","),
    "a.tsv": lambda p: delimited(p, "\t"),
    "a.parquet": lambda p: pq.write_table(pa.Table.from_pylist(ROWS), p, row_group_size=3),
    "stream.arrow": lambda p: ipc(p, pa.ipc.new_stream),
    "file.arrow": lambda p: ipc(p, pa.ipc.new_file),
}
LINES = {"crlf.jsonl": [1, 3, 5, 7, 9, 11, 13], "a.csv": [2, 3, 5, 6, 7, 8, 9], "a.tsv": [2, 3, 5, 6, 7, 8, 9]}


def table(path: Path):
    (file,) = find(Source(str(path)))
    return open_table(file)


@pytest.mark.parametrize("name", WRITERS)
def test_rows_by_number(tmp_path: Path, name: str) -> None:
    WRITERS[name](tmp_path / name)
    t = table(tmp_path / name)
    assert t.length == len(ROWS)
    for rows in (range(7), range(2, 5), range(1, 7, 2), range(0, 7, 5), range(6, 7), range(3, 3)):
        assert t.read(rows) == [ROWS[i] for i in rows]
    assert [t.line(i) for i in range(7)] == LINES.get(name, [1, 2, 3, 4, 5, 6, 7])


def test_one_object(tmp_path: Path) -> None:
    """A list inside a row is no list of rows."""
    (tmp_path / "a.json").write_text('{"messages": [{"role": "user"}]}\n')
    assert table(tmp_path / "a.json").read(range(1)) == [{"messages": [{"role": "user"}]}]


def test_lines_under_another_name(tmp_path: Path) -> None:
    """With format="json", as `datasets` calls both, lines are found by the suffix too, even if the first one is broken."""
    (tmp_path / "a.jsonl").write_text('{"a":\n{"a": 1}\n')
    (file,) = find(Source(str(tmp_path / "a.jsonl"), format="json"))
    bad, good = open_table(file).read(range(2))
    assert isinstance(bad, ValueError) and good == {"a": 1}


def test_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"one\n\ntwo \xff\r\nthree\r\n")
    t = table(tmp_path / "a.txt")
    one, two, three = t.read(range(3))
    assert (one, str(two), three) == ({"text": "one"}, "not UTF-8", {"text": "three"})
    assert [t.place(i).rpartition(":")[2] for i in range(3)] == ["1", "3", "4"]


@pytest.mark.parametrize("name", ["a.jsonl", "a.txt", "a.csv", "a.jsonl.gz"])
def test_empty_file(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(gzip.compress(b"") if name.endswith("gz") else b"")
    assert table(tmp_path / name).length == 0


def test_bad_rows(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"a": 1}\n[2]\n{"a":\n{"a": 4}\n')
    (tmp_path / "a.csv").write_text("a,b\n1,2\n1\n3,4\n")
    found = [str(r) for r in table(tmp_path / "a.jsonl").read(range(4))]
    assert found[:2] == ["{'a': 1}", "expected a JSON object, found list"] and found[2].startswith(
        "not JSON (Expecting"
    )
    assert [str(r) for r in table(tmp_path / "a.csv").read(range(3))][1] == "1 fields, but the header names 2"
    (tmp_path / "b.csv").write_bytes(b'a,b\n1,2\n"3"x,4\n5,\xff\n7,8\n9,"10\n11\n')
    good, quote, bytes_, last, end = table(tmp_path / "b.csv").read(range(5))
    assert (good, last) == ({"a": "1", "b": "2"}, {"a": "7", "b": "8"}) and bytes_["b"] == "\udcff"
    assert re.match("not CSV, in lines 3 to 3: ", str(quote)) and re.match("not CSV, in lines 6 to 7: ", str(end))
    (tmp_path / "c.csv").write_text('"a"b,c\n1,2\n')
    with pytest.raises(ValueError, match="c.csv: its header is not CSV, in lines 1 to 1"):
        table(tmp_path / "c.csv")
    (tmp_path / "a.json").write_text("{")
    with pytest.raises(ValueError, match="a.json is neither JSON nor JSON lines"):
        table(tmp_path / "a.json")


@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
def test_rows_that_no_parser_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Deep nesting, numbers without end and lines beyond the limit are bad rows, and the others are read."""
    monkeypatch.setattr("fdel.train.data.tables.LONGEST", 2**20)
    bad = ["[" * 200_000, '{"a": ' * 100_000, '{"a": 1' + "0" * 9999 + "}", json.dumps({"a": "x" * 2**20})]
    (tmp_path / name).write_text("\n".join(['{"a": 1}', *bad, '{"a": 2}']))
    first, *found, last = table(tmp_path / name).read(range(6))
    assert (first, last) == ({"a": 1}, {"a": 2})
    reasons = ["nested too deeply", "nested too deeply", "not JSON", "a line of 1,048,585 bytes, the most is 1,048,576"]
    assert all(isinstance(f, ValueError) and r in str(f) for f, r in zip(found, reasons, strict=True))


def test_a_file_that_is_one_deep_value_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("[" * 200_000)
    with pytest.raises(ValueError, match="a.json is neither JSON nor JSON lines"):
        table(tmp_path / "a.json")


def test_bombs_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is compressed may hold a hundred times its size, or the floor; a gzip that ends early is damaged."""
    monkeypatch.setattr("fdel.train.data.tables.FLOOR", 2**16)
    zeros, random = b"0" * 2**20, np.random.default_rng(0).bytes(2**18)
    (tmp_path / "bomb.txt.gz").write_bytes(gzip.compress(zeros))
    pq.write_table(pa.table({"text": ["x" * 2**20, "y" * 2**20]}), tmp_path / "bomb.parquet", compression="zstd")
    for name in ("bomb.txt.gz", "bomb.parquet"):
        with pytest.raises(ValueError, match=f"{name}: [0-9,]+ bytes hold more than 100 times as many"):
            table(tmp_path / name)
    (tmp_path / "fine.txt.gz").write_bytes(gzip.compress(random.hex().encode()))
    assert len(table(tmp_path / "fine.txt.gz").read(range(1))[0]["text"]) == 2**19
    (tmp_path / "half.txt.gz").write_bytes(gzip.compress(random)[:1000])
    with pytest.raises(ValueError, match="half.txt.gz is damaged"):
        table(tmp_path / "half.txt.gz")


def test_rows_in_memory() -> None:
    """Lists of dicts and data sets of `datasets`, by number; what is neither is refused by its name."""
    datasets = pytest.importorskip("datasets", reason="makes one")
    theirs = datasets.Dataset.from_list(ROWS)
    for given in (ROWS, tuple(ROWS), theirs, theirs.shuffle(seed=0).sort("id")):
        (file,) = find(Source(given))
        t = open_table(file)
        for rows in (range(7), range(1, 7, 2), range(3, 3)):
            assert t.length == 7 and t.read(rows) == [ROWS[i] for i in rows]
        assert t.place(3) == "memory:3"
    (file,) = find(Source([{"a": 1}, 3]))
    assert str(open_table(file).read(range(2))[1]) == "expected a dict, found int"
    splits = datasets.DatasetDict({"train": theirs, "test": theirs})
    for given, match in (
        (splits, "DatasetDict of train, test: choose one"),
        (3, "found int"),
        (iter(ROWS), "iterator"),
    ):
        with pytest.raises(ValueError, match=match):
            open_table(find(Source(given))[0])


def test_ends_of_lines_between_scans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    WRITERS["a.jsonl"](tmp_path / "a.jsonl")
    for size in (1, 7, 64):
        monkeypatch.setattr("fdel.train.data.tables.SCAN", size)
        assert table(tmp_path / "a.jsonl").read(range(7)) == ROWS


# ---- which files ---------------------------------------------------------------------------------------------------

README = """---
license: mit
configs:
- config_name: other
  data_files: x/*.jsonl
- config_name: default
  data_files:
  - split: train
    path: [one/*.jsonl, two.jsonl]
  - split: test
    path: three.jsonl
---
# A data set
"""
SHORT = "---\nconfigs:\n- config_name: x\n  data_files: one/*\n---\n"
MAPPED = "---\nconfigs:\n- config_name: x\n  data_files: {train: 'one/*', test: [two.jsonl]}\n---\n"
LAYOUTS = {  # files, then what is found for train, validation and test
    "shards": (["data/train-0-of-2.jsonl", "data/train-1-of-2.jsonl", "data/test-0-of-1.jsonl"], [0, 1], [], [2]),
    "names": (["train.jsonl", "dev.jsonl", "README.md"], [0], [1], []),
    "folders": (["train/a.jsonl", "validation/a.jsonl", "validation/b.jsonl.gz", "test/.b.jsonl"], [0], [1, 2], []),
    "unsplit": (["a.jsonl", "sub/b.jsonl", "contest_trained.jsonl", "dataset_infos.json"], [0, 2, 1], [], []),
    "short": ({"README.md": SHORT, "one/a.jsonl": "", "two.jsonl": ""}, [1], [], []),
    "mapped": ({"README.md": MAPPED, "one/a.jsonl": "", "two.jsonl": ""}, [1], [], [2]),
    "listed": (
        {"README.md": README, "one/a.jsonl": "", "two.jsonl": "", "three.jsonl": "", "x/b.jsonl": ""}, [1, 2], [], [3],
    ),
    "saved": (
        {"dataset_dict.json": "{}", "train/state.json": '{"_data_files": [{"filename": "data-0.jsonl"}]}',
         "train/data-0.jsonl": "", "train/cache-1.jsonl": "", "train/dataset_info.json": "{}"}, [2], [], [],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LAYOUTS)
def test_folder(tmp_path: Path, name: str) -> None:
    files, *expected = LAYOUTS[name]
    for file in files:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(files[file] if isinstance(files, dict) else "")
    for split, numbers in zip(("train", "validation", "test"), expected, strict=True):
        wanted = [tmp_path / list(files)[i] for i in numbers]
        if wanted:
            assert [f.path for f in find(Source(str(tmp_path), split=split))] == wanted
        else:
            with pytest.raises(FileNotFoundError, match=f"finds no file of the split '{split}'"):
                find(Source(str(tmp_path), split=split))


def test_a_folder_reads_nothing_outside_of_itself(tmp_path: Path) -> None:
    """Patterns, absolute names and links that lead out are errors that say where; links inside of the Hub's cache work."""
    folder, secret = tmp_path / "data", tmp_path / "secret.jsonl"
    secret.write_text("{}")
    (folder / "train").mkdir(parents=True)

    def refused(match: str, **options) -> None:
        with pytest.raises(ValueError, match=match):
            find(Source(str(folder), **options))

    outside = f"leads to {secret}, outside of the data set"
    listed = lambda path: f"---\nconfigs:\n- config_name: x\n  data_files: {path}\n---\n"
    for path, match in (("../secret.jsonl", outside), ("../*", outside), (str(secret), "is absolute")):
        (folder / "README.md").write_text(listed(path))
        refused(match)
    for odd in (
        "---\nconfigs: [data_files, {\n---\n",
        "---\nconfigs: {data_files: 1}\n---\n",
        listed("{train: {a: 1}}"),
    ):
        (folder / "README.md").write_text(odd)
        if "a: 1" not in odd:
            refused("README.md does not list a data set's files")
    (folder / "README.md").unlink()
    state = folder / "train/state.json"
    for name in (str(secret), "../../secret.jsonl"):
        state.write_text(json.dumps({"_data_files": [{"filename": name}]}))
        refused(outside)
    for odd in ("[]", "{", '{"_data_files": [1]}', "[" * 200_000):
        state.write_text(odd)
        refused("state.json does not list a data set's files")
    state.unlink()
    (folder / "train/a.jsonl").symlink_to(secret)
    refused(outside)
    with pytest.raises(ValueError, match=outside):
        find(Source(str(folder / "train/*.jsonl"), within=folder))
    assert len(find(Source(str(folder / "train/*.jsonl")))) == 1  # who names files himself may link them
    cache = tmp_path / "hub/datasets--x"
    (cache / "blobs").mkdir(parents=True)
    (cache / "snapshots/0123/data").mkdir(parents=True)
    (cache / "blobs/abc").write_text("{}")
    (cache / "snapshots/0123/data/train.jsonl").symlink_to("../../../blobs/abc")
    for at in ("", "data"):
        assert len(find(Source(str(cache / "snapshots/0123" / at)))) == 1


SPLITS = (
    "train train[:50%] train[50%:] train[10:20] train[:10] train[-3:] train[:-3] train[33%:66%] train[-10%:] train[:] "
    "train[5:900] train[20%:5] train[:4%](closest)"
).split()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("total", [23, 50, 101])
def test_splits_are_those_of_datasets(tmp_path: Path, tok, total: int, stream: bool) -> None:
    """Of two files together, of a folder and of rows in memory; the oracle reads the same files."""
    datasets = pytest.importorskip("datasets", reason="the oracle")
    rows = [{"text": f"{i}"} for i in range(total)]
    (tmp_path / "a.jsonl").write_text(lines(rows[:9]))
    (tmp_path / "b.jsonl").write_text(lines(rows[9:]))
    files = [str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")]
    splits = [*SPLITS, "train[:10%](pct1_dropremainder)"] if total > 100 else SPLITS
    instructions = [datasets.ReadInstruction.from_spec(s) for s in splits]
    wanted = datasets.load_dataset("json", data_files=files, split=instructions, cache_dir=str(tmp_path / "cache"))
    for split, found in zip(splits, wanted, strict=True):
        for given in (tuple(files), rows) if stream else (tuple(files), str(tmp_path), rows):
            source = Source(given, split=split)
            if not len(found):
                continue
            how = Settings(batch=1, length=8, shuffle=False, stream=stream)
            data = dataset(source, how, tok)
            read = [text.decode(tok, b["tokens"][0, : b["lengths"][0] - 1].tolist()) for b in data]
            assert read == found["text"][:], (split, given)


@pytest.mark.parametrize(("split", "match"), [
    ("bogus", "files have the split 'train' alone"), ("validation[:10]", "files have the split 'train' alone"),
    ("train[:50%", "expected a name and a slice"), ("train+test", "expected a name and a slice"),
    ("train[a:b]", "expected a name and a slice"), ("../x", "expected a name and a slice"), ("", "expected a name"),
    ("train[:101%]", "expected percentages to 100"), ("train[:9%](pct1_dropremainder)", "of 100 rows or more"),
])  # fmt: skip
def test_a_split_that_means_nothing_is_an_error(tmp_path: Path, tok, split: str, match: str) -> None:
    (tmp_path / "a.jsonl").write_text(lines([{"text": "the"}]))
    for given in (str(tmp_path / "a.jsonl"), [{"text": "the"}]):
        with pytest.raises(ValueError, match=match.replace("files", "(files|rows in memory)")):
            dataset(Source(given, split=split), Settings(batch=1), tok)


def test_patterns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("b.jsonl", "a.jsonl", "sub/c.jsonl", "d.parquet", "e.data"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
    names = lambda *files, **k: [Path(f.name).name for f in find(Source(tuple(str(tmp_path / f) for f in files), **k))]
    assert names("*.jsonl") == ["a.jsonl", "b.jsonl"]
    assert names("**/*.jsonl") == ["a.jsonl", "b.jsonl", "c.jsonl"]
    assert names("sub/*", "a.jsonl") == ["c.jsonl", "a.jsonl"]
    assert names("e.data", format="text") == ["e.data"]
    monkeypatch.chdir(tmp_path)
    assert [f.name for f in find(Source("?.jsonl"))] == ["a.jsonl", "b.jsonl"]
    with pytest.raises(ValueError, match="'.data' names no format"):
        names("e.data")
    with pytest.raises(ValueError, match="unknown format 'xml'"):
        open_table(find(Source("a.jsonl", format="xml"))[0])


def test_remote() -> None:
    fsspec = pytest.importorskip("fsspec", reason="reads URLs")
    fs = fsspec.filesystem("memory")
    for i in range(3):
        fs.pipe(f"/fdel-test/part-{i}.jsonl", lines(ROWS[i : i + 1]).encode())
    found = find(Source("memory://fdel-test/part-*.jsonl"))
    assert [open_table(f).read(range(1)) for f in found] == [[ROWS[i]] for i in range(3)]
    assert [f.name.rpartition("/")[2] for f in found] == [f"part-{i}.jsonl" for i in range(3)]
    with pytest.raises(FileNotFoundError, match="finds no file"):
        find(Source("memory://fdel-test/nothing*"))


@pytest.mark.parametrize(("module", "file", "extra"), [
    ("pyarrow.parquet", "a.parquet", r"fdel\[data\]"), ("yaml", "README.md", r"fdel\[data\]"),
    ("fsspec", "memory://fdel/a", "pip install fsspec"),
])  # fmt: skip
def test_missing_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, file: str, extra: str) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    (tmp_path / "README.md").write_text(README)
    (tmp_path / "a.parquet").write_bytes(b"")
    path = {"README.md": str(tmp_path), "a.parquet": str(tmp_path / "a.parquet")}.get(file, file)
    with pytest.raises(ImportError, match=extra):
        open_table(find(Source(path))[0])
