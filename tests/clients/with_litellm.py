"""What users of litellm do: `python with_litellm.py BASE_URL KEY MODEL`."""

import asyncio
import importlib.metadata
import json
import sys
from typing import Literal

import litellm
from pydantic import BaseModel

URL, KEY, MODEL = sys.argv[1:4]
ASK = [{"role": "user", "content": "How is the weather in Paris?"}]
PARAMETERS = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"],
              "additionalProperties": False}  # fmt: skip
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}]


class Weather(BaseModel):
    city: Literal["Paris", "Rome"]
    sunny: bool


def asked(**change: object) -> dict:
    base = dict(model=f"openai/{MODEL}", api_base=URL, api_key=KEY, messages=ASK, max_tokens=12, temperature=0)
    return base | dict(num_retries=0, max_retries=0) | change


def chat() -> None:
    whole = litellm.completion(**asked())
    used = whole.usage
    assert used.total_tokens == used.prompt_tokens + used.completion_tokens
    pieces = list(litellm.completion(**asked(stream=True, stream_options={"include_usage": True})))
    assert "".join(p.choices[0].delta.content or "" for p in pieces if p.choices) == whole.choices[0].message.content
    assert litellm.stream_chunk_builder(pieces).usage.total_tokens == used.total_tokens
    again = asyncio.run(litellm.acompletion(**asked()))
    assert again.choices[0].message.content == whole.choices[0].message.content


def tools() -> None:
    message = litellm.completion(**asked(tools=TOOLS, tool_choice="required", max_tokens=150)).choices[0].message
    call = message.tool_calls[0]
    assert call.function.name == "weather" and json.loads(call.function.arguments)["city"] in ("Paris", "Rome")
    results = [{"role": "tool", "tool_call_id": c.id, "content": "rain"} for c in message.tool_calls]
    litellm.completion(**asked(messages=[*ASK, message, *results], tools=TOOLS, max_tokens=4))


def structured() -> None:
    said = litellm.completion(**asked(response_format=Weather, max_tokens=150)).choices[0].message.content
    Weather.model_validate_json(said)


def others() -> None:
    found = litellm.embedding(model=f"openai/{MODEL}", api_base=URL, api_key=KEY, input=["a", "b"])
    assert len(found.data) == 2
    text = litellm.text_completion(model=f"openai/{MODEL}", api_base=URL, api_key=KEY, prompt="the", max_tokens=3)
    assert isinstance(text.choices[0].text, str)


def errors() -> None:
    for kind, change in (
        (litellm.AuthenticationError, {"api_key": "wrong"}),
        (litellm.NotFoundError, {"model": "openai/nothing"}),
        (litellm.BadRequestError, {"temperature": 3}),
        (litellm.ContextWindowExceededError, {"messages": [{"role": "user", "content": "word " * 5000}]}),
    ):
        try:
            litellm.completion(**asked(**change))
        except kind:
            continue
        raise AssertionError(f"no {kind.__name__}")


if __name__ == "__main__":
    for part in (chat, tools, structured, others, errors):
        part()
        print("ok", part.__name__)
    print("litellm", importlib.metadata.version("litellm"))
