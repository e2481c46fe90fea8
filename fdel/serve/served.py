"""One model behind a server: its engine, and how tokens become what it answers."""

import functools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fdel import text
from fdel.serve import grammar, openai, reasoning, tools
from fdel.serve.engine import Engine
from fdel.serve.reply import Delta
from fdel.serve.request import SamplingParams, fit
from fdel.serve.texts import Texts


@dataclass(frozen=True)
class Served:
    """A name that clients ask for: an engine with a tokenizer, or an adapter of one (`adapter`, of the model `parent`).

    `format` is how the model writes calls of tools: a key of `tools.FORMATS`, "harmony", or None (or "none").
    `truncate` is where prompts that do not fit are cut, "left", "right" or "middle"; None refuses them.
    """

    name: str
    engine: Engine
    tokenizer: text.Tokenizer
    created: float  # seconds since 1970
    vocabulary: grammar.Vocabulary
    grammars: grammar.Cache = field(default_factory=grammar.Cache)
    format: str | None = None
    thinking: reasoning.Thinking | None = None
    adapter: str = ""
    parent: str | None = None
    truncate: str | None = None

    @property
    def base(self) -> str:
        """The name of its engine, which adapters share."""
        return self.parent or self.name

    def under(self, adapter: str) -> "Served":
        """The same with an adapter of the engine, under the adapter's name."""
        return replace(self, name=adapter, adapter=adapter, parent=self.name)

    def fit(self, prompts: Sequence[Sequence[int]], asked: SamplingParams) -> tuple[list[list[int]], SamplingParams]:
        """Make prompts and answers fit the context together: max_tokens is cut to what is left after the longest prompt.

        Where nothing is left, prompts are cut to leave room for max_tokens, or for a quarter of the context if that is
        less. APIError if they may not be.
        """
        context, longest = self.engine.limit, max(map(len, prompts))
        if self.truncate is not None and longest + max(1, asked.min_tokens) > context > asked.min_tokens:
            room = max(1, asked.min_tokens, min(asked.max_tokens, context // 4))
            cut = replace(asked, max_tokens=room, truncate=self.truncate)
            prompts = [fit(p, cut, context) for p in prompts]
        return [list(p) for p in prompts], openai.fit(asked, max(map(len, prompts)), context)

    @functools.cached_property
    def limits(self) -> openai.Limits:
        """What one request may ask for."""
        limits = openai.Limits(self.engine.model.cfg.vocab, self.engine.limit)
        return replace(limits, outputs=min(limits.outputs, (self.engine.settings.queue + 1) // 2))  # a key's share

    @functools.cached_property
    def texts(self) -> Texts:
        """What child processes need to know."""
        return Texts(self.tokenizer, self.engine.limit, self.vocabulary.width)

    @property
    def syntax(self) -> tools.Format | str | None:
        """How calls are written, for `tools.Output`."""
        return tools.FORMATS.get(self.format or "", self.format if self.format == "harmony" else None)

    def chat(self, asked: openai.Chat) -> "Prompt":
        """Render and tokenize a chat in this process, for who trusts those who wrote it."""
        tools = [t.spec for t in asked.tools] or None
        return Prompt(self, asked, *self.texts.chat(asked.messages, tools, asked.template))


def around(engine: Engine, name: str, tool_parser: str | None = None, truncate: str | None = None) -> Served:
    """Put an engine behind a name. `tool_parser` as in `launch.Options`: None goes by the chat template.

    ValueError for an engine without a tokenizer.
    """
    if engine.tokenizer is None:
        raise ValueError("the engine has no tokenizer; make it as Engine(model, tokenizer=text.load(directory))")
    template = engine.tokenizer.templates.get("default", "")
    return Served(
        name, engine, engine.tokenizer, time.time(), grammar.Vocabulary(engine.tokenizer, engine.model.cfg.vocab),
        format=tools.detect(template) if tool_parser is None else tool_parser, thinking=reasoning.detect(template),
        truncate=truncate,
    )  # fmt: skip


@dataclass(frozen=True)
class Prompt:
    """A chat that is ready to run."""

    served: Served
    asked: openai.Chat
    said: str  # the end of it
    ids: Sequence[int]

    @property
    def inside(self) -> bool:
        """Whether the prompt ends inside of the reasoning."""
        thinking = self.served.thinking
        return thinking is not None and reasoning.opened(thinking, self.said)

    def spec(self) -> grammar.Spec | None:
        """The grammar that the output has to follow: the client's, or that of calls which must come or be strict."""
        asked, served = self.asked, self.served
        strict = any(t.strict for t in asked.tools if t.name in asked.callable)
        calls = asked.callable and (asked.tool_choice != "auto" or strict)
        thoughts: Any = {"thinking": served.thinking, "inside": self.inside}
        try:
            if not calls:
                harmony, wanted = served.format == "harmony", asked.grammar
                return wanted and tools.answer(wanted, served.tokenizer, harmony=harmony, **thoughts)
            if served.syntax is None:
                raise ValueError(f"{served.name} has no known format of tool calls; set tool_choice to none")
            parameters = {t.name: t.parameters for t in asked.tools if t.name in asked.callable}
            several, required = asked.parallel, asked.tool_choice != "auto"
            return tools.grammar(
                served.syntax, parameters, served.tokenizer, required=required, several=several, **thoughts
            )
        except ValueError as e:
            raise openai.APIError(str(e), param="tools" if calls else "response_format") from e

    def reader(self) -> "Reader":
        """Read one output of this prompt."""
        asked, served = self.asked, self.served
        thinking = served.thinking
        syntax = served.syntax if asked.callable or served.format == "harmony" else None
        parameters = {t.name: t.parameters for t in asked.tools}
        out = tools.Output(syntax, parameters, thinking, self.inside, 128 if asked.parallel else 1)
        said = [*(syntax.texts if isinstance(syntax, tools.Format) else ())]
        said += [] if thinking is None else [thinking.start, thinking.end]
        # What a detokenizer would leave out, which differs from tokenizer to tokenizer of one format.
        marks = syntax == "harmony" or any(special in part for special in served.texts.specials for part in said)
        words = text.Detokenizer(served.tokenizer, skip_special=False)
        thoughts = None
        if thinking is not None or syntax == "harmony":
            thoughts = tools.Output(syntax if syntax == "harmony" else None, {}, thinking, self.inside)
        return Reader(served, out, words if marks else None, thoughts, words)


@dataclass
class Reader:
    """Splits one output into reasoning, content and calls. `raw` reads tokens itself where markers are special tokens.

    `thoughts` reads the output once more, token by token by `words`, to count those of the reasoning: `reasoning`.
    """

    served: Served
    output: tools.Output
    raw: text.Detokenizer | None
    thoughts: tools.Output | None
    words: text.Detokenizer
    reasoning: int = 0
    found: list[tools.Delta] = field(default_factory=list)

    def push(self, delta: Delta) -> list[tools.Delta]:
        """Take what a step added; the last one ends the output."""
        self._count(delta.tokens)
        said = delta.text
        if self.raw is not None:
            last = delta.finish_reason == "stop" and delta.tokens[-1:] and delta.tokens[-1] in self.served.engine.eos
            self.raw, said = text.step(self.raw, delta.tokens[:-1] if last else delta.tokens)
            said += text.flush(self.raw) if delta.finish_reason else ""
        new = self.output.push(said) if said else []
        new += self.output.finish() if delta.finish_reason else []
        self.found += new
        return new

    def _count(self, tokens: Sequence[int]) -> None:
        """Count tokens between the marks of reasoning."""
        for token in tokens:
            if self.thoughts is None:
                return
            before = self.thoughts.sink.kind
            self.words, said = text.step(self.words, [token])
            if said:
                self.thoughts.push(said)
            now = self.thoughts.sink.kind
            self.reasoning += before == now == "reasoning"
            if now == "content" and self.thoughts.format is None:
                self.thoughts = None  # what follows an answer is no reasoning

    def message(self) -> tools.Message:
        """The whole output."""
        return tools.message(self.found)
