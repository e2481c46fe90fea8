"""Rewards of length and of JSON, by their formulas and by TRL where it is installed."""

import json

import pytest

from fdel.train.rollout import form

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}, "required": ["a"]}


def test_overlong_is_dapos():
    """Equation 13 of arXiv:2503.14476, typed from the paper, for each length."""
    most, cache = 20, 7
    lengths = range(30)

    def r(y):
        if y <= most - cache:
            return 0
        return ((most - cache) - y) / cache if y <= most else -1

    ids = [[1] * n for n in lengths]
    assert form.overlong(most, cache)(completion_ids=ids, completions=[""] * 30) == [
        pytest.approx(r(n)) for n in lengths
    ]
    for wrong in ((5, 6), (5, 0)):
        with pytest.raises(ValueError, match="0 < cache <= limit"):
            form.overlong(*wrong)


def test_overlong_is_trls():
    trl, ids = pytest.importorskip("trl.rewards"), [[1] * n for n in range(30)]
    assert form.overlong(20, 7)(completion_ids=ids) == trl.get_soft_overlong_punishment(20, 7)(completion_ids=ids)


def test_length_penalty():
    assert form.length_penalty(8, 0.5)(completion_ids=[[], [1, 2], [1] * 8, [1] * 99]) == [0, -0.125, -0.5, -0.5]
    with pytest.raises(ValueError, match="limit=0"):
        form.length_penalty(0)


@pytest.mark.parametrize(
    ("said", "fits"),
    [
        ('{"b": "x", "a": 1}', 1), ('{"a": 1.5}', 0), ("{}", 0), ('{"a": 1', 0), ('{"a": 1} yes', 0), ("", 0),
        ('{"a": 1, "c": NaN}', 0), ("[" * 100_000, 0), ('{"a": 1, "c": ' + "9" * 5000 + "}", 0), (' {"a": 1}\n', 1),
    ],
)  # fmt: skip
def test_json_schema(said, fits):
    pytest.importorskip("jsonschema")
    assert form.json_schema(SCHEMA)([said]) == [fits]
    assert form.json_schema()([[{"role": "assistant", "content": said}]], schema=[json.dumps(SCHEMA)]) == [fits]


def test_json_schemas_of_rows():
    pytest.importorskip("jsonschema")
    assert form.json_schema(column="s")(["1", "1", "1"], s=[{"type": "string"}, None, True]) == [0, None, 1]
    with pytest.raises(ValueError, match="no JSON schema: .*'text' is not valid"):
        form.json_schema({"type": "text"})
    away = form.json_schema({"$ref": "http://127.0.0.1:9/schema.json"})
    with pytest.raises(Exception, match="Unresolvable"):
        away(["1"])
