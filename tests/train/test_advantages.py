"""Advantages and choices against plain loops in float64, by hand, and against TRL's lines in torch."""

import jax.numpy as jnp
import numpy as np
import pytest

from fdel.train.rollout import advantages, select

torch = pytest.importorskip("torch", reason="the oracle is TRL's lines in torch (extra `test`)")
NAN = np.nan
FIXTURE = np.load(__file__.replace("test_advantages.py", "fixtures/policy_trl112.npz"))


def nanstd(x, dim):
    """TRL's: n - 1 degrees of freedom."""
    mean = torch.nanmean(x, dim, keepdim=True)
    count = (~x.isnan()).sum(dim, keepdim=True)
    return torch.sqrt(torch.nansum((x - mean) ** 2, dim, keepdim=True) / (count - 1))


@pytest.fixture
def rewards():
    """Three groups of four, where some abstained."""
    r = np.random.default_rng(0).normal(size=12)
    r[[5, 9, 10]] = NAN
    return r


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_grouped(rewards, scale) -> None:
    x = torch.tensor(rewards).view(3, 4)
    spread = nanstd(x, 1) if scale == "group" else nanstd(x.view(1, -1), 1)
    want = (x - torch.nanmean(x, 1, keepdim=True)) / (1 if scale == "none" else spread + 1e-4)
    got = advantages.grouped(rewards, 4, scale=scale)
    np.testing.assert_allclose(got, torch.nan_to_num(want).flatten().numpy(), rtol=1e-12)
    assert (got[np.isnan(rewards)] == 0).all() and got[0] != 0


def test_equal_groups_teach_nothing() -> None:
    """0.1 three times has a mean that is not 0.1: a naive deviation of 1e-17 over 1e-4 is no zero."""
    total = np.array([0.1, 0.1, 0.1, 1.0, 2.0, NAN, NAN, NAN, NAN, NAN, 4.0, NAN])
    for scale in advantages.SCALES:
        assert (advantages.grouped(total, 3, scale=scale)[[0, 1, 2, 5, 6, 7, 8, 9, 10, 11]] == 0).all()
    assert advantages.equal_groups(total, 3).tolist() == [True, False, True, True]
    assert select.unequal(total, 3).tolist() == [False] * 3 + [True] * 3 + [False] * 6
    assert (advantages.leave_one_out(total, 3)[[0, 1, 2, 10]] == 0).all()
    assert (advantages.grouped(np.array([3.0, 5.0]), 1) == 0).all()  # groups of one


def test_leave_one_out(rewards) -> None:
    want = np.zeros(12)
    for i in range(12):
        others = [rewards[j] for j in range(12) if j // 4 == i // 4 and j != i and not np.isnan(rewards[j])]
        want[i] = 0 if np.isnan(rewards[i]) else rewards[i] - np.mean(others)
    np.testing.assert_allclose(advantages.leave_one_out(rewards, 4), want, rtol=1e-12)
    there = ~np.isnan(rewards)
    scaled = np.where(there, (want - want[there].mean()) / (want[there].std(ddof=1) + 1e-4), 0)
    np.testing.assert_allclose(advantages.leave_one_out(rewards, 4, normalize=True), scaled, rtol=1e-12)


def test_several_rewards(rewards) -> None:
    each = np.stack([rewards, 100 * rewards[::-1] + 3])
    weights = np.array([1.0, 0.5])
    total = advantages.weighted_sum(each, weights)
    np.testing.assert_allclose(total[0], each[0, 0] + 0.5 * each[1, 0])
    assert total[9] == 0.5 * each[1, 9] and advantages.weighted_sum(np.array([[NAN]]))[0] != 0
    x = torch.tensor(each).view(2, 3, 4)  # TRL's lines
    scaled = (x - torch.nanmean(x, 2, keepdim=True)) / (nanstd(x, 2) + 1e-4)
    added = (scaled.view(2, -1) * torch.tensor(weights)[:, None]).nansum(0, keepdim=True)
    want = torch.nan_to_num((added - added.nanmean()) / (nanstd(added, 1) + 1e-4))[0]
    np.testing.assert_allclose(advantages.normalize_then_sum(each, 4, weights), want.numpy(), rtol=1e-12)
    with pytest.raises(ValueError, match="functions samples"):
        advantages.weighted_sum(each, np.ones(3))
    with pytest.raises(ValueError, match="groups of 5 divide"):
        advantages.grouped(rewards, 5)
    with pytest.raises(ValueError, match="expected one of group, batch, none"):
        advantages.grouped(rewards, 4, scale="rows")


def test_optimal_value(rewards) -> None:
    x = rewards.reshape(3, 4)
    want = np.repeat([0.5 * np.log(np.mean(np.exp(g[~np.isnan(g)] / 0.5))) for g in x], 4)
    np.testing.assert_allclose(advantages.optimal_value(rewards, 4), want, rtol=1e-12)
    assert advantages.optimal_value(np.array([2000.0, 0.0]), 2).tolist() == pytest.approx([2000 - 0.5 * np.log(2)] * 2)


def loop_gae(rewards, values, mask, ids, gamma, lam):
    """PPO's loop over the drawn tokens of each sequence."""
    found = np.zeros_like(rewards)
    for i, s in {(row, s) for row in range(len(ids)) for s in ids[row]}:
        at = [t for t in range(ids.shape[1]) if ids[i, t] == s and mask[i, t]]
        after, last = 0.0, 0.0
        for t in reversed(at):
            last = rewards[i, t] + gamma * after - values[i, t] + gamma * lam * last
            found[i, t], after = last, values[i, t]
    return found


@pytest.mark.parametrize("packed", [False, True])
def test_gae(packed) -> None:
    """Holes, where an environment spoke, packed rows, and a score at the end; what was not drawn may hold anything."""
    r = np.random.default_rng(0)
    rewards, values = r.normal(size=(2, 3, 17))
    mask = r.random((3, 17)) < 0.6
    ids = np.cumsum(r.random((3, 17)) < 0.25, -1) - 1 if packed else np.zeros((3, 17), int)
    want = loop_gae(rewards, values, mask, ids, 0.97, 0.9)
    arrays = [jnp.asarray(np.where(mask, x, 1e6), jnp.float32) for x in (rewards, values)]
    segments = jnp.asarray(ids) if packed else None
    got, returns = advantages.gae(*arrays, jnp.asarray(mask, jnp.float32), gamma=0.97, lam=0.9, segments=segments)
    np.testing.assert_allclose(got, want, atol=2e-6)
    np.testing.assert_allclose(returns, np.where(mask, want + values, 0), atol=2e-6)
    assert (mask.sum(1) > 3).all() and (~mask).any()


def test_reward_to_go() -> None:
    """MiniLLM's, by its formula: sum of gamma^(i - t) r_i over sum of gamma^(i - t)."""
    r = np.random.default_rng(0).normal(size=(2, 6))
    mask = np.arange(6) < np.array([[6], [4]])
    for mean in (False, True):
        got = advantages.reward_to_go(jnp.asarray(r), jnp.asarray(mask, jnp.float32), gamma=0.9, mean=mean)
        for i, t in np.argwhere(mask):
            powers = 0.9 ** np.arange(mask[i].sum() - t)
            want = (powers * r[i, t : mask[i].sum()]).sum() / (powers.sum() if mean else 1)
            assert float(got[i, t]) == pytest.approx(want, abs=1e-6)
    np.testing.assert_allclose(
        advantages.discounted(r[0], 0.9), [(0.9 ** np.arange(6 - t) * r[0, t:]).sum() for t in range(6)]
    )


def test_whiten_as_trl() -> None:
    x, mask = (jnp.asarray(FIXTURE[k]) for k in ("old", "mask"))
    for name, shift in (("whitened", True), ("whitened_kept_mean", False)):
        want = np.where(FIXTURE["mask"] > 0, FIXTURE[name], 0)
        np.testing.assert_allclose(advantages.whiten(x, mask, shift_mean=shift), want, atol=1e-6)


def test_token_rewards() -> None:
    """A score where a sample ends, minus what each drawn token costs; tokens of others neither cost nor earn."""
    mask = jnp.array([[0.0, 1.0, 1.0, 0.0]])
    scores = jnp.array([[9.0, 0.0, 2.0, 9.0]])
    got = advantages.token_rewards(scores, jnp.full((1, 4), -1.0), jnp.full((1, 4), -3.0), mask, beta=0.1)
    np.testing.assert_allclose(got, [[0, -0.2, 1.8, 0]], rtol=1e-6)
    k3 = np.exp(-2) + 2 - 1
    got = advantages.token_rewards(scores, jnp.full((1, 4), -1.0), jnp.full((1, 4), -3.0), mask, beta=0.1, kl="k3")
    np.testing.assert_allclose(got, [[0, -0.1 * k3, 2 - 0.1 * k3, 0]], rtol=1e-6)
    assert advantages.kl_penalty(np.array([1.0]), np.array([2.0]), 0.05).tolist() == [0.9]


def test_filtered_groups() -> None:
    """GFPO: the advantages are those of the chosen alone."""
    total = np.array([1.0, 0.0, 2.0, 4.0, 1.0, 1.0, NAN, 0.0])
    lengths = np.array([10, 2, 4, 8, 5, 1, 1, 2])
    chosen = select.best(-lengths.astype(float), 4, 2)
    assert chosen.tolist() == [False, True, True, False, False, True, True, False]
    got = advantages.grouped(np.where(chosen, total, NAN), 4, scale="none")
    np.testing.assert_allclose(got, [0, -1, 1, 0, 0, 0, 0, 0])
    scores = select.conciseness(total, lengths, 4)
    rate = np.array([0.1, 0, 0.5, 0.5])
    np.testing.assert_allclose(scores[:4], 0.5 * (1 - lengths[:4] / 10) + 0.5 * rate / 0.5)
    assert np.isnan(scores[6]) and not select.best(scores, 4, 4)[6]
    with pytest.raises(ValueError, match="top=5 of groups of 4"):
        select.best(total, 4, 5)


def test_who_is_learnt() -> None:
    solved = np.array([0.0, 0.0, 1.0, 0.0, 1.0, 1.0, NAN, NAN])
    assert select.solved_between(solved, 2).tolist() == [False, False, True, True, False, False, False, False]
    drawn = np.array([[False, True, True], [True, True, False]])
    assert select.learnt(drawn, np.array([False, True])).tolist() == [[False] * 3, [True, True, False]]
