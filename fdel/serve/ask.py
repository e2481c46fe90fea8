"""Chat with an engine from Python: messages and tools in, the assistant's message out."""

from collections.abc import Mapping, Sequence
from typing import Any

from fdel.serve import grammar, openai
from fdel.serve.engine import Engine
from fdel.serve.openai import body
from fdel.serve.reply import Delta
from fdel.serve.served import Served, around


def ask(
    to: Engine | Served,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Answer a chat: {"role": "assistant", "content": ...}, with "tool_calls" and "reasoning_content" where there are any.

    `messages`, `tools` and `options` (max_tokens, temperature, tool_choice, response_format, ...) are those of OpenAI's
    chat completions; what a model writes is parsed as the server parses it. Append the message and the tools' answers, and
    ask again. An engine needs its tokenizer; `launch.served` makes a Served, which keeps compiled grammars. APIError for
    what the server would refuse, RuntimeError with the reason if the engine fails.
    """
    served = around(to, "model") if isinstance(to, Engine) else to
    if wrong := {"stream", "n", "best_of", "logprobs"} & options.keys():
        raise openai.APIError(
            f"{', '.join(sorted(wrong))}: one message is answered; see Engine.stream, Engine.generate"
        )
    said = {"model": served.name, "messages": [dict(m) for m in messages], **options}
    asked = openai.parse_chat(said | ({"tools": [dict(t) for t in tools]} if tools else {}), served.limits)
    prompt = served.chat(asked)
    spec, mask = prompt.spec(), None
    if spec is not None:
        try:
            mask = lambda: grammar.compile(served.vocabulary, spec, served.grammars)
            mask()
        except ValueError as e:
            raise openai.APIError(str(e), param="response_format") from e
    prompts, sampling = served.fit([prompt.ids], asked.sampling)
    (found,) = served.engine.generate(prompts, sampling, mask=mask, adapter=served.adapter)
    if found.finish_reason == "error":
        raise RuntimeError(found.error)
    reader = prompt.reader()
    reader.push(Delta(found.tokens, found.text or "", found.finish_reason))
    return body.message(reader.message())
