"""Transcripts as OpenAI's protocol writes them: JSON, subtitles, events of a stream."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple


class Part(NamedTuple):
    """A segment's text, from `start` to `end` in seconds, with the facts and words that verbose JSON has."""

    text: str
    start: float
    end: float
    facts: Mapping[str, Any]
    words: Sequence[Mapping[str, Any]] = ()


def whole(parts: Sequence[Part]) -> str:
    """Join the texts."""
    return "".join(p.text for p in parts).strip()


def usage(seconds: float) -> dict[str, Any]:
    """Count what was heard."""
    return {"type": "duration", "seconds": math.ceil(seconds)}


def brief(parts: Sequence[Part], seconds: float) -> dict[str, Any]:
    """Write the text alone: json."""
    return {"text": whole(parts), "usage": usage(seconds)}


def verbose(
    parts: Sequence[Part], seconds: float, task: str, language: str | None, kinds: Sequence[str]
) -> dict[str, Any]:
    """Write all that is known: verbose_json; `kinds` of "segment" and "word"."""
    said = {"task": task, "language": language or "en", "duration": round(seconds, 3), "text": whole(parts)}
    if "word" in kinds:
        said["words"] = [w for p in parts for w in p.words]
    if "segment" in kinds:
        said["segments"] = [
            {"id": i, "start": round(p.start, 3), "end": round(p.end, 3), "text": p.text, **p.facts}
            for i, p in enumerate(parts)
        ]
    return said | {"usage": usage(seconds)}


def subtitles(parts: Sequence[Part], kind: str) -> str:
    """Write SubRip ("srt") or WebVTT ("vtt")."""
    mark, numbered = ("," if kind == "srt" else "."), kind == "srt"
    lines = [] if numbered else ["WEBVTT", ""]
    for i, p in enumerate(parts):
        text = p.text.strip().replace("-->", "->")  # an arrow would begin another time
        said = "\n".join(line for line in text.splitlines() if line.strip())
        lines += [str(i + 1)] if numbered else []
        lines += [f"{_clock(p.start, mark)} --> {_clock(p.end, mark)}", said, ""]
    return "\n".join(lines) + "\n" * (not numbered and not parts)


def _clock(seconds: float, mark: str) -> str:
    ms = round(seconds * 1000)
    return f"{ms // 3_600_000:02}:{ms // 60_000 % 60:02}:{ms // 1000 % 60:02}{mark}{ms % 1000:03}"


def delta(text: str) -> dict[str, Any]:
    """Make the event of more text."""
    return {"type": "transcript.text.delta", "delta": text}


def done(parts: Sequence[Part], seconds: float) -> dict[str, Any]:
    """Make the last event."""
    return {"type": "transcript.text.done", "text": whole(parts), "usage": usage(seconds)}
