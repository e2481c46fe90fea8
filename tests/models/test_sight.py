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

from fdel import models, ops, params  # noqa: E402
from fdel.media import sight  # noqa: E402
from fdel.models import clip, llama, llava  # noqa: E402

NAMES = list(tiny.sight.PROCESSORS)
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
    ends = [dict(content=f"[IMG_{name}]", id=i) for name, i in (("BREAK", 111), ("END", 112))]
    (directory / "tokenizer.json").write_text(json.dumps(dict(added_tokens=ends)))
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
    inputs = {k: v for k, v in processor(images, return_tensors="pt").items()}
    inputs |= {"input_ids": torch.tensor(tokens), "attention_mask": torch.tensor(mask(lengths)).long()}
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


@pytest.mark.parametrize("name", NAMES)
def test_logits_equal_torch(seen, name):
    """Of rows with two images of different sizes, with one, and with none; 2e-5."""
    c = seen(name)
    got, real = np.asarray(suite.full(c.model, c.tokens, batch(c))), mask(c.lengths)
    assert suite.error(got[real], c.logits[real]) < 2e-5
    blind = suite.full(c.model, c.tokens, ops.packed(jnp.asarray(c.tokens), jnp.asarray(c.lengths)))
    assert suite.error(blind[2], got[2]) < 1e-6  # of a row of text
    assert suite.error(blind[0, 2], got[0, 2]) > 1e-2


@pytest.mark.parametrize("name", NAMES)
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
@pytest.mark.parametrize("name", NAMES)
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
    assert any(k.startswith("vision_tower.") for k in named)
    for k, g in named.items():
        scale = max(np.abs(g).max(), 1e-3)  # a bias of keys has no gradient but rounding's
        assert np.abs(got[k] - g).max() < 1e-4 * scale, k
    listed = jax.jit(jax.grad(loss))(params.unstack(c.model.params))
    for a, b in zip(jax.tree.leaves(params.unstack(grads)), jax.tree.leaves(listed), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4 * max(np.abs(a).max(), 1e-3), rtol=0)


@pytest.mark.parametrize(
    "name,first,block",
    [(n, 7, 4) for n in NAMES if ":" not in n] + [pytest.param(n, 1, 1, marks=pytest.mark.slow) for n in NAMES],
)
def test_chunks_that_cut_an_image_equal_the_whole(seen, name, first, block):
    """Prefill in chunks, then decode: 2e-5. Images are encoded once, before."""
    c = seen(name)
    encoded = jax.jit(lambda p, x: c.model.family.encode(p, x, c.model.cfg))(c.model.params, c.media.inputs)
    rows, count, _ = encoded.shape
    index = np.where(c.media.index < 0, -1, c.media.index + np.arange(rows)[:, None] * count)[:2]
    media = ops.Media(index, encoded.reshape(rows * count, *encoded.shape[2:]))
    full = suite.full(c.model, c.tokens, replace(batch(c), media=c.media))[:2]
    end = c.lengths.max() - 4
    assert any(index[0, n - 1] >= 0 and index[0, n] == index[0, n - 1] + 1 for n in range(first, end, first))
    got = suite.serving_logits(c.model, c.tokens[:2], [first] * (end // first) + [1] * 99, block, media)
    real = mask(c.lengths)[:2]
    assert suite.error(got[real], np.asarray(full)[real]) < 2e-5


@pytest.mark.parametrize("name", NAMES)
def test_published_names_and_those_of_modules_load(seen, name, tmp_path):
    """model.language_model.*, as transformers holds its arrays, and vision_tower.vision_model.* of older files."""
    c = seen(name)
    tensors = safetensors.numpy.load_file(c.directory / "model.safetensors")
    (tmp_path / "config.json").write_text((c.directory / "config.json").read_text())
    inside = lambda k: k.replace("language_model.model.", "model.language_model.").replace(
        "language_model.lm_head.", "lm_head."
    )
    ahead = lambda k: f"model.{k}" if k.startswith(("vision_tower.", "multi_modal")) else k
    older = lambda k: k.replace("vision_tower.", "vision_tower.vision_model.")
    for change in (lambda k: ahead(inside(k)), older):
        assert {change(k) for k in tensors} != set(tensors)
        safetensors.numpy.save_file({change(k): v for k, v in tensors.items()}, tmp_path / "model.safetensors")
        again = models.load(tmp_path, dtype=jnp.float32)
        jax.tree.map(np.testing.assert_array_equal, again.params, c.model.params)


def test_a_language_model_that_takes_no_media_is_refused():
    with pytest.raises(models.ConfigError, match="text_config: found model_type 'gpt2', understood are llama"):
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
