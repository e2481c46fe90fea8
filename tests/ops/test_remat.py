"""Rematerialisation by name: the same gradients, and only what the policy does not save is computed twice."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fdel import ops
from fdel.ops.layers import NAMED_POLICIES, POLICIES, SYNONYMS, TARGETS, remat_policy

D, F, E, L = 8, 12, 4, 3


def weights():
    r = np.random.default_rng(0)
    experts = {"gate": (E, F, D), "up": (E, F, D), "down": (E, D, F)}
    shapes = {"norm": (D,), "q": (2, 4, D), "k": (1, 4, D), "v": (1, 4, D), "o": (D, 2, 4), "router": (E, D)}
    shapes |= {"gate": (F, D), "up": (F, D), "down": (D, F)}
    make = lambda s: jnp.asarray(r.normal(size=(L, *s)) / D**0.5, jnp.float32)
    return {k: make(s) for k, s in shapes.items()} | {"experts": {k: make(s) for k, s in experts.items()}}


def gradient(remat, impl=None, moe=False):
    """The gradient function of a model over its weights; with `moe` it has every marked value."""
    x = jnp.asarray(np.random.default_rng(1).normal(size=(2, 6, D)), jnp.float32)
    batch, mask = ops.packed(jnp.ones((2, 6), int)), ops.Mask(0.5)

    def block(x, carry, p, layer):
        h = ops.rms_norm(x, p["norm"], 1e-6)
        q, k, v = (ops.einsum("...d,nhd->...nh", h, p[i]) for i in "qkv")
        a, carry = ops.attend(batch, carry, layer, q, k, v, mask=mask, impl=impl)
        x = x + ops.einsum("...nh,dnh->...d", a, p["o"])
        x = x + jnp.sin(ops.glu(x, p, jax.nn.silu))
        if not moe:
            return x, carry
        routing = ops.route_softmax(ops.einsum("...d,ed->...e", x, p["router"]), 2, normalize=True)
        return x + jnp.sin(ops.moe(x, p["experts"], *routing, jnp.sin)), carry

    return jax.grad(lambda p: (ops.layers(block, x, ops.Carry(), p, remat=remat)[0] ** 2).sum())


def computed(remat, impl=None) -> dict[str, int]:
    """How often each name occurs in the program of the gradient."""
    program = str(jax.make_jaxpr(gradient(remat, impl, moe=True))(weights()))
    return {t: len(re.findall(rf"name={t}\b", program)) for t in TARGETS}


@pytest.mark.slow
def test_names_of_easydel_mean_the_same() -> None:
    """The same program by either name; what is saved in any case adds nothing."""
    program = lambda names: str(jax.make_jaxpr(gradient(f"save_only_these_names:{names}", moe=True))(weights()))
    strip = lambda p: re.sub(r"policy=.*", "", p)
    for theirs, ours in SYNONYMS.items():
        assert strip(program(f"attn_output,{theirs}")) == strip(program(",".join(("attn_output", *ours)))), theirs
    with pytest.raises(ValueError, match="attn_weights"):
        remat_policy("save_only_these_names:attn_weights")  # the softmax is never held


@pytest.mark.slow
@pytest.mark.parametrize(("impl", "targets"), [("flash", TARGETS), ("dense", ("attn_output", "attn_query"))])
def test_every_target_can_be_saved(impl: str, targets: tuple[str, ...]) -> None:
    """Nothing saved: computed twice. Saved by its name: once, and the others as often as before."""
    once, twice = computed(None, impl), computed("nothing_saveable", impl)
    assert all(0 < once[t] < twice[t] for t in TARGETS)
    for target in targets:
        got = computed(f"save_only_these_names:{target}", impl)
        assert got[target] == once[target], target
        assert all(got[t] == twice[t] for t in ("mlp_gate", "mlp_up", "moe_gate", "moe_up") if t != target)


@pytest.mark.parametrize("impl", ["flash", pytest.param("short", marks=pytest.mark.of_cpu("it is written for CPU"))])
def test_saved_attention_is_not_computed_again(impl: str) -> None:
    """Its output and log-sum-exp are all that the backward pass of attention needs: one loop over queries less.

    A policy that saves products saves that one too, and then none of the scores, which are square in a row's length.
    """
    program = lambda remat: str(jax.make_jaxpr(gradient(remat, impl))(weights()))
    exps = lambda remat: len(re.findall(r"= exp\b", program(remat)))
    assert exps("save_only_these_names:attn_output") == exps(None) < exps("nothing_saveable")
    for policy in ("dots_saveable", "checkpoint_dots_with_no_batch_dims"):
        assert exps(policy) == exps(None)
        # Saved values are stacked over the layers [L ...]: none of them has two axes of the row's 6 tokens.
        assert not re.search(rf"f32\[{L},[\d,]*6,6\]", program(policy))


@pytest.mark.slow
@pytest.mark.parametrize(
    "remat",
    [
        *POLICIES,
        "SAVE_ONLY_THESE_NAMES:attn_output, mlp_up",
        "save_any_names_but_these:mlp_up",
        "save_anything_except_these_names:mlp_up,mlp_gate",
        "dots_saveable+save_only_these_names:attn_output",
        "offload_only_these_names:attn_output,mlp_up",
    ],
)
def test_gradients_are_the_same(remat: str) -> None:
    """Every policy, offloading to the host's memory too, against no rematerialisation: 1e-5."""
    want, got = (jax.jit(gradient(r))(weights()) for r in (None, remat))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5 * np.abs(b).max(), rtol=0), got, want)


@pytest.mark.slow
def test_named_policies_differ() -> None:
    """What is named is saved, left out, or moved."""
    names = {p: computed(f"{p}:mlp_up") for p in NAMED_POLICIES}
    up = {p: n["mlp_up"] for p, n in names.items()}
    assert up["save_only_these_names"] == up["offload_only_these_names"] == 1 and up["save_any_names_but_these"] == 2
    assert names["save_any_names_but_these"]["mlp_gate"] == 1 and names["save_only_these_names"]["mlp_gate"] == 2
    both = computed("save_only_these_names:mlp_up+save_only_these_names:mlp_gate")
    assert both["mlp_up"] == both["mlp_gate"] == 1 and both["moe_up"] == 2
    program = str(jax.make_jaxpr(gradient("offload_only_these_names:mlp_up"))(weights()))
    assert "Host" in program or "host" in program


@pytest.mark.parametrize(
    ("remat", "match"),
    [
        ("save_only_these_names:mlp", "no value is named 'mlp'; the names are normed_input, attn_query"),
        ("save_only_these_names:", "no value is named ''"),
        ("save_only_these_names", r"is not a policy; .*save_only_these_names:NAME,\.\.\."),
        ("dots_saveable:mlp_up", "is not a policy"),
        ("dots_saveable+everything", "'everything' is not a policy"),
    ],
)
def test_unknown_names_are_refused(remat: str, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        remat_policy(remat)
