"""Qwen's and GLM's models that see against transformers, every weight random; float32, 2e-5 of the largest logit."""

import json
from dataclasses import replace
from functools import cache, partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import suite
import tiny

from fdel import models, ops, params
from fdel.media import image, qwen, sight

ALIKE = ("qwen3_5_moe", "glm46v", "glm4v_moe")  # of which CI runs what is cheap
FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "glm4v", *ALIKE)
NAMES = [pytest.param(name, marks=pytest.mark.matrix if name in ALIKE else ()) for name in FAMILIES]
each = pytest.mark.parametrize("case", NAMES, indirect=True)
IMAGE, BLOCK = 120, 4
GRIDS = (((4, 6), (10, 4)), ((2, 2),), ())  # rows and columns of patches of the images of each row
SIGHT = sight.Sight("qwen2_vl", "qwen2_vl", IMAGE, (IMAGE,), None, 4)


def picture(rng, rows: int, columns: int) -> image.Picture:
    values = rng.normal(size=(rows * columns, 3 * 2 * 4 * 4)).astype(np.float32)
    turns = qwen.turns(1, rows // 2, columns // 2)
    return image.Picture(values, qwen.places(1, rows, columns, 2), (IMAGE,) * len(turns), turns)


@cache
def inputs() -> SimpleNamespace:
    """Rows with two images, one and none: what goes into ours, and into transformers'."""
    rng = np.random.default_rng(0)
    pictures = [[picture(rng, *grid) for grid in row] for row in GRIDS]
    text = lambda n: rng.integers(3, 110, n).tolist()
    prompts = [[*text(3), 118, IMAGE, 119, 118, IMAGE, 119, *text(4)], [118, IMAGE, 119, *text(22)], text(25)]
    rows = [sight.expand(SIGHT, prompt, row) for prompt, row in zip(prompts, pictures, strict=True)]
    length = max(len(r.tokens) for r in rows)
    rows = [sight.expand(SIGHT, p + text(length - len(r.tokens)), pics) for p, r, pics in
            zip(prompts, rows, pictures, strict=True)]  # fmt: skip
    straight = np.repeat(np.arange(length)[:, None], 3, 1)
    rotary = np.array([straight if r.rotary is None else r.rotary for r in rows])
    values, places, index = sight.gather(SIGHT, pictures, np.array([r.index for r in rows]), patches=48)
    every = [p for row in pictures for p in row]
    return SimpleNamespace(
        tokens=np.array([r.tokens for r in rows]), rotary=rotary, index=index, every=every,
        inputs=ops.Patches(jnp.asarray(values), jnp.asarray(places)),
        grids=np.array([[1, *grid] for row in GRIDS for grid in row]),
    )  # fmt: skip


def packed() -> ops.Packed:
    x = inputs()
    media = ops.Media(jnp.asarray(x.index), inputs=x.inputs)
    return replace(ops.packed(jnp.asarray(x.tokens)), media=media, rotary=jnp.asarray(x.rotary))


def theirs(oracle, rows=slice(None), images=slice(None)) -> dict:
    import torch

    x = inputs()
    tokens = torch.tensor(x.tokens[rows])
    return dict(
        input_ids=tokens, pixel_values=torch.tensor(np.concatenate([p.patches for p in x.every[images]])),
        image_grid_thw=torch.tensor(x.grids[images]), mm_token_type_ids=(tokens == IMAGE).int(),
        attention_mask=torch.ones_like(tokens),
    )  # fmt: skip


def make(name, directory) -> SimpleNamespace:
    """A checkpoint, and the oracle's logits of `inputs`."""
    torch = pytest.importorskip("torch", reason="the oracle is transformers on torch")
    oracle = tiny.checkpoint(name, directory)
    with torch.no_grad():
        logits = oracle(**theirs(oracle)).logits.numpy()
    return SimpleNamespace(oracle=oracle, model=models.load(directory), directory=directory, logits=logits)


@pytest.fixture(scope="module")
def case(request, tmp_path_factory):
    return make(request.param, tmp_path_factory.mktemp(request.param))


@cache
def whole(family, cfg):
    return jax.jit(lambda p, t, b: family.forward(p, t, cfg, b)[0])


@pytest.mark.parametrize("case", FAMILIES, indirect=True)
@pytest.mark.slow
def test_logits_of_rows_with_images_and_without(case):
    m = case.model
    got = whole(m.family, m.cfg)(m.params, jnp.asarray(inputs().tokens), packed())
    assert suite.error(got, case.logits) < 2e-5


@pytest.mark.slow
@pytest.mark.parametrize("grid", [(26, 18), pytest.param((30, 38), marks=pytest.mark.matrix)], ids=str)
def test_windows_of_large_images_are_those_of_transformers(grid, tmp_path):
    """Of more patches than a block of attention has: edges cut windows, padding stands behind, far blocks are left out."""
    torch = pytest.importorskip("torch", reason="the oracle is transformers on torch")
    oracle, m = tiny.checkpoint("qwen2_5_vl", tmp_path), models.load(tmp_path)
    shown = picture(np.random.default_rng(1), *grid)
    pad = lambda x, fill: np.pad(x, ((0, 44), (0, 0)), constant_values=fill)[None, None]
    patches = ops.Patches(jnp.asarray(pad(shown.patches, 0)), jnp.asarray(pad(shown.places, -1)))
    got = jax.jit(lambda p, x: m.family.encode(p, x, m.cfg))(m.params, patches)[0, : len(shown.run)]
    with torch.no_grad():
        want = oracle.model.visual(torch.tensor(shown.patches), torch.tensor([[1, *grid]]), return_dict=True)
    assert suite.error(got, want.pooler_output.numpy()) < 2e-5


def apart(grads: dict, names: set[str]) -> dict:
    """Give gradients of experts that torch has in one tensor as the file has them, one by one."""
    out = {}
    for name, g in grads.items():
        layer, _, part = name.rpartition(".experts.")
        if not layer or name in names:
            out[name] = g
            continue
        for i, expert in enumerate(g):
            parts = zip(("gate", "up"), np.split(expert, 2), strict=True) if "gate" in part else [("down", expert)]
            out |= {f"{layer}.experts.{i}.{side}_proj.weight": x for side, x in parts}
    return out


DEARER = (*ALIKE, "qwen3_vl_moe", "qwen3_5", "glm4v")
dearer = [pytest.param(name, marks=pytest.mark.matrix if name in DEARER else ()) for name in FAMILIES]


@pytest.mark.parametrize("case", dearer, indirect=True)
@pytest.mark.slow
def test_every_gradient_is_that_of_torch(case, tmp_path):
    """Into the language model, the tower, and the projector: a weight in the tower of none would be seen."""
    import torch
    from safetensors.numpy import load_file

    m, weight = case.model, np.random.default_rng(5).normal(size=case.logits.shape).astype(np.float32)
    case.oracle.zero_grad()
    (case.oracle(**theirs(case.oracle)).logits * torch.tensor(weight)).mean().backward()
    loss = lambda p: (m.family.forward(p, jnp.asarray(inputs().tokens), m.cfg, packed())[0] * weight).mean()
    params.save(m.family.spec(m.cfg), jax.jit(jax.grad(loss))(m.params), tmp_path)
    got, fixed = load_file(tmp_path / "model.safetensors"), dict(case.oracle.named_buffers())
    want = {m.family.rename(n, m.cfg) if hasattr(m.family, "rename") else n: p.grad.numpy()
            for n, p in case.oracle.named_parameters()}  # fmt: skip
    want = apart(want, set(got)) | {n: np.zeros_like(g) for n, g in got.items() if n in fixed}
    assert set(got) == set(want)
    largest = max(np.abs(g).max() for g in want.values())
    for name, g in want.items():
        assert np.abs(g).max() > 0 or name in fixed, name
        np.testing.assert_allclose(got[name], g, atol=2e-5 * largest, err_msg=name)


def laid_out(batch: ops.Paged, values, shift=0) -> ops.Paged:
    """Give a Paged batch of rows of `inputs` what its tokens see, and how they turn."""
    x = inputs()
    rows = np.minimum(np.repeat(batch.rows, batch.block), len(x.tokens) - 1)
    at = np.clip(batch.positions, 0, x.tokens.shape[1] - 1)
    here = batch.positions >= 0
    index = x.index[rows, at]
    index = np.where(here & (index >= 0), index + rows * values.shape[1], -1)
    rotary = np.where(here[:, None], x.rotary[rows, at], -1)
    return replace(batch, media=ops.Media(index, values.reshape(-1, *values.shape[2:])), rotary=rotary)


@pytest.mark.parametrize(
    "case",
    [pytest.param(n, marks=pytest.mark.matrix if n in (*ALIKE, "glm4v") else ()) for n in FAMILIES],
    indirect=True,
)
@pytest.mark.slow
def test_chunks_that_cut_an_image_and_decode(case):
    """Two rows side by side over pages, 4 or 8 tokens at a time, the last ones alone."""
    family, cfg, weights = case.model
    weights = params.unstack(weights)
    values = jax.jit(lambda p, x: family.encode(p, x, cfg))(weights, inputs().inputs)
    length, table = inputs().tokens.shape[1], np.arange(24).reshape(2, 12)
    state = params.init(family.state_spec(cfg, pages=24, page=4, rows=2), jax.random.key(0))
    state = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), state)

    @partial(jax.jit, donate_argnums=3)
    def run(p, tokens, batch, state):
        return family.forward(p, tokens, cfg, batch, state)

    got = np.zeros((2, length, cfg.vocab), np.float32)
    start = 0
    for n in [8] * 3 + [1] * (length - 24):
        block = 1 if n == 1 else BLOCK
        new = [(i, start, inputs().tokens[i, start : start + n].tolist()) for i in range(2)]
        tokens, batch = ops.paged(new, table, block=block, size=2 * n + block)
        logits, state = run(weights, tokens, laid_out(batch, values), state)
        got[:, start : start + n] = np.asarray(logits)[: 2 * n].reshape(2, n, -1)
        start += n
    assert start == length and suite.error(got, case.logits[:2]) < 2e-5


@pytest.mark.parametrize("case", ["qwen2_vl", "qwen3_vl"], indirect=True)
@pytest.mark.slow
def test_what_is_written_after_an_image_is_what_transformers_writes(case):
    """Positions of new tokens go on from one more than the greatest of the prompt."""
    family, cfg, weights = case.model
    x, written = inputs(), []
    prompt, rotary = x.tokens[0].tolist(), x.rotary[0]
    want = case.oracle.generate(**theirs(case.oracle, slice(1), slice(2)), max_new_tokens=6, do_sample=False,
                                eos_token_id=None)[0, len(prompt) :].tolist()  # fmt: skip
    run = jax.jit(lambda p, t, b: family.forward(p, t, cfg, b)[0])
    length = len(prompt) + 6
    for n in range(6):
        tokens = np.zeros((1, length), int)
        tokens[0, : len(prompt) + n] = prompt + written
        turns = np.concatenate([rotary, rotary.max() + 1 + np.arange(6)[:, None] * np.ones(3, int)])[None]
        index = np.pad(x.index[:1], ((0, 0), (0, 6)), constant_values=-1)
        patches = jax.tree.map(lambda a: a[:1], x.inputs)
        batch = replace(ops.packed(jnp.asarray(tokens)), media=ops.Media(jnp.asarray(index), inputs=patches),
                        rotary=jnp.asarray(turns))  # fmt: skip
        written.append(int(run(weights, jnp.asarray(tokens), batch)[0, len(prompt) + n - 1].argmax()))
    assert written == want and len(set(want)) > 1


@each
@pytest.mark.slow
def test_a_file_is_written_as_it_was(case, tmp_path):
    """Every tensor by name and byte, config.json by key; transformers reads it and computes the same."""
    import torch
    from safetensors.numpy import load_file

    models.save(case.model, tmp_path)
    before, after = (load_file(d / "model.safetensors") for d in (case.directory, tmp_path))
    assert set(before) == set(after)
    for name, tensor in before.items():
        assert tensor.tobytes() == after[name].tobytes() and tensor.shape == after[name].shape, name
    again = type(case.oracle).from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        np.testing.assert_array_equal(again(**theirs(again)).logits, case.logits)
    found, kept = (json.loads((d / "config.json").read_bytes()) for d in (tmp_path, case.directory))
    assert {k: v for k, v in found.items() if k not in ("text_config", "vision_config")} == {
        k: v for k, v in kept.items() if k not in ("text_config", "vision_config")
    }
    for part in ("text_config", "vision_config"):
        kept[part].pop("tie_word_embeddings", None)  # of a text_config; what stands around it counts
        assert {k: v for k, v in found[part].items() if k in kept[part]} == kept[part]
    assert models.load(tmp_path).cfg == case.model.cfg


@pytest.mark.parametrize("case", ["qwen2_vl", "qwen2_5_vl"], indirect=True)
@pytest.mark.slow
def test_names_of_modules_and_flat_configs(case, tmp_path):
    """Files with the names that transformers' modules have, and config.json as the first published ones had it."""
    from safetensors.numpy import load_file, save_file

    tensors = load_file(case.directory / "model.safetensors")
    inner = lambda n: n.replace("model.", "model.language_model.", 1) if n.startswith("model.") else f"model.{n}"
    save_file(
        {n if n.startswith("lm_head") else inner(n): t for n, t in tensors.items()}, tmp_path / "model.safetensors"
    )
    d = json.loads((case.directory / "config.json").read_bytes())
    text = d.pop("text_config")
    parameters = text.pop("rope_parameters")
    text |= {"rope_theta": parameters["rope_theta"], "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}}
    d["vision_config"] = {k: v for k, v in d["vision_config"].items() if k != "rope_parameters"} | {
        "in_chans": 3, "spatial_patch_size": 4, "model_type": d["model_type"],
    }  # fmt: skip
    flat = text | d
    (tmp_path / "config.json").write_text(json.dumps(flat))
    m = models.load(tmp_path)
    assert m.cfg == case.model.cfg
    jax.tree.map(np.testing.assert_array_equal, m.params, case.model.params)
    written = m.cfg.to_hf()
    assert "text_config" not in written and written["hidden_size"] == 64 and m.family.Config.from_hf(written) == m.cfg


@pytest.mark.parametrize("case", ["qwen3_vl_moe"], indirect=True)
@pytest.mark.slow
def test_published_experts_have_their_inputs_first(case, tmp_path):
    from safetensors.numpy import load_file, save_file

    tensors = load_file(case.directory / "model.safetensors")
    published = {n: t.swapaxes(1, 2).copy() if ".experts." in n else t for n, t in tensors.items()}
    (tmp_path / "a").mkdir()
    save_file(published, tmp_path / "a" / "model.safetensors")
    (tmp_path / "a" / "config.json").write_bytes((case.directory / "config.json").read_bytes())
    m = models.load(tmp_path / "a")
    got = whole(m.family, m.cfg)(m.params, jnp.asarray(inputs().tokens), packed())
    assert suite.error(got, case.logits) < 2e-5
    models.save(m, tmp_path / "b")
    again = load_file(tmp_path / "b" / "model.safetensors")
    assert all(again[n].tobytes() == t.tobytes() and again[n].shape == t.shape for n, t in published.items())


@each
@pytest.mark.slow
def test_a_frame_sees_itself_alone(case):
    """Of two frames of one size, their patches behind each other: all parts of the entries, in places that pad them too."""
    import torch

    m, values = case.model, np.random.default_rng(7).normal(size=(48, 96)).astype(np.float32)
    grids = (
        [[1, 4, 6]] * 2 if m.family.MODEL_TYPE.startswith("glm") else [[2, 4, 6]]
    )  # transformers cuts GLM's videos so
    with torch.no_grad():
        found = case.oracle.model.get_image_features(torch.tensor(values), torch.tensor(grids))
    parts = [torch.cat(list(found.pooler_output)), *(f[0] for f in getattr(found, "deepstack_features", None) or ())]
    pad = lambda x, value: jnp.asarray(np.pad(x, ((0, 8), (0, 0)), constant_values=value))[None]
    patches = ops.Patches(pad(values, 1.0), pad(qwen.places(2, 4, 6, 2), -1))
    got = np.asarray(jax.jit(lambda p, x: m.family.encode(p, x, m.cfg))(m.params, patches))[:12].reshape(12, -1, 64)
    assert suite.error(got, np.stack(parts, 1)) < 2e-5


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl_moe"])
@pytest.mark.slow
def test_on_devices(name):
    """Rows and weights divided between four devices: the same logits as on one."""
    family = models.family(name)
    cfg = family.Config.from_hf(tiny.TINY[name].values)
    weights = params.init(family.spec(cfg), jax.random.key(0))
    twice = lambda x: jnp.concatenate([jnp.asarray(x)] * 2)
    tokens, batch = twice(inputs().tokens), replace(jax.tree.map(twice, packed()), single=True)
    want = whole(family, cfg)(weights, tokens, batch)
    mesh = jax.make_mesh((2, 1, 2), ("fsdp", "ep", "tp"), axis_types=(jax.sharding.AxisType.Auto,) * 3)
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("fsdp"))
    with jax.set_mesh(mesh):
        laid = jax.device_put(weights, params.shardings(family.spec(cfg), mesh))
        got = jax.jit(lambda p, t, b: family.forward(p, t, cfg, b)[0])(laid, *jax.device_put((tokens, batch), rows))
    assert suite.error(got, want) < 1e-5


@pytest.mark.parametrize("name", FAMILIES)
def test_shapes(name):
    """Of logits with images in rows, and of entries: their first part is the embedding, the others are for layers."""
    family = models.family(name)
    cfg = family.Config.from_hf(tiny.TINY[name].values)
    weights = params.abstract(family.spec(cfg))
    run = lambda p, t, b: family.forward(p, t, cfg, b)[0]
    assert jax.eval_shape(run, weights, jnp.asarray(inputs().tokens), packed()).shape == (3, 27, 128)
    entries = jax.eval_shape(lambda p, x: family.encode(p, x, cfg), weights, inputs().inputs)
    assert entries.shape == (3, 24, *([3] if "3_vl" in name else []), 64)


@pytest.mark.parametrize("name", FAMILIES)
def test_patches_that_are_none_of_the_towers(name):
    family = models.family(name)
    cfg = family.Config.from_hf(tiny.TINY[name].values)
    weights = params.abstract(family.spec(cfg))
    for count, numbers in ((5, 96), (8, 48)):
        patches = ops.Patches(jnp.zeros((1, count, numbers)), jnp.zeros((1, count, 3), int))
        with pytest.raises(ValueError, match=f"found {count} patches of {numbers} numbers, expected a multiple of 4"):
            jax.eval_shape(lambda p, x: family.encode(p, x, cfg), weights, patches)


BROKEN = [
    ("qwen2_vl", {"vision_config": {"hidden_size": 32}}, "found entries of 32 numbers, expected 64"),
    ("qwen2_vl", {"vision_config": {"num_heads": 16}}, "found heads of 32 / 16 channels, expected a multiple of 4"),
    ("qwen2_vl", {"image_token_id": "x"}, "'image_token_id': found 'x', expected a token id"),
    ("qwen2_vl", {"vision_config": {"rope_parameters": {"rope_type": "yarn"}}}, "understood is 'axial'"),
    ("qwen2_vl", {"vision_config": {"in_channels": 4}}, "vision_config: .*in_channels"),
    ("qwen2_vl", {"text_config": {"rope_parameters": {"mrope_section": [1, 1, 1]}}}, "three numbers of pairs"),
    ("qwen2_5_vl", {"vision_config": {"window_size": 4}}, "'window_size': found 4, expected at least 8"),
    ("qwen3_vl", {"vision_config": {"num_position_embeddings": 15}}, "expected a square number"),
    ("qwen3_vl", {"vision_config": {"deepstack_visual_indexes": [0, 9]}}, "expected rising numbers below 4"),
    ("glm4v", {"vision_config": {"image_size": 3}}, "'image_size': found 3, expected at least 4 pixels"),
    ("glm4v", {"vision_config": {"out_hidden_size": 32}}, "found entries of 32 numbers, expected 64"),
    (
        "glm4v",
        {"text_config": {"head_dim": 32, "rope_parameters": {"mrope_section": [8, 4, 4]}}},
        "'head_dim': found 32, only 16 is understood",
    ),
    ("glm46v", {"text_config": {"model_type": "glm4v_moe_text"}}, "understood is 'glm4v_text'"),
    ("glm4v_moe", {"text_config": {"use_qk_norm": True}}, "'use_qk_norm': found True"),
    ("qwen3_vl", {"vision_config": {"deepstack_visual_indexes": [0, 1, 2, 3], "unheard": 1}}, "unheard"),
]


@pytest.mark.parametrize(("name", "change", "message"), BROKEN)
def test_configs_that_are_not_understood(name, change, message):
    values = json.loads(json.dumps(tiny.TINY[name].values))
    for key, value in change.items():
        values[key] = values[key] | value if isinstance(value, dict) else value
    with pytest.raises(models.ConfigError, match=message):
        models.family(name).spec(models.family(name).Config.from_hf(values))
