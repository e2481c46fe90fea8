"""Receive and read a body of multipart/form-data (RFC 7578): texts by name, and files."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from email.message import Message

from aiohttp import StreamReader

from fdel.serve.server.openai import APIError

PARTS, HEAD, TEXT = 64, 2**12, 2**16  # parts of a form, bytes of a part's headers, and of one that is no file


@dataclass
class Form:
    """The parts of a form; a text that may be there several times has a name that ends with []."""

    texts: dict[str, list[str]] = field(default_factory=dict)
    files: dict[str, bytes] = field(default_factory=dict)

    def fields(self) -> dict[str, object]:
        """Give the texts as JSON would have them: lists where a name ends with [], without that end."""
        out: dict[str, object] = {}
        for name, values in self.texts.items():
            many = name.endswith("[]")
            if not many and len(values) > 1:
                raise APIError(f"{name[:64]}: there are {len(values)} of it, expected one", param=name[:64])
            out[name.removesuffix("[]")] = values if many else values[0]
        return out


async def receive(content: StreamReader, most: int) -> bytes:
    """Receive a body of at most so many bytes, which may be more than the application allows others."""
    found, size = list[bytes](), 0
    async for part in content.iter_chunked(2**16):
        found.append(part)
        size += len(part)
        if size > most:
            raise too_large(most)
    return b"".join(found)


def too_large(most: int) -> APIError:
    """Refuse a body of more than so many bytes."""
    said = f"the body has more than {most} bytes, the most that is read here; send fewer or smaller files"
    return APIError(said, status=413, code="too_large")


def boundary(content_type: str) -> bytes:
    """Find what stands between the parts. APIError without it."""
    header = Message()
    header["Content-Type"] = content_type
    found = header.get_boundary()
    if not found or len(found) > 70 or not found.isascii():
        raise APIError("the body's Content-Type names no boundary of 1 to 70 characters", code="bad_form")
    return found.encode()


def read(raw: bytes, between: bytes) -> Form:
    """Take a body apart. APIError for one that is cut off or has parts without names, twice, or too many."""
    head, *parts = (b"\r\n" + raw).split(b"\r\n--" + between, PARTS + 2)
    if len(parts) > PARTS + 1:
        raise APIError(f"the form has more than {PARTS} parts", code="bad_form")
    if not parts or not parts[-1].startswith(b"--"):
        raise APIError("the form is cut off: it has no last boundary", code="bad_form")
    form = Form()
    for part in parts[:-1]:
        start = part.find(b"\r\n\r\n", 0, HEAD)
        if not part.startswith(b"\r\n") or start < 0:
            raise APIError(f"a part of the form has no headers, or more than {HEAD} bytes of them", code="bad_form")
        name, file = _named(_headers(part[2:start]))
        content = part[start + 4 :]
        if name in form.files or (file and name in form.texts):
            raise APIError(f"{name[:64]}: there are two of it, expected one", param=name[:64])
        if file:
            form.files[name] = content
            continue
        if len(content) > TEXT:
            raise APIError(f"{name[:64]}: found {len(content)} bytes, expected at most {TEXT}", param=name[:64])
        try:
            form.texts.setdefault(name, []).append(content.decode())
        except UnicodeDecodeError as e:
            raise APIError(f"{name[:64]}: not UTF-8, at byte {e.start}", param=name[:64]) from e
    return form


def _headers(raw: bytes) -> Mapping[str, str]:
    lines = (line.partition(":") for line in raw.decode("utf-8", "replace").split("\r\n"))
    return {name.strip().lower(): value.strip() for name, _, value in lines}


def _named(headers: Mapping[str, str]) -> tuple[str, bool]:
    """Give the name of a part, and whether it is a file."""
    header = Message()
    header["Content-Disposition"] = headers.get("content-disposition", "").replace("\n", " ").replace("\r", " ")
    name = header.get_param("name", header="content-disposition")
    if header.get_content_disposition() != "form-data" or not isinstance(name, str) or not name:
        raise APIError(
            "a part of the form has no name: expected Content-Disposition: form-data; name=...", code="bad_form"
        )
    return name, header.get_param("filename", header="content-disposition") is not None
