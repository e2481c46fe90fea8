"""Run files of strangers: what is odd, endless or hostile is a RecipeError at once, on the command line one message."""

import json
import time

import pytest

from fdel import cli, recipe
from fdel.recipe import files

BASE = "model: {name_or_path: m}\nmixture: {informs: [{data_files: d.jsonl}]}\nactions: [train]\n"
LAUGHS = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{n}: &{n} [{', '.join(['*' + p] * 9)}]\n" for p, n in zip("abcdefghijkl", "bcdefghijklm", strict=True)
)
YAML = {
    "bomb": (LAUGHS, "more than 50,000 values"),
    "bomb of mappings": (
        "a: &a {x: 1}\n" + "".join(f"{n}: &{n} {{p: *{p}, q: *{p}}}\n" for p, n in zip("abcdefghijklmnopqrst",
        "bcdefghijklmnopqrstu", strict=True)), "more than 50,000 values",
    ),
    "bomb of merges": (
        "a: &a {x: 1}\n" + "".join(f"{n}: &{n} {{<<: [*{p}, *{p}]}}\n" for p, n in zip("abcdefghijklmnopqrst",
        "bcdefghijklmnopqrstu", strict=True)), "more than 50,000 values",
    ),
    "recursive list": ("model: &a [*a]\n", "an alias stands inside of what it names"),
    "recursive mapping": ("&a model: &b {name_or_path: *b}\n", "an alias stands inside of what it names"),
    "recursive values": (BASE + "base_config: {values: &a {x: *a}}\n", "an alias stands inside of what it names"),
    "list as a key": ("? [1, 2]\n: 3\n", "line 1: a sequence as a key"),
    "mapping as a key": ("model:\n  ? {a: 1}\n  : 3\n", "line 2: a mapping as a key"),
    "deep": ("model: " + "[" * 10_000, "more than 32 deep"),
    "deep blocks": ("\n".join(" " * i + "a:" for i in range(400)), "more than 32 deep"),
    "long number": ("trainer: {seed: " + "9" * 5000 + "}\n", "a number of 5000 digits"),
    "sexagesimal": ("trainer: {seed: 1" + ":59" * 50_000 + "}\n", "digits, expected at most 64"),
    "no date": ("trainer: {seed: 2020-99-99}\n", "is not YAML: month must be"),
    "object": ("model: !!python/object/apply:os.getcwd []\n", "could not determine a constructor"),
    "binary": (BASE + "base_config: {values: {x: !!binary aGVsbG8=}}\n", "base_config.values.x: found b'hello'"),
    "set": (BASE + "base_config: {values: {x: !!set {a, b}}}\n", "base_config.values.x: found"),
    "nan": ("trainer: {learning_rate: .nan}\n", "trainer.learning_rate: found nan, expected a number"),
    "infinite": ("trainer: {weight_decay: -.inf}\n", "trainer.weight_decay: found -inf, expected a number"),
    "nan inside": (BASE + "base_config: {values: {rope: {x: .nan}}}\n", "base_config.values.rope: found"),
    "infinite text": ("trainer: {clip_grad: 'inf'}\n", "trainer.clip_grad: found 'inf', expected a number"),
    "two documents": ("model: {}\n---\nmodel: {}\n", "expected a single document"),
    "tabs": ("model:\n\t- x\n", "is not YAML"),
    "null": ("model: {name_or_path: \"a\\0b\"}\nactions: [validate]\n", None),
    "scalar": ("just text\n", "holds 'just text', expected a mapping"),
    "empty": ("", "holds None, expected a mapping"),
    "number as a key": ("1: 2\n", "1: unknown key"),
    "long text": ("trainer: {optimizer: [" + "x" * 200_000 + "]}\n", "... (list), expected text"),
}  # fmt: skip
JSON = {
    "twice": ('{"trainer": {"seed": 1, "seed": 2}}', "seed: stands twice"),
    "nan": ('{"trainer": {"learning_rate": NaN}}', "NaN is no number of JSON"),
    "infinity": ('{"trainer": {"seed": -Infinity}}', "-Infinity is no number of JSON"),
    "1e999": ('{"trainer": {"learning_rate": 1e999}}', "trainer.learning_rate: found inf, expected a number"),
    "deep": ('{"model": ' + "[" * 100_000, "deep in each other"),
    "deep mappings": ('{"a":' * 40_000, "deep in each other"),
    "digits": ('{"trainer": {"seed": ' + "9" * 100_000 + "}}", "a number of 100000 digits"),
    "cut": ('{"model": ', "is not JSON"),
    "list": ("[]", "holds [], expected a mapping"),
    "wrapper": ('{"config": [1]}', "config: found [1], expected a mapping"),
    "section": ('{"config": {"trainer": 7}}', "trainer: found 7, expected a mapping"),
}


@pytest.mark.parametrize(
    ("suffix", "text", "message"),
    [(suffix, *case) for suffix, cases in ((".yaml", YAML), (".json", JSON)) for case in cases.values()],
    ids=[f"{kind}-{name}" for kind, cases in (("yaml", YAML), ("json", JSON)) for name in cases],
)
def test_an_odd_run_file_is_refused_at_once(suffix, text, message, tmp_path):
    file = tmp_path / f"r{suffix}"
    file.write_text(text)
    begun = time.perf_counter()
    if message is None:
        assert recipe.faults(recipe.load(file)) is not None
    else:
        with pytest.raises(recipe.RecipeError) as e:
            recipe.load(file)
        assert message in str(e.value) and len(str(e.value)) < 1000
    assert time.perf_counter() - begun < 5  # none of them ended before


def test_a_run_file_has_a_size_and_an_encoding(tmp_path):
    (tmp_path / "large.yaml").write_text("# " + "x" * files.SIZE)
    (tmp_path / "latin.yaml").write_bytes(b"model: {name_or_path: \xe9}")
    (tmp_path / "bom.json").write_text(json.dumps({"model": {"name_or_path": "m"}}), "utf-8-sig")
    with pytest.raises(recipe.RecipeError, match="larger than 256 KiB"):
        recipe.load(tmp_path / "large.yaml")
    with pytest.raises(recipe.RecipeError, match="is no text in UTF-8"):
        recipe.load(tmp_path / "latin.yaml")
    assert recipe.load(tmp_path / "bom.json").model.name_or_path == "m"


def test_aliases_of_ordinary_size_are_read(tmp_path):
    (tmp_path / "r.yaml").write_text(
        "model: &m {name_or_path: m}\nteacher_model: {<<: *m, task: causal-lm}\nreference_model: *m\n"
    )
    found = recipe.load(tmp_path / "r.yaml")
    assert found.reference_model == found.model and found.teacher_model.task == "causal-lm"


def test_a_value_on_the_command_line_is_read_as_one_of_a_file(tmp_path, capsys):
    (tmp_path / "r.yaml").write_text(BASE)
    for said, message in (
        ("trainer.learning_rate=NaN", "found 'NaN'"),
        ("trainer.seed=" + "[" * 100_000, "found '[[["),
    ):
        assert cli.main(["run", str(tmp_path / "r.yaml"), "--dry-run", "--set", said]) == 2
        assert message in capsys.readouterr().err
