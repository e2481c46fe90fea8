"""What `models.load` finds beside plain language models: parts of other models, classifiers, a family of one's own."""

import json
import re
import subprocess
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the oracle is transformers on torch")
import safetensors.torch  # noqa: E402
import suite  # noqa: E402
import tiny  # noqa: E402
import transformers  # noqa: E402

from fdel import models, ops, serve  # noqa: E402
from fdel.models import llama  # noqa: E402
from fdel.params import CheckpointError  # noqa: E402
from fdel.train import losses  # noqa: E402

TOKENS = np.random.default_rng(0).integers(3, 110, (2, 24))


# ---- the language model inside of one of several modalities ----------------------------------------------------------

VISION = dict(
    hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, image_size=28, patch_size=14
)
GEMMA = tiny.TINY["gemma3_text"].values | {"vocab_size": 128}


@pytest.fixture(scope="module")
def gemma(tmp_path_factory):
    """A Gemma 3 of text and images, every weight random, its directory and logits of text."""
    cfg = transformers.Gemma3Config(
        text_config=json.loads(json.dumps(GEMMA)), vision_config=VISION, mm_tokens_per_image=4, image_token_index=120,
        boi_token_index=121, eoi_token_index=122,
    )  # fmt: skip
    oracle = transformers.Gemma3ForConditionalGeneration._from_config(cfg, attn_implementation="eager").eval()
    tiny.randomise(oracle, 0)
    path = tmp_path_factory.mktemp("gemma")
    oracle.save_pretrained(path)
    with torch.no_grad():
        return path, oracle(torch.tensor(TOKENS)).logits.numpy()


@pytest.mark.parametrize("prefixes", [("language_model.model.", ""), ("model.language_model.", "model.")])
def test_the_text_of_a_published_gemma_3_equals_transformers(gemma, tmp_path, prefixes):
    """Both spellings of names that the Hub has, of a tower that config.json leaves out, which a text model is without.

    What is saved is a text model that transformers reads. 2e-5."""
    path, want = gemma
    text, tower = prefixes
    tensors = safetensors.torch.load_file(path / "model.safetensors")
    plain = {}
    for name, x in tensors.items():
        short = name.replace("model.language_model.", "@").replace("language_model.model.", "@").removeprefix("model.")
        plain[short.replace("@", text) if "@" in short else tower + short] = x
    assert sum(n.startswith(text) for n in plain) > 20 and sum("vision_tower" in n for n in plain) > 10
    safetensors.torch.save_file(plain, tmp_path / "model.safetensors", {"format": "pt"})
    d = json.loads((path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in d.items() if k != "vision_config"}))
    model = models.load(tmp_path, dtype=jnp.float32)
    assert suite.error(suite.full(model, TOKENS), want) < 2e-5
    models.save(model, tmp_path / "text")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "text", attn_implementation="eager").eval()
    assert type(again).__name__ == "Gemma3ForCausalLM"
    with torch.no_grad():
        assert suite.error(again(torch.tensor(TOKENS)).logits.numpy(), want) < 1e-6
    plain["model.mystery.weight"] = torch.zeros(3)
    safetensors.torch.save_file(plain, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match="unexpected: model.mystery.weight"):
        models.load(tmp_path)


def test_the_text_of_a_published_kimi_equals_transformers(tmp_path):
    """DeepSeek-V3's function under Kimi-K2.5's names, beside a tower and a projector: 2e-5."""
    oracle = tiny.checkpoint("deepseek_v3", tmp_path)
    tensors = safetensors.torch.load_file(tmp_path / "model.safetensors")
    plain = {f"language_model.{name}": x for name, x in tensors.items()}
    plain |= {
        f"{part}.weight": torch.zeros(3) for part in ("mm_projector.proj.0", "vision_tower.encoder.blocks.0.wqkv")
    }
    safetensors.torch.save_file(plain, tmp_path / "model.safetensors", {"format": "pt"})
    text = json.loads((tmp_path / "config.json").read_text()) | {"model_type": "kimi_k2"}
    around = {"model_type": "kimi_k25", "media_placeholder_token_id": 163605, "vision_config": {}, "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(around | {"tie_word_embeddings": False}))
    with torch.no_grad():
        want = oracle(torch.tensor(TOKENS)).logits.numpy()
    assert suite.error(suite.full(models.load(tmp_path, dtype=jnp.float32), TOKENS), want) < 2e-5


def test_experts_of_a_published_qwen3_5_in_one_tensor_are_written_as_transformers_does(tmp_path):
    """Beside a tower that config.json leaves out: the logits to 2e-5, the tensors of transformers' own copy bit by bit."""
    oracle = tiny.build("qwen3_5_moe_text")
    plain = {name: x.contiguous() for name, x in oracle.state_dict().items()}
    assert sum(name.endswith(".mlp.experts.gate_up_proj") for name in plain) == oracle.config.num_hidden_layers
    oracle.config.save_pretrained(tmp_path / "text")
    safetensors.torch.save_file(plain, tmp_path / "text" / "model.safetensors", {"format": "pt"})
    transformers.Qwen3_5MoeForCausalLM.from_pretrained(tmp_path / "text").save_pretrained(tmp_path / "theirs")
    around = {name.replace("model.", "model.language_model.", 1): x for name, x in plain.items()}
    around |= {"model.visual.blocks.0.norm1.weight": torch.zeros(3)}
    around |= {"mtp.layers.0.mlp.experts.gate_up_proj": torch.zeros(2, 6, 3)}
    safetensors.torch.save_file(around, tmp_path / "model.safetensors", {"format": "pt"})
    text = json.loads((tmp_path / "text" / "config.json").read_text())
    outer = {"model_type": "qwen3_5_moe", "text_config": text, "tie_word_embeddings": False}
    (tmp_path / "config.json").write_text(json.dumps(outer))
    model = models.load(tmp_path)
    with torch.no_grad():
        assert suite.error(suite.full(model, TOKENS), oracle(torch.tensor(TOKENS)).logits.numpy()) < 2e-5
    models.save(model, tmp_path / "ours")
    ours, theirs = (safetensors.torch.load_file(tmp_path / x / "model.safetensors") for x in ("ours", "theirs"))
    assert ours.keys() == theirs.keys() and all(torch.equal(x, ours[name]) for name, x in theirs.items())


# ---- classifiers and reward models -------------------------------------------------------------------------------------


CLASSES = {"Sequence": "SequenceClassification", "Token": "TokenClassification", "Question": "QuestionAnswering"}


@pytest.mark.parametrize(
    "name,labels,kind",
    [("llama", 1, "Sequence"), ("llama", 3, "Sequence"), ("llama", 2, "Token"), ("llama", 2, "Question"),
     ("llama", 0, "base"), ("gpt2", 3, "Token"), ("gpt2", 2, "Question"), ("gemma3_text", 2, "Sequence"),
     ("roberta", 3, "Sequence"), ("roberta", 2, "Token"), ("roberta", 2, "Question")],
)  # fmt: skip
def test_heads_load_compute_and_are_saved_again(tmp_path, name, labels, kind):
    """The outputs of transformers' classes, of padded rows: 2e-5; the files' bytes come back."""
    entry = tiny.TINY[name]
    stem = {"llama": "Llama", "gpt2": "GPT2", "gemma3_text": "Gemma3Text", "roberta": "Roberta"}[name]
    values = json.loads(json.dumps(entry.values)) | {"pad_token_id": 0} | ({"num_labels": labels} if labels else {})
    cfg = getattr(transformers, f"{stem}Config")(**values)
    theirs = f"{stem}For{CLASSES[kind]}" if labels else f"{stem}Model"
    oracle = getattr(transformers, theirs)._from_config(cfg, attn_implementation="eager").eval()
    tiny.randomise(oracle, 1)
    oracle.save_pretrained(tmp_path)
    lengths = np.array([24, 15])
    mask = torch.tensor(np.arange(24) < lengths[:, None])
    tokens = TOKENS % (cfg.vocab_size - 3) + 3
    with torch.no_grad():
        out = oracle(torch.tensor(tokens).masked_fill(~mask, 0), attention_mask=mask)
    want = out.last_hidden_state if kind == "base" else out.start_logits if kind == "Question" else out.logits
    want = torch.stack([out.start_logits, out.end_logits], -1) if kind == "Question" else want
    model = models.load(tmp_path, dtype=jnp.float32)
    batch = {"tokens": jnp.asarray(tokens), "lengths": jnp.asarray(lengths)}
    if kind == "Sequence":
        got = jax.jit(losses.score_rows(model.family, model.cfg))(model.params, batch)
        assert suite.error(got, want.numpy()) < 2e-5
    else:
        x = model.family.hidden(models.heads.inner(model.params), tokens, model.cfg, ops.packed(tokens, lengths))[0]
        got = np.asarray(models.heads.outputs(model.params, x) if labels else x)
        assert max(suite.error(got[i, :n], want[i, :n].numpy()) for i, n in enumerate(lengths)) < 2e-5
    models.save(model, tmp_path / "again")
    a, b = (safetensors.torch.load_file(p / "model.safetensors") for p in (tmp_path, tmp_path / "again"))
    assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)
    again = transformers.AutoConfig.from_pretrained(tmp_path / "again")
    assert again.architectures == [theirs] and (again.num_labels == labels or not labels)


OF_TEXT = [n for n, e in tiny.TINY.items() if ":" not in n and not e.make and "text_config" not in e.values]
WITH_HEADS = [n for n in OF_TEXT if n not in ("gemma3_text", "internlm3")]  # whose classes are called otherwise


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize("name", WITH_HEADS)
def test_heads_of_every_family(tmp_path, name):
    """All classes that transformers has for classes and answers: outputs to 2e-5, and the names and bytes of the file."""
    entry = tiny.TINY[name]
    stem = re.sub("(ForCausalLM|LMHeadModel|ForMaskedLM)$", "", entry.model)
    values = json.loads(json.dumps(entry.values)) | {"num_labels": 2, "pad_token_id": 0}
    for ending in CLASSES.values():
        theirs, directory = getattr(transformers, f"{stem}For{ending}", None), tmp_path / ending
        if theirs is None:
            continue
        oracle = theirs._from_config(
            getattr(transformers, entry.config)(**values), attn_implementation=entry.attn
        ).eval()
        tiny.randomise(oracle, 1, entry.keep)
        oracle.save_pretrained(directory)
        tokens = TOKENS[:, :12] % 100 + 3
        with torch.no_grad():
            out = oracle(torch.tensor(tokens))
        want = torch.stack([out.start_logits, out.end_logits], -1) if "start_logits" in out else out.logits
        model = models.load(directory, dtype=jnp.float32)
        x = model.family.hidden(models.heads.inner(model.params), tokens, model.cfg)[0]
        got = models.heads.outputs(model.params, x)
        pool = models.heads.of(model.family, models.heads.kind_of(model.params)).pool
        got = {"last": got[:, -1], "first": got[:, 0], "every": got}[pool]
        assert suite.error(got, want.numpy()) < 2e-5, ending
        models.save(model, directory / "again")
        a, b = (safetensors.torch.load_file(p / "model.safetensors") for p in (directory, directory / "again"))
        a = {k: x for k, x in a.items() if not k.endswith(entry.keep)} if entry.keep else a
        assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a), ending


def test_a_value_head_is_trls(tmp_path):
    """TRL's ValueHead: one linear map with a bias of each final hidden state, in the file beside the output projection."""
    oracle = tiny.checkpoint("llama", tmp_path)
    tensors = safetensors.torch.load_file(tmp_path / "model.safetensors")
    summary = torch.nn.Linear(oracle.config.hidden_size, 1)
    tensors |= {f"v_head.summary.{k}": v.detach() for k, v in summary.named_parameters()}
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with torch.no_grad():
        want = summary(oracle.model(torch.tensor(TOKENS)).last_hidden_state).numpy()
    model = models.load(tmp_path, dtype=jnp.float32)
    x = model.family.hidden(model.params["model"], TOKENS, model.cfg)[0]
    assert suite.error(models.heads.outputs(model.params, x), want) < 2e-5
    models.save(model, tmp_path / "again")
    again = safetensors.torch.load_file(tmp_path / "again/model.safetensors")
    assert again.keys() == tensors.keys() and all(torch.equal(again[k], tensors[k]) for k in tensors)
    with pytest.raises(ValueError, match="this is a value model"):
        serve.Engine(model, serve.Settings(rows=1, max_length=16)).generate([[5]])


def test_a_dense_layer_before_the_head_is_robertas():
    """RobertaClassificationHead on the first token's hidden state: 1e-6."""
    oracle = transformers.models.roberta.modeling_roberta.RobertaClassificationHead(
        transformers.RobertaConfig(hidden_size=32, num_labels=3)
    ).eval()
    tiny.randomise(oracle, 2)
    w = {k: jnp.asarray(v.detach().numpy()) for k, v in oracle.named_parameters()}
    params = {"weight": w["out_proj.weight"], "bias": w["out_proj.bias"], "dense": w["dense.weight"]}
    x = np.random.default_rng(3).normal(size=(2, 5, 32)).astype(np.float32)
    with torch.no_grad():
        want = oracle(torch.tensor(x)).numpy()
    params["dense_bias"] = w["dense.bias"]
    got = models.heads.outputs({"model": {}, "sequence": params}, jnp.asarray(x[:, 0]))
    assert suite.error(got, want) < 1e-6


# ---- a family of one's own ---------------------------------------------------------------------------------------------

OWN = '''"""Llama whose outputs are all scaled."""
from dataclasses import dataclass
from fdel import ops
from fdel.models import config, llama
from fdel.models.llama import hidden, spec, state_spec

MODEL_TYPE, ARCHITECTURE = "scaled_llama", "ScaledLlamaForCausalLM"

@dataclass(frozen=True, kw_only=True)
class Config(llama.Config):
    scale: float = config.hf("logit_scale", 1.0)
    from_hf = classmethod(config.from_hf)

def head(params, cfg):
    return ops.Head(llama.head(params, cfg).weight, scale=cfg.scale)

def forward(params, tokens, cfg, batch=None, state=None):
    x, state, _ = hidden(params, tokens, cfg, batch, state)
    return ops.logits(x, head(params, cfg)), state
'''


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A package that registers a family, as pip leaves it, and a checkpoint of that family."""
    site = tmp_path / "site"
    (site / "own-1.0.dist-info").mkdir(parents=True)
    (site / "own_family.py").write_text(OWN)
    (site / "own-1.0.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: own\nVersion: 1.0\n")
    (site / "own-1.0.dist-info/entry_points.txt").write_text(
        "[fdel.models]\nscaled_llama = own_family\nbroken = json.decoder\n"
    )
    monkeypatch.syspath_prepend(site)
    tiny.checkpoint("llama", tmp_path / "m")
    d = json.loads((tmp_path / "m/config.json").read_text())
    (tmp_path / "m/config.json").write_text(json.dumps(d | {"model_type": "scaled_llama", "logit_scale": 3.0}))
    yield SimpleNamespace(site=site, model=tmp_path / "m", config=d)
    sys.modules.pop("own_family", None)


def test_a_registered_family_loads_generates_and_is_saved(own, tmp_path):
    model = models.load(own.model, dtype=jnp.float32)
    assert (model.family.__name__, model.cfg.scale) == ("own_family", 3.0)
    plain = models.Model(llama, model.cfg, model.params)
    np.testing.assert_allclose(suite.full(model, TOKENS), 3 * suite.full(plain, TOKENS), rtol=1e-6)
    assert serve.generate(model, [[5, 6, 7]], max_tokens=4, eos=())[0].tokens
    models.save(model, tmp_path / "out")
    assert models.read_config(tmp_path / "out")[1] == model.cfg
    (own.model / "config.json").write_text(json.dumps(own.config | {"model_type": "broken"}))
    with pytest.raises(models.ConfigError, match="'json.decoder' is no model family: it lacks MODEL_TYPE"):
        models.load(own.model)
    with pytest.raises(models.ConfigError, match="not a family of this version; it has .*scaled_llama"):
        models.family("scaledllama")


def test_a_family_can_be_passed(own):
    (own.model / "config.json").write_text(json.dumps(own.config | {"model_type": "nobodys"}))
    assert models.load(own.model, family=llama).cfg == llama.Config.from_hf(own.config)


@pytest.mark.slow
def test_the_command_line_finds_a_registered_family(own):
    """`fdel info`; serve, run, eval and plan read config.json in the same place."""
    import os

    env = os.environ | {"PYTHONPATH": f"{own.site}:{os.environ.get('PYTHONPATH', '.')}", "JAX_PLATFORMS": "cpu"}
    out = subprocess.run([sys.executable, "-m", "fdel", "info", own.model], capture_output=True, text=True, env=env)
    assert "scaled_llama" in out.stdout, out.stderr
