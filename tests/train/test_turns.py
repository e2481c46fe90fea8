"""Environments in messages and tools; the oracle of what is rendered is transformers' `apply_chat_template`."""

import dataclasses
import json
import time

import numpy as np
import pytest

from fdel import text
from fdel.text.chat import ChatError
from fdel.train.rollout import Sample, Task
from fdel.train.rollout.turns import generations, schema, suffix, tools

WORDS = "what is the weather in two towns ? it is twenty one and rain tool call result user assistant name arguments"
SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>",
           "[INST]", "[/INST]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"]  # fmt: skip
PROMPT = [{"role": "user", "content": "what is the weather?"}]
ENDS = {"qwen": "<|im_end|>", "llama3": "<|eot_id|>", "mistral": "</s>"}


def weather(town: str, hour: int = 12) -> str:
    """Tell the weather."""
    return f"rain in {town} at {hour}"


def hangs(town: str) -> str:
    """Take its time."""
    time.sleep(30)


async def later(town: str) -> dict:
    """Answer in its own time."""
    return {"town": town}


@pytest.fixture(scope="module")
def toks():
    """A tokenizer for each style of templates, whose words merge across spaces and marks."""
    chats = pytest.importorskip("tests.test_text_chat", reason="the templates are beside the oracle")
    made = text.train_bpe([WORDS] * 3, 400, SPECIAL)
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    made = dataclasses.replace(made, special=special, json=made.backend.to_str())
    return {name: dataclasses.replace(made, templates={"default": chats.TEMPLATES[name]}) for name in ENDS}


def trajectory(tok, prompt: list[int], *drawn: list[int], said=()) -> Sample:
    """A sample that drew some replies, with what was said between them."""
    tokens, mask = list(prompt), [False] * len(prompt)
    for i, ids in enumerate(drawn):
        tokens, mask = tokens + ids, mask + [True] * len(ids)
        more = said[i] if i < len(said) else []
        tokens, mask = tokens + list(more), mask + [False] * len(more)
    zeros = np.zeros(len(tokens), np.float32)
    row = {"prompt": PROMPT}
    return Sample(
        Task(0, tuple(prompt), row), 0, np.array(tokens, np.int32), np.array(mask), zeros, zeros, zeros, "stop"
    )


@pytest.mark.parametrize("style", ENDS)
@pytest.mark.parametrize("ended", [True, False])
def test_what_is_said_is_what_the_template_writes(toks, style, ended, tmp_path):
    """Drawn ids and ours are the text that transformers renders, and begin with exactly what was drawn."""
    transformers = pytest.importorskip("transformers")
    tok, end = toks[style], ENDS[style]
    text.save(tok, tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    reply, new = "it is twenty", [{"role": "tool", "content": "21"}]
    before = text.encode(tok, text.render_chat(tok, PROMPT, add_generation_prompt=True), special=False)
    # As a model may draw it: letter by letter, which no tokenizer would write.
    drawn = [i for c in reply for i in text.encode(tok, c, special=False)]
    drawn += text.encode(tok, end, special=False) if ended else []
    assert drawn != text.encode(tok, reply + end * ended, special=False)
    said = suffix(tok, PROMPT, new, drawn)
    whole = theirs.apply_chat_template(
        [*PROMPT, {"role": "assistant", "content": reply}, *new], tokenize=False, add_generation_prompt=True
    )
    shown = text.decode(tok, [*before, *drawn, *said], skip_special=False)
    squeeze = lambda x: x.replace(" ", "")  # Mistral's templates put a space before a reply, which the model draws
    assert squeeze(shown) == squeeze(whole)
    s = trajectory(tok, before, drawn, [7, 8], said=[said])
    assert generations(s) == [drawn, [7, 8]] and s.tokens[len(before) :][: len(drawn)].tolist() == drawn


def test_a_template_that_drops_replies_is_refused(toks):
    silent = "{% for m in messages %}{% if m.role != 'assistant' %}{{ m.content }}{% endif %}{% endfor %}"
    tok = dataclasses.replace(toks["qwen"], templates={"default": silent})
    with pytest.raises(ChatError, match="drops a reply"):
        suffix(tok, PROMPT, [{"role": "tool", "content": "x"}], [1])


def calls(*said: tuple[str, object]) -> str:
    return "".join(f"<tool_call>\n{json.dumps({'name': n, 'arguments': a})}\n</tool_call>\n" for n, a in said)


def heard(tok, turn, *replies: str):
    """What tools answer to the last of some replies, as text and counts."""
    prompt = text.encode(tok, text.render_chat(tok, PROMPT, add_generation_prompt=True), special=False)
    ids = [text.encode(tok, r + "<|im_end|>", special=False) for r in replies]
    said = turn(trajectory(tok, prompt, *ids, said=[[0]] * (len(ids) - 1)))
    return text.decode(tok, said.tokens, skip_special=False), said


def test_tools_are_called(toks):
    tok = toks["qwen"]
    turn = tools(tok, [weather, hangs, later], timeout=0.3)
    shown, said = heard(tok, turn, "so " + calls(("weather", {"town": "Rome", "hour": 3}), ("later", {"town": "Oslo"})))
    assert "rain in Rome at 3" in shown and '{"town": "Oslo"}' in shown
    assert shown.startswith("\n<|im_start|>user") and shown.endswith("<|im_start|>assistant\n") and not said.done
    assert said.info == {"tools/calls": 2, "tools/failures": 0}
    assert heard(tok, turn, "nothing to call")[1].done
    assert heard(tok, turn, calls(("rain", {})))[1].done  # there is no such tool
    assert heard(tok, tools(tok, [weather], most=2), "a", calls(("weather", {"town": "x"})))[1].done


def test_tools_that_fail_say_so(toks):
    tok, begun = toks["qwen"], time.monotonic()
    turn = tools(tok, [weather, hangs], timeout=0.3)
    shown, said = heard(tok, turn, calls(("weather", {}), ("hangs", {"town": "x"}), ("weather", {"place": 1})))
    assert time.monotonic() - begun < 10 and said.info == {"tools/calls": 3, "tools/failures": 3}
    for why in ("missing a required argument: 'town'", "not done after 0.3 s"):
        assert why in shown, shown
    with pytest.raises(ValueError, match="expected one of"):
        tools(toks["llama3"], [weather], parser="none")
    with pytest.raises(ValueError, match="a list of messages"):
        s = trajectory(tok, [1], text.encode(tok, calls(("weather", {"town": "x"})), special=False))
        turn(dataclasses.replace(s, task=Task(0, (1,), {"prompt": "text"})))


def test_the_schema_of_a_function():
    assert schema(weather) == {
        "type": "function",
        "function": {
            "name": "weather", "description": "Tell the weather.",
            "parameters": {
                "type": "object", "properties": {"town": {"type": "string"}, "hour": {"type": "integer"}},
                "required": ["town"],
            },
        },
    }  # fmt: skip

    def odd(x: complex) -> None: ...

    with pytest.raises(ValueError, match="parameter x of odd is annotated with <class 'complex'>"):
        schema(odd)
    utils = pytest.importorskip("transformers.utils")

    def both(a: int, b: list[int], c: str = "x") -> str:
        """Do both.

        Args:
            a: one
            b: two
            c: three
        """

    theirs = utils.get_json_schema(both)["function"]["parameters"]
    ours = schema(both)["function"]["parameters"]
    assert ours["required"] == theirs["required"]
    assert {k: v["type"] for k, v in ours["properties"].items()} == {
        k: v["type"] for k, v in theirs["properties"].items()
    }


@pytest.mark.slow
def test_a_rollout_with_tools(toks):
    """A model that always draws one call: two turns, results between them, which are not learnt."""
    import jax
    import jax.numpy as jnp

    from fdel import models, ops, params
    from fdel.models import llama
    from fdel.serve import Engine, SamplingParams, Settings
    from fdel.train.rollout import rollout

    tok = toks["qwen"]
    cfg = llama.Config(vocab=400, embed=16, ffn=16, layers=1, heads=2, kv_heads=2, head_dim=8, rope=ops.Rope(8, 1e4))
    model = models.Model(llama, cfg, params.init(llama.spec(cfg), jax.random.key(0), dtype=jnp.float32))
    call = text.encode(tok, calls(("weather", {"town": "rome"})) + "<|im_end|>", special=False)

    class Scripted(Engine):
        """Draws the call alone, by a mask for each token."""

        def submit_all(self, prompts, sampling, **where):
            return super().submit_all(prompts, sampling, mask=Script, **where)

    class Script:
        def __init__(self):
            self.at, self.done = 0, False

        def mask(self):
            bits = np.zeros(-(-cfg.vocab // 32), np.uint32)
            bits[call[self.at] // 32] = np.uint32(1) << np.uint32(call[self.at] % 32)
            return bits

        def commit(self, token):
            self.at += 1

    engine = Scripted(model, Settings(rows=4, max_length=512), eos=[tok.backend.token_to_id("<|im_end|>")])
    prompt = text.encode(tok, text.render_chat(tok, PROMPT, add_generation_prompt=True), special=False)
    task = Task(0, tuple(prompt), {"prompt": PROMPT})
    ask = SamplingParams(max_tokens=400, temperature=1.0)
    (s,) = rollout(engine, [task], ask, samples=1, turn=tools(tok, [weather], most=3))
    assert s.finish == "stop" and s.info == {"turns": 3, "tools/calls": 2, "tools/failures": 0}
    assert generations(s) == [call] * 3
    shown = text.decode(tok, s.tokens[~s.drawn].tolist(), skip_special=False)
    assert shown.count("rain in rome at 12") == 2 and shown.count("<|im_start|>assistant\n") == 3
