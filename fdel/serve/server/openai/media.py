"""Images, videos and sounds in messages: their parts are checked and taken out, so that a chat template sees where they
stand alone."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from fdel.serve.server.openai.checks import NONE, APIError, Check, anything, choice, only, record, refuse, text

# Parts of content that the protocol has, and what they hold; which of them a model takes, its `Media` say.
KINDS = {
    "image_url": "images", "input_image": "images", "video_url": "videos", "audio_url": "sounds", "input_audio": "sounds",
    "file": "files", "input_file": "files",
}  # fmt: skip
TYPES = {
    "images": "image",
    "videos": "video",
    "films": "video",
    "sounds": "audio",
}  # as templates and data URLs have it
FORMATS = ("wav", "mp3", "flac", "ogg", "m4a", "mp4", "webm")  # of `input_audio`
URL = 2**23  # characters of an address, which may hold the file


class Media(NamedTuple):
    """How many of each one chat may show and play; 0: the model takes none."""

    images: int = 0
    videos: int = 0
    sounds: int = 0


class Shown(NamedTuple):
    """An image, a video or a sound of a request: its parameter, its address, and which of `Media` it is.

    "films" are videos whose own sound is heard with them.
    """

    path: str
    url: str
    kind: str = "images"


def parts(most: Media) -> dict[str, Check]:
    """The parts of content that show or play something, those of `KINDS`; each refused that the model does not take."""
    address = text(URL, 1)
    detail = choice("auto", "low", "high")  # changes nothing: the model's processor chooses the size
    part = lambda name, held, **more: record({"type": anything, name: held, **more}, [name])
    linked = lambda name, **more: (
        part(name, record({"url": address, **more}, ["url"])), f"{name}.url", lambda v: v[name]["url"]
    )  # fmt: skip
    sound = record({"data": address, "format": choice(*FORMATS)}, ["data", "format"])
    whole = lambda v: "data:audio/{format};base64,{data}".format(**v["input_audio"])
    ways: dict[str, tuple[Check, str, Callable[[Any], str]]] = {  # what a part may be, where its address stands, and that
        "image_url": linked("image_url", detail=detail),
        "video_url": linked("video_url"),
        "audio_url": linked("audio_url"),
        "input_image": (part("image_url", address, detail=detail, file_id=only()), "image_url", lambda v: v["image_url"]),
        "input_audio": (part("input_audio", sound), "input_audio.data", whole),
    }  # fmt: skip

    def taking(kind: str, check: Check, field: str, url: Callable[[Any], str]) -> Check:
        return Check(lambda v, path: Shown(f"{path}.{field}", url(check(v, path)), kind), check.schema)

    return {
        name: taking(kind, *ways[name]) if getattr(most, kind, 0) else _refusing(kind, most)
        for name, kind in KINDS.items()
    }


def _refusing(kind: str, most: Media) -> Check:
    """Refuse what a model does not take, by what it does."""
    takes = " and ".join(["text", *(k for k in Media._fields if getattr(most, k))])
    said = f"this model takes {takes if any(most) else 'text alone'} in a chat; leave {kind} out"
    if kind == "sounds":
        said += "; /v1/audio/transcriptions writes sounds down, of a model that hears"
    if kind == "images" and not any(most):
        said = "this model reads text alone; leave images out, or ask a model that sees"
    return Check(lambda value, path: refuse(path, said, "unsupported_value"), NONE)


def joined(found: Sequence[Any]) -> str | list[Any]:
    """Make lines of parts of text; a list where others are among them."""
    if not any(isinstance(p, Shown) for p in found):
        return "\n".join(p["text"] for p in found)
    return [p if isinstance(p, Shown) else {"type": "text", "text": p["text"]} for p in found]


def taken(
    messages: Sequence[Mapping[str, Any]], most: Media, heard: bool = False
) -> tuple[list[Mapping[str, Any]], tuple[Shown, ...]]:
    """Take what is shown out of messages: those as chat templates expect them, and it in order. APIError for too many.

    `heard`: the sounds of videos are asked for with them.
    """
    if heard and not (most.videos and most.sounds):
        refuse("mm_processor_kwargs.use_audio_in_video", "this model does not take videos with sounds; leave it out")
    shown = [p for m in messages if isinstance(m.get("content"), list) for p in m["content"] if isinstance(p, Shown)]
    for kind, count in Counter(p.kind for p in shown).items():
        if count > getattr(most, kind):
            expected = f"expected at most {getattr(most, kind)}; ask about fewer at a time"
            refuse("messages", f"found {count} {kind}, {expected}")
    plain = lambda p: {"type": TYPES[p.kind]} if isinstance(p, Shown) else p
    said = [
        {**m, "content": list(map(plain, m["content"]))} if isinstance(m.get("content"), list) else m for m in messages
    ]
    return said, tuple(p._replace(kind="films") if heard and p.kind == "videos" else p for p in shown)


def embedded(shown: Shown, most: int) -> bytes | None:
    """Give the base64 of a file in a data URL, to be decoded; None for an address from which it has to be fetched.

    APIError for what is neither, a path or file: among them, and for more than `most` bytes.
    """
    head, comma, data = shown.url[:256].partition(",")[0], "," in shown.url[:256], shown.url.partition(",")[2]
    scheme = head.partition(":")[0].lower()
    if scheme in ("http", "https"):
        return None
    kind, wanted = head.lower().split(";"), f"data:{TYPES[shown.kind]}/"
    if scheme != "data" or not kind[0].startswith(wanted) or kind[-1] != "base64" or not comma:
        found = f"found {shown.url[:32]!r}"
        raise APIError(f"{shown.path}: {found}, expected {wanted}...;base64,... or https://...", param=shown.path)
    check_size(shown, len(data) * 3 // 4, most)
    return data.encode("ascii", "replace")


def check_size(shown: Shown, size: int, most: int) -> None:
    """Refuse a file that is too large: APIError."""
    if size > most:
        raise APIError(f"{shown.path}: found {size} bytes, expected at most {most}; make it smaller", param=shown.path)
