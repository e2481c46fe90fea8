"""Images of rows: taken out of messages, read, and counted as tokens.

An image stands in the content of a message, {"type": "image", "image": X}, or in the columns `images` (a list) or `image`,
whose items take the places {"type": "image"} of the messages in order, of messages of texts alone before the first that the
user writes, and in texts those of the placeholder, as in TRL. X is {"bytes": ..., "path": ...}, as `datasets` writes it, a
data URL, bytes, an image of pillow, uint8[H W 3], or a path below the folder of the row's file. Nothing is fetched.
"""

import base64
import binascii
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from fdel import text
from fdel.media import image
from fdel.media import sight as sights
from fdel.media.sight import Picture, Sight
from fdel.train.data.files import Row, inside

PIXELS = 2**26  # of an image, which takes three bytes for each, and many times that as patches
LARGEST = 2**28  # bytes of an image's file
KEYS = ("image", "image_url", "url", "path", "base64", "bytes")  # of a part of a message: what may name its image
KINDS = ("sft", "prompt", "pairs")  # of data whose rows may show images
CHATS = ("messages", "prompt", "completion", "chosen", "rejected")


@dataclass(frozen=True)
class Shown:
    """An image of a sequence: its file (its bytes, or its path), and where which tokens stand for it."""

    file: bytes
    path: bool
    run: tuple[int, ...]
    patches: int
    numbers: int  # of a patch
    turned: bool
    start: int = 0

    @property
    def name(self) -> str:
        """Say which image it is, for people."""
        return self.file.decode() if self.path else f"an image of {len(self.file)} bytes"


# ---- from rows -----------------------------------------------------------------------------------------------------


def takes_texts(tok: text.Tokenizer) -> bool:
    """Whether a chat template writes contents that are texts; many of models that see write lists of parts alone."""
    try:
        return "probe" in text.render_chat(tok, [{"role": "user", "content": "probe"}])
    except text.ChatError:
        return False


def taken(
    row: Row, folder: Path | None, kind: str, sight: Sight | None, listed: bool = False
) -> tuple[Row, tuple[tuple[Shown, ...], ...]]:
    """Take the images out of a row: the row with places alone, {"type": "image"}, and the images of each sequence.

    `folder` is that of the row's file, None for rows in memory. A row without images is given back as it is, if it is not
    to be `listed`: contents as lists of parts. ValueError for images that cannot be read, and for a model or a kind of data
    that takes none.
    """
    column = row.get("images") if row.get("images") is not None else row.get("image")
    column = [] if column is None else list(column) if isinstance(column, list | tuple) else [column]
    said = [v if isinstance(v, list) else [v] for v in map(row.get, CHATS) if isinstance(v, list | Mapping)]
    chats = [m for chat in said for m in chat if isinstance(m, Mapping)]
    images = bool(column) or any(_names_image(p) for m in chats for p in _parts(m))
    if not images and not (listed and chats and kind in KINDS):
        return row, ()
    if sight is None or kind not in KINDS:
        why = "this model reads text alone" if sight is None else f"data of kind {kind!r} takes none"
        raise ValueError(f"the row shows images, but {why}; leave the row out, or its images")
    read = functools.lru_cache(maxsize=None)(lambda file, path: _shown(file, path, sight))
    changed, sides = dict(row), []
    for names in _sequences(row, kind):
        plain, found = _side({n: row[n] for n in names if row.get(n) is not None}, column)
        changed |= plain
        sides.append(tuple(read(*_file(x, folder)) for x in found))
    return changed, tuple(sides) if images else ()


def _sequences(row: Row, kind: str) -> tuple[tuple[str, ...], ...]:
    """Name the columns that make each sequence, as `rows` reads them."""
    if kind == "pairs":
        return ("prompt", "chosen"), ("prompt", "rejected")
    there = [n for n in ("messages", "prompt", "text") if row.get(n) is not None]
    if kind == "prompt":
        return (("prompt",),) if "prompt" in there else (("messages",),)
    return (("prompt", "completion") if there[:1] == ["prompt"] else tuple(there[:1]),)


def _parts(message: Mapping[str, Any]) -> Sequence[Any]:
    content = message.get("content")
    return content if isinstance(content, list | tuple) else ()


def _names_image(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") in ("image", "image_url")


def _side(said: Mapping[str, Any], column: Sequence[Any]) -> tuple[dict[str, Any], list[Any]]:
    """Take the images of the columns that make a sequence: messages with parts alone, and the images in order."""
    if any(isinstance(v, str) for v in said.values()):
        return {}, list(column)
    chats = {n: [v] if isinstance(v, Mapping) else list(v) for n, v in said.items()}
    rest, found = list(column), list[Any]()
    anywhere = any(_names_image(p) for chat in chats.values() for m in chat for p in _parts(m))

    def plain(part: Any) -> Any:
        if not isinstance(part, Mapping):
            return part
        part = {k: v for k, v in part.items() if v is not None}  # as a table has absent keys
        if not _names_image(part):
            return part
        named = next((part[k] if k not in ("path", "base64") else {k: part[k]} for k in KEYS if k in part), None)
        if named is None and not rest:
            raise ValueError("a part of type image names none, and the column images has no more; keep that column")
        found.append(rest.pop(0) if named is None else named)
        return {"type": "image"}

    def listed(message: Any) -> Any:
        if not isinstance(message, Mapping) or message.get("content") is None:
            return message
        content = message["content"]
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else list(content)
        if not anywhere and rest and message.get("role") == "user":
            parts = [{"type": "image"}] * len(rest) + parts
        return {**message, "content": [plain(p) for p in parts]}

    out = {n: [listed(m) for m in chat] for n, chat in chats.items()}
    if rest:
        raise ValueError(f"{len(column)} images in the column images, but the messages have {len(found)} places")
    return out, found


def _file(found: Any, folder: Path | None) -> tuple[bytes, bool]:
    """Give an image's file, or its path: (bytes, whether they are a path)."""
    if isinstance(found, Mapping):
        known = {k: v for k, v in found.items() if v is not None}
        data = known.get("bytes", known.get("base64"))
        if data is not None:
            return (_decoded(data) if isinstance(data, str) else bytes(data)), False
        found = known.get("url", known.get("path"))
    if isinstance(found, bytes | bytearray | memoryview):
        return bytes(found), False
    if isinstance(found, str | Path):
        head, comma, data = str(found).partition(",")
        if head.startswith("data:") and head.endswith(";base64") and comma:
            return _decoded(data), False
        return str(_located(str(found), folder)).encode(), True
    if hasattr(found, "save") or isinstance(found, np.ndarray):
        return image.encode(found), False
    expected = "bytes, a data URL, a path, or an image of pillow"
    raise ValueError(f"expected an image as {expected}, found {type(found).__name__} {found!r:.40}")


def _decoded(data: str) -> bytes:
    try:
        return base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError) as e:
        raise ValueError(f"an image's base64 is broken ({e}): {data!r:.40}") from e


def _located(name: str, folder: Path | None) -> Path:
    if "://" in name or name.startswith("data:"):
        raise ValueError(
            f"image {name!r:.80}: nothing is fetched; put the image beside the rows' file, or into the row"
        )
    if folder is None:
        raise ValueError(f"image {name!r:.80}: these rows lie in no folder; give the image itself")
    path = folder.absolute() / name
    inside(folder, [path])
    if not path.is_file():
        raise ValueError(f"image {name!r:.80}: there is no such file below {folder}")
    return path


def _shown(file: bytes, path: bool, sight: Sight) -> Shown:
    picture = load(Shown(file, path, (), 0, 0, False), sight)
    patches, numbers = picture.patches.shape
    return Shown(file, path, picture.run, patches, numbers, picture.turns is not None)


def load(shown: Shown, sight: Sight) -> Picture:
    """Read an image, and prepare it for the tower. ValueError for a file that is none."""
    data = shown.file
    try:
        if shown.path:
            if (size := Path(shown.name).stat().st_size) > LARGEST:
                raise ValueError(f"{size:,} bytes, the most is {LARGEST:,}")
            data = Path(shown.name).read_bytes()
        return sights.prepare(sight, sights.decode(data, pixels=PIXELS))
    except (OSError, ValueError) as e:
        raise ValueError(f"{shown.name}: {e}") from e


def expanded(sight: Sight, tokens: Sequence[int], shown: Sequence[Shown]) -> tuple[list[int], np.ndarray, list[Shown]]:
    """Put each image's tokens in the place of its placeholder: (tokens, how many each of them became, images with starts).

    ValueError for another number of places than of images.
    """
    at = [i for i, t in enumerate(tokens) if t == sight.placeholder]
    if len(at) != len(shown):
        raise ValueError(
            f"{len(at)} places for images (token {sight.placeholder}) and {len(shown)} images; does the chat template show "
            "images?"
        )
    widths = np.ones(len(tokens), np.int64)
    widths[at] = [len(s.run) for s in shown]
    runs = dict(zip(at, shown, strict=True))
    out = [t for i, token in enumerate(tokens) for t in (runs[i].run if i in runs else (int(token),))]
    starts = np.cumsum(widths) - widths
    return out, widths, [replace(s, start=int(starts[i])) for i, s in runs.items()]


def cut(shown: Sequence[Shown], first: int, last: int) -> tuple[Shown, ...]:
    """Give images as they stand in the tokens from first to last; ValueError if one of them is cut."""
    for s in shown:
        if s.start < first or s.start + len(s.run) > last:
            raise ValueError(f"an image of {len(s.run)} tokens does not fit whole; make it smaller, or rows longer")
    return tuple(replace(s, start=s.start - first) for s in shown)
