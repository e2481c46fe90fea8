"""Noise on what routers read and a capacity of experts, against transformers in training mode and Switch's rule."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fdel import models, ops, params, train
from fdel.models import llama, mixtral
from fdel.train import losses, parallel
from tests.models import tiny
from tests.serve import small

JITTER, CAPACITY, ROWS, LENGTH = 0.3, 0.8, 4, 20
CFG = mixtral.Config(
    vocab=64, embed=16, ffn=16, layers=2, heads=2, kv_heads=2, head_dim=8, experts=4, rope=ops.Rope(8, 1e4), jitter=0.1
)
QUIET = losses.forward.still(CFG)
SPEC = mixtral.spec(CFG)


def weights_of():
    return jax.jit(lambda key: params.init(SPEC, key, dtype=jnp.float32))(jax.random.key(0))


def batch_of(seed=0, rows=ROWS, vocab=64):
    r = np.random.default_rng(seed)
    tokens = r.integers(1, vocab, (rows, LENGTH))
    return {"tokens": jnp.asarray(tokens), "lengths": jnp.asarray(r.integers(LENGTH // 2, LENGTH + 1, rows))}


def routed(batch, key, **how):
    """The batch as a loss gets it."""
    return train.route(lambda params, batch, given: batch, **how)({}, batch, {"key": key})


def noise_of(batch, layers, width):
    """What each layer of each row multiplies with."""
    tokens, packed, _ = losses.forward.rows(batch)
    carry = ops.Carry(routing=dataclasses.replace(packed.routing, routers=jnp.zeros((), jnp.int32)))
    found = []
    for _ in range(layers):
        noise, carry = ops.jittered(jnp.ones((*tokens.shape, width)), carry)
        found.append(np.asarray(noise))
    return np.stack(found)


def kept(experts, lengths, n):
    """Switch's rule, a token after the other: an expert that is full takes no more of the row."""
    found = np.ones(experts.shape, bool)
    for row, length in enumerate(lengths):
        most, held = np.ceil(np.float64(CAPACITY) * experts.shape[-1] * length / n), np.zeros(n)
        for t in range(length):
            for j, e in enumerate(experts[row, t]):
                held[e] += 1
                found[row, t, j] = held[e] <= most
    return found


def test_noise_and_capacity_are_those_of_the_oracle(tmp_path, monkeypatch):
    """Mixtral's loss and all its gradients in torch, whose `uniform_` gives our noise and full experts 0: 1e-5.

    Torch computes the whole batch, we two microbatches. Another step has other noise, the same step the same bits.
    """
    torch = pytest.importorskip("torch", reason="the oracle is transformers on torch")
    import safetensors.numpy

    entry = tiny.TINY["mixtral"]
    entry = entry._replace(values=entry.values | {"router_jitter_noise": JITTER})
    oracle = tiny.checkpoint(entry, tmp_path / "in").train()
    model = models.load(tmp_path / "in", dtype=jnp.float32)
    with pytest.raises(ValueError, match=r"router_jitter_noise=0.3 .* train.route\(g, jitter=0.3\)"):
        losses.sft(*model[:2])
    batch, key = batch_of(vocab=model.cfg.vocab), jax.random.key(5)
    lengths = np.asarray(batch["lengths"])
    noise = noise_of(routed(batch, key, jitter=JITTER), model.cfg.layers, model.cfg.embed)
    assert 1 - JITTER <= noise.min() < 1 - 0.99 * JITTER and 1 + 0.99 * JITTER < noise.max() <= 1 + JITTER
    assert np.unique(noise).size > 0.99 * noise.size  # no layer, row or token has another's

    left, dropped = iter(torch.tensor(noise)), []

    def uniform(x, low, high):
        assert (low, high) == (1 - JITTER, 1 + JITTER)
        return next(left)

    def limit(gate, inputs, output):
        logits, scores, chosen = output
        keep = kept(chosen.reshape(ROWS, LENGTH, -1).numpy(), lengths, model.cfg.experts)
        dropped.append(1 - keep)
        return logits, scores * torch.tensor(keep).reshape(scores.shape), chosen

    monkeypatch.setattr(torch.Tensor, "uniform_", uniform)
    for path, module in oracle.named_modules():
        if path.endswith(".gate"):
            module.register_forward_hook(limit)
    mask = torch.tensor(np.arange(LENGTH) < lengths[:, None])
    tokens = torch.tensor(np.asarray(batch["tokens"])).long()
    want = oracle(tokens, attention_mask=mask.long(), labels=tokens.masked_fill(~mask, -100)).loss
    want.backward()
    assert next(left, None) is None and len(dropped) == model.cfg.layers

    g = train.accumulate(train.grads(losses.sft(model.family, losses.forward.still(model.cfg))), 2)
    step = jax.jit(train.normalize(train.route(g, jitter=JITTER, capacity=CAPACITY)))
    grads, metrics = step(model.params, batch, {"key": key})
    np.testing.assert_allclose(metrics["loss"], want.item(), rtol=1e-5)
    share = np.sum(dropped) / (lengths.sum() * model.cfg.layers * model.cfg.top_k)
    np.testing.assert_allclose(metrics["router_dropped"], share, rtol=1e-6)
    assert 0.05 < share < 0.5
    params.save(model.family.spec(model.cfg), grads, tmp_path / "ours")
    for p in oracle.parameters():
        p.data = p.grad
    oracle.save_pretrained(tmp_path / "theirs")
    got, theirs = (safetensors.numpy.load_file(tmp_path / i / "model.safetensors") for i in ("ours", "theirs"))
    assert got.keys() == theirs.keys()
    for name, x in theirs.items():
        np.testing.assert_allclose(got[name], x, atol=1e-5 * np.abs(x).max(), rtol=0, err_msg=name)
    again, other = (step(model.params, batch, {"key": k})[0] for k in (key, jax.random.key(6)))
    jax.tree.map(np.testing.assert_array_equal, again, grads)
    assert not np.allclose(other["layers"]["router"], grads["layers"]["router"], rtol=1e-2)


def gradients(n, outer=lambda g: g, inner=lambda g: g):
    g = outer(train.accumulate(inner(train.grads(losses.sft(mixtral, QUIET, chunk=8))), n))
    return jax.jit(train.normalize(train.route(g, jitter=JITTER, capacity=CAPACITY)))


def close(got, want):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5 * np.abs(b).max() + 1e-9), got, want)


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize(
    "sizes", [{"dp": 2, "fsdp": 2, "tp": 2}, {"ep": 4, "sp": 2}, {"dp": 2, "ep": 2, "tp": 2}], ids=str
)
def test_meshes_change_nothing(sizes):
    """Gradients of two microbatches on several devices are those of one device, noise and drops too: 1e-5."""
    weights, batch, given = weights_of(), batch_of(rows=8), {"key": jax.random.key(3)}
    want, told = gradients(1)(weights, batch, given)
    mesh = params.make_mesh(sizes)
    at = params.shardings(SPEC, mesh)
    with jax.set_mesh(mesh):
        g = gradients(2, parallel.reduce_once, lambda g: parallel.constrain(g, at))
        got, found = g(jax.device_put(weights, at), jax.device_put(batch, params.batch_sharding(mesh)), given)
    close(got, want)
    assert told["router_dropped"] == found["router_dropped"] > 0


@pytest.mark.slow
def test_a_reference_is_left_alone():
    """Its log-probabilities are those without noise; each side of a pair has noise of its own."""
    weights, rows = weights_of(), batch_of()
    rows = {name: jnp.stack([x, x], 1) for name, x in rows.items()}
    outputs = losses.completion_logps(mixtral, QUIET, chunk=8)

    @jax.jit
    def both(weights, rows, key):
        changed = routed(rows, key, jitter=JITTER, capacity=CAPACITY)
        return outputs(weights, changed, {"reference": weights}), outputs(weights, rows)

    noisy, plain = both(weights, rows, jax.random.key(0))
    np.testing.assert_allclose(noisy["ref_logps"], plain["logps"], rtol=1e-6)
    assert (noisy["logps"] != plain["logps"]).all() and (noisy["logps"][:, 0] != noisy["logps"][:, 1]).all()
    _, sums = losses.completions.with_balance(losses.dpo_objective(), 0.0)(noisy, rows)
    assert 0 < sums["router_dropped"][0] / sums["router_dropped"][1] < 1
    assert (
        "router_dropped"
        not in losses.completions.with_balance(losses.dpo_objective(), 0.0)(
            plain | {"ref_logps": plain["logps"]}, rows
        )[1]
    )


def test_what_cannot_be_routed_so_is_refused():
    g = train.route(train.grads(losses.sft(llama, small.CFG)), jitter=0.1)
    weights = params.abstract(llama.spec(small.CFG), jnp.float32)
    with pytest.raises(ValueError, match="the model has no experts"):
        jax.eval_shape(g, weights, batch_of(), {"key": jax.random.key(0)})
    with pytest.raises(ValueError, match="'key'"):
        g(weights, batch_of(), {})
    with pytest.raises(ValueError, match="around gradients once"):
        train.route(g, capacity=1.0)({}, batch_of(), {})
    with pytest.raises(ValueError, match=r"jitter=1.5; expected a finite number from 0 to 1"):
        train.route(g, jitter=1.5)
    with pytest.raises(ValueError, match="capacity=0; expected a finite number above 0"):
        train.route(g, capacity=0)
