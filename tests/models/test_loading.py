"""What `models.load` finds beside plain language models: parts of other models, classifiers, a family of one's own."""

import json
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

from fdel import models, serve  # noqa: E402
from fdel.models import llama  # noqa: E402
from fdel.params import CheckpointError  # noqa: E402
from fdel.train import losses  # noqa: E402

TOKENS = np.random.default_rng(0).integers(3, 110, (2, 24))


# ---- the language model inside of one of several modalities ----------------------------------------------------------

VISION = dict(
    hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, image_size=28, patch_size=14
)
GEMMA = tiny.TINY["gemma3"][1] | {"vocab_size": 128}


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
    """Both spellings of names that the Hub has; what is saved is a text model that transformers reads. 2e-5."""
    path, want = gemma
    text, tower = prefixes
    tensors = safetensors.torch.load_file(path / "model.safetensors")
    plain = {}
    for name, x in tensors.items():
        short = name.replace("model.language_model.", "@").replace("language_model.model.", "@").removeprefix("model.")
        plain[short.replace("@", text) if "@" in short else tower + short] = x
    assert sum(n.startswith(text) for n in plain) > 20 and sum("vision_tower" in n for n in plain) > 10
    safetensors.torch.save_file(plain, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text((path / "config.json").read_text())
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


# ---- classifiers and reward models -------------------------------------------------------------------------------------


@pytest.mark.parametrize("labels,kind", [(1, "Sequence"), (3, "Sequence"), (2, "Token")])
def test_classifiers_load_score_and_are_saved_again(tmp_path, labels, kind):
    """The scores of transformers' LlamaFor...Classification, of padded rows: 2e-5; the files' bytes come back."""
    cfg = transformers.LlamaConfig(**tiny.BASE, num_labels=labels)
    oracle = (
        getattr(transformers, f"LlamaFor{kind}Classification")._from_config(cfg, attn_implementation="eager").eval()
    )
    tiny.randomise(oracle, 1)
    oracle.save_pretrained(tmp_path)
    lengths = np.array([24, 15])
    mask = torch.tensor(np.arange(24) < lengths[:, None])
    with torch.no_grad():
        want = oracle(torch.tensor(TOKENS).masked_fill(~mask, 0), attention_mask=mask).logits.numpy()
    want = want if kind == "Sequence" else want[np.arange(2), lengths - 1]
    model = models.load(tmp_path, dtype=jnp.float32)
    scores = jax.jit(losses.score_rows(model.family, model.cfg))
    got = scores(model.params, {"tokens": jnp.asarray(TOKENS), "lengths": jnp.asarray(lengths)})
    assert suite.error(got, want) < 2e-5
    models.save(model, tmp_path / "again")
    a, b = (safetensors.torch.load_file(p / "model.safetensors") for p in (tmp_path, tmp_path / "again"))
    assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)
    again = transformers.AutoConfig.from_pretrained(tmp_path / "again")
    assert again.architectures == [f"LlamaFor{kind}Classification"] and again.num_labels == labels
    with pytest.raises(ValueError, match=rf"reward model \({labels} labels\), which writes no text; .*score_rows"):
        serve.Engine(model, serve.Settings(rows=1, max_length=16))


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
    x, state = hidden(params, tokens, cfg, batch, state)
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
