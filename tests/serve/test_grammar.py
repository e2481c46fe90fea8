"""Masks of structured output: what is drawn under them parses; the oracles are jsonschema, re, ast and llguidance."""

import ast
import dataclasses
import json
import random
import re
import time

import numpy as np
import pytest

from fdel import text
from fdel.serve.server import grammar
from fdel.serve.server.grammar import Spec, choice, json_schema

jsonschema = pytest.importorskip("jsonschema", reason="the oracle")
guidance = pytest.importorskip("llguidance", reason="the extra `serve`")

WIDTH = 345  # logits: more than the tokenizer's 330 tokens, and no multiple of 32
CORPUS = ['{"name": "hello", "age": 12, "x": [true, false, null]} the quick brown fox (1 + 2) * 34']
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b", None]}, "maxItems": 3},
        "next": {"anyOf": [{"type": "boolean"}, {"type": "number", "minimum": -1, "maximum": 1}]},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
ARITHMETIC = 'start: sum\nsum: term (("+"|"-") term)*\nterm: NUMBER | "(" sum ")"\nNUMBER: /[1-9][0-9]{0,3}/'


@pytest.fixture(scope="module")
def tok() -> text.Tokenizer:
    return text.train_bpe(CORPUS, 330, ["<|im_start|>"])


@pytest.fixture(scope="module")
def vocabulary(tok: text.Tokenizer) -> grammar.Vocabulary:
    return grammar.Vocabulary(tok, WIDTH)


def allowed(matcher: grammar.Matcher) -> list[int]:
    bits = np.unpackbits(matcher.mask().view(np.uint8), bitorder="little")
    assert bits.shape == (-(-WIDTH // 32) * 32,)
    return np.nonzero(bits)[0].tolist()


def draw(matcher: grammar.Matcher, seed: int, steps: int = 300) -> list[int]:
    """Random tokens under the mask, with a bias towards the end and towards closing."""
    rng, out = random.Random(seed), []
    while not matcher.done and len(out) < steps:
        ids = allowed(matcher)
        short = [i for i in ids if len(text.token_bytes(matcher.vocabulary.tokenizer, i)) <= 1]
        ids = short if short and len(out) > steps // 3 else ids
        closing = [
            i for i in ids if i < 2 or text.token_bytes(matcher.vocabulary.tokenizer, i) in (b'"', b"}", b"]", b")")
        ]
        out.append(rng.choice(closing if closing and rng.random() < 0.5 else ids))
        matcher.commit(out[-1])
    return out


def valid_json(schema: dict):
    return lambda said: jsonschema.Draft202012Validator(schema).validate(json.loads(said))


def matches(pattern: str):
    return lambda said: re.fullmatch(pattern, said) or pytest.fail(f"{said!r} is no {pattern}")


def one_of(*choices: str):
    return lambda said: said in choices or pytest.fail(f"{said!r} is none of {choices}")


PATTERN = r"[a-c]{2,5}-([0-9]{3}|foo)+é?"  # \d is Unicode's, of which the oracle has another version
CASES = {
    "schema": (json_schema(PERSON), valid_json(PERSON)),
    "object": (Spec("json_object"), valid_json({"type": "object"})),
    "regex": (Spec("regex", PATTERN), matches(PATTERN)),
    "lark": (Spec("lark", ARITHMETIC), lambda said: ast.parse(said, mode="eval")),
    "choice": (choice(["yes", "no", 'a "b"\n\\', "né"]), one_of("yes", "no", 'a "b"\n\\', "né")),
}


@pytest.mark.parametrize("kind", CASES)
def test_what_is_drawn_is_valid(kind: str, vocabulary: grammar.Vocabulary, tok: text.Tokenizer) -> None:
    spec, check = CASES[kind]
    cache, complete, said = grammar.Cache(), 0, set()
    for seed in range(25):
        matcher = grammar.compile(vocabulary, spec, cache)
        out = draw(matcher, seed)
        if matcher.done:
            assert matcher.error is None
            said.add(text.decode(tok, out))
            check(text.decode(tok, out))
            complete += 1
    assert complete >= 20 and len(said) >= 3 and len(cache.entries) == 1


def test_sentencepiece_tokenizer() -> None:
    """Bytes as tokens, and spaces as U+2581: what is forced cannot be tokenized alone, but is written all the same."""
    tests = pytest.importorskip("tests.test_text", reason="the oracle of tokenizers")
    backend, named = tests.build("llama")
    tok = text.Tokenizer(backend, named, (2,), {}, {}, "")
    vocabulary = grammar.Vocabulary(tok, backend.get_vocab_size())
    for kind, seed in [("schema", 0), ("schema", 1), ("regex", 0), ("choice", 0), ("choice", 1)]:
        matcher = grammar.compile(vocabulary, CASES[kind][0])
        rng, out = random.Random(seed), []
        while not matcher.done and len(out) < 400:
            bits = np.nonzero(np.unpackbits(matcher.mask().view(np.uint8), bitorder="little"))[0]
            out.append(2 if 2 in bits else int(rng.choice(bits)))
            matcher.commit(out[-1])
        assert matcher.done and matcher.error is None
        CASES[kind][1](text.decode(tok, out))


@pytest.mark.parametrize("kind", CASES)
def test_mask_is_what_llguidance_accepts(kind: str, vocabulary: grammar.Vocabulary, tok: text.Tokenizer) -> None:
    """Token by token for the whole vocabulary; ids without a token and special tokens are never allowed.

    Where the grammar forces text, llguidance allows its usual tokenization only, so that the mask may have less.
    """
    matcher, rng = grammar.compile(vocabulary, CASES[kind][0]), random.Random(1)
    size, equal = tok.backend.get_vocab_size(), 0
    for _ in range(12):
        if matcher.done:
            break
        ids = allowed(matcher)
        oracle = [i for i in range(size) if matcher.state.deep_copy().validate_tokens([i]) == 1]
        assert set(ids) <= set(oracle) and 1 not in ids and max(ids) < size
        assert ids == oracle or len(ids) == 1
        equal += ids == oracle
        matcher.commit(rng.choice(ids))
    assert equal >= 1


def test_token_that_is_not_allowed(vocabulary: grammar.Vocabulary, tok: text.Tokenizer) -> None:
    matcher = grammar.compile(vocabulary, choice(["abc", "abd"]))
    before = allowed(matcher)
    for token in (text.encode(tok, "x")[0], 0, 1, 331, WIDTH - 1, WIDTH, -1, 2**40):
        with pytest.raises(ValueError, match=f"token {token} is not allowed after the 0 tokens"):
            matcher.commit(token)
    assert allowed(matcher) == before and not matcher.done


@pytest.mark.parametrize("kind", ["schema", "regex", "choice"])
def test_rollback_and_copy(kind: str, vocabulary: grammar.Vocabulary) -> None:
    matcher = grammar.compile(vocabulary, CASES[kind][0])
    masks, out = [matcher.mask()], draw(grammar.compile(vocabulary, CASES[kind][0]), 3)
    for token in out:
        matcher.commit(token)
        masks.append(matcher.mask())
    assert matcher.done
    matcher.commit(0)  # the end, once more, as an engine that runs ahead may draw it
    matcher.rollback(1)
    for n in (0, 1, 2, 3, len(out) - 6):
        twin = matcher.copy()
        matcher.rollback(n)
        at = len(matcher.tokens)
        assert np.array_equal(matcher.mask(), masks[at]) and matcher.done == (at == len(out))
        assert len(twin.tokens) == at + n and np.array_equal(twin.mask(), masks[at + n])
    with pytest.raises(ValueError, match="cannot take back"):
        matcher.rollback(len(out))


def test_end_only_where_complete(vocabulary: grammar.Vocabulary, tok: text.Tokenizer) -> None:
    matcher = grammar.compile(vocabulary, Spec("regex", "a{1,2}"))
    a = text.encode(tok, "a")[0]
    assert 0 not in allowed(matcher)
    matcher.commit(a)
    assert 0 in allowed(matcher) and not matcher.done
    matcher.commit(a)
    assert matcher.done and allowed(matcher) == [0] and matcher.error is None


def test_several_ends(tok: text.Tokenizer) -> None:
    """Chat models end turns and texts with different tokens; both end an output. Without any, grammars still end."""
    a = text.encode(tok, "a")[0]
    for eos in ((0, 1), (1,), ()):
        matcher = grammar.compile(
            grammar.Vocabulary(dataclasses.replace(tok, eos_ids=eos), WIDTH), Spec("regex", "a{1,2}")
        )
        matcher.commit(a)
        assert set(allowed(matcher)) - {a} == set(eos) and not matcher.done
        matcher.commit(eos[-1] if eos else a)
        assert matcher.done and allowed(matcher) == list(eos)


def test_width_below_tokenizer(tok: text.Tokenizer) -> None:
    """Tokens 70 to 95 are plain letters, which the regex allows and the model cannot write."""
    matcher = grammar.compile(grammar.Vocabulary(tok, 70), Spec("regex", "(?s:.)*"))
    bits = np.unpackbits(matcher.mask().view(np.uint8), bitorder="little")
    assert bits.shape == (96,) and bits[2:70].sum() > 60 and not bits[70:].any()


def test_cache_is_bounded(vocabulary: grammar.Vocabulary) -> None:
    cache = grammar.Cache(limit=10 * grammar.OVERHEAD)
    for i in range(40):
        grammar.compile(vocabulary, choice([f"c{i}"]), cache)
        assert cache.held <= cache.limit and cache.held == sum(e[2] for e in cache.entries.values())
    assert [s.body for _, s in cache.entries] == [f'["c{i}"]' for i in range(31, 40)]
    first = cache.get(vocabulary, choice(["c31"]))
    grammar.compile(vocabulary, choice(["new"]), cache)
    assert cache.get(vocabulary, choice(["c31"])) is first and cache.get(vocabulary, choice(["c32"])) is None


def nested(depth: int) -> dict:
    return {"type": "object", "properties": {"a": nested(depth - 1)}, "required": ["a"]} if depth else {}


many = [{"type": "object", "properties": {f"k{i}_{j}": {"type": "string"} for j in range(20)}} for i in range(60)]
REFUSED = {
    "deep": (json_schema(nested(200)), "recursion limit"),
    "very deep": (Spec("json_schema", '{"type":"array","items":' * 2000 + "{}" + "}" * 2000), "recursion limit"),
    "itself": (json_schema({"$ref": "#"}), "accepts no output"),
    "remote": (json_schema({"$ref": "http://127.0.0.1:1/x.json"}), "does not fetch"),
    "left recursion": (Spec("lark", "start: start\n"), "accepts no output"),
    "hidden recursion": (Spec("lark", "start: a\na: b\nb: a\n"), "accepts no output"),
    "wrong type": (json_schema({"type": "stsring"}), "Invalid type: stsring"),
    "wrong pattern": (json_schema({"type": "string", "pattern": "(("}), "unclosed group"),
    "wrong regex": (Spec("regex", "(("), "unclosed group"),
    "no support": (json_schema({"type": "array", "uniqueItems": True}), "uniqueItems"),
    "format": (json_schema({"type": "string", "format": "foo"}), "Unknown format: foo"),
    "no json": (Spec("json_schema", "{"), "EOF"),
    "lenient": (json_schema({"x-guidance": {"lenient": True}, "type": "array", "uniqueItems": True}), "uniqueItems"),
    "empty": (Spec("lark", ""), "Empty grammar"),
    "impossible": (Spec("regex", r"[^\s\S]"), "accepts no output"),
    "no room": (Spec("regex", "a{1000000}"), "too many expressions"),  # the first mask uses up the lexer
}
BOUNDED = {
    "enum": json_schema({"enum": [f"v{i}" for i in range(70_000)]}),
    "regex bomb": Spec("regex", "((a{1,1000}){1,1000}){1,1000}"),
    "backtracking": Spec("regex", "(a|aa|a.*b)*c{1,500}(x+x+)+y"),
    "dfa": Spec("regex", "(.*a.{30})"),
    "min length": json_schema({"type": "string", "minLength": 10**9}),
    "min items": json_schema({"type": "array", "items": {"type": "integer"}, "minItems": 10**6}),
    "all of": json_schema({"allOf": many}),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_the_reason(name: str, vocabulary: grammar.Vocabulary) -> None:
    spec, reason = REFUSED[name]
    with pytest.raises(ValueError, match=f"the {spec.kind} cannot be used.*{reason}"):
        grammar.compile(vocabulary, spec)


@pytest.mark.parametrize("name", BOUNDED)
def test_hostile_grammars_are_bounded(name: str, vocabulary: grammar.Vocabulary) -> None:
    """They compile and give masks, or stop with a reason: never an exception, a hang or an empty mask."""
    matcher = grammar.compile(vocabulary, BOUNDED[name])
    for _ in range(20):
        ids = allowed(matcher)
        assert ids
        if matcher.done:
            break
        matcher.commit(ids[-1])
    assert matcher.error is None or "limit" in matcher.error or "max is" in matcher.error


AMBIGUOUS = {
    "powers": "start: s\ns: " + " | ".join(" ".join(["s"] * k) for k in range(2, 7)) + ' | /[a-z ]/ | ""',
    "many powers": "start: s\ns: " + " | ".join(" ".join(["s"] * k) for k in range(2, 20)) + ' | /[a-z ]/ | ""',
    "stars": "start: a*\na: b*\nb: c*\nc: d*\nd: /[a-z ]/",
    "optional": "start: " + "r? " * 1500 + "\nr: /[a-z ]/",
}


@pytest.mark.parametrize("name", AMBIGUOUS)
def test_ambiguous_grammars_end(name: str, vocabulary: grammar.Vocabulary) -> None:
    """The engine's thread computes masks for all. With llguidance's own limits one token of "powers" takes 0.6 s."""
    begin = time.thread_time()
    try:
        matcher = grammar.compile(vocabulary, Spec("lark", AMBIGUOUS[name]))
    except ValueError as e:
        assert "Too many items" in str(e)
        return
    longest = 0.0
    while not matcher.done and len(matcher.tokens) < 500:
        before = time.thread_time()
        matcher.commit(allowed(matcher)[-1])
        longest = max(longest, time.thread_time() - before)
    assert matcher.done and matcher.error and "limit" in matcher.error and matcher.rollback(1) is None
    assert longest < 0.3 and time.thread_time() - begin < 2


def test_limits_are_told(vocabulary: grammar.Vocabulary) -> None:
    """A token that is allowed but costs too much ends the output with the reason; going back works."""
    matcher = grammar.compile(vocabulary, BOUNDED["all of"])
    first = allowed(matcher)
    matcher.commit(first[-1])
    assert matcher.done and "2000" in (matcher.error or "") and allowed(matcher) == [0]
    matcher.rollback(1)
    assert allowed(matcher) == first and not matcher.done


def test_specs_are_checked(tok: text.Tokenizer) -> None:
    with pytest.raises(ValueError, match="grammar kind 'gbnf'"):
        Spec("gbnf", "")
    with pytest.raises(ValueError, match="the most is"):
        Spec("regex", "a" * (grammar.MAX_CHARS + 1))
    for wrong in ([], ["a", ""], [1]):
        with pytest.raises(ValueError, match="choice: expected strings"):
            choice(wrong)
