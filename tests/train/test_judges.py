"""Rewards by models: a reward model as transformers scores, judges by what they are asked and answer."""

import dataclasses
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fdel import models, params, serve, text
from fdel.models import heads, llama
from fdel.serve.engine.naive import naive_generate
from fdel.train.rollout import judges
from tests.serve import small

TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}[a]{% endif %}"
)
TOK = dataclasses.replace(text.train_bpe(["hello, is it A or B? "], 290, ["<s>"]), templates={"default": TEMPLATE})
PLAIN = dataclasses.replace(TOK, templates={}, special={"eos_token": "<s>"})
CHAT = [{"role": "user", "content": "is it?"}]
SAID = [{"role": "assistant", "content": "it is"}]
TEXTS = [[*range(3, 3 + n)] for n in (5, 1, 40, 17, 33)]


@pytest.mark.slow
def test_row_scores_are_those_of_transformers(tmp_path, monkeypatch):
    """LlamaForSequenceClassification of one label, random weights, each text alone: 1e-5; two sizes are compiled."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    from tests.models import tiny

    values = json.loads(json.dumps(tiny.TINY["llama"].values)) | {"pad_token_id": 0, "num_labels": 1}
    oracle = transformers.LlamaForSequenceClassification(
        getattr(transformers, tiny.TINY["llama"].config)(**values)
    ).eval()
    tiny.randomise(oracle, 1)
    oracle.save_pretrained(tmp_path)
    with torch.no_grad():
        want = [oracle(torch.tensor([x])).logits[0, 0].item() for x in TEXTS]
    traced, build = [], judges.losses.score_rows
    noted = lambda f: lambda p, batch: traced.append(batch["tokens"].shape) or f(p, batch)
    monkeypatch.setattr(judges.losses, "score_rows", lambda *a: noted(build(*a)))
    scores = judges.row_scores(models.load(tmp_path, dtype=jnp.float32), length=48, rows=2)
    np.testing.assert_allclose(scores(TEXTS), want, atol=1e-5)
    assert np.ptp(want) > 0.1 and sorted(traced) == [(2, 32), (2, 48)]
    np.testing.assert_allclose(scores(TEXTS[::-1]), want[::-1], atol=1e-5)
    assert len(traced) == 2 and scores([]).shape == (0,)
    for wrong in ([[]], [[1] * 49]):
        with pytest.raises(ValueError, match="expected 1 to length=48"):
            scores([*TEXTS, *wrong])


@pytest.mark.parametrize(
    ("kind", "labels", "found"), [("sequence", 2, "sequence of 2"), ("token", 1, "token"), (None, 0, "no head")]
)
def test_a_reward_model_has_one_label(kind, labels, found):
    made = jax.eval_shape(lambda: params.init(heads.spec(llama, small.CFG, kind, labels), jax.random.key(0)))
    with pytest.raises(ValueError, match=f"{found}.*expected a reward model"):
        judges.row_scores(models.Model(llama, small.CFG, made), length=8)


def test_reward_models_see_what_they_learnt_from():
    asked = []
    reward = judges.reward_model(
        lambda ids: asked.extend(ids) or np.arange(len(ids), dtype=np.float32), judges.text_ids(TOK)
    )
    assert reward(prompts=[CHAT, CHAT], completions=[SAID, SAID], answer=[1, 2]) == [0.0, 1.0]
    assert text.decode(TOK, asked[0]) == "[user]is it?[assistant]it is"
    ids = judges.text_ids(PLAIN)
    assert ids("is it? ", "A") == ids("is it? ", "A<s>") == [*text.encode(PLAIN, "is it? A"), PLAIN.ids["eos"]]


def test_a_judge_is_asked_about_each_row():
    asked = []
    answers = ["I say 7 of it: 7", None, "11", "no number", "1"]
    reward = judges.judge(lambda x: asked.extend(x) or answers, "{prompt}|{completion}|{answer}")
    told = {"prompts": [CHAT, *"bcde"], "completions": [SAID, *"bcde"], "answer": [1, "{x}", 3, 4, 5]}
    assert reward(**told, completion_ids=[[]] * 5) == [pytest.approx(6 / 9), None, None, None, 0]
    assert asked[:2] == ["user: is it?|it is|1", "b|b|{x}"]
    assert judges.judge(lambda x: x, "{completion}", float)(prompts=["a"], completions=["2.5"]) == [2.5]
    with pytest.raises(ValueError, match="template asks for 'colour'; there is answer, completion_ids, prompt"):
        judges.judge(lambda x: x, "{colour}")(**told, completion_ids=[[]] * 5)
    with pytest.raises(RuntimeError, match="1 answers to 5 questions"):
        judges.judge(lambda x: ["1"])(**told)
    with pytest.raises(RuntimeError, match="none of 5 questions"):
        judges.judge(lambda x: [None] * 5)(**told)
    with pytest.raises(ValueError, match="the lower one first"):
        judges.rating(2, 1)


def test_preferences_ask_in_both_orders():
    """One judge that knows, one that always says A, and one that is silent about the first order."""
    told = {
        "prompts": ["p", "p"],
        "first": ["good", "bad"],
        "second": ["bad", [{"role": "assistant", "content": "good"}]],
    }
    knows = lambda asked: ["A" if x.index("good") < x.index("bad") else "The answer is B." for x in asked]
    np.testing.assert_array_equal(judges.preference(knows)(**told), [1, 0])
    np.testing.assert_array_equal(judges.preference(lambda x: ["A"] * 4)(**told), [0.5, 0.5])
    np.testing.assert_array_equal(judges.preference(lambda x: [None, "A", "B", "B"])(**told), [np.nan, 1])


def test_rewards_make_preferences():
    """Bradley and Terry: sigmoid of the difference, also where exp overflows."""
    reward = lambda prompts, completions, scale, **_: [
        None if c == "?" else float(c) * s for c, s in zip(completions, scale, strict=True)
    ]
    p = judges.by_rewards(reward)(prompts=["p"] * 4, first=["1", "0", "?", "1"], second=["0", "1", "0", "0"],
                                  scale=[2, 2, 2, 2000])  # fmt: skip
    np.testing.assert_allclose(p, [1 / (1 + math.exp(-2)), 1 / (1 + math.exp(2)), np.nan, 1])


@pytest.mark.slow
def test_an_engine_is_a_judge():
    """As the plain loop over forward continues the rendered chat."""
    model = small.make_model(3)
    engine = serve.Engine(model, serve.Settings(rows=2, max_length=64))
    for tok, rendered in ((TOK, "[user]is it?[a]"), (PLAIN, "is it?")):
        ids = text.encode(tok, rendered, special=False)
        want = text.decode(tok, naive_generate(model, ids, 6).tokens)
        assert judges.ask_engine(engine, tok, serve.SamplingParams(max_tokens=6))(["is it?"]) == [want]
