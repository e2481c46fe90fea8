"""Videos: frames that PyAV reads, which are taken, their patches and tokens; the oracle is transformers' video processors.

Those need torchvision. What they gave for SAMPLES and SIZES stands here, and they are asked themselves where it is there.
"""

import importlib
import io
import struct
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("PIL", reason="pillow resizes")
from fdel.media import container, frames, qwen, sight, sound, video

RNG = np.random.default_rng(0)
VISION = {"patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2, "tokens_per_second": 2}
TOKENS = {"image_token_id": 9, "video_token_id": 8, "vision_start_token_id": 6, "vision_end_token_id": 7,
          "image_start_token_id": 6, "image_end_token_id": 7}  # fmt: skip
FILE = {"patch_size": 4, "merge_size": 2, "temporal_patch_size": 2,
        "size": {"shortest_edge": 256, "longest_edge": 2048}}  # fmt: skip
FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "glm4v", "glm46v")
NAMES = {"qwen2_vl": "Qwen2VL", "qwen2_5_vl": "Qwen2_5_VL", "qwen3_vl": "Qwen3VL", "glm4v": "Glm4v", "glm46v": "Glm46V"}
# Of transformers 5.23: frames in all and a second -> the numbers of those taken at 2 a second.
SAMPLES = {
    (5, 10.0): ([0, 1, 2, 3], [0, 1, 3, 4]),
    (33, 7.5): ([0, 4, 8, 12, 16, 20, 24, 28], [0, 5, 9, 14, 18, 23, 27, 32]),
    (100, 29.97): ([0, 16, 33, 50, 66, 83], [0, 20, 40, 59, 79, 99]),
}
# The same of GLM-4.1V and GLM-4.6V; of many frames, how many of them, the second, the last two and their sum.
GLM = {
    (5, 10.0): ([0, 0], [0, 0]),
    (33, 7.5): ([0, 4, 8, 12, 15, 19, 23, 27], (26, 1, 28, 30, 380)),
    (100, 29.97): ([0, 15, 30, 45, 60, 75], (20, 4, 85, 90, 891)),
    (700, 1.0): ((600, 2, 699, 699, 210298), (640, 1, 697, 699, 223362)),
    (12000, 30.0): ((600, 21, 11980, 11999, 3600298), (400, 30, 11940, 11970, 2394000)),
    (90000, 30.0): ((600, 151, 89850, 89999, 27000298), (640, 140, 89858, 89999, 28799361)),
}
# Frames, height, width -> height and width.
SIZES = {(4, 16, 24): ((16, 24), (16, 24)), (5, 37, 53): ((32, 48), (16, 24)), (8, 200, 90): ((64, 24), (16, 8)),
         (6, 9, 60): ((8, 64), (8, 40))}  # fmt: skip


def settings(family: str, **more) -> video.Settings:
    return video.read({"vision_config": VISION} | TOKENS, FILE | more, sight.VIDEOS.get(family, video.PLAIN))


def clip(count: int, height: int, width: int, fps: float = 2.0) -> frames.Clip:
    return frames.Clip(RNG.integers(0, 256, (count, height, width, 3), np.uint8), tuple(range(count)), fps, count)


def spell(text: str) -> list[int]:
    """Give tokens of a text, as many as it has characters."""
    return [20 + ord(c) % 50 for c in text]


@pytest.mark.parametrize(("family", "which"), [("qwen2_vl", 0), ("qwen2_5_vl", 0), ("qwen3_vl", 1)])
def test_frames_and_sizes_are_those_of_transformers(family, which):
    s = settings(family)
    for (total, fps), want in SAMPLES.items():
        assert video.sample(s, total, fps).tolist() == want[which]
    for (count, *size), want in SIZES.items():
        assert video.sized(s, count, *size) == want[which]
    assert video.sample(settings(family, num_frames=4), 9, 3.0).tolist() == [[0, 2, 4, 6], [0, 3, 5, 8]][which]
    capped = settings(family, cap_pixels_per_frame=True, max_video_tokens=9)
    assert video.sized(capped, 8, 64, 64) == ((16, 16), (16, 16))[which]


@pytest.mark.parametrize(("family", "which"), [("glm4v", 0), ("glm46v", 1)])
def test_glm_takes_frames_as_transformers_does(family, which):
    """Short and long videos; some frames twice, so that pairs are whole; what is too small is enlarged."""
    s = settings(family)
    for (total, fps), want in GLM.items():
        found = video.sample(s, total, fps).tolist()
        want = want[which]
        assert found == want if isinstance(want, list) else (len(found), found[1], *found[-2:], sum(found)) == want
    for shape, want in SIZES.items():
        assert video.sized(s, *shape) == want[1]
    assert video.sized(s, 4, 5, 40) == (8, 64)
    longer = settings(family, fps=1.0, max_duration=4, num_frames=16)
    assert video.sample(longer, 40, 5.0).tolist()[:3] == ([0, 14, 27], [0, 1, 2])[which]


def test_glm_oracle_of_frames():
    """GLM-4.1V's own code, which needs no torchvision for this."""
    pytest.importorskip("torch", reason="the oracle is transformers on torch")
    from transformers.models.glm4v.video_processing_glm4v import Glm4vVideoProcessor, smart_resize
    from transformers.video_utils import VideoMetadata

    s, rng = settings("glm4v", fps=1.5, max_duration=20), np.random.default_rng(1)
    for _ in range(200):
        total, fps = int(rng.integers(1, 900)), float(rng.choice([1.0, 7.5, 24.0, 29.97]))
        metadata = VideoMetadata(total_num_frames=total, fps=fps, duration=total / fps)
        theirs = Glm4vVideoProcessor.sample_frames(SimpleNamespace(fps=1.5, max_duration=20), metadata)
        np.testing.assert_array_equal(video.sample(s, total, fps), theirs)
        count, *size = map(int, rng.integers(2, 100, 3))
        assert video.sized(s, count, *size) == smart_resize(count, *size, 2, 8, 256, 2048)


def test_a_video_of_one_image_is_that_image_in_each_frame():
    """Bit for bit what `qwen.prepare`, which is transformers', makes of it; the last frame stands for a missing one."""
    s = settings("qwen2_vl")
    still = clip(1, 37, 53)
    want = qwen.prepare(s.frame, still.frames[0])
    many = video.prepare(s, frames.Clip(np.repeat(still.frames, 5, 0), tuple(range(5)), 2.0, 5))
    assert len(many.patches) == 3 * len(want.patches) and len(many.run) == 3 * len(want.run)
    np.testing.assert_array_equal(many.patches, np.concatenate([want.patches] * 3))
    np.testing.assert_array_equal(video.prepare(s, still).patches, want.patches)


def test_patches_name_where_and_when_they_were():
    x = np.zeros((4, 16, 24, 3), np.float32)
    x[..., 0], x[..., 1] = np.arange(4)[:, None, None], np.arange(16)[:, None] // 4
    x[..., 2] = np.arange(24) // 4
    s = settings("qwen2_vl").frame
    cut, at = video.patches(x, s).reshape(-1, 3, 2, 4, 4), qwen.places(2, 4, 6, 2)
    np.testing.assert_array_equal(cut[:, 0, :, 0, 0], at[:, :1] * 2 + [0, 1])
    for channel in (1, 2):
        np.testing.assert_array_equal(cut[:, channel], np.broadcast_to(at[:, channel, None, None, None], (48, 2, 4, 4)))


@pytest.mark.parametrize("family", FAMILIES)
def test_patches_are_those_of_transformers(family):
    pytest.importorskip("torchvision", reason="transformers' video processors need it")
    import torch

    name = "qwen2_vl" if family == "qwen2_5_vl" else family
    file = importlib.import_module(f"transformers.models.{name}.video_processing_{name}")
    oracle, s = getattr(file, f"{NAMES[name]}VideoProcessor")(**FILE), settings(family)
    if s.glm:
        from transformers.video_utils import VideoMetadata

        for total, fps in GLM:
            found = oracle.sample_frames(VideoMetadata(total_num_frames=total, fps=fps, duration=total / fps))
            np.testing.assert_array_equal(found, video.sample(s, total, fps))
    for shape in [(4, 16, 24), (5, 37, 53), (8, 200, 90)]:
        c = clip(*shape)
        want = oracle([torch.tensor(c.frames).permute(0, 3, 1, 2)], do_sample_frames=False, return_tensors="np")
        got = video.prepare(s, c, spell)
        assert (got.places.max(0) + 1 == want["video_grid_thw"][0]).all()
        level = 1 / 255 / min(s.frame.std)
        error = 1e-6 if video.sized(s, *shape) == shape[1:] else 1.01 * level
        np.testing.assert_allclose(got.patches, want["pixel_values_videos"], atol=error, rtol=0)


def oracle_index(family: str):
    """Give transformers' get_rope_index of a family."""
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    theirs = getattr(module, f"{NAMES[family]}Model")
    model = SimpleNamespace(config=SimpleNamespace(vision_config=SimpleNamespace(**VISION)))
    model.get_vision_position_ids = lambda *a, **k: theirs.get_vision_position_ids(model, *a, **k)
    return lambda *a, **k: theirs.get_rope_index(model, *a, **k)


@pytest.mark.parametrize("family", FAMILIES)
def test_turns_are_those_of_get_rope_index(family):
    """Of videos and an image between text; at most as long in time as in space, since there transformers 5.23 differs."""
    torch = pytest.importorskip("torch", reason="the oracle is transformers on torch")
    s = settings(family)
    entries = (9,) if s.glm else (9, 8)
    seen = sight.Sight(family, family, 9, entries, qwen.read({"vision_config": VISION}, FILE, 9), 4, video=s)
    shown = [video.prepare(s, clip(4, 16, 40), spell), sight.prepare(seen, RNG.integers(0, 256, (16, 24, 3), np.uint8)),
             video.prepare(s, clip(3, 32, 16, 3.0), spell)]  # fmt: skip
    got = sight.expand(seen, [1, 2, 6, 8, 7, 3, 6, 9, 7, 4, 4, 6, 8, 7, 5], shown)
    tokens, grid = torch.tensor([got.tokens]), lambda i: (shown[i].places.max(0) + 1).tolist()
    kinds = (tokens == 9).int() + 2 * (tokens == 8).int()
    if s.glm:  # entries of videos are those of images: the middle run alone is an image
        runs, image = np.split(np.array(got.tokens), [got.tokens.index(3) + 2, got.tokens.index(4)]), (0, 1, 0)
        kinds = [(r == 9) * (1 if i else 2) for r, i in zip(runs, image, strict=True)]
        kinds = torch.tensor(np.concatenate(kinds))[None].int()
    more = {"second_per_grid_ts": torch.tensor([1.0, 2 / 3])} if family == "qwen2_5_vl" else {}
    want, delta = oracle_index(family)(
        tokens,
        kinds,
        torch.tensor([grid(1)]),
        torch.tensor([grid(0), grid(2)]),
        attention_mask=torch.ones_like(tokens),
        **more,
    )
    np.testing.assert_array_equal(got.rotary, want[:, 0].T)
    assert np.max(got.rotary) + 1 - len(got.tokens) == delta
    entries = sum(len(p.patches) for p in shown) // 4
    assert [i for i in got.index if i >= 0] == list(range(entries))


def test_text_goes_on_behind_the_last_moment():
    """One more than the greatest of all three components, as arXiv:2409.12191 has it (section 2.1)."""
    s = settings("qwen2_5_vl")
    seen = sight.Sight("qwen2_5_vl", "qwen2_5_vl", 9, (9, 8), None, 4, video=s)
    got = sight.expand(seen, [1, 8, 2], [video.prepare(s, clip(8, 16, 16, 1.0))])
    assert [t[0] for t in got.rotary] == [0, *np.repeat([1, 5, 9, 13], 4), 14]


def test_times_stand_before_frames():
    """Of Qwen3-VL, the middle of each pair; the last frame stands for a missing one."""
    s, texts = settings("qwen3_vl"), []
    c = frames.Clip(RNG.integers(0, 256, (3, 16, 16, 3), np.uint8), (0, 4, 9), 8.0, 10)
    p = video.prepare(s, c, lambda t: [texts.append(t), 30][1:])
    assert texts == ["<0.2 seconds>", "<1.1 seconds>"]
    assert p.run == (30, 6, 8, 8, 8, 8, 7) * 2
    with pytest.raises(ValueError, match="frames stand behind their times"):
        video.prepare(s, c)


@pytest.mark.parametrize(("family", "texts"), [("glm4v", ["0", "1"]), ("glm46v", ["0.0 seconds", "1.1 seconds"])])
def test_times_stand_behind_frames(family, texts):
    """Of GLM, of the first of each pair; tokens against its processor, as text."""
    pytest.importorskip("torch", reason="the oracle is transformers on torch")
    file = importlib.import_module(f"transformers.models.{family}.processing_{family}")
    theirs, s, said = getattr(file, f"{NAMES[family]}Processor"), settings(family), []
    c = frames.Clip(RNG.integers(0, 256, (3, 16, 16, 3), np.uint8), (0, 4, 9), 8.0, 10)
    p = video.prepare(s, c, lambda t: [said.append(t), 30][1:])
    assert said == texts and p.run == (6, 9, 9, 9, 9, 7, 30) * 2
    model = SimpleNamespace(video_processor=SimpleNamespace(merge_size=2), image_token="<|image|>")
    model.replace_frame_token_id = lambda *a, **k: theirs.replace_frame_token_id(model, *a, **k)
    metadata = SimpleNamespace(fps=8.0, timestamps=[0, 0.5, 9 / 8])
    given = {"video_grid_thw": np.array([[2, 4, 4]]), "video_metadata": [metadata]}
    words = {6: "<|begin_of_image|>", 9: "<|image|>", 7: "<|end_of_image|>"}
    assert theirs.replace_video_token(model, given, 0) == "".join(words.get(t) or said.pop(0) for t in p.run)
    see = sight.Sight(family, family, 9, (9,), qwen.read({"vision_config": VISION}, FILE, 9), 4, video=s)
    still = qwen.prepare(see.settings, RNG.integers(0, 256, (16, 16, 3), np.uint8))
    for tokens, what in (([8], still), ([9], p)):
        with pytest.raises(ValueError, match="place 0 of the prompt"):
            sight.expand(see, tokens, [what])


def test_frames_of_a_video_are_images():
    """As towers see them; entries and index keep their order."""
    s = settings("qwen3_vl")
    seen = sight.Sight("qwen3_vl", "qwen3_vl", 9, (9, 8), qwen.read({"vision_config": VISION}, FILE, 9), 4, video=s)
    film, picture = (
        video.prepare(s, clip(4, 16, 24), spell),
        qwen.prepare(seen.settings, RNG.integers(0, 256, (16, 16, 3), np.uint8)),
    )
    got = sight.expand(seen, [8, 9], [film, picture])
    values, places, index = sight.gather(seen, [[film, picture]], np.array([got.index]))
    assert values.shape[:3] == (1, 3, 24) and (places[0, :2, :, 0] == 0).all()
    np.testing.assert_array_equal(values[0, :2].reshape(48, -1), film.patches)
    assert index[index >= 0].tolist() == [*range(12), *range(12, 16)]
    with pytest.raises(ValueError, match="place 0 of the prompt"):
        sight.expand(seen, [9, 8], [film, picture])


def test_files_say_how_videos_are_seen(tmp_path):
    import json

    config = {"model_type": "qwen3_vl", "vision_config": VISION} | TOKENS
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(FILE))
    assert sight.read(tmp_path).video == settings("qwen3_vl")
    (tmp_path / "video_preprocessor_config.json").write_text(json.dumps(FILE | {"fps": 1.0, "max_frames": 8}))
    found = sight.read(tmp_path)
    assert found.video == settings("qwen3_vl", fps=1.0, max_frames=8) and found.entries == (9, 8) and hash(found)


def test_settings_that_are_not_understood():
    for change, message in [
        ({"fps": 1.0, "num_frames": 8}, "found both fps"),
        ({"do_center_crop": True}, "not understood"),
        ({"patch_size": 8}, "'patch_size': found 8"),
    ]:
        with pytest.raises(ValueError, match=message):
            settings("qwen3_vl", **change)
    with pytest.raises(ValueError, match="not understood"):
        settings("glm4v", max_frames=8)
    with pytest.raises(ValueError, match="found image_start_token_id and image_end_token_id .None, None."):
        video.read({"vision_config": VISION, "image_token_id": 9, "video_token_id": 8}, FILE, video.GLM4V)
    with pytest.raises(frames.VideoError, match="found a video of 1 frames, expected at least 2"):
        video.sample(settings("qwen2_vl"), 1, 2.0)


def test_without_pyav_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "av", None)
    with pytest.raises(ImportError, match=r"pip install 'fdel\[video\]'"):
        frames.decode(b"", lambda total, fps: [0])


def test_what_is_no_video_is_refused():
    pytest.importorskip("av", reason="extra `video`")
    for data in (b"", b"#EXTM3U\nfile:///x", b"ffconcat version 1.0\nfile 'x'", b"RIFF0000WAVE"):
        with pytest.raises(frames.VideoError, match="expected MP4, MOV, WebM, Matroska or AVI"):
            frames.decode(data, lambda total, fps: [0])
    for data in (b"\0\0\0\x18ftypmp42" + bytes(99), b"\x1aE\xdf\xa3" + bytes(99), b"RIFF0000AVI " + bytes(99)):
        with pytest.raises(
            frames.VideoError, match="the file is damaged or not a video that can be read; it may be cut off$"
        ):
            frames.decode(data, lambda total, fps: [0])


def test_what_pyav_says_of_its_own_code_is_not_told(monkeypatch):
    av = pytest.importorskip("av", reason="extra `video`")

    bad = [UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid"), av.error.MemoryError(12, "no", "<none>")]

    def broken(*given, **options):
        raise bad[0]

    monkeypatch.setattr(av, "open", broken)
    for _ in range(len(bad)):
        with pytest.raises(
            frames.VideoError, match="^the file is damaged or not a video that can be read; it may be cut"
        ):
            frames.decode(b"\0\0\0\x18ftypmp42", lambda total, fps: [0])
        with pytest.raises(
            sound.SoundError, match="^the file is damaged or not a sound that can be read; it may be cut"
        ):
            sound.listen(b"\0\0\0\x18ftypmp42", most=1)
        bad.reverse()
    with pytest.raises(sound.SoundError, match="no sound in a known container; expected MP4"):
        sound.listen(b"#EXTM3U", most=1)


@pytest.fixture(scope="module")
def file():
    """Write a file whose frames are one grey each, 12 levels apart."""
    av = pytest.importorskip("av", reason="extra `video`")

    def write(container: str, codec: str) -> bytes:
        out = io.BytesIO()
        with av.open(out, "w", format=container) as c:
            stream = c.add_stream(codec, rate=10)
            stream.width, stream.height, stream.pix_fmt = 48, 32, "yuv420p"
            for i in range(20):
                frame = av.VideoFrame.from_ndarray(np.full((32, 48, 3), 12 * i, np.uint8), format="rgb24")
                c.mux(stream.encode(frame))
            c.mux(stream.encode())
        return out.getvalue()

    return write


@pytest.mark.parametrize(("container", "codec"), [("mp4", "libx264"), ("matroska", "libx264"), ("avi", "mpeg4")])
def test_frames_that_are_named_are_read(file, container, codec):
    asked = []
    c = frames.decode(file(container, codec), lambda total, fps: [asked.append((total, fps)), 0, 5, 5, 19][1:])
    assert asked == [(20, 10.0)] and c.frames.shape == (4, 32, 48, 3) and (c.fps, c.total, c.rate) == (10.0, 20, 2.0)
    np.testing.assert_allclose(c.frames.mean((1, 2, 3)), [0, 60, 60, 228], atol=6)


def test_limits(file):
    data = file("mp4", "libx264")
    for limits, message in [
        (dict(pixels=100), "found frames of 48 x 32 pixels, expected 1 to 100"),
        (dict(seconds=1.0), "at most 1 seconds"),
        (dict(total=10), "found 20 frames"),
        (dict(frames=2), "found 3 frames to take, expected 1 to 2"),
        (dict(volume=2000), "found 3 frames to take, expected 1 to 1"),
        (dict(work=30_000), "found 20 frames of 48 x 32 pixels, expected at most 30000 pixels of all of them"),
    ]:
        with pytest.raises(frames.VideoError, match=message):
            frames.decode(data, lambda total, fps: [0, 1, 2], frames.Limits(**limits))
    with pytest.raises(
        frames.VideoError, match="the file is damaged or not a video that can be read; it may be cut off$"
    ):
        frames.decode(data[: len(data) // 2], lambda total, fps: [0])


def test_frames_are_counted_no_further_than_the_limit(file, monkeypatch):
    """Of Matroska, whose header does not say how many there are."""
    counted = []
    monkeypatch.setattr(frames, "islice", lambda x, n: [counted.append(n), *x][1 : n + 1])
    with pytest.raises(frames.VideoError, match="found 11 frames, 10 a second; expected 1 to 10"):
        frames.decode(file("matroska", "libx264"), lambda total, fps: [0], frames.Limits(total=10))
    assert counted == [11]


def elsewhere(data: bytes, path: str) -> bytes:
    """Give an MP4 file with no samples of its own: its data reference is an alias of another file (QuickTime's `alis`)."""
    at, boxes = 0, []
    for name in (b"moov", b"trak", b"mdia", b"minf", b"dinf", b"dref"):
        while data[at + 4 : at + 8] != name:
            at += struct.unpack_from(">I", data, at)[0]
        boxes.append(at)
        at += 8
    at += 8  # version, flags and count
    old, where = struct.unpack_from(">I", data, at)[0], ("disk" + path.replace("/", ":")).encode()
    alias = struct.pack(">I10xB27s12xB63s16xhh16x", 0, 4, b"disk", 5, b"other", 0, 0)
    alias += struct.pack(">hH", 2, len(where)) + where + bytes(len(where) % 2) + struct.pack(">hHh2x", 0, 0, -1)
    entry = struct.pack(">I4s", 8 + len(alias), b"alis") + alias
    out = bytearray(data[:at] + entry + data[at + old :])
    for box in boxes:
        struct.pack_into(">I", out, box, struct.unpack_from(">I", out, box)[0] + len(entry) - old)
    samples = data.index(b"mdat") + 4
    out[samples : boxes[0]] = bytes(boxes[0] - samples)
    return bytes(out)


def test_no_other_file_is_read_for_one(file, tmp_path):
    """An MP4 whose samples are said to be in another file, which FFmpeg reads if it is told to."""
    import av

    data = file("mp4", "mpeg4")
    (tmp_path / "other").write_bytes(data)
    bad, told = elsewhere(data, str(tmp_path / "other")), {"enable_drefs": "1", "use_absolute_path": "1"}
    with av.open(io.BytesIO(bad), format="mp4", options=told) as f:
        assert sum(1 for _ in f.decode(video=0)) == 20  # so the reference is a true one
    with av.open(io.BytesIO(bad), format="mp4", options=told | container.ALONE) as f:
        assert not f.streams.video[0].width
    with pytest.raises(frames.VideoError):
        frames.decode(bad, lambda total, fps: [0])


@pytest.mark.parametrize(("container", "codec", "rate"), [("matroska", "pcm_s16le", 16000), ("mp4", "aac", 44100)])
def test_what_a_video_plays_is_heard(container, codec, rate):
    """Exactly where it is stored as it is, else to a tenth of a tone's size in the middle; a silent video has none."""
    av = pytest.importorskip("av", reason="extra `video`")
    x = np.sin(2 * np.pi * 440 * np.arange(rate) / rate) / 2
    played, out = (x * 32767).astype(np.int16), io.BytesIO()
    with av.open(out, "w", format=container) as c:
        still = c.add_stream("mpeg4", rate=2)
        still.width, still.height, still.pix_fmt = 48, 32, "yuv420p"
        track = c.add_stream(codec, rate=rate, layout="stereo")
        piece = av.AudioFrame.from_ndarray(np.repeat(played, 2)[None], "s16", "stereo")
        piece.sample_rate, piece.pts = rate, 0
        for stream, frame in ((still, av.VideoFrame(48, 32, "yuv420p")), (track, piece)):
            c.mux([*stream.encode(frame), *stream.encode()])
    got = sound.listen(out.getvalue(), most=2)
    want = sound.resample(played.astype(np.float32) / 2**15, rate)
    if codec == "aac":
        middle = slice(4000, 12000)
        assert abs(len(got) - len(want)) < 1000
        np.testing.assert_allclose(
            np.abs(np.fft.rfft(got[middle]))[:500], np.abs(np.fft.rfft(want[middle]))[:500], atol=200
        )
    else:
        np.testing.assert_array_equal(got, want)
    with pytest.raises(sound.SoundError, match="found more than 0.5 seconds of sound"):
        sound.listen(out.getvalue(), most=0.5)


def test_a_silent_video_is_not_heard(file):
    assert sound.listen(file("mp4", "mpeg4"), most=2) is None
