"""Structured output: which tokens a JSON schema, a regex, a Lark grammar or a list of choices allows next.

`compile` turns a `Spec` into a `Matcher`, which follows one output token by token. Compiled grammars are kept in a
`Cache`, and each output gets a copy (a few microseconds). Parsing is llguidance's, whose work per token is bounded by
`LIMITS`, and which drops the GIL. Its compiler recurses along references and never looks how much of its stack is left,
so it gets one that is enough for any grammar of `MAX_CHARS`; what strangers send is first tried in another process.
"""

import functools
import json
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fdel import text

KINDS = ("json_schema", "json_object", "regex", "lark", "choice")
MAX_CHARS = 2**20  # the longest grammar
# llguidance counts its work; these numbers are about 20 ms to start, 70 ms for the worst token, and 100 MB of lexer states.
LIMITS = {"max_items_in_row": 2_000, "initial_lexer_fuel": 1_000_000, "step_lexer_fuel": 200_000,
          "step_max_items": 5_000, "max_lexer_states": 50_000, "max_grammar_size": 500_000}  # fmt: skip
# Seconds of a thread that an output's masks may take, and more for each token: usual are 0.0005
START, EACH = 0.1, 0.005
# Whitespace in JSON is bounded, since a model may prefer it to anything else for ever; unknown keywords are errors.
JSON_OPTIONS = {"whitespace_pattern": r"[ \n\r\t]{1,64}", "lenient": False, "coerce_one_of": False}
STACK = 2**29  # bytes of address space: a reference takes up to 8 KiB and 40 characters, or 3 KiB and 12
OVERHEAD, PER_CHAR = 100_000, 64  # bytes that a compiled grammar holds: measured for small schemas and long enums


@dataclass(frozen=True)
class Spec:
    """What an output must look like; `body` is the schema's JSON, the pattern, the grammar, or the choices as JSON."""

    kind: str
    body: str = ""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"grammar kind {self.kind!r}; expected one of {', '.join(KINDS)}")
        if len(self.body) > MAX_CHARS:
            raise ValueError(f"the grammar has {len(self.body)} characters; the most is {MAX_CHARS}")


def json_schema(schema: Mapping[str, Any] | bool) -> Spec:
    """Ask for JSON of a schema (draft 2020-12, properties in the schema's order)."""
    return Spec("json_schema", json.dumps(schema))


def choice(choices: Sequence[str]) -> Spec:
    """Ask for one of some strings, of which none is empty."""
    if not choices or not all(isinstance(c, str) and c for c in choices):
        raise ValueError(f"choice: expected strings, none empty, found {choices!r:.100}")
    return Spec("choice", json.dumps(list(choices)))


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """A tokenizer's tokens as llguidance's trie, made once per model: about a second for 150,000 tokens.

    `width` is the model's number of logits: ids without a token are never allowed, nor special tokens but the end.
    """

    tokenizer: text.Tokenizer
    width: int

    @functools.cached_property
    def trie(self) -> Any:
        """llguidance's tokenizer."""
        guidance = _llguidance()
        if self.tokenizer.pieces.gap:
            fault = "this tokenizer writes spaces between tokens, so their text is not known one by one"
            raise ValueError(f"{fault}; structured output needs a tokenizer with a decoder")
        tokens = _Tokens(self.tokenizer)
        ends = [*self.tokenizer.eos_ids] or [tokens.eos_token_id]
        return guidance.LLTokenizer(guidance.TokenizerWrapper(tokens), eos_token=ends)

    @functools.cached_property
    def size(self) -> int:
        """One more than the highest id that is both a token and a logit."""
        return min(self.width, _size(self.tokenizer))

    @property
    def eos(self) -> list[int]:
        """The ids that end an output."""
        return [i for i in self.tokenizer.eos_ids if i < self.size]


def _size(tok: text.Tokenizer) -> int:
    return max(tok.backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1


class _Tokens:
    """What llguidance asks of a tokenizer."""

    def __init__(self, tok: text.Tokenizer) -> None:
        self.tok = tok
        self.tokens = [text.token_bytes(tok, i) for i in range(_size(tok))]
        self.special_token_ids = sorted(tok.special_ids)
        self.bos_token_id = None
        self.ids = {piece: i for i, piece in enumerate(self.tokens) if piece and i not in tok.special_ids}
        # llguidance demands an end: without one, an id past the vocabulary, which `Matcher.mask` leaves out.
        self.eos_token_id = tok.eos_ids[0] if tok.eos_ids else len(self.tokens)
        self.tokens += [] if tok.eos_ids else [b""]

    def __call__(self, data: bytes) -> list[int]:
        """Tokenize text that stands inside an output: as the tokenizer does, or by the longest tokens.

        The latter where it would add something, such as the space with which SentencePiece begins a text.
        """
        ids = text.encode(self.tok, data.decode(), special=False)
        if b"".join(self.tokens[i] for i in ids) == data:
            return ids
        ids, at = [], 0
        while ends := [e for e in range(at + 1, min(len(data), at + 32) + 1) if data[at:e] in self.ids]:
            ids.append(self.ids[data[at : ends[-1]]])
            at = ends[-1]
        return ids


@dataclass
class Cache:
    """Compiled grammars, the least recently used dropped beyond `limit` bytes (an estimate from their length)."""

    limit: int = 2**28
    held: int = 0
    entries: OrderedDict[tuple[int, Spec], tuple[Any, Any, int]] = field(default_factory=OrderedDict)
    lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def get(self, vocabulary: Vocabulary, spec: Spec) -> Any | None:
        """Return a compiled grammar, or None."""
        with self.lock:
            if (key := (id(vocabulary), spec)) not in self.entries:
                return None
            self.entries.move_to_end(key)
            return self.entries[key][1]

    def put(self, vocabulary: Vocabulary, spec: Spec, compiled: Any) -> None:
        """Keep a compiled grammar, if it fits at all."""
        size = OVERHEAD + PER_CHAR * len(spec.body)
        with self.lock:
            if size > self.limit or (id(vocabulary), spec) in self.entries:
                return
            self.entries[id(vocabulary), spec] = (vocabulary, compiled, size)  # its owner, so that the id stays its own
            self.held += size
            while self.held > self.limit:
                self.held -= self.entries.popitem(last=False)[1][2]


@dataclass
class Matcher:
    """Where one output stands in its grammar. Beam and speculative decoding: `copy` and `rollback`."""

    vocabulary: Vocabulary
    compiled: Any = field(repr=False)  # nothing consumed
    tokens: list[int] = field(default_factory=list)
    state: Any = field(default=None, repr=False)
    seen: np.ndarray | None = field(default=None, repr=False)  # the mask, if it was asked for since the last token
    seconds: float = 0.0  # of a thread, for the masks so far
    slow: bool = False  # whether these were too many

    def __post_init__(self) -> None:
        self._replay()

    @property
    def done(self) -> bool:
        """Whether nothing may follow: the grammar is complete, the end was drawn, or it led nowhere (see `error`)."""
        return self.slow or self.state.is_stopped()

    @property
    def error(self) -> str | None:
        """Why the output cannot be completed: a dead end of the grammar, or a limit."""
        if self.slow:
            return f"its tokens take more than the limit of {EACH} s: it is too ambiguous"
        return _reason(self.state)

    def mask(self) -> np.ndarray:
        """Return the tokens that may come next: uint32[ceil(width / 32)], the lowest bit first.

        When nothing may follow, these are the tokens that end an output: a row of logits is never masked altogether.
        """
        if self.seen is None:
            size, self.seen = self.vocabulary.size, np.zeros(-(-self.vocabulary.width // 32), np.uint32)
            if not self.done:
                begin = time.thread_time()
                words = np.frombuffer(self.state.compute_bitmask(), np.uint32)[: -(-size // 32)]
                self.seen[: len(words)] = words
                if size % 32:
                    self.seen[size // 32] &= np.uint32((1 << size % 32) - 1)
                self.seconds += time.thread_time() - begin
                self.slow = self.seconds > START + EACH * len(self.tokens)
            if self.done:  # it may be only now that llguidance sees a dead end
                self.seen[:] = 0
                for token in self.vocabulary.eos:
                    self.seen[token // 32] |= np.uint32(1 << token % 32)
        return self.seen

    def commit(self, token: int) -> None:
        """Take the next token; a ValueError if the mask does not have it (the state is then as before)."""
        if not (0 <= token < self.vocabulary.width and self.mask()[token // 32] >> np.uint32(token % 32) & 1):
            raise ValueError(f"token {token} is not allowed after the {len(self.tokens)} tokens of this output")
        if not self.done:
            self.state.consume_token(token)  # may run into a limit, which `done` and `error` then tell
        self.tokens.append(token)
        self.seen = None

    def rollback(self, n: int) -> None:
        """Take back the last n tokens."""
        if not 0 <= n <= len(self.tokens):
            raise ValueError(f"cannot take back {n} of {len(self.tokens)} tokens")
        if n:
            self.tokens, self.seen, self.slow = self.tokens[: len(self.tokens) - n], None, False
            if self.done or not self.state.rollback(n):  # llguidance never leaves an error, nor counts a second end
                self._replay()

    def copy(self) -> "Matcher":
        """Return a second output that begins as this one."""
        return Matcher(self.vocabulary, self.compiled, list(self.tokens))

    def _replay(self) -> None:
        self.state = self.compiled.deep_copy()
        self.state.try_consume_tokens(self.tokens)


def compile(vocabulary: Vocabulary, spec: Spec, cache: Cache | None = None, stack: int = STACK) -> Matcher:
    """Compile a grammar for a model's vocabulary; with a cache, at most once. A smaller `stack` may end the process.

    ValueError with the reason: a grammar that does not parse, that needs what llguidance cannot do, that accepts no
    output at all, or that is too large (`MAX_CHARS`, `LIMITS`). ImportError without the extra `serve`.
    """
    compiled = None if cache is None else cache.get(vocabulary, spec)
    if compiled is None:
        with ThreadPoolExecutor(1) as pool:  # a new thread, since only that can have a stack of this size
            before = threading.stack_size(stack)
            try:
                future = pool.submit(_compile, vocabulary, spec)
            finally:
                threading.stack_size(before)
            compiled = future.result()
        if cache is not None:
            cache.put(vocabulary, spec, compiled)
    return Matcher(vocabulary, compiled)


def _compile(vocabulary: Vocabulary, spec: Spec) -> Any:
    guidance = _llguidance()
    source = guidance.LLMatcher
    try:
        if spec.kind in ("json_schema", "json_object"):
            schema = spec.body if spec.kind == "json_schema" else '{"type": "object"}'
            grammar = source.grammar_from_json_schema(schema, overrides=JSON_OPTIONS)
        elif spec.kind == "regex":
            grammar = source.grammar_from_regex(spec.body)
        elif spec.kind == "lark":
            grammar = source.grammar_from_lark(spec.body)
        else:
            grammar = source.grammar_from_lark("start: " + " | ".join(map(json.dumps, json.loads(spec.body))))
    except ValueError as e:
        raise ValueError(f"the {spec.kind} cannot be used: {e}") from e
    limits = guidance.LLParserLimits(verbose_errors=False, **LIMITS)
    compiled = source(vocabulary.trie, grammar, log_level=0, limits=limits)
    # Some grammars accept nothing, which only a mask shows; and copies share a lexer, which the first may use up.
    for _ in range(2):
        if not compiled.is_error():
            trial = compiled.deep_copy()
            trial.compute_bitmask()
            compiled = trial if trial.is_error() else compiled
    if (reason := _reason(compiled)) is not None:
        raise ValueError(f"the {spec.kind} cannot be used: {reason}")
    return compiled


def _reason(state: Any) -> str | None:
    if not state.is_error():
        return None
    reason = " ".join(state.get_error().partition("<non-verbose")[0].split())[:300]
    return "it accepts no output from here" if reason.startswith("NoExtension") else reason or "no reason given"


def _llguidance() -> Any:
    try:
        import llguidance
    except ImportError as e:
        raise ImportError("structured output needs llguidance: pip install 'fdel[serve]'") from e
    return llguidance
