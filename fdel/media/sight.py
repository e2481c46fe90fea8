"""What a checkpoint's model sees: how an image becomes patches, and which tokens stand for it in a prompt.

A file beside this one for each kind of image processor has read(config, processor, token) -> settings, a frozen
dataclass, and prepare(settings, rgb) -> Picture; `KINDS` names it for the model_type of a tower or of a whole model.
`config` is config.json, with ids of the tokenizer's special tokens below "tokens".
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any

import numpy as np

from fdel.media import aya, clip, gemma3, gemma4, glm, hearing, moonvit, pixtral, qwen, tiles, video
from fdel.media.image import Picture, decode

__all__ = ["Expanded", "Picture", "Sight", "decode", "expand", "frames", "gather", "prepare", "read", "written"]
OF_QWEN = "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "qwen3_omni_moe_thinker"
QWEN = dict.fromkeys(OF_QWEN, qwen)
GLM = dict.fromkeys(("glm4v", "glm4v_moe", "glm46v"), glm)
KINDS: Mapping[str, ModuleType] = MappingProxyType(
    {
        "clip_vision_model": clip,
        "siglip_vision_model": clip,
        "pixtral": pixtral,
        "gemma3": gemma3,
        "gemma4": gemma4,
        "aya_vision": aya,
        "llama4": tiles,
        "moonvit": moonvit,
    }
    | QWEN
    | GLM
)
VIDEOS: Mapping[str, video.Manner] = MappingProxyType(
    dict.fromkeys(("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"), video.TIMED)
    | {"qwen2_5_vl": video.SPACED, "qwen3_omni_moe_thinker": video.HEARD}
    | {"glm4v": video.GLM4V, "glm4v_moe": video.GLM4V, "glm46v": video.GLM46V}
)  # of model_types whose videos are not taken as Qwen2-VL's are
TOKENS = ("image_token_index", "image_token_id", "media_placeholder_token_id")
# Models of two towers, whose prompts show no images: model_type -> that of their tower
ALONE = MappingProxyType({"clip": "clip_vision_model", "siglip": "siglip_vision_model"})


@dataclass(frozen=True)
class Sight:
    """How a model sees, as data.

    `placeholder` is the token that a chat template writes once for an image, -1 where no prompt shows any; `entries` are
    the tokens of a run that take what the tower gives. The tower gives one entry for `merge` patches, and `extra` ones
    besides; of patches that pad an image, behind its own, it gives entries too. `settings` are those of the image
    processor's file, `video` those of the video processor's, of a model that takes videos (`fdel.media.video`), `sound`
    those of one that hears (`fdel.media.hearing`). Where a processor writes text around an image, `around` is the
    placeholder as text, and what stands in its place (`written`). With `heard`, the processor's use_audio_in_video, what
    a video plays stands between its frames (`hearing.together`).
    """

    model_type: str
    kind: str  # of KINDS
    placeholder: int
    entries: tuple[int, ...]
    settings: Any
    merge: int = 1
    extra: int = 0
    around: tuple[str, str] | None = None
    video: Any = None  # video.Settings
    sound: Any = None  # hearing.Settings
    heard: bool = False

    def count(self, patches: int) -> int:
        """Count the entries that the tower gives of so many patches."""
        return patches // self.merge + self.extra


@dataclass(frozen=True)
class Expanded:
    """A prompt with what it shows: tokens, the entry of each (-1 for none) over all pictures, M-RoPE's turns or None."""

    tokens: list[int]
    index: list[int]
    rotary: list[tuple[int, int, int]] | None = None


def read(directory: str | Path) -> Sight | None:
    """Read how the model of a checkpoint directory sees; None if it does not, or has no image processor's file.

    From config.json and preprocessor_config.json, video_preprocessor_config.json or processor_config.json. ValueError for
    what is not understood.
    """
    config = _object(Path(directory) / "config.json") or {}
    config = config.get("thinker_config") or config
    if (alone := ALONE.get(str(config.get("model_type")))) is not None:
        config["vision_config"] = {"model_type": alone} | (config.get("vision_config") or {})
    vision = config.get("vision_config")
    kind = next((t for t in (config.get("model_type"), (vision or {}).get("model_type")) if t in KINDS), None)
    token = next((config[name] for name in TOKENS if isinstance(config.get(name), int)), -1 if alone else None)
    files = (_object(Path(directory) / f"{p}_config.json") for p in ("preprocessor", "video_preprocessor", "processor"))
    processor, moving, outer = files
    moving = moving or (outer or {}).get("video_processor") or processor
    processor = (outer or {}).get("image_processor") if processor is None else processor
    if kind is None or token is None or processor is None:
        return None
    extractor = (outer or {}).get("feature_extractor") or processor
    try:
        heard = hearing.read(config, extractor) if KINDS[kind] is qwen else None
        if heard:  # one file for both
            processor = {k: v for k, v in processor.items() if k not in hearing.KEYS}
            moving = {k: v for k, v in (moving or {}).items() if k not in hearing.KEYS}
        s = KINDS[kind].read(config | {"tokens": _tokens(Path(directory), outer or {})}, processor, token)
        seen = video.read(config, moving or {}, VIDEOS.get(kind, video.PLAIN)) if KINDS[kind] in (qwen, glm) else None
    except ValueError as e:
        raise ValueError(f"{directory}: {e}") from e
    placeholder, entries = getattr(s, "placeholder", token), getattr(s, "entries", (token,))
    entries = tuple(dict.fromkeys((*entries, *(s.token for s in (seen, heard) if s))))
    counts, around = (getattr(s, "merge", 1), getattr(s, "extra", 0)), getattr(s, "around", None)
    return Sight(config["model_type"], kind, placeholder, entries, s, *counts, around, seen, heard)


def _tokens(directory: Path, outer: Mapping[str, Any]) -> dict[str, int]:
    """Give the ids of special tokens by their text, and by the key of processor_config.json that names one."""
    found = (_object(directory / "tokenizer.json") or {}).get("added_tokens") or []
    ids = {t["content"]: t["id"] for t in found}
    return ids | {k: ids[v] for k, v in outer.items() if isinstance(v, str) and v in ids}


def _object(file: Path) -> Any:
    if not file.is_file():
        return None
    out = json.loads(file.read_bytes())
    if not isinstance(out, dict):
        raise ValueError(f"{file}: found {type(out).__name__}, expected an object")
    return out


def written(sight: Sight | None, text: str) -> str:
    """Give the text of a prompt, as a chat template wrote it, with what the processor writes around each placeholder."""
    return text if sight is None or sight.around is None else text.replace(*sight.around)


def prepare(sight: Sight, rgb: np.ndarray) -> Picture:
    """Prepare an image uint8[H W 3]."""
    if rgb.dtype != np.uint8 or rgb.ndim != 3 or rgb.shape[2] != 3 or not rgb.size:
        raise ValueError(f"found an image {rgb.dtype}{list(rgb.shape)}, expected uint8[height, width, 3]")
    picture: Picture = KINDS[sight.kind].prepare(sight.settings, rgb)
    return picture


def expand(sight: Sight, tokens: Sequence[int], pictures: Sequence[Picture]) -> Expanded:
    """Put the run of each image and video in the place of its placeholder, in order.

    `index` counts the entries of all pictures of this prompt. Where pictures have `turns`, `rotary` has those of every
    token: a text goes on from one more than the greatest before it. ValueError for another number of placeholders.
    """
    others = {} if sight.video is None else {sight.video.placeholder: sight.video.sign}
    others |= {} if sight.sound is None else {sight.sound.token: sight.sound.token}
    held = [t for t in tokens if t == sight.placeholder or t in others]
    if len(held) != len(pictures):
        found = f"the prompt has {len(held)} places for images (token {sight.placeholder})"
        raise ValueError(f"{found}, found {len(pictures)} images" + (", with videos and sounds" if others else ""))
    for i, (t, p) in enumerate(zip(held, pictures, strict=True)):
        if others[t] not in p.run if t in others else {*others.values()} & {*p.run}:
            raise ValueError(f"place {i} of the prompt (token {t}) is of another kind than what is to be shown there")
    out, index, rotary, rest = [], [], list[tuple[int, int, int]](), iter(pictures)
    entry, at = 0, 0
    for token in tokens:
        picture = next(rest) if token == sight.placeholder or token in others else None
        run = (int(token),) if picture is None else picture.run
        turns = None if picture is None else picture.turns
        turns = np.repeat(np.arange(len(run))[:, None], 3, 1) if turns is None else turns
        for t in run:
            here = picture is not None and t in sight.entries
            out.append(t)
            index.append(entry if here else -1)
            entry += here
        rotary += [(int(a), int(b), int(c)) for a, b, c in turns + at]
        at += int(turns.max(initial=-1)) + 1
    return Expanded(out, index, rotary if any(p.turns is not None for p in pictures) else None)


def frames(sight: Sight, picture: Picture) -> list[Picture]:
    """Divide a video into images of one frame of patches each, for towers see them apart; an image is its own.

    Their runs are their entries alone, their turns stay with the video.
    """
    at = picture.places[:, 0]
    if sight.video is None or not at.any():  # others may count parts of an image there
        return [picture]
    ends = [0, *(np.flatnonzero(np.diff(at)) + 1), len(at)]
    run = tuple(t for t in picture.run if t in sight.entries)
    count = len(run) // (len(ends) - 1)
    still = picture.places * np.array([0, 1, 1], np.int32)
    cut = zip(ends, ends[1:], strict=False)
    return [Picture(picture.patches[a:b], still[a:b], run[i * count :][:count]) for i, (a, b) in enumerate(cut)]


def gather(
    sight: Sight, rows: Sequence[Sequence[Picture]], index: np.ndarray, *, images: int | None = None,
    patches: int | None = None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:  # fmt: skip
    """Put the pictures of rows into arrays: float32[rows images patches numbers], places int32[rows images patches 3].

    A video is several images, its `frames`. `images` and `patches` pad them; None is the most that there are. Also gives
    `index` int[rows T], of `expand`, as it counts the entries of padded images. More pictures than `images`, or patches
    than `patches`, are a ValueError.
    """
    rows = [[frame for p in row for frame in frames(sight, p)] for row in rows]
    every = [p for row in rows for p in row]
    most = max(map(len, rows), default=0), max((len(p.patches) for p in every), default=0)
    images, patches = most[0] if images is None else images, most[1] if patches is None else patches
    if images < most[0] or patches < most[1]:
        raise ValueError(f"found rows of {most[0]} images of {most[1]} patches, expected at most {images} of {patches}")
    numbers = every[0].patches.shape[-1] if every else 0
    values = np.zeros((len(rows), images, patches, numbers), np.float32)
    places, out, stride = np.full((*values.shape[:3], 3), -1, np.int32), np.full_like(index, -1), sight.count(patches)
    for i, row in enumerate(rows):
        before = 0
        for j, p in enumerate(row):
            values[i, j, : len(p.patches)], places[i, j, : len(p.patches)] = p.patches, p.places
            count = sum(t in sight.entries for t in p.run)
            mine = (index[i] >= before) & (index[i] < before + count)
            out[i] = np.where(mine, index[i] - before + j * stride, out[i])
            before += count
    return values, places, out
