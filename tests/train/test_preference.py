"""Preference losses against TRL 1.16 (BCO: 1.12), on fixtures that `fixtures/make_preference.py` made.

Losses and gradients agree within 1e-5 of their largest value, also through a small Llama; metrics within 1e-5.
"""

import functools
import itertools
import json
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from safetensors.numpy import save_file

from fdel import models, ops, train
from fdel.params import lora
from fdel.params.hf_layout import hf_names, layout
from fdel.params.spec import Param, named_leaves, zeros
from fdel.train.losses import pairs, preference, unpaired
from fdel.train.losses.completions import completion_logps, completion_sums, on_adapters, with_mean_lengths
from fdel.train.losses.stats import TokenStats

FIXTURES = Path(__file__).parent / "fixtures"
FILES = {name: np.load(FIXTURES / f"{name}.npz") for name in ("preference", "preference_bco")}
CASES = {name: json.loads(str(file["cases"])) for name, file in FILES.items()}


@pytest.fixture(scope="module", autouse=True)
def compile_fast():
    """These tests compile much and compute little."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


def of_kind(*kinds: str):
    """Parametrise over the fixtures' cases of these kinds: (file, index in it, case)."""
    found = [(f, i, c) for f, cases in CASES.items() for i, c in enumerate(cases) if c["kind"] in kinds]
    assert found
    return pytest.mark.parametrize(("file", "index", "case"), found, ids=[f"{c['kind']}{i}" for _, i, c in found])


def close(got, want, rtol=1e-5):
    """Compare relative to the largest value."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert got.shape == want.shape and np.isfinite(want).all() and np.abs(want).max() > 0
    np.testing.assert_allclose(got, want, rtol=0, atol=rtol * np.abs(want).max())


def means(total, sums) -> tuple:
    """Divide as `train.normalize` does."""
    ratio = lambda v: v[0] / v[1] if isinstance(v, tuple) else v / sums["weight"]
    return total / sums["weight"], {k: ratio(v) for k, v in sums.items()}


def compare_metrics(got: dict, case: dict, skip=()) -> None:
    """Every metric of TRL is among ours but num_tokens (the loop's), and margins of single rows: a difference of two."""
    skip = {"num_tokens", *skip} | ({"rewards/margins"} if "rewards/accuracies" not in got else set())
    for name, want in case["metrics"].items():
        if name not in skip:
            np.testing.assert_allclose(got[name], want, rtol=1e-5, atol=1e-6, err_msg=name)


# ---- pure functions ------------------------------------------------------------------------------------------------


def pretended(data, prefix: str):
    """Statistics of the pretended model, and the weights of its completions' tokens."""
    get = lambda name: jnp.asarray(data[f"{prefix}/{name}"], jnp.float32)
    zero = jnp.zeros_like(get("logp"))
    stats = TokenStats(get("logp"), get("entropy"), zero, get("logsumsq"), get("mean_logit"), get("top1"))
    return stats, get("completion")[:, 1:]


def check_pretended(data, index: int, case: dict, form, objective, extra: dict, batch: dict) -> None:
    """Compare an objective's value, metrics and gradient in every token's log-probability with TRL's.

    TRL has the real rows alone; here others fill up the batch, in all columns with numbers that are none of theirs.
    """
    stats, completion = pretended(data, case["kind"].partition("_")[0])
    ld_alpha = case["options"].get("ld_alpha")

    def loss(logp, fill: int):
        filled = lambda x, with_: jnp.pad(x, [(1, fill - 1)] + [(0, 0)] * (x.ndim - 1), constant_values=with_)
        filled = filled if fill else lambda x, _: x
        rows = jax.tree.map(form, (stats._replace(logp=logp), completion, completion))
        o = jax.tree.map(lambda x: filled(x, 0), completion_sums(*rows, ld_alpha))
        others = jax.tree.map(lambda x: filled(jnp.asarray(x), 1 if x.dtype == bool else 3.5), (extra, batch))
        return means(*objective(o | others[0], others[1]))

    for fill in (0, 3):
        (value, metrics), grad = jax.value_and_grad(loss, has_aux=True)(stats.logp, fill)
        close(value, case["loss"])
        close(grad, data[f"{index}/logp"] * completion)  # TRL's head gives prompts no gradient
        compare_metrics(metrics, case)


def paired(x):
    """[2B ...] with the chosen ones first, as in TRL -> [B 2 ...]."""
    return jnp.stack(jnp.split(jnp.asarray(x), 2), 1)


def without(options: dict, *names: str) -> dict:
    return {k: v for k, v in options.items() if k not in names}


@pytest.mark.slow
@of_kind("dpo")
def test_dpo(file, index, case) -> None:
    data, options = FILES[file], case["options"]
    objective = pairs.dpo_objective(**without(options, "ld_alpha"))
    check_pretended(data, index, case, paired, objective, {"ref_logps": paired(data["dpo/ref"])}, {})
    if options.keys().isdisjoint(["ld_alpha", "wpo", "loss_weights"]):
        split = lambda x: np.split(np.float32(x), 2)
        lengths = dict(zip(("chosen_lengths", "rejected_lengths"), split(data["dpo/completion"].sum(-1)), strict=True))
        losses = preference.dpo(*split(data["dpo/logp"].sum(-1)), *split(data["dpo/ref"]), **options, **lengths)
        close(losses.mean(), case["loss"])


@of_kind("kto", "kto_below")
def test_kto(file, index, case) -> None:
    data, kind = FILES[file], case["kind"]
    kl = {"kl_logps": data["kto/kl/logp"].sum(-1), "kl_ref_logps": data[f"{kind}/ref_kl"]}
    extra, batch = {"ref_logps": data[f"{kind}/ref"], **kl}, {"label": data["kto/label"]}
    check_pretended(data, index, case, lambda x: x, unpaired.kto_objective(**case["options"]), extra, batch)


@of_kind("cpo", "orpo")
def test_cpo_and_orpo(file, index, case) -> None:
    data, kind = FILES[file], case["kind"]
    loss = lambda c, r: getattr(preference, kind)(c, r, **case["options"]).mean()
    value, grads = jax.value_and_grad(loss, (0, 1))(*(jnp.asarray(data[f"{kind}/{k}"]) for k in "cr"))
    close(value, case["loss"])
    close(grads, [data[f"{index}/chosen"], data[f"{index}/rejected"]])


@pytest.mark.parametrize("udm", [False, True])
def test_bco(udm: bool) -> None:
    """Three batches, each of which moves delta."""
    data, running = FILES["preference_bco"], {"mean": 0.0, "count": 0.0}
    cases = [(i, c) for i, c in enumerate(CASES["preference_bco"]) if c["options"].get("udm") == udm]
    assert len(cases) == 3
    for index, case in cases:
        get = lambda *keys, name=case["options"]["name"]: np.concatenate([data[f"{name}/{k}"] for k in keys])
        logps, reference, desirable = get("c", "r"), get("ref_c", "ref_r"), np.arange(6) < 3
        running = unpaired.running_mean(running, 0.3 * (logps - reference).mean(), 6)
        weights = unpaired.udm_weights(get("p", "p")) if udm else 1.0
        loss = lambda x, *args, w=weights: unpaired.bco(x, *args, beta=0.3, weights=w).mean()
        value, grad = jax.value_and_grad(loss)(logps, reference, desirable, running["mean"])
        close(value, case["loss"])
        close(grad, np.concatenate([data[f"{index}/chosen"], data[f"{index}/rejected"]]))
        np.testing.assert_allclose(running["mean"], case["metrics"]["delta"], rtol=1e-5)


@pytest.mark.parametrize("eps", [0.0, 0.1, 0.3])
def test_label_smoothing_makes_dpo_conservative(eps: float) -> None:
    """cDPO, as TRL publishes it: -(1 - e) log sigmoid(beta h) - e log sigmoid(-beta h), in float64, and its gradient."""
    chosen, rejected, ref_chosen, ref_rejected = np.random.default_rng(0).normal(0, 20, (4, 9))
    h, log_sigmoid = 0.3 * ((chosen - ref_chosen) - (rejected - ref_rejected)), lambda x: -np.logaddexp(0, -x)
    want = -(1 - eps) * log_sigmoid(h) - eps * log_sigmoid(-h)
    slope = 0.3 * (1 / (1 + np.exp(-h)) - (1 - eps))  # d/dh: sigmoid(h) - (1 - e)
    loss = lambda *x: preference.dpo(*x, beta=0.3, label_smoothing=eps)
    args = [jnp.asarray(x, jnp.float32) for x in (chosen, rejected, ref_chosen, ref_rejected)]
    np.testing.assert_allclose(loss(*args), want, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(jax.grad(lambda *x: loss(*x).sum())(*args), slope, rtol=1e-4, atol=1e-6)


# ---- limits --------------------------------------------------------------------------------------------------------

EXTREME = jnp.array([-1e4, -200.0, -60.0, -1e-8, 0.0, 1e-8, 60.0, 200.0, 1e4])
PAIRS_OF_EXTREMES = jnp.stack(jnp.meshgrid(EXTREME, EXTREME)).reshape(2, -1)
SINGLE = [dict(loss_type=t) for t in (*preference.DPO, "sft")]
DIVERGENT = [dict(loss_type=t, f_divergence=f) for t in preference.ON_SCORES for f in preference.DIVERGENCES]
DPO_OPTIONS = [o | (dict(label_smoothing=0.01) if o["loss_type"] in preference.SMOOTHED else {})
               for o in SINGLE + [o for o in DIVERGENT if o["f_divergence"] != "reverse_kl"]]  # fmt: skip


def finite(loss, *args) -> bool:
    return all(np.isfinite(x).all() for x in jax.tree.leaves(jax.value_and_grad(loss, (0, 1))(*args)))


@pytest.mark.slow
@pytest.mark.parametrize("options", DPO_OPTIONS, ids=lambda o: "-".join(map(str, o.values())))
def test_dpo_is_finite(options: dict) -> None:
    """Any two log-ratios, empty completions included."""
    zeros, sevens = jnp.zeros(PAIRS_OF_EXTREMES.shape[1]), jnp.full(PAIRS_OF_EXTREMES.shape[1], 7.0)
    f = functools.partial(preference.dpo, chosen_lengths=sevens, rejected_lengths=zeros, beta=2.0, **options)
    assert finite(lambda c, r: f(c, r, zeros, zeros).sum(), *PAIRS_OF_EXTREMES)


@pytest.mark.slow
def test_the_others_are_finite() -> None:
    logps = -jnp.abs(PAIRS_OF_EXTREMES)
    for kind, alpha in itertools.product(preference.CPO, (0.0, 0.25, -0.5)):
        assert finite(lambda c, r, k=kind, a=alpha: preference.cpo(c, r, loss_type=k, alpha=a).sum(), *logps)
    assert finite(lambda c, r: preference.orpo(c, r).sum(), *logps)
    for label in (True, False):
        assert finite(lambda x, r, at=label: unpaired.kto(x, r, at, 3.0).sum(), *PAIRS_OF_EXTREMES)
        assert finite(lambda x, r, at=label: unpaired.bco(x, r, at, 3.0).sum(), *PAIRS_OF_EXTREMES)
    assert unpaired.udm_weights(jnp.array([0.0, 0.5, 1.0])).tolist() == [0.5, 1.0, 10.0]


@pytest.mark.wrong_shapes
def test_wrong_options() -> None:
    zero = jnp.zeros(2)
    for options, message in [
        (dict(loss_type="simoid"), "loss_type='simoid'; expected one of sigmoid, hinge"),
        (dict(f_divergence="kl"), "f_divergence='kl'; expected one of reverse_kl"),
        (dict(loss_type="apo_zero", f_divergence="forward_kl"), "use 'reverse_kl', or a loss of sigmoid"),
        (dict(loss_type="hinge", label_smoothing=0.1), "expected 0, as only sigmoid, exo_pair"),
        (dict(loss_type="sigmoid", label_smoothing=0.5), r"expected a number in \[0, 0.5\)"),
        (dict(loss_type="exo_pair"), r"label_smoothing=0.0 with loss_type='exo_pair'; expected a number in \(0, 1\)"),
        (dict(loss_type="robust", label_smoothing=0.5), r"expected a number in \[0, 0.5\)"),
        (dict(loss_type="aot", label_smoothing=-0.1), r"expected a number in \[0, 1\]"),
        (dict(loss_type="ipo"), "'ipo' is per token; give chosen_lengths"),
    ]:
        with pytest.raises(ValueError, match=message):
            preference.dpo(zero, zero, zero, zero, **options)
    for call, message in [
        (lambda: preference.cpo(zero, zero, loss_type="nll"), "loss_type='nll'; expected one of sigmoid, simpo"),
        (lambda: preference.cpo(zero, zero, loss_type="hinge", label_smoothing=0.1), "0 for 'hinge' and 'ipo'"),
        (lambda: preference.ld_weights(jnp.ones((1, 2, 3)), 1.5), "ld_alpha=1.5; expected a finite number from 0 to 1"),
        (lambda: pairs.dpo_objective(loss_type=["sigmoid", "sft"], loss_weights=[1.0]), "1 loss_weights for"),
        (lambda: pairs.dpo_objective(loss_type=["sigmoid", "aot"], wpo=True), "but aot gives no loss per pair"),
        (lambda: pairs.dpo_objective(loss_type=["hinge", "apo_down"], label_smoothing=0.1), "'hinge'; expected 0"),
        (lambda: unpaired.kto_objective(loss_type="bco"), "loss_type='bco'; expected one of kto"),
        (lambda: unpaired.kto_objective()({}, {}), "the batch has no 'kl'"),
        (lambda: pairs.dpo_objective()({"logps": zero}, {}), "give the batch a column 'ref_logps'"),
        (lambda: pairs.orpo_objective()({"logps": zero, "lengths": zero}, {}), r"shape \(2,\); a loss over pairs"),
        (lambda: completion_logps(tiny, None)({}, {"packed": 0}), "give 'lengths' instead"),
    ]:
        with pytest.raises(ValueError, match=message):
            call()


# ---- on a model ----------------------------------------------------------------------------------------------------


V, D, B, T = 23, 8, 8, 12
tiny = SimpleNamespace(  # what losses need of a model family
    hidden=lambda p, tokens, cfg, batch, state=None, taps=None, remat=None: (
        jnp.tanh(ops.linear("btd,df->btf", p["embed"][tokens], p["w"], p["b"])),
        None,
        None,
    ),
    head=lambda params, cfg: ops.Head(params["embed"]),
)


def tiny_params(seed: int):
    r = np.random.default_rng(seed)
    return {k: jnp.asarray(r.normal(size=s), float) for k, s in dict(embed=(V, D), w=(D, D), b=(D,)).items()}


def ragged(seed: int, *rows: int) -> dict:
    """Rows of 1 to T tokens, of which a random part is to be learnt; the first row has nothing to learn."""
    r = np.random.default_rng(seed)
    tokens, lengths = r.integers(0, V, (*rows, T)), r.integers(1, T + 1, rows)
    mask = r.random((*rows, T)) < 0.7
    mask[0] = False
    return jax.tree.map(jnp.asarray, {"tokens": tokens, "lengths": lengths, "mask": mask})


@functools.cache
def llama(file: str, directory: Path):
    """The fixtures' policy and reference, as fdel loads them from a checkpoint."""
    loaded = []
    for name in ("policy", "reference"):
        path = directory / name
        path.mkdir(exist_ok=True)
        tensors = {k.removeprefix(f"{name}/"): v for k, v in FILES[file].items() if k.startswith(f"{name}/")}
        save_file(tensors, path / "model.safetensors")
        config = json.loads(str(FILES[file]["llama"])) | {"model_type": "llama"}
        (path / "config.json").write_text(json.dumps(config))
        loaded.append(models.load(path, dtype=jnp.float32))
    return loaded


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tmp_path_factory.mktemp("llama")


def llama_batch(data, pairs: bool) -> dict:
    """Pairs, or single completions with mismatched ones for KTO, which are the same ones where the fixture has none."""
    names = {"tokens": "tokens", "completion": "mask", "lengths": "lengths"}
    read = lambda prefix, form: {ours: form(data[f"{prefix}/{theirs}"]) for theirs, ours in names.items()}
    if pairs:
        return read("pairs", paired)
    kl = read("single/kl" if "single/kl/tokens" in data else "single", jnp.asarray)
    return read("single", jnp.asarray) | {"label": jnp.asarray(data["single/label"]), "kl": kl}


def filled(batch: dict, rows: int) -> dict:
    """Fill a batch up with empty rows at its end, as data sets do."""
    return jax.tree.map(lambda x: jnp.pad(x, [(0, rows)] + [(0, 0)] * (x.ndim - 1)), batch)


@functools.cache
def outputs_and_gradients(family, cfg):
    """(params, batch, given, cotangents of the outputs) -> (outputs, gradients), compiled once for all losses."""

    @jax.jit
    def run(params, batch, given, cotangents):
        out, pull = jax.vjp(lambda p: completion_logps(family, cfg, chunk=4)(p, batch, given), params)
        return out, pull(cotangents)[0]

    return run


def checkpoint_layout(spec, tree):
    """Iterate over (name, tensor) as a checkpoint has them."""
    for (_, p), (_, x) in zip(named_leaves(spec), named_leaves(tree), strict=True):
        for name, part in zip(hf_names(p), np.asarray(x).reshape(-1, *x.shape[len(p.stacked) :]), strict=True):
            tensor = np.zeros(layout(p).file_shape)
            layout(p).write(tensor, part)
            yield name, tensor


def no_cotangents(batch) -> dict:
    """Cotangents of the outputs, for their values alone."""
    names = ["aligned", "entropy", "lengths", "logits", "logps", "nll", "ref_logps", "text_lengths", "text_nll", "top1"]
    return dict.fromkeys(names + ["kl_logps", "kl_ref_logps"] * ("kl" in batch), jnp.zeros(batch["lengths"].shape))


@pytest.mark.slow
@of_kind("pairs_dpo", "pairs_cpo", "pairs_orpo", "single_kto", "single_bco")
def test_on_llama(file, index, case, directory) -> None:
    """Loss, metrics and gradients in four weights, from tokens; empty rows fill up the batch, which TRL does not have."""
    data, options, (side, name) = FILES[file], case["options"], case["kind"].split("_")
    policy, reference = llama(file, directory)
    batch = filled(llama_batch(data, side == "pairs"), 2)
    given = {"reference": reference.params, "bco": {"mean": 0.4, "count": 10.0}}  # what BCO has seen
    run = functools.partial(outputs_and_gradients(policy.family, policy.cfg), policy.params, batch, given)
    objective = getattr(pairs if side == "pairs" else unpaired, f"{name}_objective")(**options)

    loss = lambda o: means(*objective(o, batch, given))
    out, _ = run(no_cotangents(batch))
    (value, metrics), cotangents = jax.value_and_grad(loss, has_aux=True)(out)
    _, grads = run(cotangents)
    close(value, case["loss"])
    # TRL averages the logits of CPO and ORPO over prompts and padding too, and has no NLL where its weight is 0.
    skip = ["logits/chosen", "logits/rejected"] if name in ("cpo", "orpo") else []
    compare_metrics(metrics, case, skip + (["nll_loss"] if options.get("cpo_alpha") == 0 else []))
    named = dict(checkpoint_layout(policy.family.spec(policy.cfg), grads))
    names = [k.partition("/")[2] for k in data.files if k.startswith(f"{index}/")]
    assert len(names) == 4
    for key in names:
        close(named[key], data[f"{index}/{key}"])


@pytest.mark.slow
def test_reference_of_three_kinds() -> None:
    """Columns, parameters, and the base under adapters give one reference; LD-DPO weighs it like the policy."""
    base, batch, outputs = tiny_params(0), ragged(0, 3, 2), completion_logps(tiny, None, ld_alpha=0.3)
    spec = {k: Param(axes, base[k].shape, zeros) for k, axes in dict(embed="vocab embed", w="in out", b="out").items()}
    params = lora.add(base, 2, 4, "w", key=jax.random.key(0), spec=spec)
    adapters, frozen = lora.split(
        jax.tree.map(lambda x: x + 0.1 * jnp.cos(jnp.arange(x.size)).reshape(x.shape), params)
    )
    got = jax.jit(on_adapters(outputs))(adapters, batch, {"base": frozen})
    run = jax.jit(outputs)
    policy, reference = run(lora.merge(lora.join(adapters, frozen)), batch), run(lora.unload(frozen), batch)
    close(got["logps"], policy["logps"])
    close(got["ref_logps"], reference["logps"])
    assert np.abs(policy["logps"] - reference["logps"]).max() > 0.1
    assert np.abs(reference["logps"] + reference["nll"]).max() > 0.1  # not a plain sum
    column = outputs(base, batch | {"ref_logps": got["ref_logps"]}, {"reference": "not read"})
    assert column["ref_logps"] is got["ref_logps"]


# ---- any number of microbatches ------------------------------------------------------------------------------------

OPTIONS = [o for o in DPO_OPTIONS if o["loss_type"] == "sigmoid" or "f_divergence" not in o]
PAIRED = (
    *(pairs.dpo_objective(**o) for o in OPTIONS),
    pairs.dpo_objective(loss_type="ipo", wpo=True, f_divergence="js_divergence"),
    pairs.dpo_objective(loss_type=["sigmoid", "bco_pair", "sft"], loss_weights=[0.8, 0.2, 1.0]),
    *(pairs.cpo_objective(loss_type=t, alpha=0.25 if t == "simpo" else 0.0) for t in preference.CPO),
    pairs.orpo_objective(),
)
UNPAIRED = (unpaired.kto_objective(), unpaired.kto_objective(loss_type="apo_zero_unpaired"), unpaired.bco_objective())


@functools.cache
def all_gradients(objectives: tuple, n: int, accumulated: bool = False, ld_alpha: float | None = None):
    """(params, batch, given) -> the gradients of every loss, each normalised, in n microbatches."""
    outputs = completion_logps(tiny, None, ld_alpha=ld_alpha, chunk=5)
    running = {"bco": {"mean": jnp.array(0.3), "count": jnp.array(20.0)}}

    def objective(o, batch, given):
        found = [f(o, batch, running) for f in objectives]
        return given["one"] @ jnp.stack([total for total, _ in found]), {"weight": found[0][1]["weight"]}

    g = train.gradcache(outputs, objective, 1 if accumulated else n)
    g = train.normalize(train.accumulate(g, n) if accumulated else g)
    each = lambda params, batch, given: jax.vmap(lambda one: g(params, batch, {**given, "one": one})[0])
    return jax.jit(lambda *args: each(*args)(jnp.eye(len(objectives))))


def worst(got, want) -> np.ndarray:
    """Per loss, the largest error of an array's gradient relative to the array's largest value."""
    flat = lambda tree: [np.asarray(x).reshape(len(x), -1) for x in jax.tree.leaves(tree)]
    size = lambda b: np.maximum(np.abs(b).max(-1), 1e-30)  # hinge losses can have no gradient
    error = [np.abs(a - b).max(-1) / size(b) for a, b in zip(flat(got), flat(want), strict=True)]
    assert np.isfinite(error).all()
    return np.max(error, 0)


def some_batch(seed: int, single: bool) -> tuple:
    """A policy, a batch and, to be given, a reference near the policy."""
    params = tiny_params(seed)
    batch = ragged(seed, B) if single else ragged(seed, B, 2)
    if single:
        batch |= {"label": jnp.arange(B) % 3 > 0, "kl": ragged(seed + 9, B), "udm": jnp.linspace(0.5, 2, B)}
    return params, batch, {"reference": jax.tree.map(lambda x, y: x + 0.1 * y, params, tiny_params(seed + 50))}


@pytest.mark.slow
@pytest.mark.parametrize("single", [pytest.param(False, marks=pytest.mark.matrix), True])
def test_any_number_of_microbatches(single: bool) -> None:
    """1, 2 and 4 microbatches of ragged lengths give each loss the same gradient: in float64, to 1e-10.

    So do incomplete batches, filled up with empty rows, and their real rows alone.
    """
    objectives, ld_alpha = (UNPAIRED, None) if single else (PAIRED, 0.4)
    with jax.enable_x64(True):
        run = {n: all_gradients(objectives, n, ld_alpha=ld_alpha) for n in (1, 2, 4)}
        for seed, real in enumerate((B, 5, 2)):
            params, batch, given = some_batch(seed, single)
            batch = jax.tree.map(lambda x, n=real: x[:n], batch)
            want = run[1](params, batch, given)
            full = filled(batch, B - real)
            assert max(worst(run[n](params, full, given), want).max() for n in run) < 1e-10


@pytest.mark.slow
def test_accumulation() -> None:
    """Without `gradcache` the sorted losses are wrong, those with an NLL too unless they know the mean lengths."""
    types = ["sigmoid", "aot", "aot_unpaired", "sft"]
    objectives = (*(pairs.dpo_objective(loss_type=t) for t in types), pairs.cpo_objective(), pairs.orpo_objective())
    with jax.enable_x64(True):
        (params, batch, _), given = some_batch(0, False), {"reference": tiny_params(50)}
        want, got = all_gradients(objectives, 1)(params, batch, given), all_gradients(objectives, 4, True)
        wrong = worst(got(params, batch, given), want) > 1e-6
        assert wrong.tolist() == [False, True, True, True, True, True]
        wrong = worst(got(params, with_mean_lengths(batch), given), want) > 1e-6
        assert wrong.tolist() == [False, True, True, False, False, False]
        batch = jax.tree.map(lambda x: x[:5], batch)  # so few may be in order by chance
        want, full = all_gradients(objectives, 1)(params, batch, given), filled(batch, B - 5)
        wrong = worst(got(params, with_mean_lengths(full), given), want) > 1e-6
        assert not wrong[[0, 3, 4, 5]].any()


@pytest.mark.slow
def test_track_rewards() -> None:
    """BCO's delta is the mean of all rewards so far, of rows with tokens to learn; a step that is not finite leaves it."""
    optimizer, total, rows = optax.sgd(0.1), 0.0, 0
    g = train.normalize(train.gradcache(completion_logps(tiny, None), unpaired.bco_objective(beta=0.3), 2))
    step = jax.jit(unpaired.track_rewards(train.update(g, optimizer, reads=("bco",), skip_nonfinite=True)))
    state = train.init_state(tiny_params(0), optimizer, bco={"mean": 0.0, "count": 0.0})
    for seed in range(4):
        batch = ragged(seed, B) | {"label": jnp.arange(B) % 2 > 0}
        state, metrics = step(state, batch | {"ref_logps": jnp.full(B, jnp.nan)})
        assert metrics["skipped"] == 1 and state.extra["bco"]["count"] == rows
        state, metrics = step(state, batch | {"ref_logps": jnp.linspace(-40 * seed, 0, B)})
        learnt = batch["mask"] & (jnp.arange(T) < batch["lengths"][:, None]) & (jnp.arange(T) > 0)
        count = int(learnt.any(1).sum())
        total, rows = total + count * metrics["rewards/mean"], rows + count
        assert metrics["weight"] == count < B
        np.testing.assert_allclose(metrics["delta"], total / rows, rtol=1e-5)
        np.testing.assert_allclose(state.extra["bco"]["mean"], metrics["delta"], rtol=1e-5)
