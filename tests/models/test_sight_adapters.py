"""Adapters of models that see, to PEFT and from it: of text and tower, the projector whole; 2e-5 of the largest logit."""

import copy
import re
import warnings
from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import suite

torch = pytest.importorskip("torch", reason="the oracle is PEFT on torch (extra `test`)")
peft = pytest.importorskip("peft", reason="the oracle is PEFT (extra `test`)")

import test_omni  # noqa: E402
import test_qwenvl  # noqa: E402
import test_sight  # noqa: E402
from safetensors.numpy import load_file  # noqa: E402

from fdel import models, params  # noqa: E402

FIRST = ("llava", "qwen2_5_vl")  # the names of files and those of modules differ, in two ways
SIGHT = [n for n in test_sight.NAMES if n != "kimi_vl"]  # whose class is no part of transformers
NAMES = [
    n if n in FIRST else pytest.param(n, marks=[pytest.mark.slow, *[pytest.mark.matrix] * (":" in n)])
    for n in (*SIGHT, *test_qwenvl.FAMILIES, test_omni.NAME)
]
CLOSE = 2e-5
RENAMED = ("llava", "mistral3", "aya_vision", "gemma3", "qwen2_vl", "qwen2_5_vl", test_omni.NAME)


def make(name, directory):
    """A checkpoint, with functions that give ours and the oracle's logits of rows with images."""
    if name in SIGHT:
        c = test_sight.make(name, directory)
        real, inputs = test_sight.mask(c.lengths), c.inputs
        run = lambda p: suite.full(c.model._replace(params=p), c.tokens, test_sight.batch(c))
    elif name == test_omni.NAME:
        c = test_omni.make(directory)
        real, inputs, forward = c.real, c.theirs, test_omni.whole(c.model.cfg)
        run = lambda p: forward(p, c.tokens, c.batch)
    else:
        c = test_qwenvl.make(name, directory)
        real, inputs = slice(None), test_qwenvl.theirs(c.oracle)
        forward = test_qwenvl.whole(c.model.family, c.model.cfg)
        run = lambda p: forward(p, jnp.asarray(test_qwenvl.inputs().tokens), test_qwenvl.packed())

    def theirs(model):
        with torch.no_grad():
            return model(**inputs).logits.numpy()[real]

    spec = models.spec_of(c.model)
    return SimpleNamespace(
        name=name, model=c.model, oracle=c.oracle, spec=spec, ours=lambda p: np.asarray(run(p))[real], theirs=theirs
    )


@pytest.fixture(scope="module", params=NAMES)
def case(request, tmp_path_factory):
    return make(request.param, tmp_path_factory.mktemp(request.param.replace(":", "_")))


def learnt(c):
    """Params with adapters of text and tower that are not zero, of several scales, and another projector."""
    rng = np.random.default_rng(3)
    other = lambda x: x + jnp.asarray(rng.normal(0, 0.1, x.shape), x.dtype)
    p, how = c.model.params, dict(key=jax.random.key(0), spec=c.spec)
    for rank, alpha, where in (2, 3.0, r"^layers\b.*\.(q|v)$"), (3, 8.0, r"^vision\.layers\b.*\.(q|v)$"):
        p = params.lora.add(p, rank, alpha, where, **how)
    adapters, rest = params.lora.split(p)
    p = params.lora.join(jax.tree.map(other, adapters), rest)
    return p | {"projector": jax.tree.map(other, p["projector"])}


def test_peft_reads_what_is_written(case, tmp_path):
    """PEFT, and transformers' own loading of adapters: every tensor has its place there."""
    c, p = case, learnt(case)
    params.save_peft(c.spec, p, tmp_path, whole="^projector")
    want, before = c.ours(p), c.ours(c.model.params)
    assert suite.error(before, want) > 1e-2
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        adapted = peft.PeftModel.from_pretrained(copy.deepcopy(c.oracle), tmp_path).eval()
    assert not [w for w in said if "keys" in str(w.message)]
    names = set(load_file(tmp_path / "adapter_model.safetensors"))
    assert {k for k in peft.get_peft_model_state_dict(adapted)} == names
    assert suite.error(c.theirs(adapted), want) < CLOSE
    loaded = copy.deepcopy(c.oracle)
    loaded.load_adapter(str(tmp_path))
    assert suite.error(c.theirs(loaded), want) < CLOSE
    again = params.load_peft(c.spec, c.model.params, tmp_path)
    assert suite.error(c.ours(again), want) < CLOSE


def test_what_peft_has_written_is_read(case, tmp_path):
    """Of the same matrices, random, and the projector as it was and moved."""
    c, torch_rng = case, torch.Generator().manual_seed(0)
    modules = [k for k, m in c.oracle.named_modules() if isinstance(m, torch.nn.Linear)]
    chosen = [k for k in modules if re.search(r"\.(q_proj|v_proj|qkv)(\.linear)?$", k)]
    whole = [k for k in modules if re.search(r"multi_modal_projector|embed_vision|visual\.merger\.", k)]
    assert {"vis" in k for k in chosen} == {True, False}
    settings = peft.LoraConfig(r=2, lora_alpha=3, target_modules=chosen, modules_to_save=whole or None)
    adapted = peft.get_peft_model(copy.deepcopy(c.oracle), settings).eval()
    with torch.no_grad():
        for x in adapted.parameters():
            if x.requires_grad:
                x += torch.randn(x.shape, generator=torch_rng) * 0.1
    adapted.save_pretrained(tmp_path)
    want = c.theirs(adapted)
    assert suite.error(c.ours(c.model.params), want) > 1e-2
    got = params.load_peft(params.unstack(c.spec), params.unstack(c.model.params), tmp_path)
    assert suite.error(c.ours(got), want) < CLOSE
    got = params.load_peft(c.spec, c.model.params, tmp_path)
    assert suite.error(c.ours(got), want) < CLOSE


def test_names_of_files_are_read_too(case, tmp_path):
    """As fdel wrote them, and PEFT before transformers held its arrays as it does now."""
    c, p = case, learnt(case)
    older = jax.tree.map(lambda x: replace(x, module=None), c.spec)
    for directory, spec in (("old", older), ("new", c.spec)):
        params.save_peft(spec, p, tmp_path / directory, whole="^projector")
    names = [set(load_file(tmp_path / d / "adapter_model.safetensors")) for d in ("old", "new")]
    assert (names[0] != names[1]) == (c.name.partition(":")[0] in RENAMED)
    if c.name == "llava":
        assert "base_model.model.language_model.model.layers.0.self_attn.q_proj.lora_A.weight" in names[0]
        assert "base_model.model.model.language_model.layers.0.self_attn.q_proj.lora_A.weight" in names[1]
    old, new = (params.load_peft(c.spec, c.model.params, tmp_path / d) for d in ("old", "new"))
    jax.tree.map(np.testing.assert_array_equal, old, new)
