"""Log-probabilities under penalties: the engine's own, the formulas in float64, and the plain gradient."""

from collections import Counter
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fdel import ops, params, train
from fdel.models import llama
from fdel.params import lora
from fdel.serve import SamplingParams
from fdel.train import losses
from fdel.train.losses import penalties
from fdel.train.rollout import Said, Sample, Task, collate, rollout
from tests.train import small_policy

PENALTY, PRESENCE, FREQUENCY, TEMPERATURE = 1.4, 0.8, -0.3, 0.7
COUNTED = {"temperature": TEMPERATURE, "presence_penalty": PRESENCE, "frequency_penalty": FREQUENCY}
DRAWN = {**COUNTED, "repetition_penalty": PENALTY}
CFG = llama.Config(vocab=24, embed=16, ffn=24, layers=1, heads=2, kv_heads=2, head_dim=8, rope=ops.Rope(8, 1e4))
MATRIX = pytest.mark.matrix
LAYOUTS = {"rows": {}, "packed": {"packed": True}, "shared": {"shared": True}}


def randomised(cfg=CFG, seed: int = 0):
    tree = params.init(llama.spec(cfg), jax.random.key(seed), dtype=jnp.float32)
    r = np.random.default_rng(seed)
    return jax.tree.map(lambda x: x + jnp.asarray(r.normal(size=x.shape) * 0.3, jnp.float32), tree)


@pytest.fixture(scope="module")
def samples():
    """Of two turns, between which an environment speaks, or is silent; prompts have tokens in common with what is drawn."""
    turn = lambda s: Said([6, 2] * (s.index > 0 and s.info["turns"] == 1), done=s.info["turns"] == 2)
    weights = small_policy.weights(scale=8.0)
    engine, found = small_policy.engine(weights), {}
    for name, asked in (("all", DRAWN), ("counted", COUNTED)):
        ask = SamplingParams(max_tokens=10, top_p=0.9, **asked)
        found[name] = rollout(engine, small_policy.tasks(8), ask, samples=4, turn=turn)
        assert {s.index > 0 for s in found[name] if s.info["turns"] == 2 and s.length > 5} == {False, True}
        assert min(s.kept.min() for s in found[name]) < -0.01
    return weights, found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "asked"),
    [*((x, "all") for x in LAYOUTS), *(pytest.param(x, "counted", marks=[MATRIX] * (x != "shared")) for x in LAYOUTS)],
)
def test_the_trainer_says_what_the_sampler_drew_from(samples, layout, asked) -> None:
    """To 1e-5 (seen: 2e-6), with the mass that top-p left; without a penalty it is another distribution."""
    weights, found, drawn = samples[0], samples[1][asked], {"all": DRAWN, "counted": COUNTED}[asked]
    batch = collate(found, np.ones(len(found)), length=48, **LAYOUTS[layout])
    logps = lambda batch, **how: np.asarray(
        jax.jit(losses.token_logps(llama, small_policy.CFG, chunk=16, **how))(weights, batch)
    )[batch["mask"]]
    told = (batch["logps"] + batch["kept"])[batch["mask"]]
    assert batch["mask"].sum() == sum(s.length for s in found)
    np.testing.assert_allclose(logps(batch, **drawn), told, atol=1e-5)
    if layout == "rows":  # without one of them, and where two turns without a word between are taken for one
        for name in set(drawn) - {"temperature"}:
            assert np.abs(logps(batch, **{k: x for k, x in drawn.items() if k != name}) - told).mean() > 0.02, name
        assert np.abs(logps({k: x for k, x in batch.items() if k != "turns"}, **drawn) - told).max() > 0.02


def by_hand(z: np.ndarray, tokens, segments, prefixes, t: int, since: int) -> np.ndarray:
    """log softmax of a row's logits at place t, float64: one token after the other."""
    z = z.astype(np.float64).copy()
    before = {
        int(v) for v, s in zip(tokens[: t + 1], segments[: t + 1], strict=True) if s in (segments[t], prefixes[t])
    }
    for v in before:
        z[v] = z[v] / PENALTY if z[v] > 0 else z[v] * PENALTY
    for v, n in Counter(tokens[since : t + 1].tolist()).items():  # OpenAI's formula
        z[v] -= n * FREQUENCY + float(n > 0) * PRESENCE
    z /= TEMPERATURE
    return z - z.max() - np.log(np.exp(z - z.max()).sum())


def since_by_hand(learnt: np.ndarray) -> np.ndarray:
    """Where the turn of each place's next token begins, if each run of learnt tokens is one."""
    since, last = [], False
    for t, now in enumerate(learnt):
        since.append(t + 1 if now and not last else since[-1] if since else 0)
        last = now
    return np.array(since)


def packed_batch(rows: int = 2) -> dict:
    """A prompt with two samples that share it, another sample, and padding."""
    r = np.random.default_rng(1)
    lengths = np.array([6, 5, 4, 6, 3])
    segments = np.tile(np.repeat([0, 1, 2, 3, -1], lengths), (rows, 1)).astype(np.int32)
    prefixes = np.where((segments == 1) | (segments == 2), 0, -2).astype(np.int32)
    starts = np.repeat(np.array([0, 0, 5, 15, 21]), lengths)  # samples go on at their prompt's end
    positions = np.tile(np.arange(24) - starts, (rows, 1)).astype(np.int32)
    batch = {"tokens": r.integers(0, 12, (rows, 24)).astype(np.int32), "mask": r.random((rows, 24)) < 0.7}
    batch["packed"] = ops.Packed(positions, segments, prefix_ids=prefixes)
    batch["places"] = losses.forward.learnt_places(batch, 24)
    turns = np.repeat([0, 6, 9, 11, 15, 18, 21], [6, 3, 2, 4, 3, 3, 3])  # two of segments 1 and 3
    batch["turns"] = np.tile(turns, (rows, 1)).astype(np.int32)
    return batch | {"advantages": r.normal(size=(rows, 24)).astype(np.float32)}


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["packed", pytest.param("everywhere", marks=MATRIX), "rows"])
def test_statistics_and_gradients_are_those_of_the_formula(layout) -> None:
    """Values against float64 by hand, gradients against all logits at once; chunks of 10 tokens, of few places or all."""
    weights, batch = randomised(), packed_batch()
    if layout != "packed":
        batch.pop("places")
    if layout == "rows":
        batch = {k: jnp.asarray(v) for k, v in batch.items() if k not in ("packed", "turns")}
        batch |= {"lengths": jnp.array([24, 19])}  # runs of learnt tokens are turns
    tokens, packed, labels = losses.forward.rows(batch)
    segments = np.asarray(packed.segment_ids)
    prefixes = np.full_like(segments, -2) if packed.prefix_ids is None else np.asarray(packed.prefix_ids)
    learnt, t = np.asarray(labels) >= 0, np.arange(24)
    seen = (t[:, None] >= t) & ((segments[:, None] == segments[..., None]) | (segments[:, None] == prefixes[..., None]))
    since = np.stack([since_by_hand(row) for row in learnt])
    if layout != "rows":
        since = np.roll(batch["turns"], -1, 1)
    drawn = (t[:, None] >= t) & (t >= since[..., None])
    counts, often = (np.einsum("rtj,rjv->rtv", x, np.eye(CFG.vocab)[np.asarray(tokens)]) for x in (seen, drawn))

    def plain(params):
        x, *_ = llama.hidden(params, tokens, CFG, packed)
        z = ops.logits(x, llama.head(params, CFG))
        p = jnp.where(counts > 0, jnp.where(z > 0, z / PENALTY, z * PENALTY), z)
        logp = jax.nn.log_softmax((p - FREQUENCY * often - PRESENCE * (often > 0)) / TEMPERATURE)
        entropy = -(jnp.exp(logp) * logp).sum(-1)
        picked = jnp.take_along_axis(logp, jnp.maximum(labels, 0)[..., None], -1)[..., 0]
        return z, {"logp": jnp.where(learnt, picked, 0), "entropy": jnp.where(learnt, entropy, 0)}

    outputs = losses.policy_outputs(llama, CFG, chunk=10, **DRAWN)
    got, z = jax.jit(outputs)(weights, batch), np.asarray(plain(weights)[0])
    for r, i in zip(*np.nonzero(learnt), strict=True):
        want = by_hand(z[r, i], np.asarray(tokens)[r], segments[r], prefixes[r], i, since[r, i])
        assert abs(got["logp"][r, i] - want[labels[r, i]]) < 1e-5
        assert abs(got["entropy"][r, i] + (np.exp(want) * want).sum()) < 1e-5
    cotangent = np.random.default_rng(2).normal(size=(2, *learnt.shape))
    weighted = lambda o: (o["logp"] * cotangent[0] + o["entropy"] * cotangent[1]).sum()
    mine, theirs = (jax.jit(jax.grad(lambda p, f=f: weighted(f(p))))(weights)
                    for f in (lambda p: outputs(p, batch), lambda p: plain(p)[1]))  # fmt: skip
    for a, b in zip(jax.tree.leaves(mine), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * float(jnp.abs(b).max()))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shared", "axes"),
    [(False, "dp=2,sp=2,tp=2"), *(pytest.param(x, "dp=2,sp=2,tp=2", marks=MATRIX) for x in (True, None)),
     pytest.param(True, "dp=1,tp=8", marks=MATRIX)],
)  # fmt: skip
def test_on_a_mesh_with_adapters_and_microbatches(shared, axes) -> None:
    """On eight devices in two microbatches: the loss and the adapters' gradient of one device."""
    batch = packed_batch(8)
    if not shared:
        batch = {k: v for k, v in batch.items() if k != "packed"} | {"lengths": np.full(8, 22, np.int32)}
        batch["places"] = losses.forward.learnt_places(batch, 24)
    if shared is None:
        del batch["turns"], batch["places"]
    spec, base = llama.spec(CFG), randomised()
    adapted = lora.add(base, 2, 4.0, key=jax.random.key(1), spec=spec)
    adapted = jax.tree.map(lambda x: x + 0.01, adapted)
    loss = losses.policy_gradient(llama, CFG, losses.Policy(loss_type="grpo"), chunk=16, **DRAWN)
    g = lambda p, b: jax.jit(train.normalize(train.accumulate(train.grads(loss), 2)))(p, b)
    want, means = g(adapted, jax.tree.map(jnp.asarray, batch))
    mesh = params.make_mesh(params.parse_mesh(axes))
    with jax.set_mesh(mesh):
        rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("dp"))
        rules = params.TRAIN | (dict.fromkeys(["heads", "kv_heads"]) if "tp=8" in axes else {})
        placed = params.reshard(adapted, spec, mesh, rules)  # the vocabulary is divided over tp
        got, others = g(placed, jax.device_put(batch, rows))
    np.testing.assert_allclose(others["loss"], means["loss"], rtol=1e-5)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-5 * float(jnp.abs(b).max()))


def test_no_array_of_all_logits() -> None:
    """What is compiled holds no [T V], nor masks of it, but those of a chunk."""
    cfg = replace(CFG, vocab=4096)
    tree = jax.eval_shape(lambda: params.init(llama.spec(cfg), jax.random.key(0), dtype=jnp.float32))
    for layout in ("rows", "packed"):
        batch = packed_batch(4)
        if layout == "rows":
            batch.pop("packed")
        batch["places"] = losses.forward.learnt_places(batch, 24)
        loss = losses.policy_gradient(llama, cfg, chunk=8, **DRAWN)
        compiled = jax.jit(train.grads(loss)).lower(tree, jax.tree.map(jnp.asarray, batch)).compile()
        whole = 4 * 24 * cfg.vocab * 4
        assert compiled.memory_analysis().temp_size_in_bytes < whole, layout


def test_penalties_that_are_none() -> None:
    with pytest.raises(ValueError, match="repetition_penalty=0; expected a finite number above 0"):
        losses.policy_outputs(llama, CFG, repetition_penalty=0)
    with pytest.raises(ValueError, match="frequency_penalty=3; expected a finite number from -2 to 2"):
        losses.policy_outputs(llama, CFG, frequency_penalty=3)
    with pytest.raises(TypeError, match="repetitions"):
        losses.policy_outputs(llama, CFG, repetitions=2.0)
    z, asked = jnp.array([2.0, -2.0, 1.0]), penalties.Penalties(2.0, 0.5, 0.25)
    assert penalties.penalised(z, asked, z != 1).tolist() == [1.0, -4.0, 1.0]
    assert penalties.penalised(z, asked, count=jnp.array([0, 1, 2]), temperature=0.5).tolist() == [2.0, -3.5, -1.0]


def test_turns_of_a_sample() -> None:
    """As it was asked, and if nobody says so, by what was drawn."""
    drawn = np.array([0, 0, 1, 1, 1, 0, 1], bool)
    zeros = np.zeros(7, np.float32)
    s = Sample(Task(0, (1, 2)), 0, np.arange(7), drawn, zeros, zeros, zeros, "stop", asked=(2, 4, 6, 7))
    assert s.turns[drawn].tolist() == [2, 2, 4, 6] and replace(s, asked=None).turns[drawn].tolist() == [2, 2, 2, 6]
