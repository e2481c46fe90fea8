"""Images, videos and sounds of rows: taken out of messages, read, and counted as tokens.

They stand in the content of a message, {"type": "image", "image": X}, so "video" and "audio", or in the columns `images`,
`videos` and `audios` (lists; of one alone `image`, `video`, `audio`), whose items take the places {"type": "image"} and so
on of the messages in order, of messages without any before the first text of the user, and in texts (and `input_ids`)
those of the model's tokens, as in TRL. X is {"bytes": ..., "path": ...}, as `datasets` writes it, a data URL, bytes, or a
path below the folder of the row's file; an image also one of pillow or uint8[H W 3], a sound {"array": ...,
"sampling_rate": ...} or floats at 16 kHz. Nothing is fetched.
"""

import base64
import binascii
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from fdel import text
from fdel.media import image, senses, sound
from fdel.media.senses import Item
from fdel.media.sight import Sight
from fdel.train.data.files import Row, located

LARGEST = 2**28  # bytes of a file; what it unfolds to is held to `senses.TRUSTED`
KINDS = {"images": "image", "videos": "video", "sounds": "audio"}  # and what messages call one of them
COLUMNS = {"images": ("images", "image"), "videos": ("videos", "video"), "sounds": ("audios", "audio")}
TYPES = {name: kind for kind, of in KINDS.items() for name in (of, f"{of}_url")} | {"input_audio": "sounds"}
# Of a part of a message: what may name its file.
KEYS = (*TYPES, "url", "path", "base64", "bytes")
TAKING = ("sft", "prompt", "pairs", "triples", "unpaired")  # kinds of data whose rows may show and play
CHATS = ("messages", "prompt", "completion", "chosen", "rejected", "reference")


@dataclass(frozen=True)
class Shown:
    """An image, a video or a sound (`kind`) of a sequence: its file, bytes or a path, and where which tokens stand for it.

    It is seen as so many `parts`, frames of a video, of so many `patches`, which have so many `numbers`, and heard as a
    sound of so many `chunks`, if there are any. `turned`: its tokens turn by three components.
    """

    file: bytes
    path: bool
    kind: str
    run: tuple[int, ...]
    parts: int = 0
    patches: int = 0
    numbers: int = 0
    chunks: int = 0
    turned: bool = False
    start: int = 0

    @property
    def name(self) -> str:
        """Say which it is, for people."""
        return self.file.decode() if self.path else f"{one(self.kind)} of {len(self.file)} bytes"


def one(kind: str) -> str:
    """Say one of a kind: an image, a video, a sound."""
    return ("an " if kind == "images" else "a ") + kind[:-1]


def tokens(sight: Sight) -> dict[str, int]:
    """Give the token of each kind that a model takes, once for each in a prompt."""
    found = {"images": sight, "videos": sight.video, "sounds": sight.sound}
    return {k: s.token if k == "sounds" else s.placeholder for k, s in found.items() if s is not None}


# ---- from rows -----------------------------------------------------------------------------------------------------


def takes_texts(tok: text.Tokenizer) -> bool:
    """Whether a chat template writes contents that are texts; many of models that see write lists of parts alone."""
    try:
        return "probe" in text.render_chat(tok, [{"role": "user", "content": "probe"}])
    except text.ChatError:
        return False


def taken(
    row: Row, folder: Path | None, kind: str, sight: Sight | None, tok: text.Tokenizer, listed: bool = False
) -> tuple[Row, tuple[tuple[Shown, ...], ...]]:
    """Take out of a row what it shows and plays: the row with places alone, {"type": "image"}, and that of each sequence.

    `folder` is that of the row's file, None for rows in memory. Columns may hold what is `Shown` already. A row of text
    alone is given back as it is, if it is not to be `listed`: contents as lists of parts. ValueError for what cannot be
    read, and for a model or a kind of data that takes none.
    """
    columns = {k: _column(row, names) for k, names in COLUMNS.items()}
    said = [v if isinstance(v, list) else [v] for v in map(row.get, CHATS) if isinstance(v, list | Mapping)]
    chats = [m for chat in said for m in chat if isinstance(m, Mapping)]
    if sight is not None:
        _typed(chats)
    there = [k for k in KINDS if columns[k] or any(kind_of(p) == k for m in chats for p in _parts(m))]
    if not there and not (listed and chats and kind in TAKING):
        return row, ()
    for k in there:
        if sight is None or kind not in TAKING or k not in tokens(sight):
            none = f"this model takes no {k}" if kind in TAKING else f"data of kind {kind!r} takes none"
            why = none if sight else "this model reads text alone"
            raise ValueError(f"the row shows {k}, but {why}; leave the row out, or its {k}")
    spell = lambda said: text.encode(tok, said, special=False)
    read = functools.lru_cache(maxsize=None)(lambda kind, file, path: _shown(kind, file, path, sight, spell))
    changed, sides = dict(row), []
    for names in _sequences(row, kind):
        plain, found = _side({n: row[n] for n in names if row.get(n) is not None}, columns)
        changed |= plain
        sides.append(tuple(x if isinstance(x, Shown) else read(k, *_file(k, x, folder)) for k, x in found))
    return changed, tuple(sides) if there else ()


def _column(row: Row, names: tuple[str, str]) -> list[Any]:
    """Give what the column of a kind holds, by either of its names."""
    found = row.get(names[0]) if row.get(names[0]) is not None else row.get(names[1])
    return [] if found is None else list(found) if isinstance(found, list | tuple) else [found]


def _sequences(row: Row, kind: str) -> tuple[tuple[str, ...], ...]:
    """Name the columns that make each sequence, as `rows` reads them."""
    if kind in ("pairs", "triples") or (kind == "unpaired" and "chosen" in row and "rejected" in row):
        said = ("chosen", "rejected", "reference") if kind == "triples" else ("chosen", "rejected")
        return tuple(("prompt", name) for name in said)
    there = [n for n in ("input_ids", "messages", "prompt", "text") if row.get(n) is not None]
    if kind == "prompt":
        return (("prompt",),) if "prompt" in there else (("messages",),)
    return (("prompt", "completion") if there[:1] == ["prompt"] else tuple(there[:1]),)


def _parts(message: Mapping[str, Any]) -> Sequence[Any]:
    content = message.get("content")
    return content if isinstance(content, list | tuple) else ()


def _typed(chats: Sequence[Mapping[str, Any]]) -> None:
    """Raise ValueError for a part that has a file, but not the type of its kind: templates leave it out."""
    for i, message in enumerate(chats, 1):
        for j, part in enumerate(_parts(message), 1):
            held = [k for k in TYPES if isinstance(part, Mapping) and part.get(k) is not None]
            if held and kind_of(part) is None:
                kind = KINDS[TYPES[held[0]]]
                raise ValueError(
                    f"part {j} of message {i} has {held[0]!r} and the type {str(part.get('type'))!r:.40}; "
                    f"expected the type {kind!r}"
                )


def kind_of(part: Any) -> str | None:
    """Say which of `KINDS` a part of a message's content is; None of a text."""
    return TYPES.get(str(part.get("type"))) if isinstance(part, Mapping) else None


def _side(
    said: Mapping[str, Any], columns: Mapping[str, Sequence[Any]]
) -> tuple[dict[str, Any], list[tuple[str, Any]]]:
    """Take what the columns of a sequence show: messages with places alone, and files by kind, those of one in order."""
    if "input_ids" in said or any(isinstance(v, str) for v in said.values()):
        return {}, [(k, x) for k, column in columns.items() for x in column]
    chats = {n: [v] if isinstance(v, Mapping) else list(v) for n, v in said.items()}
    rest, found = {k: list(column) for k, column in columns.items()}, list[tuple[str, Any]]()
    placed = {kind_of(p) for chat in chats.values() for m in chat for p in _parts(m)}

    def plain(part: Any) -> Any:
        if not isinstance(part, Mapping):
            return part
        part = {k: v for k, v in part.items() if v is not None}  # as a table has absent keys
        if (kind := kind_of(part)) is None:
            return part
        named = next((part[k] if k not in ("path", "base64") else {k: part[k]} for k in KEYS if k in part), None)
        if named is None and not rest[kind]:
            column = COLUMNS[kind][0]
            raise ValueError(
                f"a part of type {KINDS[kind]} names none, and the column {column} has no more; keep that column"
            )
        found.append((kind, rest[kind].pop(0) if named is None else named))
        return {"type": KINDS[kind]}

    def listed(message: Any) -> Any:
        if not isinstance(message, Mapping) or message.get("content") is None:
            return message
        content = message["content"]
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else list(content)
        if message.get("role") == "user":
            parts = [{"type": KINDS[k]} for k in KINDS if k not in placed for _ in rest[k]] + parts
        return {**message, "content": [plain(p) for p in parts]}

    out = {n: [listed(m) for m in chat] for n, chat in chats.items()}
    for kind in (k for k, left in rest.items() if left):
        places, name = sum(k == kind for k, _ in found), COLUMNS[kind][0]
        raise ValueError(f"{len(columns[kind])} {kind} in the column {name}, but the messages have {places} places")
    return out, found


def _file(kind: str, found: Any, folder: Path | None) -> tuple[bytes, bool]:
    """Give the file of an image, a video or a sound, or its path: (bytes, whether they are a path)."""
    if isinstance(found, Mapping):
        known = {k: v for k, v in found.items() if v is not None}
        if kind == "sounds" and "array" in known:
            return sound.encode(np.asarray(known["array"]), int(known.get("sampling_rate", sound.RATE))), False
        data = next((known[k] for k in ("bytes", "base64", "data") if k in known), None)
        if data is not None:
            return (_decoded(kind, data) if isinstance(data, str) else bytes(data)), False
        found = known.get("url", known.get("path"))
    if isinstance(found, bytes | bytearray | memoryview):
        return bytes(found), False
    if isinstance(found, str | Path):
        head, comma, data = str(found).partition(",")
        if head.startswith("data:") and head.endswith(";base64") and comma:
            return _decoded(kind, data), False
        return str(located(kind[:-1], str(found), folder)).encode(), True
    if kind == "sounds" and isinstance(found, np.ndarray):
        return sound.encode(found, sound.RATE), False
    if kind == "images" and (hasattr(found, "save") or isinstance(found, np.ndarray)):
        return image.encode(found), False
    more = {"images": "an image of pillow", "videos": "the file's name and bytes", "sounds": "array and sampling_rate"}
    expected = f"bytes, a data URL, a path, or {more[kind]}"
    raise ValueError(f"expected {one(kind)} as {expected}, found {type(found).__name__} {found!r:.40}")


def _decoded(kind: str, data: str) -> bytes:
    try:
        return base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError) as e:
        raise ValueError(f"{one(kind)}'s base64 is broken ({e}): {data!r:.40}") from e


def _shown(kind: str, file: bytes, path: bool, sight: Any, spell: Callable[[str], Sequence[int]]) -> Shown:
    shown = Shown(file, path, kind, ())
    item = load(shown, sight, spell)
    parts = senses.parts(sight, item)
    seen = [p for p in parts if isinstance(p, senses.Picture)]
    heard = [p for p in parts if isinstance(p, senses.Sound)]
    size = seen[0].patches.shape if seen else (0, 0)
    chunks, turned = sum(len(x.lengths) for x in heard), item.turns is not None
    return replace(shown, run=item.run, parts=len(seen), patches=size[0], numbers=size[1], chunks=chunks, turned=turned)


def load(shown: Shown, sight: Sight, spell: Callable[[str], Sequence[int]] | None = None) -> Item:
    """Read an image, a video or a sound, and prepare it for the tower. ValueError for a file that is none.

    `spell` tokenizes the times of a video's frames; None: they are those of the run.
    """
    data = shown.file
    try:
        if shown.path:
            if (size := Path(shown.name).stat().st_size) > LARGEST:
                raise ValueError(f"{size:,} bytes, the most is {LARGEST:,}")
            data = Path(shown.name).read_bytes()
        return senses.prepare(sight, shown.kind, data, senses.TRUSTED, spell or _times(shown, sight))
    except (OSError, ValueError) as e:
        raise ValueError(f"{shown.name}: {e}") from e


def _times(shown: Shown, sight: Sight) -> Callable[[str], Sequence[int]]:
    """Give the times of a video's frames, one after the other, as its run has them around frames between two marks."""
    times, outside = [list[int]()], True
    for token in shown.run if sight.video and sight.video.marks else ():
        if token in sight.video.marks:
            outside = token == sight.video.marks[1]
            times += [[]] * outside
        elif outside:
            times[-1] = [*times[-1], token]
    rest = iter(times[bool(sight.video and sight.video.glm) :])  # GLM's stand behind their frames
    return lambda said: next(rest, [])


def expanded(sight: Sight, ids: Sequence[int], shown: Sequence[Shown]) -> tuple[list[int], np.ndarray, list[Shown]]:
    """Put the tokens of each in the place of its placeholder: (tokens, how many each became, what is shown with starts).

    Those of a kind come in order. ValueError for another number of places than there are of a kind.
    """
    runs = dict[int, Shown]()
    for kind, token in tokens(sight).items():
        at, here = [i for i, t in enumerate(ids) if t == token], [s for s in shown if s.kind == kind]
        if len(at) != len(here):
            raise ValueError(
                f"{len(at)} places for {kind} (token {token}) and {len(here)} {kind}; does the chat template show {kind}?"
            )
        runs |= dict(zip(at, here, strict=True))
    widths = np.array([len(runs[i].run) if i in runs else 1 for i in range(len(ids))], np.int64)
    out = [t for i, token in enumerate(ids) for t in (runs[i].run if i in runs else (int(token),))]
    starts = np.cumsum(widths) - widths
    return out, widths, [replace(runs[i], start=int(starts[i])) for i in sorted(runs)]


def cut(shown: Sequence[Shown], first: int, last: int, most: int) -> tuple[Shown, ...]:
    """Give what is shown as it stands in the tokens from first to last; ValueError if one is cut, or longer than `most`."""
    for s in shown:
        if s.start < first or s.start + len(s.run) > last or len(s.run) > most:
            raise ValueError(
                f"{one(s.kind)} of {len(s.run)} tokens does not fit whole; make it smaller, or rows longer"
            )
    return tuple(replace(s, start=s.start - first) for s in shown)
