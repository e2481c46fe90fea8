"""Videos and images in one batch against transformers, every weight random; float32, 2e-5 of the largest logit."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import suite
import tiny

torch = pytest.importorskip("torch", reason="the oracle is transformers on torch (extra `test`)")
pytest.importorskip("PIL", reason="extra `media`")

from fdel import models, ops  # noqa: E402
from fdel.media import frames, qwen, sight, video  # noqa: E402

IMAGE, VIDEO, BEGIN, END = 120, 121, 118, 119
costly = lambda name: pytest.param(name, marks=pytest.mark.matrix)
FILE = {"patch_size": 4, "merge_size": 2, "temporal_patch_size": 2,
        "size": {"shortest_edge": 256, "longest_edge": 2048}}  # fmt: skip
SHOWN = (("image", "video"), ("video", "video"), ())  # of each row
APART = (("video",), ("video", "video"), ())  # transformers' GLM takes no images in the same batch
# Frames, height, width, frames a second: none is longer in time than in space, where transformers 5.23 goes on too early.
CLIPS = ((4, 16, 40, 2.0), (3, 24, 16, 8.0), (4, 16, 24, 8.0))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["qwen2_5_vl", "qwen3_vl", "glm4v", *map(costly, ("qwen2_vl", "qwen3_vl_moe", "glm4v_moe", "glm46v"))],
)
def test_logits_of_rows_with_videos_images_and_text(name, tmp_path):
    """What the host makes of frames, their tokens and turns among it; the tower sees each frame apart."""
    oracle, rng = tiny.checkpoint(name, tmp_path), np.random.default_rng(0)
    config = oracle.config.to_dict()
    settings = video.read(config, FILE, sight.VIDEOS.get(name, video.PLAIN))
    plan, entries = (APART, (IMAGE,)) if settings.glm else (SHOWN, (IMAGE, VIDEO))
    see = sight.Sight(name, name, IMAGE, entries, qwen.read(config, FILE, IMAGE), 4, video=settings)
    spell = lambda text: [3 + ord(c) % 100 for c in text]
    pixels = lambda *shape: rng.integers(0, 256, (*shape, 3), np.uint8)
    make = {"image": iter([qwen.prepare(see.settings, pixels(16, 24))])}
    clips = [frames.Clip(pixels(*c[:3]), tuple(range(c[0])), c[3], c[0]) for c in CLIPS]
    make["video"] = iter([video.prepare(settings, c, spell) for c in clips])
    shown = [[next(make[kind]) for kind in row] for row in plan]
    text, spots = lambda n: rng.integers(3, 110, n).tolist(), {"image": IMAGE, "video": VIDEO}
    prompts = [[*text(2), *(t for kind in row for t in (BEGIN, spots[kind], END, *text(2)))] for row in plan]
    rows = [sight.expand(see, *x) for x in zip(prompts, shown, strict=True)]
    lengths = np.array([len(r.tokens) for r in rows])
    pad = lambda values, fill: np.array([[*v, *[fill] * (max(lengths) - len(v))] for v in values])
    tokens, real = pad([r.tokens for r in rows], 0), np.arange(max(lengths)) < lengths[:, None]
    straight = [[(i,) * 3 for i in range(len(r.tokens))] for r in rows]
    rotary = pad([r.rotary or s for r, s in zip(rows, straight, strict=True)], (0,) * 3)
    values, places, index = sight.gather(see, shown, pad([r.index for r in rows], -1))
    assert values.shape[:2] == (3, 4)  # frames of both videos in the second row
    media = ops.Media(jnp.asarray(index), inputs=ops.Patches(jnp.asarray(values), jnp.asarray(places)))
    batch = replace(ops.packed(jnp.asarray(tokens), jnp.asarray(lengths)), media=media, rotary=jnp.asarray(rotary))

    def theirs(kind):
        every = [
            p for row, kinds in zip(shown, plan, strict=True) for p, k in zip(row, kinds, strict=True) if k == kind
        ]
        grids = torch.tensor(np.array([p.places.max(0) + 1 for p in every]))
        return torch.tensor(np.concatenate([p.patches for p in every])), grids

    ids, (moving, grids) = torch.tensor(tokens), theirs("video")
    still, grid = (None, None) if settings.glm else theirs("image")
    inputs = dict(
        input_ids=ids, attention_mask=torch.tensor(real).long(), pixel_values=still, image_grid_thw=grid,
        pixel_values_videos=moving, video_grid_thw=grids, mm_token_type_ids=(ids == IMAGE).int() + 2 * (ids == VIDEO).int(),
    )  # fmt: skip
    if settings.glm:  # entries of videos are those of images
        inputs["mm_token_type_ids"] = 2 * (ids == IMAGE).int()
    if name == "qwen2_5_vl":
        inputs["second_per_grid_ts"] = torch.tensor([2 / c.rate for c in clips])
    with torch.no_grad():
        want = oracle(**inputs).logits.numpy()
    m = models.load(tmp_path, dtype=jnp.float32)
    got = np.asarray(jax.jit(lambda p, t, b: m.family.forward(p, t, m.cfg, b)[0])(m.params, jnp.asarray(tokens), batch))
    assert suite.error(got[real], want[real]) < 2e-5
