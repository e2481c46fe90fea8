"""Images in messages: their parts are checked and taken out, so that a chat template sees where they stand alone."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from fdel.serve.server.openai.checks import NONE, APIError, Check, anything, only, record, refuse, text

OTHERS = {  # parts of content that the protocol has and that no model here takes: what they hold
    "input_audio": "sounds", "audio_url": "sounds", "video_url": "videos", "file": "files", "input_file": "files",
}  # fmt: skip
URL = 2**23  # characters of an address, which may hold the image


class Shown(NamedTuple):
    """An image of a request: its parameter, and its address."""

    path: str
    url: str


def parts(most: int) -> dict[str, Check]:
    """The parts of content that show an image, of chat completions and of responses; refused where `most` is 0."""
    if not most:
        none = Check(_refused, NONE)
        return {"image_url": none, "input_image": none}
    address, detail = text(URL, 1), only("auto")
    inner = record({"url": address, "detail": detail}, ["url"])
    chat = record({"type": anything, "image_url": inner}, ["image_url"])
    response = record({"type": anything, "image_url": address, "detail": detail, "file_id": only()}, ["image_url"])
    return {
        "image_url": Check(
            lambda v, path: Shown(f"{path}.image_url.url", chat(v, path)["image_url"]["url"]), chat.schema
        ),
        "input_image": Check(
            lambda v, path: Shown(f"{path}.image_url", response(v, path)["image_url"]), response.schema
        ),
    }


def others(most: int) -> dict[str, Check]:
    """The parts of content that hold something else, each refused by what the model takes."""
    takes = "text and images" if most else "text alone"

    def refusing(what: str) -> Check:
        hint = "; /v1/audio/transcriptions writes sounds down, of a model that hears" if what == "sounds" else ""
        said = f"this model takes {takes} in a chat; leave {what} out{hint}"
        return Check(lambda value, path: refuse(path, said, "unsupported_value"), NONE)

    return {kind: refusing(what) for kind, what in OTHERS.items()}


def _refused(value: Any, path: str) -> Any:
    refuse(path, "this model reads text alone; leave images out, or ask a model that sees", "unsupported_value")


def joined(found: Sequence[Any]) -> str | list[Any]:
    """Make lines of parts of text; a list where images are among them."""
    if not any(isinstance(p, Shown) for p in found):
        return "\n".join(p["text"] for p in found)
    return [p if isinstance(p, Shown) else {"type": "text", "text": p["text"]} for p in found]


def taken(messages: Sequence[Mapping[str, Any]], most: int) -> tuple[list[Mapping[str, Any]], tuple[Shown, ...]]:
    """Take images out of messages: those as chat templates expect them, and the images in order. APIError for too many."""
    images = [p for m in messages if isinstance(m.get("content"), list) for p in m["content"] if isinstance(p, Shown)]
    if len(images) > most:
        refuse("messages", f"found {len(images)} images, expected at most {most}; ask about fewer at a time")
    plain = lambda p: {"type": "image"} if isinstance(p, Shown) else p
    said = [
        {**m, "content": list(map(plain, m["content"]))} if isinstance(m.get("content"), list) else m for m in messages
    ]
    return said, tuple(images)


def embedded(shown: Shown, most: int) -> bytes | None:
    """Give the base64 of an image in a data URL, to be decoded; None for an address from which it has to be fetched.

    APIError for what is neither, a path or file: among them, and for more than `most` bytes.
    """
    head, comma, data = shown.url[:256].partition(",")[0], "," in shown.url[:256], shown.url.partition(",")[2]
    scheme = head.partition(":")[0].lower()
    if scheme in ("http", "https"):
        return None
    kind = head.lower().split(";")
    if scheme != "data" or not kind[0].startswith("data:image/") or kind[-1] != "base64" or not comma:
        found = f"found {shown.url[:32]!r}"
        raise APIError(f"{shown.path}: {found}, expected data:image/...;base64,... or https://...", param=shown.path)
    check_size(shown, len(data) * 3 // 4, most)
    return data.encode("ascii", "replace")


def check_size(shown: Shown, size: int, most: int) -> None:
    """Refuse a file that is too large: APIError."""
    if size > most:
        raise APIError(f"{shown.path}: found {size} bytes, expected at most {most}; make it smaller", param=shown.path)
