"""Attention weights that a loss watches, and their distance from a teacher's: transformers' eager attention is the oracle.

Every weight is randomised. Weights are held to 2e-5, seen: 9e-7; losses and gradients to 1e-5 of float64.
"""

import dataclasses
from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import suite
import tiny

torch = pytest.importorskip("torch", reason="the oracle is transformers on torch (extra `test`)")

from fdel import ops, params, train  # noqa: E402
from fdel.models import llama, mamba2  # noqa: E402

slow = lambda *values: pytest.param(*values, marks=pytest.mark.slow)
NAMES = ["llama", "gpt2", "gemma3_text", "qwen3:sliding", "mixtral", "deepseek_v3", "qwen3_next"]
FEWER = dict(num_attention_heads=2, num_key_value_heads=1, num_hidden_layers=3)


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    return lru_cache(lambda name: suite.make_case(name, tmp_path_factory.mktemp(name.replace(":", "_"))))


def watched(c, layers, **options):
    """Compute the attention weights of some layers, jitted, in a function of the model's parameters."""
    run = train.losses.forward.forward_pass(c.model.family, c.model.cfg, attention=layers, **options)
    return jax.jit(lambda p: run(p, c.tokens, ops.packed(jnp.asarray(c.tokens))).attention)


@pytest.mark.parametrize("name", [n if n == "llama" else slow(n) for n in NAMES])
def test_attention_weights_are_those_of_transformers(case, name):
    """All that attend, from stacked and from listed layers; of a hybrid, transformers gives those that attend too."""
    c = case(name)
    with torch.no_grad():
        want = tiny.build(name)(torch.tensor(c.tokens), output_attentions=True).attentions
    want = [w for w in want if w is not None]
    assert len(want) == (2 if name == "qwen3_next" else c.model.cfg.layers)
    run = watched(c, range(len(want)))
    for weights in (c.model.params, params.unstack(c.model.params)):
        for ours, theirs in zip(run(weights), want, strict=True):
            assert ours.dtype == jnp.float32
            np.testing.assert_allclose(ours, theirs.numpy(), atol=2e-5, rtol=0)


def attention_only(z, zt):
    """A target that is nothing, so that values and gradients are those of the attention alone."""
    return jnp.zeros(z.shape[:-1])


@pytest.mark.slow
@pytest.mark.parametrize("name, layers, remat", [("qwen3", None, None), ("llama:fewer", (-1, 0, -1), "dots_saveable")])
def test_value_and_gradients_are_those_of_float64(case, monkeypatch, name, layers, remat):
    """Torch in float64, from the formula; rows have padding and prompts, the second teacher fewer heads and more layers."""
    monkeypatch.setitem(tiny.TINY, "llama:fewer", tiny.Entry("LlamaConfig", tiny.BASE | FEWER, "LlamaForCausalLM"))
    c, teacher, weight = case("llama"), case(name), 0.7
    mask, lengths = np.random.default_rng(3).random(c.tokens.shape) < 0.6, np.array([suite.LENGTH, 23])
    learnt = torch.tensor((mask & (np.arange(suite.LENGTH) < lengths[:, None]))[:, 1:])
    oracle, other, ids = tiny.build("llama").double(), tiny.build(name).double(), torch.tensor(c.tokens)
    mine, theirs = (m(ids, output_attentions=True).attentions for m in (oracle, other))
    mean = (lambda w: w) if layers is None else (lambda w: w.mean(1, keepdim=True))
    pairs = [(mine[i], theirs[i].detach()) for i in layers or range(2)]
    errors = torch.stack([((mean(s) - mean(t)) ** 2).sum(-1).mean(1) for s, t in pairs]).mean(0)[:, :-1]
    (weight * errors * learnt).sum().backward()
    batch = {"tokens": c.tokens, "mask": mask, "lengths": lengths}
    pair = c.model.family, c.model.cfg, teacher.model.family, teacher.model.cfg
    terms = train.losses.Terms(attention_weight=weight, attention_layers=layers)
    loss = train.losses.distill(*pair, target=attention_only, terms=terms, remat=remat)
    compute = jax.jit(jax.value_and_grad(loss, has_aux=True))
    (total, sums), got = compute(c.model.params, batch, {"teacher": teacher.model.params})
    np.testing.assert_allclose(sums["attention_loss"], (errors * learnt).sum().item(), rtol=1e-5)
    np.testing.assert_allclose(total, weight * sums["attention_loss"], rtol=1e-6)
    assert sums["weight"] == learnt.sum().item()
    ours = got["layers"]
    for grads, parts in (
        (got["embed"][None], [oracle.model.embed_tokens]),
        (ours["q"], [layer.self_attn.q_proj for layer in oracle.model.layers]),
        (ours["k"], [layer.self_attn.k_proj for layer in oracle.model.layers]),
        (ours["v"], [layer.self_attn.v_proj for layer in oracle.model.layers]),
        (ours["gate"], [layer.mlp.gate_proj for layer in oracle.model.layers]),
    ):
        for a, part in zip(grads, parts, strict=True):
            want = torch.zeros_like(part.weight) if part.weight.grad is None else part.weight.grad
            np.testing.assert_allclose(
                a.reshape(want.shape), want, atol=1e-5 * max(want.abs().max().item(), 1e-9), rtol=0
            )
    assert all(np.abs(ours[i]).max() > 0 for i in "qk") and not np.any(ours["v"][-1])  # the last values come later


# ---- the program ---------------------------------------------------------------------------------------------------


def arrays(jaxpr):
    """Every array's shape in a program, those of inner programs included."""
    inner = lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")
    found = [v for e in jaxpr.eqns for v in jax.tree.leaves(list(e.params.values()), is_leaf=inner) if inner(v)]
    here = {v.aval.shape for e in jaxpr.eqns for v in e.outvars if hasattr(v.aval, "shape")}
    return here.union(*(arrays(getattr(j, "jaxpr", j)) for j in found))


SMALL = llama.Config(vocab=64, embed=32, ffn=48, layers=6, heads=4, kv_heads=2, head_dim=8, rope=ops.Rope(8, 1e4))


@pytest.mark.parametrize("remat", [slow(None), slow("nothing_saveable"), "dots_saveable"])
def test_no_layer_holds_its_weights_but_those_watched(remat):
    """Of six scanned layers the gradient holds two and works on one; no scores are [T S] where nobody watches."""
    t, p = 256, params.abstract(llama.spec(SMALL), jnp.float32)
    batch = {"tokens": jax.ShapeDtypeStruct((2, t), jnp.int32)}

    def squares(terms):
        loss = train.losses.distill(llama, SMALL, llama, SMALL, terms=terms, remat=remat)
        program = jax.make_jaxpr(jax.grad(lambda p, b, teacher: loss(p, b, {"teacher": teacher})[0]))(p, batch, p)
        # A mask is [rows T S] at most, and so is what one row's heads hold while they work.
        return {s for s in arrays(program.jaxpr) if s[-1:] == (t,) and np.prod(s) > 2 * t * t}

    assert not squares(train.losses.Terms())
    found = squares(train.losses.Terms(attention_weight=1.0, attention_layers=(1, -1)))
    assert max(found, key=np.prod) == (2, 2, 4, t, t) and max(s[0] for s in found if len(s) > 4) == 2, found


@pytest.mark.slow
def test_a_mesh_of_eight_devices_gives_the_same_loss_and_shares_the_weights():
    """Rows and heads are divided, and no device holds more than its part."""
    p, teacher = (params.init(llama.spec(SMALL), jax.random.key(i), dtype=jnp.float32) for i in (0, 1))
    batch = {"tokens": np.random.default_rng(0).integers(0, 64, (4, 48))}
    terms = train.losses.Terms(attention_weight=1.0, attention_layers=(0, 3))
    loss = train.losses.distill(llama, SMALL, llama, SMALL, target=attention_only, terms=terms)
    compute = jax.value_and_grad(loss, has_aux=True)
    (want, _), grads = jax.jit(compute)(p, batch, {"teacher": teacher})
    mesh = params.make_mesh({"fsdp": 4, "tp": 2})
    with jax.set_mesh(mesh):
        p, teacher = (jax.device_put(x, params.shardings(llama.spec(SMALL), mesh)) for x in (p, teacher))
        args = p, jax.device_put(batch, params.batch_sharding(mesh)), {"teacher": teacher}
        program = jax.jit(compute).lower(*args).compile()
        (got, _), others = program(*args)
    np.testing.assert_allclose(got, want, rtol=1e-5)
    for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(others), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5 * max(np.abs(a).max(), 1e-9))
    text = program.as_text()
    assert "f32[2,1,2,48,48]" in text and "f32[2,4,4,48,48]" not in text


# ---- what cannot be ------------------------------------------------------------------------------------------------


def test_what_has_no_attention_weights_is_refused():
    terms = lambda *layers: train.losses.Terms(attention_weight=1.0, attention_layers=layers)
    build = lambda terms, cfg=SMALL: train.losses.distill(llama, SMALL, llama, cfg, terms=terms)
    recurrent = mamba2.Config.from_hf({**tiny.TINY["mamba2"].values, "num_heads": 8})
    with pytest.raises(ValueError, match="mamba2 has no attention weights, its layers are recurrent"):
        train.losses.distill(mamba2, recurrent, mamba2, recurrent, terms=train.losses.Terms(attention_weight=1.0))
    with pytest.raises(ValueError, match=r"attention weights \[6\] of a model of 6 layers that attend; .* -6 to 5"):
        build(terms(0, 6))
    with pytest.raises(ValueError, match="attention_layers is empty"):
        build(terms())
    deeper = dataclasses.replace(SMALL, layers=8)
    with pytest.raises(ValueError, match="the student has 6 layers that attend and the teacher 8; name those to match"):
        build(train.losses.Terms(attention_weight=1.0), deeper)
    build(terms(0, -1), deeper)
