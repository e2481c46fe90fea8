"""Benchmarks: an engine and a server against lm_eval's own backend for transformers, on one checkpoint and three tasks."""

import asyncio
import json
import random
import threading

import numpy as np
import pytest
from tokenizers.processors import TemplateProcessing

from fdel import cli, models, text
from fdel.serve.engine.engine import Engine, Settings
from fdel.serve.likelihood import likelihoods
from fdel.serve.server import evaluate, grammar, http, metrics
from fdel.serve.server.call import Server
from fdel.serve.server.served import ServedModel
from tests.serve import small

CONTEXT = 64
WORDS = "the weather in Paris is fine but the music of rain is not , so we stay and read old books about cats".split()
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
UNTIL = {"until": ["o", "\n", "<|system|>"], "max_gen_toks": 8}
TASKS = {
    "choices": {
        "output_type": "multiple_choice", "doc_to_text": "{{q}}", "doc_to_choice": "{{c}}", "doc_to_target": "{{a}}",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    },
    "answers": {
        "output_type": "generate_until", "doc_to_text": "{{q}}", "doc_to_target": "{{c[a]}}",
        "generation_kwargs": UNTIL, "metric_list": [{"metric": "exact_match"}],
    },
    "texts": {
        "output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{t}}",
        "metric_list": [{"metric": "word_perplexity"}, {"metric": "byte_perplexity"}],
    },
}  # fmt: skip


def sentence(rng: random.Random, n: int) -> str:
    return " ".join(rng.choices(WORDS, k=n))


def rows(count: int) -> list[dict]:
    """Questions of all lengths, some longer than the context, some ending in a space; choices of one token and more."""
    rng = random.Random(0)
    out = []
    for i in range(count):
        question = sentence(rng, [1, 3, 8, 20, 90][i % 5]) + rng.choice(["", " ", "\n"])
        choices = [" " + sentence(rng, rng.choice([1, 1, 3])) for _ in range(3)]
        out.append({"q": question, "c": choices, "a": i % 3, "t": sentence(rng, [2, 30, 150][i % 3])})
    return out


ROWS = rows(5)
PAIRS = [(r["q"], c) for r in ROWS for c in r["c"]]
PAIRS += [("", " the weather"), ("<s>the weather", " in Paris"), ("the  ", "music"), ("", "<s>the")]


def make_tokenizer() -> text.Tokenizer:
    """A byte-level BPE that adds a bos token, with a chat template that writes it itself."""
    tok = text.train_bpe([" ".join(WORDS)] * 3, 300, ["<s>", "<|user|>", "<|assistant|>", "<|system|>"])
    tok.backend.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    named = {"eos_token": "<|endoftext|>", "bos_token": "<s>", "pad_token": "<|endoftext|>"}
    return text.Tokenizer(tok.backend, named, (0,), {"default": TEMPLATE}, {}, tok.backend.to_str())


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Directories with a random llama of torch, and with tasks."""
    torch = pytest.importorskip("torch", reason="the oracle")
    from transformers import LlamaConfig, LlamaForCausalLM

    path, tasks = tmp_path_factory.mktemp("tiny"), tmp_path_factory.mktemp("tasks")
    torch.manual_seed(0)
    torch.set_num_threads(1)
    cfg = LlamaConfig(
        vocab_size=300, hidden_size=48, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=CONTEXT, bos_token_id=1, eos_token_id=0, pad_token_id=0,
        initializer_range=0.25,
    )  # fmt: skip
    LlamaForCausalLM(cfg).save_pretrained(path)
    text.save(make_tokenizer(), path)
    (tasks / "rows.json").write_text(json.dumps(ROWS))
    data = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(tasks / "rows.json")}}}
    for name, task in TASKS.items():
        (tasks / f"{name}.yaml").write_text(json.dumps({"task": name, "test_split": "test"} | data | task))
    return path, tasks


@pytest.fixture(scope="module")
def oracle(checkpoint):
    hf = pytest.importorskip("lm_eval.models.huggingface", reason="the oracle")
    return hf.HFLM(pretrained=str(checkpoint[0]), dtype="float32", batch_size=1, device="cpu")


@pytest.fixture(scope="module")
def engine(checkpoint):
    tok = text.load(checkpoint[0])
    made = Engine(models.load(checkpoint[0], stacked=False), Settings(rows=4, budget=64), tokenizer=tok)
    yield made
    made.close()


def ask(lm, kind: str, every: list[tuple]) -> list:
    """What an lm_eval model answers."""
    from lm_eval.api.instance import Instance

    return getattr(lm, kind)([Instance(kind, {}, args, i) for i, args in enumerate(every)])


def same(found: list, want: list) -> None:
    """Log-likelihoods are equal to 1e-6 of their size and what float32 leaves of logits of 20 (found: 2.6e-6 of 2.1)."""
    one = lambda answers: [a if isinstance(a, float) else a[0] for a in answers]
    np.testing.assert_allclose(one(found), one(want), rtol=1e-6, atol=5e-6)
    assert [a[1] for a in found if isinstance(a, tuple)] == [a[1] for a in want if isinstance(a, tuple)]


# ---- against transformers ------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_an_engine_answers_as_transformers_do(oracle, engine):
    """Contexts that are cut, empty ones, spaces at the end, bos that is there already, windows, stop strings."""
    lm = evaluate.language_model(engine, engine.tokenizer, "tiny", batch=4, progress=False)
    starts = [(q, {"max_gen_toks": 1}) for q in WORDS[:8]]
    likely = [(q, said) for (q, _), said in zip(starts, ask(lm, "generate_until", starts), strict=True) if said.strip()]
    same(ask(lm, "loglikelihood", PAIRS + likely), want := ask(oracle, "loglikelihood", PAIRS + likely))
    assert {greedy for _, greedy in want} == {True, False}
    long = [(r["t"],) for r in ROWS]
    same(ask(lm, "loglikelihood_rolling", long), ask(oracle, "loglikelihood_rolling", long))
    said = [(r["q"], dict(UNTIL)) for r in ROWS]
    assert ask(lm, "generate_until", said) == ask(oracle, "generate_until", said)
    talk = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "the weather"}]
    assert lm.apply_chat_template(talk) == oracle.apply_chat_template(talk)
    open_end = [*talk, {"role": "assistant", "content": "is"}]
    assert lm.apply_chat_template(open_end, False) == oracle.apply_chat_template(open_end, False)
    assert lm.chat_template(True) == TEMPLATE and "/" not in lm.tokenizer_name


@pytest.fixture(scope="module")
def address(checkpoint, engine):
    """The address of a server with the engine, without keys."""
    tok = engine.tokenizer
    state = Server(
        {"tiny": ServedModel("tiny", engine, tok, 1.0, grammar.Vocabulary(tok, 300))},
        metrics.Metrics(metrics.serving(["tiny"], http.PATHS)),
    )
    started, found = threading.Event(), []
    engine.start()

    async def main() -> None:
        runner = http.runner(state)
        await runner.setup()
        await http.web.TCPSite(runner, "127.0.0.1", 0).start()
        found.append(runner.addresses[0][1])
        started.set()
        await asyncio.get_running_loop().create_future()

    threading.Thread(target=lambda: asyncio.run(main()), daemon=True).start()
    assert started.wait(60)
    return f"http://127.0.0.1:{found[0]}/v1"


@pytest.mark.slow
def test_a_server_answers_as_transformers_do(oracle, address):
    """lm_eval's own client: several prompts in a request, the server's tokenizer, full precision of log-probabilities."""
    api = pytest.importorskip("lm_eval.models.openai_completions", reason="the oracle")
    how = {"model": "tiny", "max_length": CONTEXT, "tokenizer_backend": "remote", "batch_size": 4}
    lm = api.LocalCompletionsAPI(base_url=f"{address}/completions", **how)
    assert (lm.prefix_token_id, lm.eot_token_id) == (oracle.prefix_token_id, oracle.eot_token_id) == (1, 0)
    short = [(q, c) for q, c in PAIRS if len(q) + len(c) < 100 and "<s>" not in q + c]
    bare = harness_without_bos(oracle)
    same(ask(lm, "loglikelihood", short), ask(bare, "loglikelihood", short))
    brief = [(r["t"],) for r in ROWS if len(r["t"]) < 150]
    same(ask(lm, "loglikelihood_rolling", brief), ask(bare, "loglikelihood_rolling", brief))
    said = [(q, dict(UNTIL)) for q, _ in short if q]
    assert ask(lm, "generate_until", said) == ask(bare, "generate_until", said)


def harness_without_bos(oracle):
    """The oracle, told to add no bos, as lm_eval's client of a server does by itself."""
    from lm_eval.models.huggingface import HFLM

    return HFLM(pretrained=oracle.model, tokenizer=oracle.tokenizer, batch_size=1, device="cpu", add_bos_token=False)


@pytest.mark.slow
def test_a_chat_server_answers_as_transformers_do(oracle, address):
    api = pytest.importorskip("lm_eval.models.openai_completions", reason="the oracle")
    lm = api.LocalChatCompletion(base_url=f"{address}/chat/completions", model="tiny", max_length=CONTEXT)
    talks = [[{"role": "user", "content": r["q"]}] for r in ROWS if len(r["q"]) < 80]
    asked = lambda lm: [(lm.apply_chat_template(t), dict(UNTIL)) for t in talks]
    assert ask(lm, "generate_until", asked(lm)) == ask(oracle, "generate_until", asked(oracle))


@pytest.mark.slow
def test_fdel_eval_prints_and_writes_the_scores(checkpoint, oracle, tmp_path, capsys):
    from lm_eval.evaluator import evaluate as run

    path, tasks = checkpoint
    names, out = ["choices", "answers", "texts"], tmp_path / "new" / "scores.json"
    manager = evaluate.find(evaluate.Options(tasks=names, include_path=tasks))
    want = run(oracle, manager.load(names), limit=4, bootstrap_iters=0)["results"]
    asked = [
        "eval",
        str(path),
        "--tasks",
        ",".join(names),
        "--include-path",
        str(tasks),
        "--limit",
        "4",
        "--batch",
        "4",
    ]
    assert cli.main([*asked, "--output", str(out)]) == 0
    shown, written = capsys.readouterr().out, json.loads(out.read_text())
    for name in names:
        for metric, value in want[name].items():
            if isinstance(value, float) and "stderr" not in metric:
                np.testing.assert_allclose(written["results"][name][metric], value, rtol=1e-5)
                assert f"|{metric.partition(',')[0]}" in shown.replace(" ", "")
    assert written["config"]["limit"] == 4 and "pretty_env_info" not in written
    assert cli.main([*asked, "--output", str(out)]) == 2 and "nothing is overwritten" in capsys.readouterr().err
    assert cli.main(["eval", "nowhere", "--tasks", "choice", "--include-path", str(tmp_path / "new2")]) == 2
    assert "is no directory" in capsys.readouterr().err


def test_generation_kwargs_mean_what_they_say():
    pytest.importorskip("lm_eval", reason="the extra eval")
    s = evaluate.sampling_of({"until": ["a", "<|user|>", ""], "max_new_tokens": 5, "top_p": 0.5}, 7)
    assert (s.max_tokens, s.temperature, s.top_p, s.stop, s.seed) == (5, 0, 1.0, ["a", "<|user|>"], 7)
    s = evaluate.sampling_of({"until": "a", "do_sample": True, "temperature": 0.7, "top_p": 0.5, "top_k": 3}, 7)
    assert (s.max_tokens, s.temperature, s.top_p, s.top_k, s.stop) == (256, 0.7, 0.5, 3, ["a"])
    with pytest.raises(ValueError, match=r"\['num_beams'\] are not supported"):
        evaluate.sampling_of({"num_beams": 4}, 7)


# ---- against a full forward ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plain(model):
    return Engine(model, Settings(rows=2, max_length=40))


def pairs(count: int) -> list[tuple[list[int], list[int]]]:
    rng = np.random.default_rng(0)
    draw = lambda n: rng.integers(0, small.VOCAB, n).tolist()
    return [(draw(rng.integers(1, 60)), draw(rng.integers(1, 12))) for _ in range(count)]


@pytest.mark.slow
def test_likelihoods_are_those_of_a_full_forward(plain):
    """Whatever the batch; contexts longer than the limit lose their beginning; the likeliest continuation is greedy."""
    every = pairs(5)
    context = every[0][0][:20]
    best = small.full_forward(plain.model.family, plain.model.cfg)(plain.model.params, np.array([context]))[0]
    every += [
        (context, [int(best[-1].argmax())]),
        (context, [3]),
        (context, [3, 4]),
        (context, [int(best[-1].argmin())]),
    ]
    told: list[int] = []
    found = likelihoods(plain, every, batch=4, progress=told.append)
    assert sum(told) == len(every) and [x.greedy for x in found[-4:]] == [True, False, False, False]
    for (c, w), x in zip(every, found, strict=True):
        whole = (c + w)[-41:]
        want = small.scores(plain.model, whole[: -len(w)], w)
        np.testing.assert_allclose(x.logprob, want.sum(), rtol=1e-5)
    (alone,) = likelihoods(plain, every[:1], batch=1)
    np.testing.assert_allclose(alone.logprob, found[0].logprob, rtol=1e-6)
    assert likelihoods(plain, []) == []


def test_pairs_that_cannot_be_scored_are_refused(plain):
    for pair, message in [
        (([], [1]), "context 0 is empty"), (([1], []), "continuation 0 is empty"),
        (([1], [2] * 41), "continuation 0 has 41 tokens"), (([1], [small.VOCAB]), "expected token ids from 0 to"),
        (([-1], [1]), "expected token ids from 0 to"),
    ]:  # fmt: skip
        with pytest.raises(ValueError, match=message):
            likelihoods(plain, [pair])
    with pytest.raises(ValueError, match="batch=0"):
        likelihoods(plain, pairs(1), batch=0)
