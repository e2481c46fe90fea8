"""What users of langchain-openai do: `python with_langchain.py BASE_URL KEY MODEL`."""

import asyncio
import importlib.metadata
import sys
from typing import Literal

import openai
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from pydantic import BaseModel

URL, KEY, MODEL = sys.argv[1:4]


class Weather(BaseModel):
    """The weather of a city."""

    city: Literal["Paris", "Rome"]
    sunny: bool


@tool
def weather(city: Literal["Paris", "Rome"]) -> str:
    """Tell the weather of a city."""
    return f"rain in {city}"


def model(**change: object) -> ChatOpenAI:
    return ChatOpenAI(
        **dict(base_url=URL, api_key=KEY, model=MODEL, temperature=0, max_tokens=12, max_retries=0) | change
    )


def chat() -> None:
    whole = model().invoke("How is the weather?")
    used = whole.usage_metadata
    assert isinstance(whole.content, str) and used["total_tokens"] == used["input_tokens"] + used["output_tokens"]
    pieces = list(model(stream_usage=True).stream("How is the weather?"))
    assert "".join(p.content for p in pieces) == whole.content
    assert sum(p.usage_metadata["total_tokens"] for p in pieces if p.usage_metadata) == used["total_tokens"]
    both = model().batch(["a", [("system", "be brief"), ("user", "b")]])
    assert len(both) == 2 and asyncio.run(model().ainvoke("How is the weather?")).content == whole.content


def tools() -> None:
    bound = model(max_tokens=150).bind_tools([weather], tool_choice="any", parallel_tool_calls=False, strict=True)
    asked = [HumanMessage("How is the weather in Paris?")]
    called = bound.invoke(asked)
    (call,) = called.tool_calls
    assert call["name"] == "weather" and call["args"]["city"] in ("Paris", "Rome")
    result = weather.invoke(call)
    assert isinstance(result, ToolMessage) and isinstance(model().invoke([*asked, called, result]).content, str)
    merged = None
    for piece in bound.stream(asked):
        merged = piece if merged is None else merged + piece
    assert merged.tool_calls[0]["args"] == call["args"]


def structured() -> None:
    for method in ("json_schema", "function_calling"):
        found = (
            model(max_tokens=150)
            .with_structured_output(Weather, method=method, strict=True)
            .invoke("How is the weather?")
        )
        assert isinstance(found, Weather), method


def others() -> None:
    vectors = OpenAIEmbeddings(base_url=URL, api_key=KEY, model=MODEL, check_embedding_ctx_length=False)
    assert len(vectors.embed_documents(["a", "b"])) == 2
    answer = model(use_responses_api=True, output_version="responses/v1").invoke("How is the weather?")
    assert isinstance(answer.text, str) and answer.usage_metadata["output_tokens"] > 0


def errors() -> None:
    for kind, change in (
        (openai.AuthenticationError, {"api_key": "wrong"}),
        (openai.NotFoundError, {"model": "nothing"}),
        (openai.BadRequestError, {"temperature": 3}),
    ):
        try:
            model(**change).invoke("a")
        except kind:
            continue
        raise AssertionError(f"no {kind.__name__}")


if __name__ == "__main__":
    for part in (chat, tools, structured, others, errors):
        part()
        print("ok", part.__name__)
    print("langchain-openai", importlib.metadata.version("langchain-openai"), "openai", openai.__version__)
