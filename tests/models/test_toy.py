"""docs/family.md, done: its file and its line are all that a family needs to load, train and serve."""

import dataclasses
import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fdel import models, ops, params, serve, train
from fdel.models import protocol

PAGE = (Path(__file__).parents[2] / "docs" / "family.md").read_text()
SIZES = dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2)  # fmt: skip


def code(mark: str) -> str:
    return PAGE.split(f"<!-- {mark} -->")[1].split("```")[1].partition("\n")[2]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Install the page's file and its line as pip leaves them; make a checkpoint, and load it."""
    site = tmp_path_factory.mktemp("site")
    (site / "toy.py").write_text(code("family"))
    info = site / "toy-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: toy\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        code("entry").replace('[project.entry-points."fdel.models"]', "[fdel.models]")
    )
    (info / "entry_points.txt").write_text((info / "entry_points.txt").read_text().replace('"', ""))
    sys.path.insert(0, str(site))
    try:
        family = models.family("toy")
        cfg = family.Config.from_hf(SIZES)
        weights = params.init(family.spec(cfg), jax.random.key(0))
        models.save(models.Model(family, cfg, weights), site / "checkpoint")
        yield models.load(site / "checkpoint")
    finally:
        sys.path.remove(str(site))
        sys.modules.pop("toy", None)


def test_it_loads_and_says_what_it_is(model):
    assert model.family.__name__ == "toy" and "toy" not in models.families()
    assert model.cfg == model.family.Config.from_hf(SIZES) and json.loads(model.cfg.source)["model_type"] == "toy"
    assert set(params.unstack(model.params)["layers"][0]) == {*"qkvo", "attn_norm", "mlp_norm", "up", "down"}
    with pytest.raises(ValueError, match="'alibi': found True, which toy does not read"):
        model.family.Config.from_hf(SIZES | {"alibi": True})


def test_its_logits_are_the_formula(model):
    """Against numpy in float64: 1e-5 of the largest logit."""
    tokens = np.arange(1, 12)
    f64 = lambda x: np.asarray(x, np.float64)
    p, x = jax.tree.map(f64, params.unstack(model.params)), f64(model.params["embed"])[tokens]
    norm = lambda x, w: x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * w
    angle = np.arange(len(tokens))[:, None] / 10000.0 ** (np.arange(4) / 4)
    for layer in p["layers"]:
        h = norm(x, layer["attn_norm"])
        q, k, v = (np.einsum("td,nhd->tnh", h, layer[i]) for i in "qkv")
        turn = lambda z: np.concatenate(
            [z[..., :4] * np.cos(angle)[:, None] - z[..., 4:] * np.sin(angle)[:, None],
             z[..., 4:] * np.cos(angle)[:, None] + z[..., :4] * np.sin(angle)[:, None]], -1)  # fmt: skip
        q, k, v = turn(q), np.repeat(turn(k), 2, 1), np.repeat(v, 2, 1)
        s = np.where(np.tri(len(tokens), dtype=bool), np.einsum("tnh,snh->nts", q, k) / 8**0.5, -np.inf)
        s = np.exp(s - s.max(-1, keepdims=True))
        a = np.einsum("nts,snh->tnh", s / s.sum(-1, keepdims=True), v)
        x = x + np.einsum("tnh,dnh->td", a, layer["o"])
        h = norm(x, layer["mlp_norm"]) @ layer["up"].T
        x = x + np.maximum(h, 0) ** 2 @ layer["down"].T
    want = norm(x, p["norm"]) @ p["embed"].T
    got = model.family.forward(model.params, jnp.asarray(tokens)[None], model.cfg)[0][0]
    np.testing.assert_allclose(got, want, atol=1e-5 * np.abs(want).max())


def test_it_trains(model):
    """Twenty steps on one batch: the loss falls below a third; with LoRA on its declared matrices it falls too."""
    loss = train.losses.sft(model.family, model.cfg, remat="nothing_saveable")
    batch = {"tokens": jnp.asarray(np.random.default_rng(0).integers(0, 64, (2, 16)))}
    optimizer = optax.adam(1e-2)

    def fall(weights, value):
        @jax.jit
        def step(weights, state):
            (total, sums), g = jax.value_and_grad(value, has_aux=True)(weights)
            updates, state = optimizer.update(g, state)
            return optax.apply_updates(weights, updates), state, total / sums["weight"]

        state, totals = optimizer.init(weights), []
        for _ in range(20):
            weights, state, total = step(weights, state)
            totals.append(float(total))
        return totals[-1] / totals[0]

    call = lambda p: loss(p, batch)
    assert fall(model.params, call) < 1 / 3
    adapted = params.lora.add(model.params, 4, 32.0, key=jax.random.key(1), spec=model.family.spec(model.cfg))
    trainable, frozen = params.lora.split(adapted)
    assert fall(trainable, lambda t: call(params.lora.join(t, frozen))) < 0.98


@pytest.mark.slow
def test_it_serves(model):
    """Greedy tokens of the engine are those of full forward passes."""
    prompts = [[1, 2, 3], [9, 8, 7, 6, 5]]
    engine = serve.Engine(model, serve.Settings(rows=2, max_length=64))
    got = [g.tokens for g in engine.generate(prompts, serve.SamplingParams(temperature=0.0, max_tokens=8))]
    for prompt, tokens in zip(prompts, got, strict=True):
        known = list(prompt)
        for token in tokens:
            logits = model.family.forward(model.params, jnp.asarray([known]), model.cfg)[0][0, -1]
            assert int(jnp.argmax(logits)) == token
            known.append(token)
        assert len(tokens) == 8


def test_a_module_that_lacks_names_is_told_all_of_them(model, tmp_path):
    """What is no family names what it lacks, in the module and in its Config."""

    @dataclasses.dataclass
    class Config:
        vocab: int
        layers: int

    class almost:
        MODEL_TYPE, spec, hidden = "almost", model.family.spec, model.family.hidden

    almost.Config = Config
    wanted = r"'almost' is no model family: it lacks ARCHITECTURE \(a string\), state_spec .*, head .*, forward .*"
    with pytest.raises(models.ConfigError, match=wanted + r"Config.embed, Config.source, Config.from_hf, Config.to_hf"):
        protocol.check(almost)
    for name in models.families():
        assert protocol.check(models.family(name)) is models.family(name)
    assert isinstance(model.family.state_spec(model.cfg, pages=1), ops.State)
