"""Routers' losses and drops in losses of own samples: what `losses.sft` says of the same rows, which is transformers'."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fdel import ops, params, train
from fdel.models import heads, mixtral
from fdel.train import losses
from fdel.train.losses.forward import learnt_places

CFG = mixtral.Config(
    vocab=23, embed=8, ffn=8, layers=1, heads=2, kv_heads=1, head_dim=4, experts=4, rope=ops.Rope(4, 1e4)
)
AUX, Z = 0.7, 0.05
COEFS = {"router_aux_loss_coef": AUX, "router_z_loss_coef": Z}
MINE = (mixtral, CFG)
LOSSES = {
    "policy": lambda **k: losses.policy_gradient(*MINE, **k),
    "ppo": lambda **k: losses.ppo(*MINE, **k),
    "nash_md": lambda **k: losses.nash_md_gradient(*MINE, **k),
    "teacher": lambda **k: losses.taught_gradient(*MINE, *MINE, lambda drift, t: drift, **k),
    "drawn tokens": lambda **k: losses.sampled_distill(*MINE, *MINE, **k),
    "self": lambda **k: losses.self_distill(*MINE, **k),
}


def batch_of() -> dict:
    r = np.random.default_rng(0)
    lengths = np.array([10, 7, 4, 9], np.int32)
    at = np.arange(10) < lengths[:, None]
    batch = {
        "tokens": r.integers(1, 23, (4, 10)).astype(np.int32),
        "lengths": lengths,
        "mask": at & (np.arange(10) > 2),
    }
    batch["places"] = learnt_places(batch, 8)
    told = {f"told_{k}": x for k, x in batch.items()}
    columns = ("advantages", "values", "returns", "ref_logps")
    return batch | told | {k: np.float32(r.normal(size=at.shape)) for k in columns}


@pytest.mark.parametrize("kind", ["ppo", *(pytest.param(k, marks=pytest.mark.matrix) for k in LOSSES if k != "ppo")])
def test_terms_and_drops_are_those_of_the_rows(kind) -> None:
    batch = batch_of()
    weights = params.init(mixtral.spec(CFG), jax.random.key(0), dtype=jnp.float32)
    critic = params.init(heads.spec(*MINE, "value"), jax.random.key(1), dtype=jnp.float32)
    made = {**critic, "model": weights} if kind == "ppo" else weights
    given = {"teacher": weights, "reference": weights, "key": jax.random.key(2)}
    rows = {k: batch[k] for k in ("tokens", "lengths")}

    @jax.jit
    def run(made, weights, batch):
        limited = lambda b: train.route(lambda p, b, g: b, capacity=0.6)({}, b, given)
        mine = [(LOSSES[kind](), batch), (LOSSES[kind](**COEFS), batch), (LOSSES[kind](), limited(batch))]
        theirs = [(losses.sft(*MINE, **COEFS), rows), (losses.sft(*MINE), limited(rows))]
        return [f(made, b, given) for f, b in mine] + [f(weights, b, given) for f, b in theirs]

    (plain, before), (total, sums), (_, limited), (_, told), (_, drops) = run(made, weights, batch)
    assert "aux_loss" not in before and "router_dropped" not in sums
    for name in ("aux_loss", "router_z_loss", "router_load"):
        np.testing.assert_allclose(sums[name] / sums["weight"], told[name] / told["weight"], rtol=1e-6)
    np.testing.assert_allclose(total - plain, AUX * sums["aux_loss"] + Z * sums["router_z_loss"], rtol=1e-4)
    assert limited["router_dropped"] == drops["router_dropped"] and 0 < drops["router_dropped"][0]
