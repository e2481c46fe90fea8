"""One parametrised suite for all families; the oracle is transformers on tiny checkpoints with every weight randomised.

Tolerances are relative to the largest logit, in float32. Seen: 2e-7 to 3e-6 for (a), (b), (c) and (f).
"""

import dataclasses
import json
from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
import suite
import tiny

torch = pytest.importorskip("torch", reason="the oracle is transformers on torch (extra `test`)")

from fdel import models, ops, params, recipe, train  # noqa: E402
from fdel.models import llama, mixtral  # noqa: E402
from fdel.ops.mask import HIDDEN  # noqa: E402

NAMES = list(tiny.TINY)
PLAIN = [n for n in NAMES if ":" not in n]
CAUSAL = [n for n in NAMES if tiny.TINY[n].causal]
FAST = ("llama", "mamba2")  # the others' longer checks are left out of test-fast
MOE = [n for n in PLAIN if "experts" in models.family(n).Config.__dataclass_fields__]


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


def each(names):
    """Every check of the families that stand for a wiring; of the others with `make matrix` only."""
    return [slow(n) if tiny.TINY[n].wiring else pytest.param(n, marks=pytest.mark.matrix) for n in names]


# What wraps the layers (meshes, few bits, adapters) knows nothing of their insides: experts, states, latents, one of each.
WRAPPED = [
    n for n in PLAIN if not tiny.TINY[n].wiring or n in ("llama", "gpt2", "gpt_oss", "deepseek_v3", "qwen3_next")
]


def wrapped(names):
    """As `each`; with `make matrix` the other wirings too."""
    return [p if p.values[0] in WRAPPED else pytest.param(*p.values, marks=pytest.mark.matrix) for p in each(names)]


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    return lru_cache(lambda name: suite.make_case(name, tmp_path_factory.mktemp(name.replace(":", "_"))))


def test_every_family_is_here():
    assert {n.split(":")[0] for n in NAMES} == set(models.families())


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_logits_equal_torch(case, name):
    assert suite.logits_error(case(name)) < 2e-5


def few(name):
    """Slow; of a variant whose family stands for no wiring, with `make matrix` only."""
    entry, plain = tiny.TINY[name], tiny.TINY[name.partition(":")[0]]
    return [pytest.mark.slow, *[pytest.mark.matrix] * (entry is not plain and not plain.wiring)]


# Keys cached before a dynamic or long rope stretches keep their angles, as in transformers: no equality there.
SERVED = [n for n in CAUSAL if tiny.TINY[n].served]
CHUNKS = [(n, 7, 4) if n in FAST else pytest.param(n, 7, 4, marks=few(n)) for n in SERVED]
CHUNKS += [
    pytest.param(n, *size, marks=[pytest.mark.slow, *[pytest.mark.matrix] * (not tiny.TINY[n].wiring)])
    for n in SERVED
    for size in ((20, 8), (1, 1))
]


@pytest.mark.parametrize("name,first,block", CHUNKS)
def test_chunked_prefill_and_decode_equal_full_forward(case, name, first, block):
    assert suite.serving_error(case(name), first, block) < 2e-5


@pytest.mark.parametrize("name", ["llama", *each(n for n in PLAIN if n != "llama")])
def test_without_state_none_comes_back(case, name):
    m = case(name).model
    assert jax.eval_shape(lambda p, t: m.family.forward(p, t, m.cfg), m.params, case(name).tokens)[1] is None


@pytest.mark.parametrize("name", each(NAMES))
def test_packed_segments_equal_separate_calls(case, name):
    entry = tiny.TINY[name]  # what depends on a row's length, or sees later tokens, needs calls of its own
    assert suite.packing_error(case(name), prefixes=entry.served and entry.causal) < 2e-5


def recurrent(name):
    module = models.family(name.partition(":")[0])
    return module.state_spec(module.Config.from_hf(tiny.TINY[name].values), pages=1, rows=1).slots is not None


RECURRENT = [n for n in PLAIN if recurrent(n)]


@pytest.mark.parametrize("name", ["llama", *each(n for n in CAUSAL if n.partition(":")[0] not in RECURRENT)])
def test_a_hidden_token_changes_no_other(case, name):
    """Not in any layer, as the key of any query: other logits stay bit by bit, its own do not."""
    m, tokens = case(name).model, jnp.asarray(case(name).tokens)
    batch = ops.packed(tokens)
    keys = batch.segment_ids.at[:, 7].set(HIDDEN)
    logits = [
        suite.full(m, t, dataclasses.replace(batch, key_segment_ids=keys)) for t in (tokens, tokens.at[:, 7].set(2))
    ]
    changed = np.asarray((logits[0] != logits[1]).any(-1))
    assert changed[:, 7].all() and changed.sum() == len(tokens)
    seen = suite.full(m, tokens.at[:, 7].set(2), batch) != suite.full(m, tokens, batch)
    assert seen[:, 7:9].any(-1).all()
    recipe.build_objective(recipe.from_dict({"trainer": {"fcm_max_ratio": 0.2}}), m)


@pytest.mark.parametrize("name", RECURRENT)
def test_recurrent_layers_hide_no_key(case, name):
    m, tokens = case(name).model, jnp.asarray(case(name).tokens)
    batch = ops.packed(tokens)
    with pytest.raises(
        ValueError, match="Packed.key_segment_ids and prefix_ids say what attention sees; a recurrent layer has no keys"
    ):
        suite.full(m, tokens, dataclasses.replace(batch, key_segment_ids=batch.segment_ids))
    recipe.build_objective(recipe.Recipe(), m)
    with pytest.raises(
        ValueError, match=f"fcm_max_ratio=0.2: {name} has recurrent layers, which hide no key; remove it"
    ):
        recipe.build_objective(recipe.from_dict({"trainer": {"fcm_max_ratio": 0.2}}), m)


@pytest.mark.parametrize("name", each(n for n in PLAIN if tiny.TINY[n].causal))
def test_no_gradient_from_the_future(case, name):
    future, past = suite.future_gradient(case(name))
    assert future == 0 and past > 1e-9


@pytest.mark.parametrize("name", NAMES)
def test_checkpoint_round_trip_is_exact(case, name, tmp_path):
    import transformers
    from safetensors.numpy import load_file

    c = case(name)
    models.save(c.model, tmp_path)
    want, got = load_file(c.directory / "model.safetensors"), load_file(tmp_path / "model.safetensors")
    rename = getattr(c.model.family, "rename", lambda key, cfg: key)
    want = {new: x for key, x in want.items() if (new := rename(key, c.model.cfg))}
    assert want.keys() == got.keys()
    for key in want:
        assert want[key].dtype == got[key].dtype and want[key].tobytes() == got[key].tobytes(), key
    written = json.loads((tmp_path / "config.json").read_text())
    assert models.family(written["model_type"]).Config.from_hf(written) == c.model.cfg
    if tiny.TINY[name].make:  # no class of transformers reads it
        return
    again = getattr(transformers, tiny.TINY[name].model)
    again = again.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation=tiny.TINY[name].attn).eval()
    with torch.no_grad():
        assert suite.error(again(torch.tensor(c.tokens)).logits.numpy(), c.logits) < 1e-6


@pytest.mark.parametrize("name", PLAIN)
def test_config_written_from_scratch_equals_the_original(case, name):
    """Without the original file's text, what fdel writes still says everything that fdel reads."""
    import dataclasses

    cfg = case(name).model.cfg
    bare = dataclasses.replace(cfg, source="{}")
    module = case(name).model.family
    assert module.Config.from_hf(models.config_dict(module, bare)) == cfg


@pytest.mark.parametrize("name", ["qwen3_moe", slow("mixtral"), pytest.param("qwen3_next", marks=pytest.mark.matrix)])
def test_router_auxiliary_loss_is_that_of_transformers(case, name, tmp_path):
    """Of rows of 40 and 23 tokens; the loss is the cross-entropy plus its share (1e-5). DeepSeek's has no oracle."""
    c, coef = case(name), 0.3
    oracle, lengths = tiny.build(name), np.array([suite.LENGTH, 23])
    oracle.config.output_router_logits, oracle.router_aux_loss_coef = True, coef
    mask = torch.tensor(np.arange(suite.LENGTH) < lengths[:, None])
    tokens = torch.tensor(c.tokens)
    want = oracle(tokens, attention_mask=mask, labels=tokens.masked_fill(~mask, -100), output_router_logits=True)
    loss = train.losses.sft(c.model.family, c.model.cfg, router_aux_loss_coef=coef)
    step = jax.jit(train.normalize(train.grads(loss)))
    grads, sums = step(c.model.params, {"tokens": jnp.asarray(c.tokens), "lengths": jnp.asarray(lengths)})
    np.testing.assert_allclose(sums["aux_loss"], want.aux_loss.item(), rtol=1e-5)
    np.testing.assert_allclose(sums["loss"], want.loss.item(), rtol=1e-5)
    want.loss.backward()
    params.save(c.model.family.spec(c.model.cfg), grads, tmp_path)
    written = safetensors.numpy.load_file(tmp_path / "model.safetensors")
    ours, theirs = (
        [np.asarray(x) for k, x in sorted(named) if k.endswith(".gate.weight")]
        for named in (written.items(), ((k, p.grad) for k, p in oracle.named_parameters()))
    )
    assert ours
    for got, g in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(got, g, atol=1e-5 * np.abs(g).max(), rtol=0)


@pytest.mark.parametrize("name", [slow("qwen3_moe"), pytest.param("deepseek_v3", marks=pytest.mark.matrix)])
def test_router_z_loss_is_that_of_transformers(case, name):
    """Of rows of 40 and 23 tokens: transformers' `router_z_loss_func` of its routers' logits, all layers together."""
    from transformers.models.switch_transformers.modeling_switch_transformers import router_z_loss_func

    c, coef, seen = case(name), 0.3, []
    oracle, lengths = tiny.build(name), np.array([suite.LENGTH, 23])
    for path, module in oracle.named_modules():
        if path.endswith("mlp.gate"):
            module.register_forward_hook(lambda module, x, out: seen.append(x[0].detach() @ module.weight.detach().T))
    mask = torch.tensor(np.arange(suite.LENGTH) < lengths[:, None])
    oracle(torch.tensor(c.tokens), attention_mask=mask)
    logits = torch.cat([x.reshape(*mask.shape, -1)[mask] for x in seen]).double()
    want = router_z_loss_func(logits[None]).item()
    batch = {"tokens": jnp.asarray(c.tokens), "lengths": jnp.asarray(lengths)}
    means = [
        train.normalize(train.grads(train.losses.sft(c.model.family, c.model.cfg, **coefs)))(c.model.params, batch)[1]
        for coefs in ({"router_z_loss_coef": coef}, {})
    ]
    np.testing.assert_allclose(means[0]["router_z_loss"], want, rtol=1e-5)
    np.testing.assert_allclose(means[0]["loss"] - means[1]["loss"], coef * want, rtol=1e-4)
    assert means[0]["router_load"] > 1 and "router_z_loss" not in means[1]


@pytest.mark.parametrize(
    "name",
    [
        "deepseek_v3",
        slow("glm_moe_dsa"),
        *(pytest.param(n, marks=pytest.mark.matrix) for n in ("glm4_moe", "kimi_linear")),
    ],
)
def test_selection_biases_move_by_deepseeks_rule(case, name):
    """Counts are those of transformers' routers, without padding; then b + u sign(mean - count), in float64 by numpy."""
    c, speed, seen = case(name), 0.25, []
    oracle, lengths = tiny.build(name), np.array([suite.LENGTH, 23])
    gates = [m for _, m in oracle.named_modules() if hasattr(m, "e_score_correction_bias") and hasattr(m, "weight")]
    for module in gates:
        module.register_forward_hook(lambda m, x, out: seen.append(out[-1] if out[-1].dtype == torch.int64 else out[0]))
    mask = torch.tensor(np.arange(suite.LENGTH) < lengths[:, None])
    with torch.no_grad():
        oracle(torch.tensor(c.tokens), attention_mask=mask)
    want = []
    for module, chosen in zip(gates, seen, strict=True):
        bias = module.e_score_correction_bias.double().numpy()
        counts = np.bincount(chosen.reshape(*mask.shape, -1)[mask].reshape(-1), minlength=len(bias)).astype(np.float64)
        want.append(bias + speed * np.sign(counts.mean() - counts))
    spec, optimizer = c.model.family.spec(c.model.cfg), train.optim.lion(0.0)
    g = train.count_choices(train.accumulate(train.grads(train.losses.sft(c.model.family, c.model.cfg)), 2), spec)
    step = jax.jit(train.balance(train.update(train.normalize(g), optimizer), speed))
    state = train.init_state(c.model.params, optimizer)
    new, metrics = step(state, {"tokens": jnp.asarray(c.tokens), "lengths": jnp.asarray(lengths)})
    moved = [x for path, x in params.named_leaves(new.params) if path.endswith("router_bias")]
    got = np.concatenate([np.asarray(x, np.float64).reshape(-1, x.shape[-1]) for x in moved])
    order = lambda x: x[np.lexsort(x.T)]
    np.testing.assert_allclose(order(got), order(np.stack(want)), atol=1e-6)
    assert metrics["router_busiest"] > 1 > metrics["router_idle"] and not any("choices" in name for name in metrics)


def test_router_auxiliary_loss_needs_experts(case):
    with pytest.raises(ValueError, match="has no experts"):
        train.losses.sft(llama, case("llama").model.cfg, router_aux_loss_coef=0.1)


@pytest.mark.slow
def test_preferences_have_transformers_auxiliary_loss(case):
    """DPO and KTO of qwen3_moe: what the coefficient adds to loss and gradients is transformers' on the same rows: 1e-5."""
    c, coef, losses = case("qwen3_moe"), 0.3, train.losses
    oracle, lengths = tiny.build("qwen3_moe"), np.array([suite.LENGTH, 23])
    mask = torch.tensor(np.arange(suite.LENGTH) < lengths[:, None])
    want = oracle(torch.tensor(c.tokens), attention_mask=mask, output_router_logits=True).aux_loss
    want.backward()
    gates = [p.grad.numpy() for k, p in oracle.named_parameters() if k.endswith("gate.weight")]
    rated = {"label": jnp.array([True, False]), "ref_logps": jnp.ones(2)}
    plain = {"tokens": jnp.asarray(c.tokens), "lengths": jnp.asarray(lengths)}
    pairs = jax.tree.map(lambda x: x[None], plain) | {"ref_logps": jnp.ones((1, 2))}
    outputs = losses.completion_logps(c.model.family, c.model.cfg, router=True)
    kto = losses.kto_objective(loss_type="apo_zero_unpaired")
    for objective, batch in ((losses.dpo_objective(), pairs), (kto, plain | rated)):
        balanced = losses.completions.with_balance(objective, coef)

        def difference(p, batch=batch, objective=objective, balanced=balanced):
            o = outputs(p, batch)
            (full, sums), (bare, _) = balanced(o, batch), objective(o, batch)
            return (full - bare) / coef, sums

        (value, sums), added = jax.jit(jax.value_and_grad(difference, has_aux=True))(c.model.params)
        weight = sums["weight"].item()
        assert weight == (2 if "label" in batch else 1)
        np.testing.assert_allclose(sums["aux_loss"] / weight, want.item(), rtol=1e-5)
        np.testing.assert_allclose(value / weight, want.item(), rtol=1e-4)
        routers = [x for path, x in jax.tree.leaves_with_path(added) if "router" in jax.tree_util.keystr(path)]
        got = np.concatenate([x.reshape(-1, *gates[0].shape) for x in routers]) / weight
        np.testing.assert_allclose(got, np.stack(gates), atol=1e-5 * np.abs(gates).max(), rtol=0)


def test_noise_on_the_router_is_no_loss_s_own():
    """A loss whose Config asks for it would train without, so it says what adds it: tests/train/test_route.py."""
    cfg = mixtral.Config.from_hf({"router_jitter_noise": 0.1})
    with pytest.raises(ValueError, match=r"router_jitter_noise=0.1 in the model's config.json.* train.route"):
        train.losses.sft(mixtral, cfg)
    assert train.losses.forward.still(cfg) == dataclasses.replace(cfg, jitter=0.0)
    sees, d = models.family("llama4"), json.loads(json.dumps(tiny.TINY["llama4"].values))
    cfg = sees.Config.from_hf(d | {"text_config": d["text_config"] | {"router_jitter_noise": 0.1}})
    with pytest.raises(ValueError, match=r"router_jitter_noise=0.1 in the model's config.json.* train.route"):
        train.losses.sft(sees, cfg)
    assert (cfg.jitter, train.losses.forward.still(cfg).jitter) == (0.1, 0.0)
    found = {"router_jitter_noise": 0.5, "head_dim": 8}
    assert mixtral.Config.from_hf(found).jitter == 0.5


# ---- hidden states -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", *each(n for n in PLAIN if n != "llama" and not tiny.TINY[n].make)])
def test_hidden_states_are_those_of_transformers(case, name):
    """All of them, from stacked and from listed layers: 2e-5 of each one's largest value."""
    c = case(name)
    with torch.no_grad():
        theirs = tiny.build(name)
        want = theirs(torch.tensor(c.tokens), output_hidden_states=True).hidden_states
        if tiny.TINY[name].states:
            want = tiny.TINY[name].states(theirs, torch.tensor(c.tokens), want)
    places, packed = range(len(want)), ops.packed(jnp.asarray(c.tokens))
    run = jax.jit(
        lambda p: train.losses.forward.forward_pass(c.model.family, c.model.cfg, places=places)(p, c.tokens, packed)
    )
    for weights in (c.model.params, params.unstack(c.model.params)):
        got = run(weights)
        assert len(got.states) == len(want) == c.model.cfg.layers + 1
        for ours, theirs in zip(got.states, want, strict=True):
            assert suite.error(ours, theirs.numpy()) < 2e-5
    with pytest.raises(ValueError, match=rf"hidden states \[{len(want)}\] of a model of"):
        train.losses.forward.forward_pass(c.model.family, c.model.cfg, places=(0, len(want)))


@pytest.mark.slow
def test_distillation_matches_hidden_states_as_torch_does(case):
    """Qwen3 teaches Llama, of as many channels: value and gradients of the mean squared error; with remat too: 1e-5."""
    c, teacher, layers, weight = case("llama"), case("qwen3"), (0, 1, -1), 0.7
    mask = np.random.default_rng(3).random(c.tokens.shape) < 0.6
    oracle, other = tiny.build("llama"), tiny.build("qwen3")
    ids, learnt = torch.tensor(c.tokens), torch.tensor(mask[:, 1:])
    theirs = other(ids, output_hidden_states=True).hidden_states
    mine = oracle(ids, output_hidden_states=True).hidden_states
    errors = torch.stack([((mine[i] - theirs[i].detach()) ** 2).mean(-1) for i in layers]).mean(0)[:, :-1]
    want = (errors * learnt).sum()
    want.backward()
    batch = {"tokens": jnp.asarray(c.tokens), "mask": jnp.asarray(mask)}
    pair = c.model.family, c.model.cfg, teacher.model.family, teacher.model.cfg
    grad = lambda **k: jax.jit(jax.grad(train.losses.distill(*pair, **k), has_aux=True))
    base, _ = grad()(c.model.params, batch, {"teacher": teacher.model.params})
    for remat in (None, "nothing_saveable"):
        asked = grad(terms=train.losses.Terms(weight, layers), remat=remat)
        full, sums = asked(c.model.params, batch, {"teacher": teacher.model.params})
        np.testing.assert_allclose(sums["hidden_loss"], want.item(), rtol=1e-5)
        added = jax.tree.map(lambda a, b: (b - a) / weight, base, full)
        for got, parameter in (
            (added["embed"], oracle.model.embed_tokens.weight),
            (added["layers"]["gate"], torch.stack([layer.mlp.gate_proj.weight.grad for layer in oracle.model.layers])),
        ):
            expected = (parameter if parameter.grad is None else parameter.grad).numpy()
            np.testing.assert_allclose(got, expected, atol=1e-4 * np.abs(expected).max(), rtol=0)


@pytest.mark.slow
def test_distillation_projects_narrower_hidden_states(case):
    """With "projection" among the params; without, both widths are named. Against numpy on the states: 1e-5."""
    c, cfg = case("llama"), case("llama").model.cfg
    wide = dataclasses.replace(cfg, embed=80)
    big = jax.jit(lambda k: params.init(llama.spec(wide), k, dtype=jnp.float32))(jax.random.key(0))
    projection = jax.random.normal(jax.random.key(1), (2, 80, 64)) / 8
    batch, asked = {"tokens": jnp.asarray(c.tokens)}, train.losses.Terms(1.0, (1, 2))
    loss = jax.jit(train.losses.distill(llama, cfg, llama, wide, terms=asked))
    sums = loss({**c.model.params, "projection": projection}, batch, {"teacher": big})[1]
    states = lambda p, cfg: (
        train.losses.forward.forward_pass(llama, cfg, places=(1, 2))(p, c.tokens, ops.packed(c.tokens)).states
    )
    error = lambda s, t, w: ((np.asarray(s, float) @ np.asarray(w, float).T - t) ** 2).mean(-1)[:, :-1].sum()
    want = np.mean([error(*x) for x in zip(states(c.model.params, cfg), states(big, wide), projection, strict=True)])
    np.testing.assert_allclose(sums["hidden_loss"], want, rtol=1e-5)
    with pytest.raises(ValueError, match=r"student \(2, 40, 64\) and teacher \(2, 40, 80\) differ"):
        loss(c.model.params, batch, {"teacher": big})
    with pytest.raises(ValueError, match="hidden_layers is empty"):
        train.losses.distill(llama, cfg, llama, wide, terms=train.losses.Terms(1.0, ()))


@pytest.mark.parametrize("last", ["fsdp", "sp"])
@pytest.mark.parametrize("name", wrapped(PLAIN))
def test_mesh_of_eight_devices_gives_the_same_logits(case, name, last):
    c = case(name)
    mesh = params.make_mesh({"ep" if name in MOE else "dp": 2, "tp": 2, last: 2})
    sharded = models.load(c.directory, dtype=jnp.float32, mesh=mesh)
    assert any(not x.sharding.is_fully_replicated for x in jax.tree.leaves(sharded.params))
    even = c.tokens[:, : c.tokens.shape[1] // 2 * 2]  # for sp
    tokens = jax.device_put(np.tile(even, (2, 1)), params.batch_sharding(mesh))
    with jax.set_mesh(mesh):
        got = np.asarray(suite.full(sharded, tokens))
    assert suite.error(got[:2], suite.full(c.model, even)) < 2e-5
    assert suite.error(got[2:], suite.full(c.model, even)) < 2e-5


@pytest.mark.parametrize("name", each(PLAIN))
def test_gradients_are_finite_and_equal_stacked_and_listed(case, name):
    c = case(name)
    stacked = suite.gradients(c, c.model.params)
    listed = suite.gradients(c, params.unstack(c.model.params))
    for (path, a), b in zip(params.named_leaves(params.unstack(stacked)), jax.tree.leaves(listed), strict=True):
        assert np.isfinite(a).all(), path
        assert suite.error(a, b) < 1e-4 if np.abs(b).max() > 1e-6 else np.abs(a).max() < 1e-5, path


# Error of the logits against full precision: root mean square, relative. A tiny MoE flips experts at the least change.
@pytest.mark.parametrize("name", wrapped(PLAIN))
@pytest.mark.parametrize(
    "form,limit",
    [("int8", 0.05), *(pytest.param(*f, marks=pytest.mark.matrix) for f in (("fp8", 0.15), ("nf4", 0.45)))],
)
def test_quantized_forward(case, name, form, limit):
    c = case(name)
    spec = c.model.family.spec(c.model.cfg)
    small = params.quantize(c.model.params, form, spec=spec)
    assert params.nbytes(small) < 0.75 * params.nbytes(c.model.params)
    got = np.asarray(suite.full(c.model._replace(params=small), c.tokens))
    same = suite.full(c.model._replace(params=params.dequantize(small, jnp.float32)), c.tokens)
    assert suite.error(got, same) < 1e-4
    assert 1e-6 < np.linalg.norm(got - c.logits) / np.linalg.norm(c.logits) < limit * tiny.TINY[name].loss


@pytest.mark.parametrize("name", wrapped(PLAIN))
def test_lora_forward_and_merge(case, name):
    c = case(name)
    spec = c.model.family.spec(c.model.cfg)
    adapted = params.lora.add(c.model.params, 4, 8.0, key=jax.random.key(1), spec=spec)
    assert suite.error(suite.full(c.model._replace(params=adapted), c.tokens), c.logits) < 2e-5  # B starts at zero
    trainable, frozen = params.lora.split(adapted)
    bump = jax.tree.map(lambda x: x + 0.05, trainable)
    moved = params.lora.join(bump, frozen)
    changed = suite.full(c.model._replace(params=moved), c.tokens)
    merged = suite.full(c.model._replace(params=params.lora.merge(moved)), c.tokens)
    assert suite.error(changed, c.logits) > 1e-3
    assert suite.error(changed, merged) < 1e-4
