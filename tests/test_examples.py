"""The run files of examples/, each run to its end on a tiny model: losses fall, margins grow, what is saved can be used."""

import contextlib
import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fdel import cli, models, ops, params, recipe, serve, text
from fdel.models import gidd, heads, llama
from fdel.train import losses, metrics
from tests.killed import goes_on, rows_of

ROOT = Path(__file__).parents[1]
DEAR = "gkd kto masked_lm online_dpo ppo qlora rloo tools".split()  # whose training others do in CI, in smaller tests
EXAMPLES = sorted(f.stem for f in (ROOT / "examples").glob("*.yaml"))
CHAT = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# A tiny model from nothing learns at other rates than a real one.
RATES = {
    "sft": 3e-3,
    "chat": 3e-3,
    "distillation": 3e-3,
    "lora": 2e-2,
    "qlora": 2e-2,
    "diffusion": 1e-2,
    "masked_lm": 1e-2,
    "grpo": 1e-2,
    "online_dpo": 2e-2,
    "tools": 1e-2,
    "ppo": 1e-2,
    "rloo": 2e-2,
    "gkd": 3e-3,
    "question_answering": 1e-2,
} | dict.fromkeys(("dpo", "orpo", "kto", "reward", "prm", "embedding", "classification", "token_classification"), 1e-3)

SAMPLED = ("grpo", "online_dpo", "ppo", "rloo", "tools")  # that learn from own samples
LEAST_GAIN = {"dpo": 0.3, "kto": 0.3, "reward": 0.3, "orpo": 0.03}  # of margins; orpo's are means over tokens


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    """A llama of two layers with a BPE of the examples' data, and a chat template."""
    path = tmp_path_factory.mktemp("tiny")
    found = [ROOT / "examples" / "data" / f"{name}.jsonl" for name in ("chat", "pairs", "text")]
    words = [line for f in found for line in f.read_text().splitlines()]
    tok = text.train_bpe(words, 512, ["<|im_start|>", "<|im_end|>"])
    text.save(dataclasses.replace(tok, templates={"default": CHAT}), path)
    cfg = llama.Config(vocab=512, embed=64, ffn=96, layers=2, heads=4, kv_heads=2, head_dim=16, rope=ops.Rope(16, 1e4))
    weights = jax.jit(lambda key: params.init(llama.spec(cfg), key, dtype=jnp.float32))(jax.random.key(0))
    models.save(models.Model(llama, cfg, weights), path)
    return path


@pytest.fixture(scope="module")
def taught(tiny, tmp_path_factory) -> Path:
    """The run of the example sft: a model to adapt and to distil."""
    return run("sft", tiny, tmp_path_factory.mktemp("sft"))


def run(name: str, tiny: Path, out: Path, seed: int = 42, **teacher: Path) -> Path:
    """Run a shrunk example by its command."""
    shrunk(name, tiny, out, **teacher).set("trainer.seed", seed).to_yaml(out / "run.yaml")
    with contextlib.chdir(ROOT):
        assert cli.main(["run", str(out / "run.yaml")]) == 0
    return out


def shrunk(name: str, tiny: Path, out: Path, steps: int = 30, teacher: Path | None = None) -> recipe.Recipe:
    """An example on the tiny model, with short rows and few steps; what it says is otherwise left."""
    wanted = recipe.load(ROOT / "examples" / f"{name}.yaml").set("model.name_or_path", str(tiny))
    changes = {"total_batch_size": 8, "max_training_steps": steps, "save_directory": str(out), "save_steps": None}
    changes |= {"learning_rate": RATES[name], "warmup_steps": 2, "warmup_ratio": None}
    wanted = wanted.set("trainer.mask_token_id", 3) if name == "masked_lm" else wanted
    length = "mixture.pack_seq_length" if wanted.mixture.pack_tokens else "trainer.max_length"
    wanted = wanted.set(length, 96 if name in SAMPLED else 64).set("sharding.axis_dims", [1, 1, 1, 1, 1])
    wanted = wanted.set("trainer.max_completion_length", 16) if name == "gkd" else wanted
    if name in SAMPLED:
        rows = 4 * {"online_dpo": 2, "ppo": 1}.get(name, 8)  # few tasks in a step
        wanted, changes = wanted.set("trainer.max_completion_length", 32), changes | {"total_batch_size": rows}
    if wanted.teacher_model:
        wanted = wanted.set("teacher_model.name_or_path", str(teacher))
    for key, value in changes.items():
        wanted = wanted.set(f"trainer.{key}", value)
    return wanted


def curve(out: Path, name: str) -> np.ndarray:
    return np.array([row[name] for row in metrics.read(out)])


def test_there_is_an_example_of_each_kind_and_its_data_is_small():
    assert EXAMPLES == [
        "chat", "classification", "diffusion", "distillation", "dpo", "embedding", "gkd", "grpo", "kto", "lora",
        "masked_lm", "online_dpo", "orpo", "ppo", "prm", "qlora", "question_answering", "reward", "rloo", "sft",
        "token_classification", "tools",
    ]  # fmt: skip
    for name in EXAMPLES:
        assert recipe.faults(recipe.load(ROOT / "examples" / f"{name}.yaml")) == []
    assert sum(f.stat().st_size for f in (ROOT / "examples" / "data").glob("*.jsonl")) < 125_000


MORE = pytest.mark.matrix
SEEDS = [pytest.param(n, 42, marks=[MORE] * (n in DEAR)) for n in EXAMPLES]
SEEDS += [pytest.param(n, seed, marks=MORE) for n in SAMPLED for seed in (0, 1)]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "seed"), SEEDS)
def test_the_example_learns(name, seed, tiny, taught, tmp_path):
    start = taught / "model" if "lora" in name else tiny
    start = bidirectional(tiny, tmp_path) if name in ("diffusion", "masked_lm") else start
    out = taught if name == "sft" else run(name, start, tmp_path, seed, teacher=taught / "model")
    loss = curve(out, "loss")
    assert [row["step"] for row in metrics.read(out)] == list(range(1, 31))
    if name in SAMPLED:  # answers get shorter; sums are beyond a tiny model
        reward = curve(out, "rewards/brief/mean")
        assert reward[-5:].mean() > 0.5 > reward[:3].mean() + 0.1 and (curve(out, "rewards/hashes/mean") < 0.1).all()
        return whole(out, start)
    assert np.isfinite(loss).all() and loss[-5:].mean() < (0.95 if "lora" in name else 0.9) * loss[:3].mean()
    if name in LEAST_GAIN:
        margin = curve(out, "margin" if name == "reward" else "rewards/chosen")
        margin = margin if name == "reward" else margin - curve(out, "rewards/rejected")
        assert margin[-5:].mean() > margin[:3].mean() + LEAST_GAIN[name]
    checks = {"lora": adapters, "qlora": adapters, "reward": rewards, "prm": steps, "diffusion": denoises}
    checks |= {"masked_lm": denoises, "question_answering": spans}
    (checks | dict.fromkeys(("classification", "token_classification"), classes)).get(name, whole)(out, start)


def of_own_samples(name: str, tiny: Path, out: Path, teacher: Path, steps: int, devices: int = 1) -> recipe.Recipe:
    """An example of own samples in a few small steps, of batches that eight devices can divide."""
    wanted = shrunk(name, tiny, out, steps, teacher).set("trainer.learning_rate", 1e-3).set("trainer.save_steps", 2)
    wanted = wanted.set("trainer.warmup_steps", 0).set("trainer.scheduler", "constant")
    wanted = wanted.set("trainer.total_batch_size", 8 if name == "gkd" else 32)
    return wanted.set("sharding.axis_dims", [1, devices, 1, 1, 1])


OWN = [pytest.param(n, marks=MORE) for n in ("gkd", *SAMPLED)]


@pytest.mark.slow
@pytest.mark.parametrize("name", OWN)
def test_an_example_of_own_samples_that_was_killed_goes_on(name, tiny, request, tmp_path):
    """kill -9 in the middle of sampling or learning, in a process of its own: metrics, samples and weights bit by bit."""
    teacher = request.getfixturevalue("taught") / "model" if name == "gkd" else None
    runs = {x: of_own_samples(name, tiny, tmp_path / x, teacher, steps=6) for x in ("whole", "killed")}
    goes_on(runs, tmp_path, 2)


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize("name", ("gkd", *SAMPLED))
def test_an_example_of_own_samples_on_eight_devices(name, tiny, taught, tmp_path, monkeypatch):
    """The rewards of one device, and its curve, to rounding over three steps; gkd learns rows of the data between."""
    monkeypatch.chdir(ROOT)
    steps = 6 if name == "gkd" else 3
    for n in (1, 8):
        recipe.train(of_own_samples(name, tiny, tmp_path / str(n), taught / "model", steps, n))
    names = ["grad_norm", "loss", "own_samples"] if name == "gkd" else ["reward", "grad_norm", "loss"]
    for column in names:
        one, eight = (curve(tmp_path / str(n), column) for n in (1, 8))
        np.testing.assert_allclose(one, eight, rtol=5e-3, atol=1e-5 if column == "loss" else 0, err_msg=column)
    assert [len(rows_of(tmp_path / str(n))) for n in (1, 8)] == [steps, steps]
    assert name != "gkd" or 0 < curve(tmp_path / "1", "own_samples").sum() < steps


def whole(out: Path, begin: Path) -> None:
    """The saved model and tokenizer load, differ from the start, and speak."""
    model, tok = models.load(out / "model", stacked=False), text.load(out / "model")
    start = models.load(begin, stacked=False)
    assert not np.allclose(model.params["layers"][0]["q"], start.params["layers"][0]["q"])
    assert len(serve.generate(model, [text.encode(tok, "What")], max_tokens=4)[0].tokens) > 0


def bidirectional(tiny: Path, path: Path) -> Path:
    """A gidd of two layers with the same tokenizer."""
    sizes = dict(vocab_size=512, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4)
    cfg = gidd.Config.from_hf({"model_type": "gidd", "max_position_embeddings": 64, **sizes})
    weights = jax.jit(lambda key: params.init(gidd.spec(cfg), key, dtype=jnp.float32))(jax.random.key(0))
    text.save(text.load(tiny), path / "gidd")
    models.save(models.Model(gidd, cfg, weights), path / "gidd")
    return path / "gidd"


def denoises(out: Path, begin: Path) -> None:
    """The saved model loads, and puts a token for each mask."""
    model = models.load(out / "model")
    assert not np.allclose(model.params["layers"]["q"], models.load(begin).params["layers"]["q"])
    tokens, noise = jnp.arange(20, 36)[None], ops.diffusion.Noise(512, 3)
    free = jnp.arange(16)[None] > 7
    call = lambda t: gidd.forward(model.params, t, model.cfg)[0]
    got = jax.jit(lambda key: ops.diffusion.denoise(noise, call, key, tokens, free, steps=4))(jax.random.key(0))
    assert (got[0, :8] == tokens[0, :8]).all() and (got != 3).all()


def adapters(out: Path, begin: Path) -> None:
    """The adapters load on the start as PEFT's; merged, they are what `merge` saved."""
    model = models.load(begin, dtype=jnp.bfloat16)
    spec = llama.spec(model.cfg)
    adapted = params.load_peft(spec, model.params, out / "model")
    assert float(jnp.abs(adapted["layers"]["q"].b).max()) > 1e-3
    text.load(out / "model")
    if (out / "merged").exists():
        merged = models.load(out / "merged").params
        jax.tree.map(np.testing.assert_array_equal, merged, params.lora.merge(adapted))


def rewards(out: Path, begin: Path) -> None:
    """transformers reads the reward model and gives its scores."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    model = transformers.AutoModelForSequenceClassification.from_pretrained(out / "model").eval()
    tokens = np.random.default_rng(0).integers(3, 512, (3, 12))
    with torch.no_grad():
        want = model(torch.tensor(tokens)).logits.numpy()
    cfg = models.read_config(out / "model")[1]
    weights = params.load(heads.spec(llama, cfg, "sequence"), out / "model")
    got = jax.jit(losses.score_rows(llama, cfg))(weights, {"tokens": tokens})
    np.testing.assert_allclose(got, want, atol=1e-4)


def steps(out: Path, begin: Path) -> None:
    """transformers reads the model as a token classifier of two classes."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    model = transformers.AutoModelForTokenClassification.from_pretrained(out / "model").eval()
    backend, line = text.load(out / "model").backend, (ROOT / "examples" / "data" / "steps.jsonl").open().readline()
    row = json.loads(line)
    ids = [backend.encode(t + "\n", add_special_tokens=False).ids for t in (row["prompt"][:-1], *row["completions"])]
    with torch.no_grad():
        scores = model(torch.tensor([sum(ids, [])[:64]])).logits[0].softmax(-1)[:, 1]
    assert scores.shape == (min(64, sum(map(len, ids))),) and bool(scores.isfinite().all())


def spans(out: Path, begin: Path) -> None:
    """transformers reads the model, and gives its scores of first and last tokens of answers: 1e-4."""
    assert curve(out, "exact_match")[-5:].mean() > 0.6
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    oracle = transformers.AutoModelForQuestionAnswering.from_pretrained(out / "model").eval()
    model, tok = models.load(out / "model", dtype=jnp.float32), text.load(out / "model")
    row = json.loads((ROOT / "examples" / "data" / "answers.jsonl").open().readline())
    tokens = np.array([text.encode(tok, (row["question"], row["context"]))])
    with torch.no_grad():
        said = oracle(torch.tensor(tokens))
    got = heads.outputs(model.params, llama.hidden(model.params["model"], tokens, model.cfg)[0])
    np.testing.assert_allclose(got[..., 0], said.start_logits, atol=1e-4)
    np.testing.assert_allclose(got[..., 1], said.end_logits, atol=1e-4)


def classes(out: Path, begin: Path) -> None:
    """The saved classifier names what it learnt, and an engine classifies with it as the training had it."""
    model, tok = models.load(out / "model", stacked=False), text.load(out / "model")
    texts = model.params.get("sequence") is not None
    names = ["str", "math", "statistics"] if texts else ["O", "CODE"]
    assert heads.label_names(model.cfg, len(names)) == names and curve(out, "accuracy")[-5:].mean() > 0.6
    row = json.loads(
        (ROOT / "examples" / "data" / ("labels" if texts else "words")).with_suffix(".jsonl").open().readline()
    )
    ids = text.encode(tok, row["text"] if texts else " ".join(row["tokens"]))[:64]
    found = serve.Engine(model, serve.Settings(rows=1, max_length=64)).classify(ids)
    assert np.isfinite(found).all() and found.shape == ((3,) if texts else (len(ids), 2))


@pytest.mark.slow
def test_the_same_command_again_goes_on(tiny, tmp_path, monkeypatch):
    """Six steps at once, or three and then the same file with six: the same curve, bit by bit; each step is there once."""
    monkeypatch.chdir(ROOT)
    of = lambda out, steps: shrunk("sft", tiny, tmp_path / out, steps).set("trainer.scheduler", "constant")
    recipe.train(of("whole", 6))
    recipe.train(of("parts", 3))
    recipe.train(of("parts", 6))
    rows = [[(r["step"], r["loss"], r["grad_norm"]) for r in metrics.read(tmp_path / d)] for d in ("whole", "parts")]
    assert rows[0] == rows[1] and [step for step, _, _ in rows[0]] == [1, 2, 3, 4, 5, 6]
    a, b = (models.load(tmp_path / d / "model").params for d in ("whole", "parts"))
    jax.tree.map(np.testing.assert_array_equal, a, b)
    with pytest.raises(recipe.RecipeError, match="12 rows cannot be divided among 8 devices"):
        recipe.train(of("wide", 3).set("sharding", None).set("trainer.total_batch_size", 12))
    with pytest.raises(
        recipe.RecipeError, match=r"each of 2 parts has 4 rows, which cannot be divided among 8 replicas"
    ):
        parts = of("wide", 3).set("trainer.gradient_accumulation_steps", 2).set("trainer.total_batch_size", 8)
        recipe.train(parts.set("sharding.axis_dims", [-1, 1, 1, 1, 1]))
    with pytest.raises(recipe.RecipeError, match="has checkpoints; choose a new directory"):
        recipe.train(of("parts", 6).set("trainer.resume_if_possible", False))


@pytest.mark.slow
def test_evaluation_averages_and_the_best_checkpoint(tiny, tmp_path, monkeypatch):
    """The moving average is evaluated and saved: the last eval_loss is the saved model's."""
    monkeypatch.chdir(ROOT)
    held = {"data_files": "examples/data/text.jsonl", "num_rows": 13}
    wanted = shrunk("sft", tiny, tmp_path, 6).set("mixture.eval_informs", [held]).set("trainer.ema_decay", 0.5)
    wanted = wanted.set("trainer.evaluation_steps", 3).set("trainer.metric_for_best_model", "eval_loss")
    model, out, last = recipe.train(wanted)
    evaluated = [row["eval_loss"] for row in metrics.read(tmp_path) if "eval_loss" in row]
    assert len(evaluated) == 2 and evaluated[1] < evaluated[0] and last["eval_loss"] == evaluated[1]
    tok, sums = text.load(out), np.zeros(2)
    forward = jax.jit(lambda p, t: jax.nn.log_softmax(llama.forward(p, t, model.cfg)[0])[0])
    for line in (ROOT / held["data_files"]).read_text().splitlines()[:13]:
        ids = np.array([*text.encode(tok, json.loads(line)["text"]), tok.ids["eos"]])[:64]
        logp = forward(model.params, np.pad(ids, (0, 64 - len(ids)))[None])
        sums += -float(logp[np.arange(len(ids) - 1), ids[1:]].sum()), len(ids) - 1
    assert abs(evaluated[1] - sums[0] / sums[1]) < 1e-4


@pytest.mark.slow
def test_adapters_on_a_mesh_change_nothing_but_rounding(tiny, tmp_path, monkeypatch):
    """Four steps of BCO on nf4 weights with dp=2, fsdp=2, tp=2: the losses of one device, and a mean over all rows."""
    monkeypatch.chdir(ROOT)
    curves = []
    for dims in ([1, 1, 1, 1, 1], [2, -1, 1, 2, 1]):
        wanted = shrunk("kto", tiny, tmp_path / str(dims[0]), 4).set("sharding.axis_dims", dims)
        wanted = wanted.set("trainer.trainer_type", "bco").set("quantization.model.quantization_method", "nf4")
        recipe.train(wanted.set("trainer.learning_rate", 1e-2))
        curves.append(curve(tmp_path / str(dims[0]), "loss"))
    assert abs(curves[0][0] - np.log(2)) < 1e-6 and curves[0][-1] < 0.69
    np.testing.assert_allclose(curves[0], curves[1], rtol=1e-4)


@pytest.mark.slow
def test_the_curve_is_that_of_torch(tiny, tmp_path):
    """transformers and torch's AdamW with a linear schedule, decay of matrices, clipping and two parts: 1e-4."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    told = [json.loads(line)["text"] for line in (ROOT / "examples" / "data" / "text.jsonl").open()][:24]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in told))
    model = {"name_or_path": str(tiny)}
    mixture = {"informs": [{"data_files": str(tmp_path / "rows.jsonl")}], "shuffle_buffer_size": 0}
    settings = dict(
        learning_rate=1e-2, warmup_steps=2, weight_decay=0.1, gradient_accumulation_steps=2, log_steps=1,
        num_train_epochs=2, total_batch_size=8, max_length=48, save_directory=str(tmp_path),
    )  # fmt: skip
    sections = {"model": model, "mixture": mixture, "trainer": settings, "sharding": {"axis_dims": [1] * 5}}
    recipe.train(recipe.from_dict(sections))
    tok = text.load(tiny)
    oracle = transformers.AutoModelForCausalLM.from_pretrained(tiny)
    decays = {True: [], False: []}
    for p in oracle.parameters():
        decays[p.ndim > 1].append(p)
    groups = [{"params": decays[True], "weight_decay": 0.1}, {"params": decays[False], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    schedule = transformers.get_linear_schedule_with_warmup(optimizer, 2, 6)
    rows = [([*text.encode(tok, t), tok.ids["eos"]])[:48] for t in told] * 2
    for want, start in zip(metrics.read(tmp_path), range(0, 48, 8), strict=True):
        optimizer.zero_grad()
        total, count = 0.0, 0
        for ids in rows[start : start + 8]:
            logp = oracle(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
            total = total - logp[torch.arange(len(ids) - 1), torch.tensor(ids[1:])].sum()
            count += len(ids) - 1
        (total / count).backward()
        norm = torch.nn.utils.clip_grad_norm_(oracle.parameters(), 1.0)
        np.testing.assert_allclose(
            [want["loss"], want["grad_norm"]], [float((total / count).detach()), float(norm)], rtol=1e-4
        )
        assert abs(want["learning_rate"] - schedule.get_last_lr()[0]) < 1e-8
        optimizer.step()
        schedule.step()


@pytest.mark.slow
def test_half_precision_means_what_it_says(tiny, tmp_path, monkeypatch):
    """bfloat16 parameters keep updates that nearest rounding would lose; bfloat16 computation leaves parameters float32."""
    monkeypatch.chdir(ROOT)
    of = lambda name, loader: recipe.train(shrunk("sft", tiny, tmp_path / name, 4).set("loader", loader)).model.params
    half = of("half", {"param_dtype": "bf16"})["norm"]
    assert (
        half.dtype == jnp.bfloat16 and 4 < int((half != 1).sum()) < 64
    )  # each step moves a weight by a quarter of its spacing
    mixed = of("mixed", {"dtype": "bf16"})["norm"]
    assert mixed.dtype == jnp.float32
    wide, narrow = (curve(tmp_path / name, "loss") for name in ("half", "mixed"))
    assert 0 < np.abs(wide - narrow).max() < 0.05
