"""What users of the official Python client do: `python with_openai.py BASE_URL KEY MODEL`."""

import asyncio
import sys
from typing import Literal

import openai
from pydantic import BaseModel

URL, KEY, MODEL = sys.argv[1:4]
ASK = [{"role": "user", "content": "How is the weather in Paris?"}]
PARAMETERS = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"],
              "additionalProperties": False}  # fmt: skip
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}]
client = openai.OpenAI(base_url=URL, api_key=KEY, max_retries=0)


class Weather(BaseModel):
    city: Literal["Paris", "Rome"]
    sunny: bool


def chat() -> None:
    assert MODEL in [m.id for m in client.models.list()]
    whole = client.chat.completions.create(model=MODEL, messages=ASK, max_tokens=12, temperature=0)
    assert whole.choices[0].finish_reason in ("stop", "length") and whole.usage.completion_tokens <= 12
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    said, used = "", None
    for chunk in client.chat.completions.create(
        model=MODEL, messages=ASK, max_tokens=12, temperature=0, stream=True, stream_options={"include_usage": True}
    ):
        said += (chunk.choices[0].delta.content or "") if chunk.choices else ""
        used = chunk.usage or used
    assert (said, used.total_tokens) == (whole.choices[0].message.content, whole.usage.total_tokens)


def tools() -> None:
    asked = dict(model=MODEL, tools=TOOLS, tool_choice="required", parallel_tool_calls=False, max_tokens=150)
    message = client.chat.completions.create(messages=ASK, **asked).choices[0].message
    (call,) = message.tool_calls
    assert call.function.name == "weather" and call.function.arguments in ('{"city": "Paris"}', '{"city": "Rome"}')
    result = {"role": "tool", "tool_call_id": call.id, "content": "rain"}
    client.chat.completions.create(model=MODEL, messages=[*ASK, message, result], tools=TOOLS, max_tokens=5)
    with client.chat.completions.stream(messages=ASK, **asked, seed=1) as stream:
        kinds = {event.type for event in stream}
        last = stream.get_final_completion().choices[0]
    assert "tool_calls.function.arguments.done" in kinds and last.finish_reason == "tool_calls"


def structured() -> None:
    found = client.chat.completions.parse(model=MODEL, messages=ASK, response_format=Weather, max_tokens=150, seed=1)
    assert isinstance(found.choices[0].message.parsed, Weather)
    answer = client.responses.parse(model=MODEL, input="weather", text_format=Weather, max_output_tokens=150)
    assert isinstance(answer.output_parsed, Weather) and answer.usage.output_tokens > 0


def others() -> None:
    text = client.completions.create(model=MODEL, prompt="the", max_tokens=3, logprobs=2, temperature=0).choices[0]
    assert len(text.logprobs.tokens) == 3
    assert len(client.embeddings.create(model=MODEL, input=["a", "b"]).data) == 2
    kinds = [event.type for event in client.responses.create(model=MODEL, input="a", max_output_tokens=4, stream=True)]
    assert kinds[0] == "response.created" and kinds[-1] in ("response.completed", "response.incomplete")


async def together() -> None:
    other = openai.AsyncOpenAI(base_url=URL, api_key=KEY, max_retries=0)
    ask = lambda i: other.chat.completions.create(model=MODEL, messages=ASK, max_tokens=4, seed=i)
    assert len(await asyncio.gather(*map(ask, range(4)))) == 4


def errors() -> None:
    def refused(kind: type, key: str = KEY, **change: object) -> openai.APIStatusError:
        asked = dict(model=MODEL, messages=ASK, max_tokens=2) | change
        try:
            openai.OpenAI(base_url=URL, api_key=key, max_retries=0).chat.completions.create(**asked)
        except kind as e:
            return e
        raise AssertionError(f"no {kind.__name__}")

    assert refused(openai.AuthenticationError, key="wrong").status_code == 401
    assert refused(openai.NotFoundError, model="nothing").code == "model_not_found"
    assert refused(openai.BadRequestError, temperature=3).param == "temperature"
    long = [{"role": "user", "content": "word " * 5000}]
    assert refused(openai.BadRequestError, messages=long).code == "context_length_exceeded"


if __name__ == "__main__":
    for part in (chat, tools, structured, others, errors):
        part()
        print("ok", part.__name__)
    asyncio.run(together())
    print("openai", openai.__version__)
