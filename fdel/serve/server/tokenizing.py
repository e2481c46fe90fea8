"""A client's texts as tokens, and messages in the words of a chat template. Child processes do this (`worker`): no jax."""

import functools
import math
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tokenizers

from fdel import text
from fdel.serve.server import grammar
from fdel.serve.server.openai.checks import APIError

# Keys, and values of "role" and "type", that the protocol itself writes: templates look for them.
_FIXED = frozenset(
    "role type content name arguments function tool_calls tool_call_id id reasoning_content description parameters strict "
    "properties required items enum additionalProperties system user assistant tool text string number integer boolean "
    "object array null".split()
)


PAIRS = "score"  # the name of the chat template for pairs


@dataclass(frozen=True, eq=False)
class PromptEncoder:
    """A tokenizer with its chat template; `context` is the model's length in tokens, `width` its number of logits."""

    tokenizer: text.Tokenizer
    context: int
    width: int

    def facts(self) -> dict[str, Any]:
        """Write it down as JSON values, for `from_facts` in another process."""
        tok = self.tokenizer
        return {
            "json": tok.backend.to_str(), "split": tok.backend.encode_special_tokens, "special": dict(tok.special),
            "eos": list(tok.eos_ids), "templates": dict(tok.templates), "context": self.context, "width": self.width,
        }  # fmt: skip

    @classmethod
    def from_facts(cls, facts: Mapping[str, Any]) -> "PromptEncoder":
        """Make it from what `facts` gave."""
        backend = tokenizers.Tokenizer.from_str(facts["json"])
        backend.encode_special_tokens = facts["split"]
        tok = text.Tokenizer(backend, facts["special"], tuple(facts["eos"]), facts["templates"], {}, facts["json"])
        return cls(tok, facts["context"], facts["width"])

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
