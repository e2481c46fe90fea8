"""Chatting from Python says what the server says; a draft model changes no answer; recipes make engines."""

import json

import jax
import jax.numpy as jnp
import pytest

from fdel import cli, models, params, recipe, serve, text
from fdel.serve.server import launch
from fdel.serve.server.openai import APIError
from tests.serve import small, wire

pytest.importorskip("aiohttp", reason="needs the serve extra")
pytestmark = pytest.mark.slow
WEATHER = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": WEATHER}}]
MESSAGES = wire.CHAT["messages"]


def test_a_message_is_the_servers(running):
    for options in (
        {"temperature": 0, "max_tokens": 12},
        {"seed": 1, "max_tokens": 120, "tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False},
    ):
        status, answer, _ = wire.call(
            running, "POST", "/v1/chat/completions", {"model": "small", "messages": MESSAGES, **options}
        )
        want, got = answer["choices"][0]["message"], serve.ask(running.served, MESSAGES, **options)
        for call in (*want.get("tool_calls", ()), *got.get("tool_calls", ())):
            assert call.pop("id")
        assert status == 200 and got == want
    (call,) = got["tool_calls"]
    assert call["function"]["name"] == "weather" and json.loads(call["function"]["arguments"])["city"] in (
        "Paris",
        "Rome",
    )


def test_what_the_server_refuses_is_refused(running):
    for options, message in (({"temprature": 1}, "temprature"), ({"stream": True}, "one message is answered")):
        with pytest.raises(APIError, match=message):
            serve.ask(running.served, MESSAGES, **options)
    with pytest.raises(ValueError, match="the engine has no tokenizer"):
        serve.ask(serve.Engine(small.make_model(), serve.Settings(rows=1)), MESSAGES)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """A model, and a draft of it which is the same."""
    path = tmp_path_factory.mktemp("model")
    weights = params.init(small.llama.spec(small.CFG), jax.random.key(0), dtype=jnp.float32)
    models.save(models.Model(small.llama, small.CFG, weights), path)
    text.save(wire.tokenizer(), path)
    return path


def test_a_recipe_makes_an_engine_with_a_draft_model(directory):
    base = {"model": {"name_or_path": str(directory)}, "sharding": {"axis_dims": [1] * 5}, "actions": ["serve"]}
    plain = recipe.from_dict({**base, "esurge": {"max_num_seqs": 2}})
    drafted = plain.merge({"esurge": {"draft_model": str(directory), "draft_tokens": 2}})
    recipe.validate(drafted)
    engines = [
        recipe.build_engine(r) for r in (plain, drafted, plain.merge({"esurge": {"draft_model": str(directory)}}))
    ]
    assert [e.settings.drafts for e in engines] == [0, 2, 3] and engines[0].settings.rows == 2
    said = [serve.ask(e, MESSAGES, temperature=0, max_tokens=8) for e in engines[:2]]
    assert said[0] == said[1] and said[0]["role"] == "assistant"
    with pytest.raises(recipe.RecipeError, match="esurge.draft_tokens: found 0, expected 1 or more"):
        recipe.validate(plain.merge({"esurge": {"draft_tokens": 0}}))


def test_the_command_line_takes_a_draft_model(directory, monkeypatch, capsys):
    served = []
    monkeypatch.setattr(launch, "listen", lambda found, *_: served.extend(found))
    command = ["serve", str(directory), "--rows", "2", "--draft", str(directory)]
    assert cli.main(command) == 0 and served[0].engine.settings.drafts == 3
    assert cli.main([*command[:2], str(directory), *command[2:], "--name", "a", "--name", "b"]) == 2
    assert "a draft model guesses for one" in capsys.readouterr().err
