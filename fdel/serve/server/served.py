"""One model behind a server: its engine, and how tokens become what it answers."""

import base64
import functools
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fdel import text
from fdel.media.senses import TRUSTED
from fdel.serve.engine.engine import Engine
from fdel.serve.engine.pictures import PromptMedia, prompt_media
from fdel.serve.engine.reply import Delta
from fdel.serve.engine.request import SamplingParams, check_prompt, fit
from fdel.serve.server import grammar, openai, reasoning, tools
from fdel.serve.server.openai import body
from fdel.serve.server.openai.media import TYPES, Media, Shown, embedded
from fdel.serve.server.tokenizing import PromptEncoder

Prompts = Sequence[Sequence[int]]
BYTES = 2**26  # of what `ask` takes


@dataclass(frozen=True)
class ServedModel:
    """A name that clients ask for: an engine with a tokenizer, or an adapter of one (`adapter`, of the model `parent`).

    `format` is how the model writes calls of tools: a key of `tools.FORMATS`, or None (or "none").
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
    media: Media = Media(8, 1, 4)  # the most of one chat, of a model that sees, or hears

    @property
    def base(self) -> str:
        """The name of its engine, which adapters share."""
        return self.parent or self.name

    @property
    def takes(self) -> tuple[str, ...]:
        """What may go in."""
        return ("text", *(TYPES[kind] for kind, most in self.limits.media._asdict().items() if most))

    def with_adapter(self, adapter: str) -> "ServedModel":
        """The same with an adapter of the engine, under the adapter's name."""
        return replace(self, name=adapter, adapter=adapter, parent=self.name)

    def fit_context(
        self, prompts: Prompts, asked: SamplingParams, whole: bool = False
    ) -> tuple[list[list[int]], SamplingParams]:
        """Make prompts and answers fit the context together: max_tokens is cut to what is left after the longest prompt.

        Where nothing is left, prompts are cut to leave room for max_tokens, or for a quarter of the context if that is
        less. APIError if they may not be, or have to stay `whole`.
        """
        context, longest = self.engine.limit, max(map(len, prompts))
        if self.truncate is not None and not whole and longest + max(1, asked.min_tokens) > context > asked.min_tokens:
            room = max(1, asked.min_tokens, min(asked.max_tokens, context // 4))
            cut = replace(asked, max_tokens=room, truncate=self.truncate)
            prompts = [fit(p, cut, context) for p in prompts]
        return [list(p) for p in prompts], openai.cap_max_tokens(asked, max(map(len, prompts)), context)

    def check_lengths(self, prompts: Prompts) -> None:
        """Refuse texts that are longer than the context, or have ids that the model lacks: APIError."""
        for x in prompts:
            openai.cap_max_tokens(SamplingParams(max_tokens=1), len(x) - 1, self.engine.limit)
            try:
                check_prompt(x, self.engine.model.cfg.vocab, self.engine.limit + 1, "the prompt")
            except ValueError as e:
                raise openai.APIError(str(e), param="prompt") from e

    @functools.cached_property
    def limits(self) -> openai.Limits:
        """What one request may ask for."""
        limits = openai.Limits(self.engine.model.cfg.vocab, self.engine.limit)
        sight = self.engine.sight
        taken = [sight, sight and sight.video, sight and sight.sound]
        limits = replace(limits, media=Media(*(n if way else 0 for n, way in zip(self.media, taken, strict=True))))
        return replace(limits, outputs=min(limits.outputs, (self.engine.settings.queue + 1) // 2))  # a key's share

    @functools.cached_property
    def encoder(self) -> PromptEncoder:
        """What child processes need to know."""
        return PromptEncoder(self.tokenizer, self.engine.limit, self.vocabulary.width, self.engine.sight)

    @property
    def syntax(self) -> tools.Format | None:
        """How calls are written, for `tools.Output`."""
        return tools.FORMATS.get(self.format or "")

    def structure(self, asked: openai.Chat, inside: bool) -> grammar.Spec | None:
        """The grammar that the output has to follow: the client's, or that of calls which must come or be strict.

        `inside`: the prompt ends in the reasoning. APIError for a structure that this model cannot have.
        """
        strict = any(t.strict for t in asked.tools if t.name in asked.callable)
        calls = asked.callable and (asked.tool_choice != "auto" or strict)
        thoughts: Any = {"thinking": self.thinking, "inside": inside}
        try:
            if not calls:
                wanted = asked.grammar
                return wanted and tools.answer(wanted, self.tokenizer, harmony=self.format == "harmony", **thoughts)
            if self.syntax is None:
                raise ValueError(f"{self.name} has no known format of tool calls; set tool_choice to none")
            parameters = {t.name: t.parameters for t in asked.tools if t.name in asked.callable}
            thoughts |= {"required": asked.tool_choice != "auto", "several": asked.parallel}
            return tools.grammar(self.syntax, parameters, self.tokenizer, **thoughts)
        except ValueError as e:
            raise openai.APIError(str(e), param="tools" if calls else "response_format") from e

    def reader(self, asked: openai.Chat, inside: bool) -> "Reader":
        """Read one output of a chat; `inside`: its prompt ends in the reasoning."""
        thinking = self.thinking
        channels = self.syntax if self.syntax is not None and self.syntax.channels else None
        syntax = self.syntax if asked.callable else channels
        parameters = {t.name: t.parameters for t in asked.tools}
        out = tools.Output(syntax, parameters, thinking, inside, 128 if asked.parallel else 1)
        marks = [*(() if syntax is None else syntax.texts)]
        marks += [] if thinking is None else [thinking.start, thinking.end]
        # What a detokenizer would leave out, which differs from tokenizer to tokenizer of one format.
        special = channels is not None or any(s in mark for s in self.encoder.specials for mark in marks)
        words = text.Detokenizer(self.tokenizer, skip_special=False)
        thoughts = tools.Output(channels, {}, thinking, inside) if thinking or channels else None
        return Reader(self.engine.eos, out, words if special else None, thoughts, words)


def served_model(engine: Engine, name: str, tool_parser: str | None = None, truncate: str | None = None) -> ServedModel:
    """Put an engine behind a name. `tool_parser` as in `ServerOptions`: None goes by the chat template.

    ValueError for an engine without a tokenizer.
    """
    if engine.tokenizer is None:
        raise ValueError("the engine has no tokenizer; make it as Engine(model, tokenizer=text.load(directory))")
    template = engine.tokenizer.templates.get("default", "")
    return ServedModel(
        name, engine, engine.tokenizer, time.time(), grammar.Vocabulary(engine.tokenizer, engine.model.cfg.vocab),
        format=tools.detect(template) if tool_parser is None else tool_parser, thinking=reasoning.detect(template),
        truncate=truncate,
    )  # fmt: skip


@dataclass
class Reader:
    """Splits one output into reasoning, content and calls. `raw` reads tokens itself where markers are special tokens.

    `thoughts` reads the output once more, token by token by `words`, to count those of the reasoning: `reasoning`.
    """

    eos: Collection[int]
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
            last = delta.finish_reason == "stop" and delta.tokens[-1:] and delta.tokens[-1] in self.eos
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


def ask(to: Engine | ServedModel, messages: Sequence[Mapping[str, Any]], *,
        tools: Sequence[Mapping[str, Any]] | None = None, **options: Any) -> dict[str, Any]:  # fmt: skip
    """Answer a chat: {"role": "assistant", "content": ...}, with "tool_calls" and "reasoning_content" where there are any.

    `messages`, `tools` and `options` (max_tokens, temperature, tool_choice, response_format, ...) are those of OpenAI's
    chat completions, images as data URLs; what a model writes is parsed as the server parses it. Append the message and
    the tools' answers, and ask again. An engine needs its tokenizer; `launch.served` makes a ServedModel, which keeps
    compiled grammars.
    APIError for what the server would refuse, RuntimeError with the reason if the engine fails.
    """
    served = served_model(to, "model") if isinstance(to, Engine) else to
    if wrong := {"stream", "n", "best_of", "logprobs"} & options.keys():
        why = f"{', '.join(sorted(wrong))}: one message is answered; see Engine.stream, Engine.generate"
        raise openai.APIError(why)
    said = {"model": served.name, "messages": [dict(m) for m in messages], **options}
    asked = openai.parse_chat(said | ({"tools": [dict(t) for t in tools]} if tools else {}), served.limits)
    tail, ids = served.encoder.chat(asked.messages, [t.spec for t in asked.tools] or None, asked.template)
    inside = reasoning.opened(served.thinking, tail)
    spec, mask = served.structure(asked, inside), None
    if spec is not None:
        try:
            mask = grammar.compile(served.vocabulary, spec, served.grammars).copy
        except ValueError as e:
            raise openai.APIError(str(e), param="response_format") from e
    media = None
    if asked.shown:
        ids, media = _shown(served, asked.shown, ids)
    prompts, sampling = served.fit_context([ids], asked.sampling, media is not None)
    (found,) = served.engine.generate(prompts, sampling, mask=mask, adapter=served.adapter, media=[media])
    if found.finish_reason == "error":
        raise RuntimeError(found.error)
    reader = served.reader(asked, inside)
    reader.push(Delta(found.tokens, found.text or "", found.finish_reason))
    return body.message(reader.message())


def _shown(served: ServedModel, every: Sequence[Shown], ids: Sequence[int]) -> tuple[list[int], PromptMedia]:
    """Decode what a chat shows and plays here, and put it into its tokens. APIError for what cannot be shown."""
    pictures = []
    for shown in every:
        if (data := embedded(shown, BYTES)) is None:
            expected = f"expected data:{TYPES[shown.kind]}/...;base64,..."
            raise openai.APIError(f"{shown.path}: {expected}", param=shown.path)
        try:
            pictures.append(served.encoder.prepared(shown.kind, base64.b64decode(data, validate=True), TRUSTED))
        except ValueError as e:
            raise openai.APIError(f"{shown.path}: {e}", param=shown.path) from e
    try:
        return prompt_media(served.engine.sight, ids, pictures)
    except ValueError as e:
        raise openai.APIError(f"messages: {e}", param="messages") from e
