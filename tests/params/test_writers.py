"""Files of few bits that fdel writes: read by compressed-tensors, bitsandbytes, transformers, and by fdel itself."""

import functools
import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from fdel import calibration, models, ops, params, quantizing, smoothing
from fdel.models import llama
from fdel.ops.weights import Observed
from fdel.params import named_leaves, writers
from fdel.params.rounding import gptq, nearest, scales
from tests.models import tiny
from tests.params.test_published import BASE, quantized_leaves

CONFIG = BASE | dict(intermediate_size=128, dtype="bfloat16")
TOKENS = np.random.default_rng(0).integers(0, 32, (4, 16))


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


@functools.cache
def model(family="llama") -> models.Model:
    """Random weights in bfloat16; its matrices' rows differ in size."""
    module = models.family(family)
    more = dict(num_local_experts=3, num_experts_per_tok=2) if family == "mixtral" else {}
    plain = family in ("llama", "mixtral")
    values = CONFIG | {"model_type": family} | more if plain else tiny.TINY[family].values
    cfg = module.Config.from_hf(values)
    rng = np.random.default_rng(1)
    draw = lambda p: jnp.array(
        rng.normal(0, 0.1, p.shape) * np.exp(rng.normal(0, 0.5, (*p.shape[:-1], 1))), jnp.bfloat16
    )
    return models.Model(module, cfg, jax.tree.map(draw, module.spec(cfg)))


def write(path, format: str, rows=None, **how) -> dict[str, np.ndarray]:
    group = 32 if writers.scheme(format).group and format != "nf4" else None
    quantizing.save(model(), path, writers.scheme(format, group, **how), rows)
    return {name: t.read() for name, t in params.files.tensors(path).items()}


def plain() -> dict[str, np.ndarray]:
    """The model's matrices [outputs inputs], by their names in a file."""
    spec, tree = params.unstack(models.spec_of(model())), dict(named_leaves(params.unstack(model().params)))
    found = {p.hf: np.asarray(tree[path], np.float32) for path, p in named_leaves(spec)}
    return {name: x.reshape(len(x) if "o_proj" in name else -1, 128 if "down" in name else 64)
            for name, x in found.items() if "_proj" in name}  # fmt: skip


# ---- GPTQ ------------------------------------------------------------------------------------------------------------


def correlated(rng, inputs: int, rows: int = 200) -> np.ndarray:
    x = rng.normal(size=(rows, inputs // 2)) @ rng.normal(size=(inputs // 2, inputs)) + rng.normal(size=(rows, inputs))
    return x.T @ x


def brain_surgeon(w, gram, bits, group, damp=0.01):
    """Section 3.1 of arXiv 2210.17323 as it stands: after each column the best change of all that are left, with the
    inverse of what is left of the damped matrix made anew."""
    w, h, q = w.astype(np.float64), gram + damp * np.diag(gram).mean() * np.eye(len(gram)), np.zeros(w.shape)
    half = 2 ** (bits - 1)
    for i in range(w.shape[1]):
        if i % group == 0:
            scale = (np.abs(w[:, i : i + group]).max(1) / (half - 0.5)).astype(np.float32).astype(np.float64)
        q[:, i] = np.clip(np.rint(w[:, i] / scale), -half, half - 1)
        inverse = np.linalg.inv(h[i:, i:])
        w[:, i:] -= np.outer((w[:, i] - q[:, i] * scale) / inverse[0, 0], inverse[0])
    return q


@pytest.mark.parametrize(("bits", "group"), [(4, 160), (4, 32), (8, 160)])
def test_gptq_is_the_best_change_of_what_is_left(rng, bits, group):
    """The same integers as the definition without Cholesky's factor, in several blocks; errors below rounding's."""
    w, gram = rng.normal(size=(24, 160)) * np.exp(rng.normal(size=(24, 1))), correlated(rng, 160)
    q, scale = gptq(w, gram, bits, group, np.float32)
    np.testing.assert_array_equal(q, brain_surgeon(w, gram, bits, group))
    error = lambda q, s: np.trace((d := w - q * np.repeat(s, group, 1)) @ gram @ d.T)
    s = scales(w, bits, group, np.float32)
    rounded = error(nearest(w, s, bits), s)
    assert error(q, scale) < 0.5 * rounded
    assert error(*gptq(w, gram, bits, group, np.float32, act_order=True)) < 0.5 * rounded


def test_inputs_that_were_never_seen_are_rounded(rng):
    w, gram = rng.normal(size=(4, 32)), correlated(rng, 32)
    gram[5] = gram[:, 5] = 0
    q, scale = gptq(w, gram, 4, 32, np.float32)
    np.testing.assert_array_equal(q[:, 5], nearest(w, scale, 4)[:, 5])
    np.testing.assert_array_equal(gptq(w, np.zeros((32, 32)), 4, 32, np.float32)[0], nearest(w, scale, 4))


# ---- what calibration sees -------------------------------------------------------------------------------------------


def test_gram_matrices_of_a_model():
    """The first layer's q and k: of its normed embeddings; 1e-4 of the greatest."""
    m = model()
    got = calibration.grams(m, TOKENS, ["layers.0.q", "layers.0.k", "layers.1.down"], batch=2)
    layer = params.unstack(m.params)["layers"][0]
    x = np.asarray(m.params["embed"], np.float64)[TOKENS].reshape(-1, 64)
    x = x / np.sqrt((x**2).mean(-1, keepdims=True) + m.cfg.norm_eps)
    x = (x.astype(ml_dtypes.bfloat16) * np.asarray(layer["attn_norm"])).astype(np.float64)
    assert sorted(got) == ["layers.0.k", "layers.0.q", "layers.1.down"] and got["layers.1.down"].shape == (128, 128)
    assert np.linalg.eigvalsh(got["layers.1.down"]).min() > -1e-4 and got["layers.1.down"].any()
    for name in ("layers.0.q", "layers.0.k"):
        assert np.abs(got[name] - x.T @ x).max() < 1e-2 * np.abs(x.T @ x).max()


def test_gram_matrices_of_products(rng):
    """Several inputs; experts, of which one has no rows; a product from the other side leaves zeros. 1e-5."""
    x, w = rng.normal(size=(2, 5, 3, 4)).astype(np.float32), jnp.ones((7, 3, 4))
    see = lambda f, w, gram: jax.grad(lambda g: f(Observed(w, g)).sum())(gram)
    got = see(lambda w: ops.einsum("...nh,dnh->...d", x, w), w, jnp.zeros((12, 12)))
    rows = x.reshape(-1, 12)
    np.testing.assert_allclose(got, rows.T @ rows, atol=1e-5)
    other = see(lambda w: ops.einsum("...d,dnh->...nh", jnp.ones((2, 7)), w), w, jnp.zeros((12, 12)))
    assert not other.any()
    rows, sizes = rng.normal(size=(9, 4)).astype(np.float32), jnp.array([4, 0, 5])
    got = see(lambda w: ops.grouped_matmul(rows, w, sizes), jnp.ones((3, 6, 4)), jnp.zeros((3, 4, 4)))
    want = np.stack([r.T @ r for r in np.split(rows, [4, 4])])
    np.testing.assert_allclose(got, want, atol=1e-5)


# ---- files -----------------------------------------------------------------------------------------------------------


def decoded(stored: dict, how: dict) -> dict[str, np.ndarray]:
    """What the tensors of a file stand for, by the formats' definitions, one number after the other."""
    bits, out = how.get("bits", 8), {}
    if how["quant_method"] == "compressed-tensors":
        bits = how["config_groups"]["group_0"]["weights"]["num_bits"]
    number = lambda words, i, bits: int(words.view(np.uint32)[i * bits // 32]) >> i * bits % 32 & 2**bits - 1
    take = lambda words, n: np.array([[number(row, i, bits) for i in range(n)] for row in words])
    for key, s in stored.items():
        stem, _, end = key.rpartition("weight" if "weight_" in key else ".")
        s32 = s.astype(np.float32)
        if end == "scales":
            q, z = (
                take(stored[stem + ".qweight"].T.copy(), 128 if "down" in stem else 64),
                take(stored[stem + ".qzeros"], s.shape[1]),
            )
            g = stored[stem + ".g_idx"]
            out[stem + ".weight"] = (q - z.T[:, g] - 1) * s32.T[:, g]
        elif end == "_scale" and stem + "weight_packed" in stored:
            outputs, inputs = stored[stem + "weight_shape"]
            q = take(stored[stem + "weight_packed"], inputs)
            assert q.shape == (outputs, inputs)
            out[stem + "weight"] = (q - 2 ** (bits - 1)) * np.repeat(s32, inputs // s.shape[1], 1)
        elif end == "_scale":
            out[stem + "weight"] = stored[stem + "weight"].astype(np.float32) * s32
        elif end == "_scale_inv":
            q = stored[stem + "weight"].astype(np.float32)
            out[stem + "weight"] = q * np.kron(s32, np.ones((32, 32), np.float32))[: q.shape[0], : q.shape[1]]
        elif end == "SCB":
            out[stem + ".weight"] = stored[stem + ".weight"] * s[:, None] / np.float32(127)
    return out


# format: greatest relative error of a matrix, in the root of the mean square
ERRORS = {
    "w8a16": 0.012, "w8a8": 0.012, "w4a16": 0.12, "fp8": 0.04, "fp8_tensor": 0.04, "fp8_block": 0.04, "gptq": 0.12,
    "gptq_8": 0.01, "nf4": 0.11, "bnb_8": 0.012,
}  # fmt: skip


@pytest.mark.parametrize("format", ERRORS)
def test_a_file_stands_for_the_matrices(format, tmp_path):
    """Near the matrices; by the formats' definitions, and by fdel's reader, which keeps the bits: equal numbers."""
    stored = write(tmp_path, format)
    how = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    read = models.load(tmp_path, stacked=False)
    assert len(quantized_leaves(read.params)) == 14 and "lm_head" in str(how)
    listed = dict(named_leaves(params.dequantize(read.params, jnp.float32)))
    spec = params.unstack(models.spec_of(read))
    got = {p.hf: np.asarray(listed[path]) for path, p in named_leaves(spec)}
    for name, w in plain().items():
        ours = got[name].reshape(w.shape)
        assert np.linalg.norm(ours - w) < ERRORS[format] * np.linalg.norm(w)
    for name, w in decoded(stored, how).items():
        np.testing.assert_allclose(got[name].reshape(w.shape), w, rtol=1e-6 if format == "bnb_8" else 0, err_msg=name)
    assert len(decoded(stored, how)) == (0 if format == "nf4" else 14)


@pytest.mark.parametrize("format", ERRORS)
def test_rows_whose_scale_float16_does_not_hold_become_zeros(format, rng):
    """A row of 1e-6, of a float16 checkpoint: what is stored are numbers, and no scale is zero; by division it was NaN."""
    w = rng.normal(size=(8, 64)).astype(np.float16)
    w[1], w[2] = 0, rng.choice([0, 1e-6], 64)
    group = 64 if writers.scheme(format).group else None
    stored = writers.written(writers.scheme(format, group), "a.weight", w.astype(np.float32), np.dtype("float16"))
    for name, x in stored.items():
        assert np.isfinite(x.astype(np.float32)).all(), name
        assert "scale" not in name or x.all(), name


@pytest.mark.slow
def test_nf4_equals_bitsandbytes(tmp_path):
    """The tensors that bitsandbytes writes, equal."""
    torch, bnb = pytest.importorskip("torch"), pytest.importorskip("bitsandbytes.functional")
    stored = write(tmp_path, "nf4")
    for name, w in plain().items():
        values, state = bnb.quantize_4bit(torch.tensor(w), blocksize=64, quant_type="nf4")
        np.testing.assert_array_equal(stored[name], values.numpy())
        np.testing.assert_array_equal(stored[f"{name}.absmax"], state.absmax.numpy())
        theirs = json.loads(state.as_dict(packed=True)["quant_state.bitsandbytes__nf4"].numpy().tobytes())
        ours = json.loads(stored[f"{name}.quant_state.bitsandbytes__nf4"].tobytes())
        assert ours == theirs | {"dtype": "bfloat16"}


@pytest.mark.slow
@pytest.mark.parametrize("format", ["w4a16", "w8a16"])
def test_transformers_reads_it(format, tmp_path):
    """The same logits, float32, 1e-5 of the greatest. w4a16 found by GPTQ, in the order of activations."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    pytest.importorskip("compressed_tensors")
    write(tmp_path, format, *((TOKENS,) if format == "w4a16" else ()), act_order=format == "w4a16")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    with torch.no_grad():
        want = theirs(torch.tensor(TOKENS)).logits.numpy()
    ours = models.load(tmp_path, dtype=jnp.float32)
    got = jax.jit(lambda p: llama.forward(p, jnp.asarray(TOKENS), ours.cfg)[0])(ours.params)
    assert np.abs(got - want).max() < 1e-5 * np.abs(want).max()


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen2_moe", "phimoe"])
def test_transformers_reads_experts(family, tmp_path):
    """Gates of shared experts and renamed routers are whole: the same logits, float32, 1e-5 of the greatest."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    pytest.importorskip("compressed_tensors")
    tiny.checkpoint(family, tmp_path / "plain")
    quantizing.save(models.load(tmp_path / "plain", stacked=False), tmp_path, writers.scheme("w8a16"))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    with torch.no_grad():
        want = theirs(torch.tensor(TOKENS)).logits.numpy()
    ours = models.load(tmp_path, dtype=jnp.float32)
    got = jax.jit(lambda p: ours.family.forward(p, jnp.asarray(TOKENS), ours.cfg)[0])(ours.params)
    assert np.abs(got - want).max() < 1e-5 * np.abs(want).max()


def test_calibrated_files_are_nearer_in_what_they_compute(tmp_path):
    """Products with what the matrices saw: GPTQ's errors are below those of rounding, in each matrix and format."""
    rows = np.random.default_rng(3).integers(0, 32, (8, 16))
    seen = calibration.grams(model(), rows, [path for path in QUANTIZED])
    errors = {}
    for kind, how in (("rounded", {}), ("gptq", {"rows": rows})):
        stored = decoded(write(tmp_path / kind, "w4a16", **how), {"quant_method": "gptq", "bits": 4})
        spec = dict(named_leaves(params.unstack(models.spec_of(model()))))
        for path in QUANTIZED:
            d = stored[spec[path].hf] - plain()[spec[path].hf]
            errors[kind, path] = np.trace(d @ seen[path] @ d.T)
    for path in QUANTIZED:
        assert errors["gptq", path] < 0.8 * errors["rounded", path], path


QUANTIZED = [f"layers.{i}.{name}" for i in range(2) for name in ("q", "o", "up", "down")]


@pytest.mark.matrix
def test_experts_are_calibrated(tmp_path):
    """Each expert's matrix by what it saw; the router stays, and readers are told so."""
    quantizing.save(model("mixtral"), tmp_path, writers.scheme("gptq", 32), TOKENS)
    how = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert all("gate" in name for name in how["dynamic"]) and len(how["dynamic"]) == 2
    read = models.load(tmp_path, stacked=False)
    assert len(quantized_leaves(read.params)) == 2 * 7


@pytest.mark.parametrize(
    ("family", "format", "named"),
    [
        ("qwen2_moe", "w8a16", "model.layers.0.mlp.shared_expert_gate"),  # one output alone
        ("qwen2_moe", "gptq_8", r"-:^model\.layers\.0\.mlp\.shared_expert_gate$"),
        ("phimoe", "w8a16", "model.layers.0.mlp.router"),  # as transformers calls block_sparse_moe.gate
        ("llava", "w8a16", "model.vision_tower.encoder.layers.0.mlp.fc1"),  # without `model.` in the file
        ("roberta", "w8a16", "re:.*lm_head"),  # lm_head.decoder, which is the embedding
        ("rwkv", "w8a16", "head"),
    ],
)
def test_readers_are_told_of_every_matrix_that_is_left(family, format, named, tmp_path):
    """Whatever Linear is not among those in few bits is named as transformers calls it, and as the file does."""
    m = model(family)
    quantizing.save(m, tmp_path, writers.scheme(format, 8 if format == "gptq_8" else None))
    how = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert named in (how["ignore"] if format == "w8a16" else how["dynamic"])


def test_experts_that_readers_would_misread_are_refused(tmp_path):
    """Readers put the blocks of gate and up below each other; and none has experts in bitsandbytes' int8."""
    with pytest.raises(ValueError, match=r"experts\.0\.w2\.weight has 64 outputs, no multiple of blocks of 48"):
        quantizing.save(model("mixtral"), tmp_path, writers.scheme("fp8_block", 48))
    with pytest.raises(ValueError, match="is an expert's, which neither"):
        quantizing.save(model("mixtral"), tmp_path, writers.scheme("bnb_8"))
    assert not any(tmp_path.iterdir())


def test_a_tower_stays_whole(tmp_path):
    """Its tensors are as they were, the file names its modules among those that are plain, and both are read again."""
    scheme = writers.scheme("w8a16")
    quantizing.save(model("llava"), tmp_path, scheme)
    models.save(model("llava"), tmp_path / "plain")
    files = {name: t.read() for name, t in params.files.tensors(tmp_path).items()}
    whole = {name: t.read() for name, t in params.files.tensors(tmp_path / "plain").items()}
    tower = {name for name in whole if "vision_tower" in name or "projector" in name}
    for name in tower:
        np.testing.assert_array_equal(files[name], whole[name])
    packed = {name.removesuffix("_packed") for name in files if name.endswith("_packed")}
    assert packed == {name for name in whole if "_proj.weight" in name} - tower
    plain = json.loads((tmp_path / "config.json").read_text())["quantization_config"]["ignore"]
    assert {n.removesuffix(".weight") for n in tower if "_proj.weight" in n or ".fc1.weight" in n} < set(plain)
    leaves = quantized_leaves(models.load(tmp_path).params)
    assert leaves and not any(path.startswith(("vision", "projector")) for path in leaves)


def test_what_cannot_be_written_is_refused(tmp_path):
    for name, why in (("a4q", "no published file"), ("int3", "unknown; use one of w8a16")):
        with pytest.raises(ValueError, match=why):
            writers.scheme(name)
    with pytest.raises(ValueError, match="has none"):
        writers.scheme("w8a8", 64)
    with pytest.raises(ValueError, match="act_order belongs to GPTQ"):
        writers.scheme("nf4", act_order=True)
    with pytest.raises(ValueError, match="group=48: bitsandbytes has blocks of 64, 128, 256"):
        quantizing.save(model(), tmp_path, writers.scheme("nf4", 48))
    with pytest.raises(ValueError, match="no multiple of groups of 48"):
        quantizing.save(model(), tmp_path, writers.scheme("w4a16", 48))
    with pytest.raises(ValueError, match="nothing to calibrate"):
        quantizing.save(model(), tmp_path, writers.scheme("fp8"), TOKENS)
    with pytest.raises(ValueError, match="helps formats that round activations"):
        quantizing.save(model(), tmp_path, writers.scheme("w4a16"), TOKENS, alpha=0.5)
    few = model()._replace(params=params.quantize(model().params, "int8", spec=models.spec_of(model())))
    with pytest.raises(ValueError, match="14 matrices like .* are quantized already"):
        quantizing.save(few, tmp_path, writers.scheme("fp8"))
    assert not any(tmp_path.iterdir())


# ---- SmoothQuant -----------------------------------------------------------------------------------------------------


def test_smoothing_changes_no_result_and_helps_rounded_activations():
    """Outliers in two channels of each norm: the same hidden states, 1e-4; in 8 bits, half the error."""
    m = model()
    wild = lambda path, x: x.at[..., jnp.array([3, 40])].mul(60) if path[-1].key.endswith("_norm") else x
    m = m._replace(
        params=jax.tree_util.tree_map_with_path(wild, jax.tree.map(lambda x: x.astype(jnp.float32), m.params))
    )
    got, count = smoothing.smooth(m, TOKENS, 0.5)
    assert count == 4  # both norms of two layers
    run = jax.jit(lambda p: llama.hidden(p, jnp.asarray(TOKENS), m.cfg)[0])
    want = run(params.unstack(m.params))
    assert np.abs(run(got.params) - want).max() < 1e-4 * np.abs(want).max()
    layers = params.unstack(m.params)["layers"], got.params["layers"]
    s = np.asarray(layers[0][0]["attn_norm"] / layers[1][0]["attn_norm"])
    np.testing.assert_allclose(
        layers[1][0]["k"] / layers[0][0]["k"], np.broadcast_to(s, layers[0][0]["k"].shape), rtol=1e-4
    )
    assert s[[3, 40]].min() > 4 * np.median(s)
    spec = params.unstack(models.spec_of(m))
    errors = [
        np.linalg.norm(run(params.quantize(p, "a8q", r"\.(q|k|v|gate|up)$", spec=spec)) - want)
        for p in (params.unstack(m.params), got.params)
    ]
    assert errors[1] < 0.5 * errors[0]


def test_factors_are_those_of_section_4_2(rng):
    x, w = rng.uniform(0.1, 9, 6), rng.uniform(0.1, 9, 6)
    x[2] = 0
    s = smoothing.factors(x, w, 0.6)
    known = np.delete(x**0.6 / w**0.4 / s, 2)
    np.testing.assert_allclose(known, known[0], rtol=1e-6)
    assert s[2] == 1 and np.log(s).sum() == pytest.approx(0, abs=1e-9)
    with pytest.raises(ValueError, match=r"alpha=1\.5; expected"):
        smoothing.smooth(model(), TOKENS, 1.5)
