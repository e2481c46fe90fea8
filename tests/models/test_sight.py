"""Models that see, with images in their batches; the oracle is transformers with its image processors and every weight
randomised. What they do with text alone is checked by test_families.py.

Tolerances are relative to the largest value, in float32. Seen: 1e-6 for logits.
"""

import json
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
import suite
import tiny

torch = pytest.importorskip("torch", reason="the oracle is transformers on torch (extra `test`)")
pytest.importorskip("PIL", reason="extra `media`")

from fdel import models, ops, params, train  # noqa: E402
from fdel.media import sight  # noqa: E402
from fdel.models import clip, llama, llava, pixtral, siglip  # noqa: E402

NAMES = list(tiny.sight.PROCESSORS)
LATER = [n for n in NAMES if n not in ("llava", "llava:pixtral", "mistral3")]
DEAR = [pytest.mark.slow, pytest.mark.matrix]


def each(names, **marks):
    """Mark names; those beside the first run in CI where there is nothing dear about it."""
    return [pytest.param(n, marks=marks.get("later", DEAR)) if n in LATER else n for n in names]


SIZES = ((37, 53), (24, 16), (16, 31))  # height and width of images; two are in the first row, one in the second
ROWS = ((0, 1), (2,), ())


class Seen(NamedTuple):
    """A checkpoint with an image processor, a batch of three rows, and the oracle's logits of what is no padding."""

    directory: object
    model: models.Model
    oracle: object
    inputs: dict
    tokens: np.ndarray
    lengths: np.ndarray
    media: ops.Media
    logits: np.ndarray


def prompts(placeholder):
    words = np.random.default_rng(1).integers(3, 100, (3, 16)).tolist()
    for row, at in enumerate(((2, 9), (5,), ())):
        for i in at:
            words[row][i] = placeholder
    return words


def make(name, directory):
    oracle = tiny.checkpoint(name, directory)
    processor = tiny.sight.processor(name)
    processor.save_pretrained(directory)
    added = [dict(content=token, id=i) for i, token in enumerate(tiny.sight.TOKENS, tiny.sight.IMAGE + 1)]
    (directory / "tokenizer.json").write_text(json.dumps(dict(added_tokens=added)))
    rng = np.random.default_rng(0)
    images = [rng.integers(0, 256, (*size, 3)).astype(np.uint8) for size in SIZES]
    see = sight.read(directory)
    pictures = [[sight.prepare(see, images[i]) for i in row] for row in ROWS]
    rows = [sight.expand(see, words, p) for words, p in zip(prompts(see.placeholder), pictures, strict=True)]
    lengths = np.array([len(r.tokens) for r in rows])
    pad = lambda values, fill: np.array([v + [fill] * (lengths.max() - len(v)) for v in values])
    tokens, index = pad([r.tokens for r in rows], 0), pad([r.index for r in rows], -1)
    values, places, index = sight.gather(see, pictures, index)
    media = ops.Media(jnp.asarray(index), inputs=ops.Patches(jnp.asarray(values), jnp.asarray(places)))
    inputs = {k: v for k, v in processor(images, return_tensors="pt").items() if not k.startswith("num_")}
    inputs |= {"input_ids": torch.tensor(tokens), "attention_mask": torch.tensor(mask(lengths)).long()}
    if types := {"gemma3": "token_type_ids", "gemma4": "mm_token_type_ids"}.get(see.model_type):
        inputs[types] = torch.tensor(index >= 0).long()
    with torch.no_grad():
        logits = oracle(**inputs).logits.numpy()
    model = models.load(directory, dtype=jnp.float32)
    return Seen(directory, model, oracle, inputs, tokens, lengths, media, logits)


def mask(lengths):
    return np.arange(lengths.max()) < lengths[:, None]


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    return lru_cache(lambda name: make(name, tmp_path_factory.mktemp(name.replace(":", "_"))))


def batch(c):
    return replace(ops.packed(jnp.asarray(c.tokens), jnp.asarray(c.lengths)), media=c.media)


@pytest.mark.parametrize("name", each(NAMES, later=pytest.mark.slow))
def test_logits_equal_torch(seen, name):
    """Of rows with two images of different sizes, with one, and with none; 2e-5."""
    c = seen(name)
    got, real = np.asarray(suite.full(c.model, c.tokens, batch(c))), mask(c.lengths)
    assert suite.error(got[real], c.logits[real]) < 2e-5
    blind = suite.full(c.model, c.tokens, ops.packed(jnp.asarray(c.tokens), jnp.asarray(c.lengths)))
    assert suite.error(blind[2], got[2]) < 1e-6  # of a row of text
    first = int(np.argmax(np.asarray(c.media.index)[0] >= 0))
    assert suite.error(blind[0, first], got[0, first]) > 1e-2


@pytest.mark.parametrize("name", each(NAMES))
def test_padding_of_images_changes_nothing(seen, name):
    """Rows of three places for images, each longer than any image."""
    c = seen(name)
    see = sight.read(c.directory)
    values, places = np.asarray(c.media.inputs.values), np.asarray(c.media.inputs.places)
    rows, images, patches, numbers = values.shape
    more = patches + 4 * see.merge
    wide = np.zeros((rows, 3, more, numbers), np.float32)
    at = np.full((rows, 3, more, 3), -1, np.int32)
    wide[:, :images, :patches], at[:, :images, :patches] = values, places
    old, new, index = see.count(patches), see.count(more), np.asarray(c.media.index)
    index = np.where(index < 0, -1, index // old * new + index % old)
    media = ops.Media(jnp.asarray(index), inputs=ops.Patches(jnp.asarray(wide), jnp.asarray(at)))
    got = suite.full(c.model, c.tokens, replace(batch(c), media=media))
    real = mask(c.lengths)
    assert suite.error(got[real], c.logits[real]) < 2e-5


@pytest.mark.slow
@pytest.mark.parametrize("name", each(NAMES))
def test_gradients_equal_torch(seen, name, tmp_path):
    """Of the mean log-likelihood, of every tensor, tower's and projector's among them: 1e-4; with listed layers too."""
    c = seen(name)
    labels = np.where(mask(c.lengths) & (np.asarray(c.media.index) < 0), c.tokens, -100)
    c.oracle.zero_grad()
    c.oracle(**c.inputs, labels=torch.tensor(labels)).loss.backward()
    want = {k: p.grad.numpy() for k, p in c.oracle.named_parameters() if p.grad is not None}

    def loss(p):
        logits = c.model.family.forward(p, jnp.asarray(c.tokens), c.model.cfg, batch(c))[0][:, :-1]
        logp = jnp.take_along_axis(jax.nn.log_softmax(logits), jnp.maximum(labels[:, 1:, None], 0), -1)[..., 0]
        learnt = labels[:, 1:] >= 0
        return -(logp * learnt).sum() / learnt.sum()

    grads = jax.jit(jax.grad(loss))(c.model.params)
    params.save(c.model.family.spec(c.model.cfg), grads, tmp_path)
    got = safetensors.numpy.load_file(tmp_path / "model.safetensors")
    named = {c.model.family.rename(k, c.model.cfg): g for k, g in want.items()}
    assert {k for k, g in got.items() if np.abs(g).max() > 0} >= {k for k, g in named.items() if np.abs(g).max() > 0}
    assert any("vision_" in k for k in named)
    for k, g in named.items():
        scale = max(np.abs(g).max(), 1e-3)  # a bias of keys has no gradient but rounding's
        assert np.abs(got[k] - g).max() < 1e-4 * scale, k
    listed = jax.jit(jax.grad(loss))(params.unstack(c.model.params))
    for a, b in zip(jax.tree.leaves(params.unstack(grads)), jax.tree.leaves(listed), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4 * max(np.abs(a).max(), 1e-3), rtol=0)


def training(c):
    return {"tokens": jnp.asarray(c.tokens), "lengths": jnp.asarray(c.lengths), "media": c.media}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "llava",
        *(pytest.param(n, marks=pytest.mark.matrix) for n in ("mistral3", "llama4", "aya_vision", "gemma3", "gemma4")),
    ],
)
def test_training_loss_is_that_of_torch(seen, name):
    """Not of media's own tokens, 1e-5; in microbatches, and on a mesh of eight devices."""
    c = seen(name)
    labels = np.where(mask(c.lengths) & (np.asarray(c.media.index) < 0), c.tokens, -100)
    with torch.no_grad():
        want = c.oracle(**c.inputs, labels=torch.tensor(labels)).loss.item()
    loss = train.losses.sft(c.model.family, c.model.cfg)
    g, sums = jax.jit(train.normalize(train.grads(loss)))(c.model.params, training(c))
    np.testing.assert_allclose(sums["loss"], want, rtol=1e-5)
    assert sums["weight"] == (labels[:, 1:] >= 0).sum()
    apart, sums = jax.jit(train.normalize(train.accumulate(train.grads(loss), 3)))(c.model.params, training(c))
    np.testing.assert_allclose(sums["loss"], want, rtol=1e-5)
    for a, b in zip(jax.tree.leaves(g), jax.tree.leaves(apart), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4 * max(np.abs(a).max(), 1e-3), rtol=0)
    mesh = params.make_mesh({"dp": 2, "fsdp": 2, "tp": 2})
    sharded = models.load(c.directory, dtype=jnp.float32, mesh=mesh)
    assert any(not x.sharding.is_fully_replicated for x in jax.tree.leaves(sharded.params["vision"]))
    rows = jax.tree.map(lambda x: jnp.concatenate([x, x, x, x])[:8], training(c))
    want = float(jax.jit(loss)(c.model.params, rows)[0])
    with jax.set_mesh(mesh):
        got = jax.jit(jax.value_and_grad(loss, has_aux=True))(
            sharded.params, jax.device_put(rows, params.batch_sharding(mesh))
        )
    np.testing.assert_allclose(got[0][0], want, rtol=1e-5)


def test_pairs_with_media_are_rows_with_media(seen):
    """[:, 0] chosen and [:, 1] rejected, as tokens have it; nothing is learnt in the place of media."""
    c = seen("llava")
    tokens, packed, labels = train.losses.forward.rows(training(c))
    pair = jax.tree.map(lambda x: x[:2][None], training(c))
    again, two, learnt = train.losses.forward.rows(pair)
    np.testing.assert_array_equal(again, tokens[:2])
    np.testing.assert_array_equal(learnt, labels[:2])
    jax.tree.map(np.testing.assert_array_equal, two.media, jax.tree.map(lambda x: x[:2], packed.media))
    assert (np.asarray(labels)[:, :-1][np.asarray(c.media.index)[:, 1:] >= 0] < 0).all() and (labels >= 0).sum() > 20
    turned = train.losses.forward.rows(pair | {"rotary": jnp.ones((*pair["tokens"].shape, 3), int)})[1]
    assert turned.rotary.shape == (2, tokens.shape[1], 3)


@pytest.mark.slow
def test_rematerialisation_reaches_the_tower(seen):
    """Its layers too compute again what a policy does not save, with the same gradient: 1e-6."""
    c = seen("llava")
    loss = lambda remat: lambda p: c.model.family.hidden(p, c.tokens, c.model.cfg, batch(c), remat=remat)[0].sum()
    again = lambda remat: str(jax.make_jaxpr(jax.grad(loss(remat)))(c.model.params)).count("policy=<function nothing")
    assert (again(None), again("nothing_saveable")) == (0, 2)
    encoded = lambda p: c.model.family.encode(p, c.media.inputs, c.model.cfg).sum()
    with ops.rematerialising("nothing_saveable"):
        got = jax.jit(jax.grad(encoded))(c.model.params)["vision"]
    want = jax.jit(jax.grad(encoded))(c.model.params)["vision"]
    largest = max(np.abs(a).max() for a in jax.tree.leaves(want))
    for a, b in zip(jax.tree.leaves(want), jax.tree.leaves(got), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6 * largest, rtol=0)


def test_adapters_are_the_texts_by_default(seen):
    """A tower's layers are adapted where they are named, in a run file too."""
    from fdel.ops import weights
    from fdel.recipe import config, methods

    c = seen("llava")
    spec = c.model.family.spec(c.model.cfg)
    adapted = lambda *where: {
        path.split(".")[0] for path, w in params.named_leaves(
            params.lora.add(c.model.params, 2, 4.0, *where, key=jax.random.key(1), spec=spec), is_leaf=weights.is_weight
        ) if isinstance(w, weights.LowRank)
    }  # fmt: skip
    lora = lambda names: config.lora_targets(methods.Lora(target_modules=names), spec)
    assert adapted() == adapted(lora("all-linear")) == {"layers"}
    assert adapted(lora(("q_proj", "fc1"))) == {"layers", "vision"}
    assert adapted(lora(r"vision_tower\..*\.(fc1|q_proj)")) == {"vision"}
    assert adapted(lora(("linear_1",))) == {"projector"}


@pytest.mark.parametrize("where", ["^layers", "^vision", "^projector"])
def test_adapters_by_pattern(seen, where):
    """On the text, the tower or the projector alone: zero at first, merged as they are applied."""
    c = seen("llava")
    spec = c.model.family.spec(c.model.cfg)
    adapted = params.lora.add(c.model.params, 4, 8.0, where, key=jax.random.key(1), spec=spec)
    trainable, frozen = params.lora.split(adapted)
    moved = params.lora.join(jax.tree.map(lambda x: x + 0.05, trainable), frozen)
    run = lambda p: np.asarray(suite.full(c.model._replace(params=p), c.tokens, batch(c)))
    real, plain = mask(c.lengths), suite.full(c.model, c.tokens, batch(c))
    assert suite.error(run(adapted)[real], np.asarray(plain)[real]) < 2e-5
    changed = run(moved)
    assert suite.error(changed[real], np.asarray(plain)[real]) > 1e-3
    assert suite.error(changed[real], run(params.lora.merge(moved))[real]) < 1e-4


@pytest.mark.parametrize(
    "name,first,block",
    [pytest.param(n, 7, 4, marks=[pytest.mark.slow] * (n in LATER)) for n in NAMES if ":" not in n]
    + [pytest.param(n, 1, 1, marks=DEAR if n in LATER else pytest.mark.slow) for n in NAMES],
)
def test_chunks_that_cut_an_image_equal_the_whole(seen, name, first, block):
    """Prefill in chunks, then decode: 2e-5. Images are encoded before. Those whose tokens see each other stay whole."""
    c = seen(name)
    encoded = jax.jit(lambda p, x: c.model.family.encode(p, x, c.model.cfg))(c.model.params, c.media.inputs)
    rows, count, _ = encoded.shape
    index = np.where(c.media.index < 0, -1, c.media.index + np.arange(rows)[:, None] * count)[:2]
    media = ops.Media(index, encoded.reshape(rows * count, *encoded.shape[2:]))
    full = suite.full(c.model, c.tokens, replace(batch(c), media=c.media))[:2]
    end = c.lengths.max() - 4
    cut = np.append(((index[:, 1:] >= 0) & (index[:, 1:] == index[:, :-1] + 1)).any(0), False)  # behind a token
    ends = np.arange(first, end + 1, first)
    assert cut[ends - 1].any()
    if c.model.family.hidden.ahead(c.model.cfg):
        ends, block = np.unique([n + np.argmin(cut[n - 1 :]) for n in ends]), 4
    chunks = np.diff(ends, prepend=0).tolist()
    got = suite.serving_logits(c.model, c.tokens[:2], chunks + [1] * 99, block, media)
    real = mask(c.lengths)[:2]
    assert suite.error(got[real], np.asarray(full)[real]) < 2e-5


@pytest.mark.parametrize("name", each(n for n in NAMES if not n.startswith("gemma4")))
def test_published_names_and_those_of_modules_load(seen, name, tmp_path):
    """model.language_model.*, as transformers holds its arrays, and vision_tower.vision_model.* of older files."""
    c = seen(name)
    tensors = safetensors.numpy.load_file(c.directory / "model.safetensors")
    (tmp_path / "config.json").write_text((c.directory / "config.json").read_text())
    towers = {k.partition(".")[0] for k in tensors} - {"language_model"}
    inside = lambda k: k.replace("language_model.model.", "model.language_model.").replace(
        "language_model.lm_head.", "lm_head."
    )
    ahead = lambda k: f"model.{k}" if k.partition(".")[0] in towers - {"vision_model"} else k
    older = lambda k: k.replace("vision_tower.", "vision_tower.vision_model.")
    for change in (lambda k: ahead(inside(k)), *[older] * ("vision_tower" in towers)):
        assert {change(k) for k in tensors} != set(tensors)
        safetensors.numpy.save_file({change(k): v for k, v in tensors.items()}, tmp_path / "model.safetensors")
        again = models.load(tmp_path, dtype=jnp.float32)
        jax.tree.map(np.testing.assert_array_equal, again.params, c.model.params)


def test_a_language_model_that_takes_no_media_is_refused():
    with pytest.raises(models.ConfigError, match="text_config: found model_type 'gpt2', understood are .*llama"):
        llava.Config.from_hf({"text_config": {"model_type": "gpt2"}})
    with pytest.raises(models.ConfigError, match="vision_config: found model_type 'vit', understood are clip"):
        llava.Config.from_hf(tiny.sight.LLAVA | {"vision_config": {"model_type": "vit"}})


def test_text_config_without_sizes_is_what_transformers_assumes():
    """As of llava-hf/llava-1.5-7b-hf, whose text_config says little."""
    text = dict(model_type="llama", max_position_embeddings=4096, rms_norm_eps=1e-5, vocab_size=32064)
    found = llava.Config.from_hf({"text_config": text, "image_token_index": 32000})
    assert (found.embed, found.text.ffn, found.layers, found.heads, found.vocab) == (4096, 11008, 32, 32, 32064)
    assert isinstance(found.text, llama.Config)


# ---- CLIP ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", [2, 5])
def test_clip_scores_images_and_texts_as_torch_does(end, tmp_path):
    """Features and logits, 2e-5; the round trip, byte for byte; and what is refused."""
    import transformers

    text = dict(vocab_size=128, hidden_size=40, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
                max_position_embeddings=16, bos_token_id=1, eos_token_id=end, pad_token_id=0)  # fmt: skip
    cfg = transformers.CLIPConfig(text_config=text, vision_config=tiny.sight.CLIP, projection_dim=24)
    oracle = transformers.CLIPModel._from_config(cfg, attn_implementation="eager").eval()
    tiny.randomise(oracle, 0)
    oracle.save_pretrained(tmp_path / "a")
    with pytest.raises(models.ConfigError, match="found 'clip', which writes no text; load it with"):
        models.load(tmp_path / "a")
    m = models.load(tmp_path / "a", family=clip, dtype=jnp.float32)
    rng = np.random.default_rng(0)
    tokens = rng.integers(6, 100, (3, 12))
    tokens[np.arange(3), [4, 11, 7]] = 127 if end == 2 else 5
    tokens[0, 9] = 127 if end == 2 else 5  # the first counts
    pixels = rng.normal(size=(2, 3, 16, 16)).astype(np.float32)
    cut = [sight.clip.image.patches(x.transpose(1, 2, 0), 4) for x in pixels]
    patches = ops.Patches(*(jnp.stack(x) for x in zip(*cut, strict=True)))
    with torch.no_grad():
        want = oracle(input_ids=torch.tensor(tokens), pixel_values=torch.tensor(pixels))
        images = oracle.get_image_features(pixel_values=torch.tensor(pixels)).pooler_output
    assert suite.error(clip.image_features(m.params, patches, m.cfg), images.numpy()) < 2e-5
    got = jax.jit(clip.forward, static_argnums=2)(m.params, tokens, m.cfg, patches)
    assert suite.error(got, want.logits_per_image.numpy()) < 2e-5
    listed = clip.forward(params.unstack(m.params), tokens, m.cfg, patches)
    assert suite.error(listed, want.logits_per_image.numpy()) < 2e-5
    models.save(m, tmp_path / "b")
    a, b = (safetensors.numpy.load_file(tmp_path / x / "model.safetensors") for x in "ab")
    assert {k: v.tobytes() for k, v in a.items()} == {k: v.tobytes() for k, v in b.items()}
    written = json.loads((tmp_path / "b" / "config.json").read_text())
    assert clip.Config.from_hf(written) == m.cfg and written["architectures"] == ["CLIPModel"]
    again = transformers.CLIPModel.from_pretrained(tmp_path / "b", attn_implementation="eager")
    with torch.no_grad():
        again = again(input_ids=torch.tensor(tokens), pixel_values=torch.tensor(pixels)).logits_per_image
    assert suite.error(again.numpy(), want.logits_per_image.numpy()) < 1e-6
    with pytest.raises(ValueError, match="found texts of 17 tokens, expected at most 16"):
        clip.text_features(m.params, jnp.zeros((1, 17), int), m.cfg)


def test_siglip_scores_images_and_texts_as_torch_does(tmp_path):
    """Features and logits, 2e-5, of padded images too; the round trip, byte for byte."""
    import transformers

    text = dict(vocab_size=128, hidden_size=40, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
                max_position_embeddings=16, projection_size=32, bos_token_id=1, eos_token_id=2)  # fmt: skip
    cfg = transformers.SiglipConfig(text_config=text, vision_config=tiny.sight.SIGLIP)
    oracle = transformers.SiglipModel._from_config(cfg, attn_implementation="eager").eval()
    tiny.randomise(oracle, 0)
    oracle.save_pretrained(tmp_path / "a")
    m = models.load(tmp_path / "a", family=siglip, dtype=jnp.float32)
    rng = np.random.default_rng(0)
    tokens, pixels = rng.integers(6, 100, (3, 16)), rng.normal(size=(2, 3, 16, 16)).astype(np.float32)
    cut = [sight.clip.image.patches(x.transpose(1, 2, 0), 4) for x in pixels]
    values, places = (np.stack(x) for x in zip(*cut, strict=True))
    with torch.no_grad():
        want = oracle(input_ids=torch.tensor(tokens), pixel_values=torch.tensor(pixels))
        images = oracle.get_image_features(pixel_values=torch.tensor(pixels)).pooler_output
    wide = np.pad(values, ((0, 0), (0, 4), (0, 0))), np.pad(places, ((0, 0), (0, 4), (0, 0)), constant_values=-1)
    for patches in (ops.Patches(values, places), ops.Patches(*wide)):
        assert suite.error(siglip.image_features(m.params, patches, m.cfg), images.numpy()) < 2e-5
        got = jax.jit(siglip.forward, static_argnums=2)(m.params, tokens, m.cfg, patches)
        assert suite.error(got, want.logits_per_image.numpy()) < 2e-5
    models.save(m, tmp_path / "b")
    a, b = (safetensors.numpy.load_file(tmp_path / x / "model.safetensors") for x in "ab")
    assert {k: v.tobytes() for k, v in a.items()} == {k: v.tobytes() for k, v in b.items()}
    written = json.loads((tmp_path / "b" / "config.json").read_text())
    assert siglip.Config.from_hf(written) == m.cfg and written["architectures"] == ["SiglipModel"]
    bare = replace(m.cfg, vision=replace(m.cfg.vision, pooled=False))
    with pytest.raises(ValueError, match="vision_use_head is false"):
        siglip.image_features(m.params, patches, bare)


def test_pixtrals_tower_alone(tmp_path):
    """Of images of two sizes, whose states transformers gives in one row: 2e-5; and its file, byte for byte."""
    import transformers

    cfg = transformers.PixtralVisionConfig(**{k: v for k, v in tiny.sight.PIXTRAL.items() if k != "model_type"})
    oracle = transformers.PixtralVisionModel._from_config(cfg, attn_implementation="eager").eval()
    tiny.randomise(oracle, 0)
    oracle.save_pretrained(tmp_path / "a")
    m = models.load(tmp_path / "a", family=pixtral, dtype=jnp.float32)
    pixels = np.random.default_rng(0).normal(size=(2, 3, 16, 24)).astype(np.float32)
    sizes = [[16, 24], [8, 16]]
    cut = [
        sight.clip.image.patches(x[:, :h, :w].transpose(1, 2, 0), 4) for x, (h, w) in zip(pixels, sizes, strict=True)
    ]
    values, places = np.zeros((2, 24, 48), np.float32), np.full((2, 24, 3), -1, np.int32)
    for i, (v, at) in enumerate(cut):
        values[i, : len(v)], places[i, : len(v)] = v, at
    with torch.no_grad():
        want = oracle(torch.tensor(pixels), image_sizes=torch.tensor(sizes)).last_hidden_state[0].numpy()
    got = np.asarray(pixtral.encode(m.params, ops.Patches(values, places), m.cfg))
    assert suite.error(np.concatenate([got[0], got[1, :8]]), want) < 2e-5
    models.save(m, tmp_path / "b")
    a, b = (safetensors.numpy.load_file(tmp_path / x / "model.safetensors") for x in "ab")
    assert {k: v.tobytes() for k, v in a.items()} == {k: v.tobytes() for k, v in b.items()}
    with pytest.raises(models.ConfigError, match="only 'axial' is understood"):
        pixtral.Config.from_hf({"rope_parameters": {"rope_type": "yarn"}})
