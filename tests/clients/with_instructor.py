"""What users of instructor do: `python with_instructor.py BASE_URL KEY MODEL`."""

import importlib.metadata
import sys
from typing import Literal

import instructor
import openai
from pydantic import BaseModel, ConfigDict

URL, KEY, MODEL = sys.argv[1:4]
ASK = [{"role": "user", "content": "How is the weather in Paris?"}]


class Weather(BaseModel):
    """The weather of a city. No other fields: a random model would go on adding some."""

    model_config = ConfigDict(extra="forbid")
    city: Literal["Paris", "Rome"]
    sunny: bool


def client(mode: instructor.Mode, key: str = KEY) -> instructor.Instructor:
    return instructor.from_openai(openai.OpenAI(base_url=URL, api_key=key, max_retries=0), mode=mode)


def structured(mode: instructor.Mode) -> None:
    """Fields of the class, the raw answer's usage, and a stream of parts."""
    asked = dict(model=MODEL, messages=ASK, max_tokens=200, temperature=0)
    found, raw = client(mode).create_with_completion(response_model=Weather, max_retries=0, **asked)
    assert isinstance(found, Weather) and raw.usage.total_tokens > 0
    *_, last = client(mode).create_partial(response_model=Weather, **asked)  # of a schema where all may be missing
    assert last.city in (None, "Paris", "Rome")


def errors() -> None:
    for kind, key, change in (
        (openai.AuthenticationError, "wrong", {}),
        (openai.NotFoundError, KEY, {"model": "nothing"}),
        (openai.BadRequestError, KEY, {"temperature": 3}),
    ):
        try:
            asked = dict(model=MODEL, messages=ASK, max_tokens=5, max_retries=0) | change
            client(instructor.Mode.JSON_SCHEMA, key).create(response_model=Weather, **asked)
        except kind:
            continue
        except instructor.core.InstructorRetryException as e:  # instructor wraps what its attempts raised
            assert isinstance(e.__cause__, kind) or kind.__name__ in repr(e.__cause__), repr(e.__cause__)
            continue
        raise AssertionError(f"no {kind.__name__}")


if __name__ == "__main__":
    for mode in (instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT, instructor.Mode.JSON_SCHEMA):
        structured(mode)
        print("ok", mode.name)
    errors()
    print("instructor", importlib.metadata.version("instructor"), "openai", openai.__version__)
