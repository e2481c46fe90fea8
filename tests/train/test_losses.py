"""SFT, reward and distillation losses: values and gradients against TRL's (fixtures) and against full logits in float64."""

import functools
import importlib
import json
import pkgutil
import types
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

from fdel import ops, train
from fdel import params as P
from fdel.models import llama
from fdel.models.heads import spec as head_spec
from fdel.train import losses
from fdel.train.losses.distillation import (
    attention_mse,
    distill,
    generalized_jsd,
    hidden_mse,
    soft_targets,
    sparse_distill,
    sparse_kl,
    top_k_kl,
)
from fdel.train.losses.head import logits_sum
from fdel.train.losses.reward_model import bradley_terry, process_reward, process_row, reward, score_rows
from fdel.train.losses.stats import IGNORE
from fdel.train.losses.supervised import dft, nll, sft

FIXTURES = Path(__file__).parent / "fixtures"


@functools.cache
def fixture(name: str) -> dict[str, np.ndarray]:
    with np.load(FIXTURES / f"other_{name}.npz") as file:
        return dict(file)


def part(name: str, prefix: str) -> dict[str, np.ndarray]:
    """The arrays under a prefix, by the rest of their names."""
    return {k.removeprefix(prefix): v for k, v in fixture(name).items() if k.startswith(prefix)}


def close(got, want, rtol):
    """Compare trees leaf by leaf, relative to the leaf's largest value."""
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, atol=rtol * max(np.abs(b).max(), 1e-30), rtol=0)


def value_and_grads(loss, params, *args):
    """Jit ((sum, sums), gradients in params)."""
    return jax.jit(jax.value_and_grad(loss, has_aux=True))(params, *args)


# A family whose parameters are its hidden states, so that gradients in them can be compared.
given_states = SimpleNamespace(
    hidden=lambda params, tokens, cfg, packed, state=None, taps=None, remat=None: (params["hidden"], None, None),
    head=lambda params, cfg: ops.Head(params["head"]),
)


def given_labels(labels: np.ndarray) -> dict[str, np.ndarray]:
    """The batch whose labels these are."""
    before = np.pad(labels[:, :-1], ((0, 0), (1, 0)), constant_values=-100)
    return {"tokens": np.maximum(before, 0), "mask": before >= 0}


# ---- SFT -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "loss"), [("nll", nll), ("dft", dft), ("smooth", partial(nll, label_smoothing=0.1))])
def test_sft_is_trls(name: str, loss) -> None:
    """SFTTrainer.compute_loss on ragged rows of which a completion, or some assistant's tokens, are learnt: 1e-5."""
    batch, want = {k: v for k, v in part("trl116", "sft/").items() if "/" not in k}, part("trl116", f"sft/{name}/")
    params = {k: batch.pop(k) for k in ("hidden", "head")}
    (got, sums), grads = value_and_grads(sft(given_states, None, loss=loss, chunk=4), params, batch)
    close((got, grads), (want["loss"], {k: want[f"grad/{k}"] for k in params}), 1e-5)
    assert sums["weight"] == batch["mask"][:, 1:].sum()
    for metric in ("entropy", "mean_token_accuracy"):
        np.testing.assert_allclose(sums[metric], batch[metric], rtol=1e-5)
    assert sums["mean_token_accuracy"] > 0


def test_z_loss() -> None:
    """Against the formula on full logits in float64: 1e-5."""
    r = np.random.default_rng(0)
    params = {"hidden": r.normal(size=(2, 6, 4)), "head": r.normal(size=(9, 4))}
    labels = np.where(r.random((2, 6)) < 0.3, -100, r.integers(0, 9, (2, 6)))
    labels[:, -1] = -100

    def oracle(p):
        z = p["hidden"] @ p["head"].T
        logp = jnp.take_along_axis(jax.nn.log_softmax(z), jnp.maximum(labels, 0)[..., None], -1)[..., 0]
        penalty = jnp.where(labels >= 0, 0.1 * jax.nn.logsumexp(z, -1) ** 2, 0).sum()
        return penalty - jnp.where(labels >= 0, logp, 0).sum(), {"z_loss": penalty}

    with jax.enable_x64(True):
        (want, metrics), want_grads = value_and_grads(oracle, params)
    loss = sft(given_states, None, loss=partial(nll, z_loss=0.1), chunk=4)
    single = jax.tree.map(np.float32, params)
    (got, sums), grads = value_and_grads(loss, single, given_labels(labels))
    close((got, grads, sums["z_loss"]), (want, want_grads, metrics["z_loss"]), 1e-5)


# ---- rewards -------------------------------------------------------------------------------------------------------


def of_transformers(name: str, prefix: str, path: Path, *args, **kwargs):
    """Read a fixture's model through its checkpoint names: (spec, params, Config)."""
    cfg = llama.Config.from_hf(json.loads(str(fixture(name)["config"])))
    spec = head_spec(llama, cfg, *args, **kwargs)
    safetensors.numpy.save_file(part(name, prefix), path / "model.safetensors")
    return spec, P.load(spec, path, dtype=jnp.float32), cfg


@pytest.mark.parametrize("name", ["plain", "margin", "centred", "both"])
def test_bradley_terry_is_trls(name: str) -> None:
    """RewardTrainer.compute_loss, gradients in the rewards: 1e-5."""
    data, want = part("trl116", "reward/"), part("trl116", f"reward/{name}/")
    margin = data["margin"] if name in ("margin", "both") else 0.0
    settings = {"center_rewards_coefficient": 0.3} if name in ("centred", "both") else {}
    loss = lambda r: bradley_terry(r[:3, 0], r[3:, 0], margin, **settings).mean()
    got, grad = jax.value_and_grad(loss)(data["rewards"])
    close((got, grad), (want["mean_loss"], want["grad/rewards"]), 1e-5)


@pytest.mark.slow
def test_reward_is_trls(tmp_path: Path) -> None:
    """The same of a whole llama on ragged pairs, with a margin and centring, read under transformers' names: 1e-5."""
    _, params, cfg = of_transformers("trl116", "reward/params/", tmp_path, "sequence")
    data, want = part("trl116", "reward/"), part("trl116", "reward/both/")
    pairs = lambda x: np.stack(np.split(x, 2), 1)  # TRL puts all chosen rows before all rejected ones
    batch = {"tokens": pairs(data["tokens"]), "lengths": pairs(data["lengths"]), "margin": data["margin"]}
    loss = reward(llama, cfg, center_rewards_coefficient=0.3)
    (got, sums), grads = value_and_grads(loss, params, batch)
    assert sums["weight"] == 3
    close(got / 3, want["mean_loss"], 1e-5)
    close(grads["sequence"]["weight"] / 3, want["grad/score.weight"], 1e-5)
    close(grads["model"]["embed"] / 3, want["grad/model.embed_tokens.weight"], 1e-5)
    for metric in ("accuracy", "margin", "mean_reward"):
        np.testing.assert_allclose(sums[metric] / 3, data[f"mean/{metric}"], rtol=1e-5)


@pytest.mark.slow
def test_process_reward_is_trls(tmp_path: Path) -> None:
    """PRMTrainer.compute_loss of a llama that classifies tokens, gradients in all parameters: 1e-5."""
    spec, params, cfg = of_transformers("trl112", "process/params/", tmp_path, "token", 3)
    batch = {k: fixture("trl112")[f"process/{k}"] for k in ("tokens", "lengths", "labels")}
    (got, sums), grads = value_and_grads(process_reward(llama, cfg, chunk=4), params, batch)
    n = (batch["labels"] >= 0).sum()
    assert sums["weight"] == n and 0 < sums["accuracy"] < n
    close(got / n, fixture("trl112")["process/mean_loss"], 1e-5)
    P.save(spec, jax.tree.map(lambda g: g / n, grads), tmp_path / "grads")
    got_grads = safetensors.numpy.load_file(tmp_path / "grads" / "model.safetensors")
    want_grads = part("trl112", "process/grad/")
    assert got_grads.keys() == want_grads.keys()
    close(got_grads, want_grads, 1e-5)


@pytest.mark.parametrize("last_only", [False, True])
def test_process_row_is_trls(last_only: bool) -> None:
    """PRMTrainer.tokenize_row, with a separator of two tokens."""
    w = 5  # the first word's id in the fixture's vocabulary
    want = part("trl112", "process/row_last/" if last_only else "process/row_all/")
    steps = [[w + 3, w + 4], [w + 5], [w + 6, w + 7, w + 8]]
    tokens, labels = process_row([1, w, w + 1, w + 2], steps, [1, 0, 1], [4, 4], last_only=last_only)
    assert tokens == want["input_ids"].tolist() and labels == want["labels"].tolist()


def test_wrong_rows() -> None:
    with pytest.raises(ValueError, match="separator is empty"):
        process_row([1], [[2]], [1], [])
    tokens, packed = ops.pack([[1, 2], [3]], 4)
    with pytest.raises(ValueError, match="one sequence per row"):
        score_rows(tiny, None)({"model": tiny_params()}, {"tokens": tokens, "packed": packed})


def test_last_token_is_read() -> None:
    """A row's score is that of the same row without padding and changes with its last token; empty rows have one too."""
    params = reward_params()
    scores = jax.jit(score_rows(tiny, None))
    tokens = np.random.default_rng(0).integers(0, V, (3, T))
    lengths = np.array([T, 5, 0])
    got = scores(params, {"tokens": tokens, "lengths": lengths})
    np.testing.assert_allclose(got[1], scores(params, {"tokens": tokens[1:2, :5]})[0], rtol=1e-6)
    changed = scores(params, {"tokens": np.where(np.arange(T) == 4, (tokens + 1) % V, tokens), "lengths": lengths})
    assert got.shape == (3, 1) and np.isfinite(got).all() and (changed[0] == got[0]) and (changed[1] != got[1])


# ---- distillation --------------------------------------------------------------------------------------------------


def distill_arrays(*names: str) -> dict[str, np.ndarray]:
    return {k: fixture("trl116")[f"distill/{k}"] for k in names}


def teacher_arrays() -> dict[str, np.ndarray]:
    return {k.removeprefix("teacher_"): v for k, v in distill_arrays("teacher_hidden", "teacher_head").items()}


def target_case(name: str, target, student, *teacher) -> None:
    """A target on full logits, which `student` computes from parameters: 1e-5 in value and gradients."""
    data = part("trl116", "distill/")
    want = part("trl116", f"distill/{name}/")
    params = {k.removeprefix("grad/"): data[k.removeprefix("grad/")] for k in want if k != "loss"}
    loss = lambda p: jnp.where(data["labels"] >= 0, target(student(p), *teacher), 0).sum()
    got, grads = jax.jit(jax.value_and_grad(loss))(params)
    close((got, grads), (want["loss"], {k: want[f"grad/{k}"] for k in params}), 1e-5)


def plain(p):
    return p["hidden"] @ p["head"].T


def capped(p):
    return 3 * jnp.tanh(0.7 * (plain(p) + p["bias"]) / 3)


TARGETS = [(f"gkd_{b}_{t}", plain, b, t) for b in (0.0, 0.3, 1.0) for t in (1.0, 2.0)]
TARGETS += [(f"trl_{b}", capped, b, 1.5) for b in (0.0, 0.3, 1.0)]


@pytest.mark.parametrize(("name", "student", "beta", "temperature"), TARGETS)
def test_generalized_jsd_is_trls(name: str, student, beta: float, temperature: float) -> None:
    """GKDTrainer.generalized_jsd_loss and DistillationTrainer's divergence."""
    target = partial(generalized_jsd, beta=beta, temperature=temperature)
    target_case(name, target, student, plain(teacher_arrays()))


@pytest.mark.parametrize("support", ["tail", "renormalized"])
def test_sparse_kl_is_trls(support: str) -> None:
    """The sparse forward KL of ServerDistillationTrainer, where some answers are shorter than k."""
    answers = distill_arrays("teacher_ids", "teacher_logps")
    assert np.isneginf(answers["teacher_logps"]).any()
    target_case(f"sparse_{support}", partial(sparse_kl, support=support), plain, *answers.values())


def in_chunks(name: str, loss, params, batch, *teacher) -> None:
    data = part("trl116", "distill/")
    (got, sums), grads = value_and_grads(loss, params, given_labels(data["labels"]) | batch, *teacher)
    assert sums["weight"] == (data["labels"] >= 0).sum()
    want = {k: data[f"{name}/grad/{k}"] for k in params}
    close((got, sums["divergence"], grads), (data[f"{name}/loss"], data[f"{name}/loss"], want), 1e-5)


def test_distill_is_trls() -> None:
    """A student whose head has a bias, a scale and a soft-cap, in chunks that do not divide the row: 1e-5."""
    head = lambda params, cfg: ops.Head(params["head"], 3.0, 0.7, 0.7 * params["bias"])  # TRL scales the bias too
    student = SimpleNamespace(hidden=given_states.hidden, head=head)
    loss = distill(
        student, None, given_states, None, target=partial(generalized_jsd, beta=0.3, temperature=1.5), chunk=4
    )
    in_chunks("trl_0.3", loss, distill_arrays("hidden", "head", "bias"), {}, {"teacher": teacher_arrays()})


def test_sparse_distill_is_trls() -> None:
    """From a teacher's answers in the batch: 1e-5."""
    answers = distill_arrays("teacher_ids", "teacher_logps")
    in_chunks("sparse_tail", sparse_distill(given_states, None, chunk=4), distill_arrays("hidden", "head"), answers)


def classic(z, zt, temperature=4.0):
    """Hinton's soft targets, from the paper's formula."""
    p, q = jax.nn.softmax(zt / temperature), jax.nn.softmax(z / temperature)
    return temperature**2 * (p * (jnp.log(p) - jnp.log(q))).sum(-1)


def sparse_full(z, zt, k=5):
    """Cross-entropy of the teacher's renormalised top k with the student over all tokens, less the teacher's entropy."""
    kept = jnp.where(zt >= jnp.sort(zt)[..., -k, None], jnp.exp(zt), 0)
    p = kept / kept.sum(-1, keepdims=True)
    return -(p * jax.nn.log_softmax(z)).sum(-1) + jnp.where(p > 0, p * jnp.log(jnp.where(p > 0, p, 1)), 0).sum(-1)


NAIVE = {
    "classic": (soft_targets, classic, 0.9),
    "sparse": (partial(top_k_kl, k=5, support="full"), sparse_full, 1.0),
    "hard labels only": (generalized_jsd, classic, 0.0),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", NAIVE)
def test_distillation_is_that_of_full_logits(name: str) -> None:
    """alpha * target + (1 - alpha) * cross-entropy with the *next* token, against float64 on full logits: 1e-5."""
    target, oracle, alpha = NAIVE[name]
    params, teacher, labels = distill_arrays("hidden", "head"), teacher_arrays(), fixture("trl116")["distill/labels"]
    batch = given_labels(labels)

    def naive(p, t):
        z, zt = p["hidden"] @ p["head"].T, t["hidden"] @ t["head"].T
        hard = -jnp.take_along_axis(jax.nn.log_softmax(z[:, :-1]), batch["tokens"][:, 1:, None], -1)[..., 0]
        per_token = alpha * oracle(z, zt)[:, :-1] + (1 - alpha) * hard
        return (batch["mask"][:, 1:] * per_token).sum(), {}

    with jax.enable_x64(True):
        wide = jax.tree.map(np.float64, (params, teacher))
        (want, _), want_grads = value_and_grads(naive, *wide)
    loss = distill(given_states, None, given_states, None, target=target, alpha=alpha, chunk=3)
    (got, _), grads = value_and_grads(loss, params, batch, {"teacher": teacher})
    close((got, grads), (want, want_grads), 1e-5)


def test_teacher_gets_no_gradient() -> None:
    params, teacher = distill_arrays("hidden", "head"), teacher_arrays()
    loss = distill(given_states, None, given_states, None, chunk=4)
    batch = given_labels(fixture("trl116")["distill/labels"])
    grads = jax.jit(jax.grad(lambda t: loss(params, batch, {"teacher": t})[0]))(teacher)
    assert all((g == 0).all() for g in jax.tree.leaves(grads))


@pytest.mark.slow
def test_matching_against_numpy() -> None:
    """Hidden states and attention weights, float64 formulas: 1e-6; no gradient in the teacher's."""
    r = np.random.default_rng(0)
    for f, shape in ((hidden_mse, (2, 5, 8)), (attention_mse, (2, 3, 5, 5))):
        a, b = r.normal(size=shape), r.normal(size=shape)
        want = ((a - b) ** 2).mean(-1) if f is hidden_mse else ((a - b) ** 2).sum(-1).mean(1)
        got, pull = jax.vjp(f, np.float32(a), np.float32(b))
        close(got, want, 1e-6)
        scale = 8 if f is hidden_mse else 3
        close(pull(jnp.ones_like(got)), (2 * (a - b) / scale, np.zeros(shape)), 1e-6)
    with pytest.raises(ValueError, match=r"student \(2, 5, 8\) and teacher \(2, 5, 9\)"):
        hidden_mse(jnp.ones((2, 5, 8)), jnp.ones((2, 5, 9)))


def test_wrong_targets() -> None:
    z = jnp.ones((1, 3))
    with pytest.raises(ValueError, match="beta=1.5"):
        generalized_jsd(z, z, beta=1.5)
    with pytest.raises(ValueError, match="support='all'"):
        top_k_kl(z, z, k=2, support="all")
    params, teacher = distill_arrays("hidden", "head"), teacher_arrays()
    with pytest.raises(ValueError, match="predicts 29 tokens and the teacher 20"):
        cut = teacher | {"head": teacher["head"][:20]}
        batch = given_labels(fixture("trl116")["distill/labels"])
        distill(given_states, None, given_states, None)(params, batch, {"teacher": cut})


def shapes_in(jaxpr) -> set[tuple[int, ...]]:
    """Every array's shape in a program, those of inner programs included."""
    inner = [v for e in jaxpr.eqns for v in jax.tree.leaves(list(e.params.values()), is_leaf=is_jaxpr) if is_jaxpr(v)]
    here = {v.aval.shape for e in jaxpr.eqns for v in e.outvars if hasattr(v.aval, "shape")}
    return here.union(*(shapes_in(getattr(j, "jaxpr", j)) for j in inner))


def is_jaxpr(x) -> bool:
    return hasattr(x, "eqns") or hasattr(x, "jaxpr")


def test_distillation_memory() -> None:
    """The gradient of 1024 tokens in chunks of 32 makes no array of half a copy of the logits, and takes 1/4 of one."""
    t, d, v = 1024, 8, 8192
    loss = distill(given_states, None, given_states, None, target=soft_targets, alpha=0.9, chunk=32)
    abstract = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    model = {"hidden": abstract(1, t, d), "head": abstract(v, d)}
    batch = {"tokens": jax.ShapeDtypeStruct((1, t), jnp.int32)}
    grad = jax.jit(jax.grad(lambda p, b, teacher: loss(p, b, {"teacher": teacher})[0]))
    sizes = {s: np.prod(s) for s in shapes_in(jax.make_jaxpr(grad)(model, batch, model).jaxpr)}
    assert sizes and max(sizes.values()) < t * v / 2, max(sizes, key=sizes.get)
    assert (1, 32, v) in sizes  # the walk does look inside the scan
    memory = grad.lower(model, batch, model).compile().memory_analysis().temp_size_in_bytes
    assert memory < t * v * 4 / 4, memory / 2**20


# ---- every loss ----------------------------------------------------------------------------------------------------

V, E, T, ROWS = 23, 8, 12, 4
tiny = SimpleNamespace(
    hidden=lambda params, tokens, cfg, packed, state=None, taps=None, remat=None: (
        jnp.tanh(params["embed"][tokens] @ params["w"] + params["b"]),
        None,
        None,
    ),
    head=lambda params, cfg: ops.Head(params["embed"]),
)


def tiny_params(seed: int = 0):
    r = np.random.default_rng(seed)
    return {k: np.float32(r.normal(size=s)) for k, s in {"embed": (V, E), "w": (E, E), "b": (E,)}.items()}


def reward_params(labels: int = 1, kind: str = "sequence"):
    r = np.random.default_rng(7)
    head = {"weight": r.normal(size=(labels, E)), "bias": r.normal(size=labels)}
    return {"model": tiny_params(), kind: jax.tree.map(np.float32, head)}


CAUSAL, TEACHER = tiny_params(0), {"teacher": tiny_params(1)}
EVERY = {  # loss, its parameters, what it is given
    "nll": (sft(tiny, None, loss=partial(nll, label_smoothing=0.1, z_loss=0.01), chunk=5), CAUSAL),
    "dft": (sft(tiny, None, loss=dft, chunk=5), CAUSAL),
    "reward": (reward(tiny, None, center_rewards_coefficient=0.1), reward_params()),
    "process_reward": (process_reward(tiny, None, chunk=5), reward_params(3, "token")),
    "jsd": (
        distill(tiny, None, tiny, None, target=partial(generalized_jsd, beta=0.3), chunk=5),
        CAUSAL,
        TEACHER,
    ),
    "classic": (distill(tiny, None, tiny, None, target=soft_targets, alpha=0.9, chunk=5), CAUSAL, TEACHER),
    "sparse": (sparse_distill(tiny, None, alpha=0.7, chunk=5), CAUSAL),
}


def batch_for(name: str, lengths: list[int], seed: int):
    """Ragged rows, or pairs, with everything that the loss reads."""
    r = np.random.default_rng(seed)
    shape = (ROWS, 2, T) if name == "reward" else (ROWS, T)
    batch = {"tokens": r.integers(0, V, shape), "lengths": np.array(lengths[: np.prod(shape[:-1])]).reshape(shape[:-1])}
    if name == "reward":
        return batch | {"margin": r.normal(size=ROWS).astype(np.float32)}
    batch["mask"] = r.random(shape) < 0.7
    if name == "process_reward":
        batch["labels"] = np.where(r.random(shape) < 0.5, r.integers(0, 3, shape), -100)
    if name == "sparse":
        batch["teacher_ids"] = np.argsort(r.random((*shape, V)))[..., :4]
        batch["teacher_logps"] = np.sort(-r.random((*shape, 4)) - 1.5).astype(np.float32)[..., ::-1]
    return batch


@functools.cache
def gradient(name: str, n: int):
    return jax.jit(train.normalize(train.accumulate(train.grads(EVERY[name][0]), n)))


def in_float64(f, name: str, batch):
    """Call f(params, batch, given) where rounding is out of the way."""
    wide = lambda x: np.float64(x) if x.dtype == np.float32 else x
    with jax.enable_x64(True):
        params, *given = jax.tree.map(wide, EVERY[name][1:])
        return jax.tree.map(np.asarray, f(params, jax.tree.map(wide, batch), *given))


@pytest.mark.slow
@pytest.mark.parametrize("n", [4, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", EVERY)
@settings(max_examples=6)
@given(lengths=st.lists(st.integers(0, T), min_size=2 * ROWS, max_size=2 * ROWS), seed=st.integers(0, 99))
def test_gradient_does_not_depend_on_microbatches(name: str, n: int, lengths: list[int], seed: int) -> None:
    """Ragged lengths, empty rows included: gradients and metrics in float64, 1e-11."""
    batch = batch_for(name, lengths, seed)
    close(in_float64(gradient(name, n), name, batch), in_float64(gradient(name, 1), name, batch), 1e-11)


@pytest.mark.slow
def test_mean_of_means_would_fail() -> None:
    """The property is not empty: normalising each microbatch first gives another gradient."""
    batch = batch_for("classic", [12, 3, 7, 0], 0)
    want, _ = in_float64(gradient("classic", 1), "classic", batch)
    mean = train.normalize(train.grads(EVERY["classic"][0]))
    wrong, _ = in_float64(jax.jit(train.accumulate(mean, 2)), "classic", batch)
    assert np.abs(wrong["w"] / 2 - want["w"]).max() > 0.01 * np.abs(want["w"]).max()


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in EVERY if "reward" not in n])
def test_peaked_logits_have_finite_gradients(name: str) -> None:
    """Logits of about +-1e4 in student and teacher, and a row without tokens."""
    _, params, *given = EVERY[name]
    peaked = lambda p: p | {"embed": 3e3 * p["embed"]}
    given = {k: peaked(p) for k, p in given[0].items()} if given else {}
    grads, metrics = gradient(name, 1)(peaked(params), batch_for(name, [12, 3, 7, 0], 0), given)
    assert metrics["loss"] > 1e3 or name in ("dft", "jsd")  # which are bounded
    assert all(np.isfinite(x).all() for x in jax.tree.leaves((grads, metrics)))


def test_extreme_rewards_have_finite_gradients() -> None:
    """Rewards that differ by up to 2e4; a lost pair costs what it is wrong by, with gradient -1 and 1."""
    r = jnp.array([1e4, -1e4, 1e4, 0.0, -1e-8])
    f = jax.jit(jax.value_and_grad(lambda c, r: bradley_terry(c, r).sum(), (0, 1)))
    for chosen in r:
        value, grads = f(jnp.broadcast_to(chosen, r.shape), r)
        assert np.isfinite(value) and all(np.isfinite(g).all() for g in grads)
    value, grads = f(jnp.array([-1e4]), jnp.array([1e4]))
    assert value == 2e4 and grads[0] == -1 and grads[1] == 1


@pytest.mark.parametrize("support", ["tail", "renormalized", "full"])
def test_sparse_answers_at_their_limits(support: str) -> None:
    """All mass on the answers, none of it, and no answer at all: finite values and gradients."""
    z = jnp.array([[1e4, 0.0, -1e4, 3.0]] * 4)
    ids = jnp.array([[0, 1], [2, 1], [0, 1], [0, 1]])
    logps = jnp.array([[-0.0, -jnp.inf], [-1e-8, -1e4], [-jnp.inf, -jnp.inf], [-0.7, -0.7]])
    f = lambda z: (sparse_kl(z, ids, logps, support=support).sum(), None)
    (value, _), grads = value_and_grads(f, z)
    assert np.isfinite(value) and np.isfinite(grads).all()


@pytest.mark.slow
def test_no_tokens() -> None:
    """A batch of which nothing is learnt has loss 0 and gradient 0."""
    for name in EVERY:
        result = in_float64(gradient(name, 1), name, batch_for(name, [0] * 2 * ROWS, 0))
        assert all((x == 0).all() for x in jax.tree.leaves(result)), name


def test_logits_sum_sees_ignored_tokens() -> None:
    """Its loss must mask by itself: what it sees at an ignored token is that token's logits, with statistics of 0."""
    x, head, labels = jnp.ones((1, 3, 2)), ops.Head(jnp.ones((5, 2))), jnp.array([[1, IGNORE, 2]])
    loss = lambda z, stats: (z.sum(), (stats.logp != 0).sum())
    total, count = logits_sum(loss, x, head, labels, chunk=3)
    assert total == 30 and count == 2


BUILT = (
    losses.sft,
    losses.completion_logps,
    losses.sentence_embeddings,
    losses.reward,
    losses.process_reward,
    losses.sparse_distill,
)
WRONG = [
    *((partial(f, tiny, None), {"remat": "foo"}, "remat='foo'") for f in BUILT),
    *(
        (partial(f, tiny, None), {"chunk": 0}, "chunk=0; expected a finite number from 1")
        for f in (BUILT[0], *BUILT[4:])
    ),
    (
        partial(losses.sft, tiny, None),
        {"loss": partial(nll, label_smoothing=1.5)},
        "label_smoothing=1.5; .* from 0 to 1",
    ),
    (partial(losses.sft, tiny, None), {"loss": partial(nll, z_loss=-1)}, "z_loss=-1; expected a finite number from 0"),
    (partial(losses.sft, tiny, None), {"router_aux_loss_coef": float("nan")}, "router_aux_loss_coef=nan"),
    (
        partial(losses.completion_logps, tiny, None),
        {"ld_alpha": 1.5},
        "ld_alpha=1.5; expected a finite number from 0 to 1",
    ),
    (partial(losses.completions.with_balance, None), {"coef": -1}, "coef=-1"),
    (losses.dpo_objective, {"beta": 0}, "beta=0; expected a finite number above 0"),
    (losses.dpo_objective, {"beta": float("inf")}, "beta=inf"),
    (losses.dpo_objective, {"loss_type": "dpo"}, "loss_type='dpo'; expected one of sigmoid"),
    (losses.dpo_objective, {"loss_type": "discopop", "tau": 0}, "tau=0; expected a finite number above 0"),
    (losses.dpo_objective, {"f_divergence": "kl"}, "f_divergence='kl'; expected one of"),
    (losses.dpo_objective, {"f_divergence": "alpha_divergence", "f_alpha": float("nan")}, "f_alpha=nan"),
    (losses.dpo_objective, {"loss_weights": [float("nan")]}, r"loss_weights\[0\]=nan"),
    (losses.cpo_objective, {"loss_type": "dpo"}, "loss_type='dpo'; expected one of sigmoid, simpo"),
    (losses.cpo_objective, {"beta": -1}, "beta=-1"),
    (losses.cpo_objective, {"cpo_alpha": -1}, "cpo_alpha=-1"),
    (losses.cpo_objective, {"gamma": float("inf")}, "gamma=inf"),
    (losses.cpo_objective, {"alpha": float("nan")}, "alpha=nan"),
    (losses.cpo_objective, {"label_smoothing": 2}, "label_smoothing=2"),
    (losses.orpo_objective, {"beta": 0}, "beta=0"),
    (losses.kto_objective, {"beta": 0}, "beta=0"),
    (losses.kto_objective, {"desirable_weight": -1}, "desirable_weight=-1"),
    (losses.bco_objective, {"beta": 0}, "beta=0"),
    (partial(losses.reward, tiny, None), {"center_rewards_coefficient": -1}, "center_rewards_coefficient=-1"),
    (partial(losses.distill, tiny, None, tiny, None), {"alpha": 2}, "alpha=2; expected a finite number from 0 to 1"),
    (
        partial(losses.distill, tiny, None, tiny, None),
        {"target": partial(soft_targets, temperature=0)},
        "temperature=0",
    ),
    (partial(losses.distill, tiny, None, tiny, None), {"target": partial(generalized_jsd, beta=2)}, "beta=2"),
    (partial(losses.distill, tiny, None, tiny, None), {"target": partial(top_k_kl, k=0)}, "k=0"),
    (partial(losses.distill, tiny, None, tiny, None), {"target": partial(top_k_kl, support="a")}, "support='a'"),
    (partial(losses.distill, tiny, None, tiny, None), {"terms": losses.Terms(hidden_weight=-1)}, "hidden_weight=-1"),
    (partial(losses.sparse_distill, tiny, None), {"target": partial(sparse_kl, support="a")}, "support='a'"),
    (partial(losses.embedding, tiny, None), {"loss": partial(losses.info_nce, temperature=0)}, "temperature=0"),
    (partial(losses.embedding, tiny, None), {"loss": partial(losses.triplet, margin=-1)}, "margin=-1"),
    (partial(losses.embedding, tiny, None), {"loss": losses.matryoshka(losses.info_nce, (0,))}, r"dims \(0,\)"),
    (partial(losses.matryoshka, losses.info_nce), {"dims": (4, 2), "weights": [1.0]}, "1 weights for the dims"),
]


@pytest.mark.parametrize(("build", "options", "match"), WRONG, ids=[f"{i}-{m}" for i, (_, _, m) in enumerate(WRONG)])
def test_options_are_checked_when_a_loss_is_built(build, options, match):
    """Not in the traced step, and without any work on a device."""
    with pytest.raises(ValueError, match=match):
        build(**options)


@pytest.mark.parametrize("shape", [(4, 6), (4, 4, 6), (2, 2, 2, 6)])
def test_mean_lengths_are_of_pairs(shape):
    batch = {"tokens": jnp.zeros(shape, jnp.int32), "lengths": jnp.full(shape[:-1], 6)}
    with pytest.raises(ValueError, match=r"means over chosen tokens are of pairs, \[B 2 T\]"):
        losses.completions.with_mean_lengths(batch)


@pytest.mark.parametrize("package", [train, losses, train.data])
def test_no_function_hides_a_module_of_its_name(package) -> None:
    """Each module of a package is an attribute of it, and what a package declares as public is there, once."""
    for name in (m.name for m in pkgutil.iter_modules(package.__path__)):
        importlib.import_module(f"{package.__name__}.{name}")
        assert isinstance(getattr(package, name), types.ModuleType), name
    public = getattr(package, "__all__", [])
    assert len(set(public)) == len(public) and all(hasattr(package, name) for name in public)
