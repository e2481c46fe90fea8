"""A client's texts as tokens, and messages in the words of a chat template. Child processes do this (`worker`): no jax."""

import dataclasses
import functools
import importlib
import math
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tokenizers

from fdel import text
from fdel.media import senses
from fdel.media import sight as sights
from fdel.media.senses import Item, Most
from fdel.media.sight import Sight
from fdel.serve.server import grammar
from fdel.serve.server.openai.checks import APIError

# Keys, and values of "role" and "type", that the protocol itself writes: templates look for them.
_FIXED = frozenset(
    "role type content name arguments function tool_calls tool_call_id id reasoning_content description parameters strict "
    "properties required items enum additionalProperties system user assistant tool text string number integer boolean "
    "object array null image video audio".split()
)


PAIRS = "score"  # the name of the chat template for pairs


@dataclass(frozen=True, eq=False)
class PromptEncoder:
    """A tokenizer with its chat template; `context` is the model's length in tokens, `width` its number of logits.

    `sight` is how the model sees, if it does.
    """

    tokenizer: text.Tokenizer
    context: int
    width: int
    sight: Sight | None = None

    def facts(self) -> dict[str, Any]:
        """Write it down as JSON values, for `from_facts` in another process."""
        tok = self.tokenizer
        return {
            "json": tok.backend.to_str(), "split": tok.backend.encode_special_tokens, "special": dict(tok.special),
            "eos": list(tok.eos_ids), "templates": dict(tok.templates), "context": self.context, "width": self.width,
            "sight": _written(self.sight),
        }  # fmt: skip

    @classmethod
    def from_facts(cls, facts: Mapping[str, Any]) -> "PromptEncoder":
        """Make it from what `facts` gave."""
        backend = tokenizers.Tokenizer.from_str(facts["json"])
        backend.encode_special_tokens = facts["split"]
        tok = text.Tokenizer(backend, facts["special"], tuple(facts["eos"]), facts["templates"], {}, facts["json"])
        return cls(tok, facts["context"], facts["width"], _read(facts["sight"]))

    @functools.cached_property
    def vocabulary(self) -> grammar.Vocabulary:
        """The tokens for grammars."""
        return grammar.Vocabulary(self.tokenizer, self.width)

    @functools.cached_property
    def specials(self) -> tuple[str, ...]:
        """The texts of special tokens, the longest first."""
        texts = {self.tokenizer.backend.id_to_token(i) for i in self.tokenizer.special_ids}
        return tuple(sorted(filter(None, texts), key=lambda t: (-len(t), t)))

    @functools.cached_property
    def plain(self) -> text.Tokenizer:
        """The tokenizer to which special tokens are text as any other."""
        facts = {**self.facts(), "split": True}
        return PromptEncoder.from_facts(facts).tokenizer

    @functools.cached_property
    def longest(self) -> float:
        """A bound on the characters of a text that fits the context; infinite where one token may stand for any text."""
        pieces = self.tokenizer.pieces
        if not (pieces.byte_level or pieces.byte_fallback):
            return math.inf
        return 4 * self.context * max(map(len, self.tokenizer.backend.get_vocab()))  # normalizers may shorten

    @functools.cached_property
    def listed(self) -> bool:
        """Whether the chat template of a model that sees shows texts only as parts of a list."""
        if self.sight is None or "default" not in self.tokenizer.templates:
            return False
        shown = []
        for content in ("4821", [{"type": "text", "text": "4821"}]):
            try:
                shown.append("4821" in text.render_chat(self.tokenizer, [{"role": "user", "content": content}]))
            except text.ChatError:
                shown.append(False)
        return shown == [False, True]

    def prepared(self, kind: str, data: bytes, most: Most) -> Item:
        """Decode and prepare a file (`media.senses.prepare`); ValueError for what is none, or too large."""
        try:
            return senses.prepare(
                self.sight, kind, data, most, lambda said: text.encode(self.plain, said, special=False)
            )
        except ImportError as e:
            raise ValueError(f"this server cannot read {kind}: {e}") from e

    def look(self, said: str) -> None:
        """Refuse a text that is too long by its characters already: to tokenize megabytes takes seconds."""
        if len(said) > self.longest:
            raise APIError(
                f"the prompt has {len(said)} characters, more than the model's context of {self.context} tokens holds",
                param="messages", code="context_length_exceeded",
            )  # fmt: skip

    def encode(self, said: str | Sequence[str], special: bool = True) -> list[int]:
        """Tokenize a client's text, or a pair; special tokens in it stay text. `special`: the tokenizer adds its own.

        A pair is a query and a document: written by the chat template `PAIRS` where there is one, as vLLM does.
        """
        if not isinstance(said, str) and PAIRS in self.tokenizer.templates:
            return self._pair(*said)
        self.look(said if isinstance(said, str) else "".join(said))
        ids = text.encode(self.plain, said, special=special)
        if not ids:
            raise APIError("the prompt is empty; it needs at least one token", param="prompt")
        return ids

    def _pair(self, query: str, document: str) -> list[int]:
        """Write a pair by its template; bos and eos are added as to any text, unless the template wrote them."""
        messages = [{"role": "query", "content": query}, {"role": "document", "content": document}]
        _, ids = self.chat(messages, None, {"template": PAIRS, "add_generation_prompt": False})
        tok = self.tokenizer
        first, last = [tok.ids["bos"]] if tok.add_bos else [], [tok.ids["eos"]] if tok.add_eos else []
        return first * (ids[:1] != first) + ids + last * (ids[-1:] != last)

    def tokens(self, said: str, special: bool) -> list[int]:
        """Tokenize what somebody wants to see as tokens; a text that is one special token alone is asked for its id."""
        known = said in self.specials  # as lm_eval asks for bos and eos
        return text.encode(self.tokenizer if known else self.plain, said, special=special)

    def chat(self, messages: Sequence[Any], tools: Any, variables: Mapping[str, Any]) -> tuple[str, list[int]]:
        """Render and tokenize a chat. Only the template writes special tokens: wherever a client spelled one, it is text.

        Until the template has run, a number that nobody can guess stands for it: digits survive what templates do.
        """
        nonce, found = f"{secrets.randbelow(10**24):024}", re.compile("|".join(map(re.escape, self.specials)))
        if self.listed:
            parts = lambda m: m | {"content": [{"type": "text", "text": m["content"]}]}
            messages = [parts(m) if isinstance(m.get("content"), str) else m for m in messages]
        if self.specials:
            mark = lambda s: found.sub(lambda m: f"{nonce}{self.specials.index(m[0]):06}", s)
            messages, tools = _mapped(messages, mark), _mapped(tools, mark)
            variables = {k: _mapped(v, mark) for k, v in variables.items()}
        try:
            said = text.render_chat(
                self.tokenizer, messages, tools=tools, **{"add_generation_prompt": True, **variables}
            )
        except text.ChatError as e:
            raise APIError(f"the messages do not fit this model's chat template: {e}", param="messages") from e
        said = sights.written(self.sight, said)
        self.look(said)
        ids: list[int] = []
        for i, part in enumerate(re.split(nonce + "([0-9]{6})", said)):  # text and numbers of special tokens take turns
            tok, part = (self.plain, self.specials[int(part)]) if i % 2 else (self.tokenizer, part)
            ids += text.encode(tok, part, special=False)
        return said, ids


def _mapped(value: Any, change: Any, fixed: bool = False) -> Any:
    """Change every string inside a value, keys as well; `fixed`: not those of the protocol."""
    if isinstance(value, str):
        return value if fixed and value in _FIXED else change(value)
    if isinstance(value, Mapping):
        return {_mapped(k, change, True): _mapped(v, change, k in ("role", "type")) for k, v in value.items()}
    return [_mapped(v, change, fixed) for v in value] if isinstance(value, list | tuple) else value


def _written(value: Any) -> Any:
    """Write what describes sight as JSON values: its classes are dataclasses of `fdel.media`."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: _written(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return {"class": [type(value).__module__, type(value).__name__], "fields": fields}
    return list(map(_written, value)) if isinstance(value, list | tuple) else value


def _read(value: Any) -> Any:
    """Read what `_written` gave; lists were tuples."""
    if isinstance(value, Mapping) and value.keys() == {"class", "fields"}:
        module, name = value["class"]
        if not module.startswith("fdel.media."):
            raise ValueError(f"found a class of {module}, expected one of fdel.media")
        return getattr(importlib.import_module(module), name)(**{k: _read(v) for k, v in value["fields"].items()})
    return tuple(map(_read, value)) if isinstance(value, list) else value
