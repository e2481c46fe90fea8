"""Sounds as arrays: files decoded, to be resampled and made log-mel features of (`spectrum`).

What a file says of itself is checked before anything of its size is allocated.
"""

import io
import math
import struct
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from fdel.media import container
from fdel.media.spectrum import FRAME, HOP, RATE, log_mel, lowpass, resample

__all__ = ["FRAME", "HOP", "RATE", "Format", "SoundError", "bound", "decode", "encode", "header", "listen", "log_mel",
           "lowpass", "resample", "samples", "sane"]  # fmt: skip

CHANNELS = 32  # the most of a file
RATES = (
    1_000,
    384_000,
    25,
)  # samples a second of a file: the least, the most, and what divides them, which bounds filters
FRAMES = 75_000_000  # the most of a compressed file: 26 minutes at 48 kHz
BLOCK = 2**16  # frames decoded at a time
UNSAID = 2**62  # the number of frames, or more, where a file does not say it
TAKEN = "WAV, FLAC, Ogg (Vorbis or Opus), MP3, MP4 (M4A) or WebM (Matroska)"
# Of the sounds in containers that PyAV opens.
CODECS = ("aac", "mp3", "mp3float", "opus", "vorbis", "flac", "alac", "pcm_s16le", "pcm_s16be", "pcm_f32le")
PCM, FLOAT, EXTENSIBLE, UNKNOWN = 1, 3, 0xFFFE, 0xFFFFFFFF


class SoundError(ValueError):
    """A file that is no sound that can be read, or too long."""


class Format(NamedTuple):
    """What a WAV file's header says: `kind` is PCM or FLOAT, `size` the bytes of its samples from `start` on."""

    kind: int
    channels: int
    rate: int
    bits: int
    start: int
    size: int

    @property
    def seconds(self) -> float:
        """Length in seconds."""
        return self.size / (self.bits // 8 * self.channels) / self.rate


def decode(data: bytes, *, most: float) -> np.ndarray:
    """Decode a file of at most `most` seconds: float32[samples] at 16 kHz, the mean of its channels, in [-1, 1].

    WAV is read here; FLAC, Ogg (Vorbis, Opus) and MP3 by soundfile, extra `media`; the sound of MP4 and WebM by PyAV, extra
    `video`. SoundError says what is wrong with a file.
    """
    if data[:4] == b"RIFF" and data[8:12] == b"WAVE":
        form = header(data)
        bound(form.seconds, most)
        return resample(samples(data, form), form.rate)
    found = f"found {data[:4]!r} at the beginning of the file"
    try:
        if container.kind(data) in ("mp4", "matroska"):
            if (x := listen(data, most=most)) is None:
                raise SoundError("the file plays nothing, expected one with a sound")
            return x
        if (name := _signed(data)) is None:
            raise SoundError(f"{found}, not a sound of a known format; expected {TAKEN}")
        return _compressed(data, name, most)
    except ImportError as e:
        raise SoundError(f"{found}, which is not WAV; what reads others is not there: {e}") from e


def listen(data: bytes, *, most: float) -> np.ndarray | None:
    """Decode what an MP4, Matroska or AVI file plays, as `decode`; None for a silent one. ImportError without PyAV."""
    av = container.pyav()
    with container.opened(data, "sound", SoundError) as file:
        if not file.streams.audio:
            return None
        stream = file.streams.audio[0]
        codec = stream.codec_context
        if codec is None or codec.name not in CODECS:
            name = "none" if codec is None else codec.name
            raise SoundError(f"found a sound of codec {name}, expected one of {', '.join(CODECS)}")
        rate = codec.sample_rate
        sane(codec.channels, rate)
        codec.thread_count = 1
        plain = av.AudioResampler("fltp", codec.layout, rate)

        def blocks() -> Iterator[np.ndarray]:
            for frame in file.decode(stream):
                sane(frame.layout.nb_channels, frame.sample_rate)  # bounds what the next line makes
                yield from (x.to_ndarray().mean(0) for x in plain.resample(frame))

        x = _joined(blocks(), rate, _room(rate, most))
    return resample(x, rate) if len(x) else None


def _signed(data: bytes) -> str | None:
    """Name the format of a file by its first bytes, behind tags that MP3 files begin with; None for what is not taken."""
    at = 0
    for _ in range(4):
        if data[at : at + 3] == b"ID3":
            size = data[at + 9 : at + 5 : -1]  # of seven bits a byte
            at += 10 + sum(n % 128 << 7 * i for i, n in enumerate(size))
    head = data[at : at + 4]
    if head[:2] >= b"\xff\xe0" and head[1] & 6:  # the sync of a frame, of a layer that there is (AAC has none)
        return "MP3"
    return {b"fLaC": "FLAC", b"OggS": "OGG"}.get(head)


def _compressed(data: bytes, name: str, most: float) -> np.ndarray:
    """Decode a file of the format `name` by soundfile; one that says no length is read up to the most that is allowed."""
    try:
        import soundfile
    except ImportError as e:
        raise ImportError("FLAC, Ogg and MP3 need soundfile, of the extra 'media': pip install 'fdel[media]'") from e
    try:
        with soundfile.SoundFile(io.BytesIO(data)) as file:
            if file.format != name:
                raise SoundError(f"found a file of {file.format} that begins as {name}, expected {TAKEN}")
            rate, count = file.samplerate, file.frames
            sane(file.channels, rate)
            room = _room(rate, most)
            if count < UNSAID:
                bound(count / rate, most)
                if count > FRAMES:
                    raise SoundError(
                        f"found {count} samples a channel, expected at most {FRAMES}; lower the rate or cut the file"
                    )
            # Else it seeks after each block, which damages MP3, and fails where the length is not known.
            file.seekable = lambda: False

            def blocks() -> Iterator[np.ndarray]:
                left = min(count, room + 1)  # no more is read than the header says, or than shows that it is too long
                while left and len(x := file.read(min(BLOCK, left), "float32", always_2d=True)):
                    left -= len(x)
                    yield x.mean(1)  # of as many channels as a header likes to say, only the mean is kept

            x = _joined(blocks(), rate, room, 0 if count >= UNSAID else count)
    except (soundfile.SoundFileError, RuntimeError) as e:  # of damaged MP3 it says that there is no such file
        raise SoundError(f"the file begins as {name}, but is damaged or not a sound that can be read") from e
    bound(len(x) / rate, most)
    return resample(x, rate)


def _room(rate: int, most: float) -> int:
    """How many samples a channel a file may have that does not say it."""
    return min(FRAMES, math.ceil(most * rate))


def _joined(blocks: Iterable[np.ndarray], rate: int, room: int, count: int = 0) -> np.ndarray:
    """Put blocks of samples one after the other, clipped to [-1, 1]: float32[samples], `count` of them if that is known.

    SoundError for more than `room`, and for what is no number.
    """
    out, end = np.empty(count, np.float32), 0
    for block in blocks:
        start, end = end, end + len(block)
        if end > room:
            found = f"found more than {room / rate:g} seconds of sound"
            raise SoundError(f"{found} ({room} samples a channel), the most that are read; cut the file")
        if not np.isfinite(block).all():
            raise SoundError("the file has samples that are not finite numbers")
        if end > len(out):  # in place, where memory behind it is free
            out.resize(max(end, len(out) + 2**20), refcheck=False)
        np.clip(block, -1.0, 1.0, out=out[start:end])
    return out[:end]


def encode(samples: np.ndarray, rate: int) -> bytes:
    """Write a sound, floats [samples] or [channels samples] in [-1, 1], as a WAV file of float32."""
    x = np.atleast_2d(samples).astype("<f4") if samples.dtype.kind == "f" else np.zeros((0, 0))
    if x.ndim != 2 or not x.size:
        raise SoundError(f"found a sound {samples.dtype}{list(samples.shape)}, expected floats [samples] in [-1, 1]")
    x = x.T
    form = struct.pack("<4sIHHIIHH", b"fmt ", 16, FLOAT, x.shape[1], rate, 4 * rate * x.shape[1], 4 * x.shape[1], 32)
    body = b"WAVE" + form + struct.pack("<4sI", b"data", x.nbytes) + x.tobytes()
    return struct.pack("<4sI", b"RIFF", len(body)) + body


def bound(seconds: float, most: float) -> None:
    """Refuse a sound of more than `most` seconds, or of none: SoundError."""
    if not 0 < seconds <= most:
        raise SoundError(
            f"found {seconds:.2f} seconds of sound, expected more than 0 and at most {most:g}; cut the file"
        )


def sane(channels: int, rate: int) -> None:
    """Refuse numbers of channels and of samples a second that no sound has: SoundError."""
    if not 1 <= channels <= CHANNELS:
        raise SoundError(f"found {channels} channels, expected 1 to {CHANNELS}")
    least, most, step = RATES
    if not least <= rate <= most or rate % step:
        raise SoundError(f"found {rate} samples a second, expected {least} to {most}, a multiple of {step}")


def header(data: bytes) -> Format:
    """Read the header of a WAV file (RIFF, Microsoft's WAVEFORMATEX); no sample is touched. SoundError for a bad one."""
    at, form = 12, None
    while at + 8 <= len(data):
        name, size = data[at : at + 4], struct.unpack_from("<I", data, at + 4)[0]
        at += 8
        if name == b"fmt ":
            form = _form(data[at : at + min(size, 40)])
        elif name == b"data":
            if form is None:
                raise SoundError("the WAV file has its samples before its format ('fmt ')")
            rest = len(data) - at
            size = rest if size == UNKNOWN else size  # of a program that wrote to a pipe
            if size > rest:
                raise SoundError(f"the WAV file is cut off: its header says {size} bytes of samples, found {rest}")
            kind, channels, rate, bits = form
            whole = bits // 8 * channels
            return Format(kind, channels, rate, bits, at, size - size % whole)
        at += size + size % 2  # chunks begin at even places
    raise SoundError("the WAV file has no samples: expected a chunk 'fmt ' and a chunk 'data'")


def _form(chunk: bytes) -> tuple[int, int, int, int]:
    """Read a chunk 'fmt ': kind, channels, rate, bits."""
    if len(chunk) < 16:
        raise SoundError(f"the WAV file's format has {len(chunk)} bytes, expected at least 16")
    kind, channels, rate, _, _, bits = struct.unpack_from("<HHIIHH", chunk)
    if kind == EXTENSIBLE and len(chunk) >= 26:
        kind = struct.unpack_from("<H", chunk, 24)[0]
    sane(channels, rate)
    if (kind, bits) not in {*((PCM, n) for n in (8, 16, 24, 32)), (FLOAT, 32), (FLOAT, 64)}:
        expected = "PCM (1) of 8, 16, 24 or 32 bits, or floats (3) of 32 or 64"
        raise SoundError(f"the WAV file has samples of format {kind} with {bits} bits, expected {expected}")
    return kind, channels, rate, bits


def samples(data: bytes, form: Format) -> np.ndarray:
    """Give the samples that a header describes, the mean of the channels: float32[samples] in [-1, 1]."""
    whole = form.bits // 8 * form.channels
    count = form.size // whole
    starts = range(0, count, BLOCK)
    raw = (np.frombuffer(data, np.uint8, whole * min(BLOCK, count - n), form.start + whole * n) for n in starts)
    return _joined((_floats(x, form).reshape(-1, form.channels).mean(1) for x in raw), form.rate, count, count)


def _floats(raw: np.ndarray, form: Format) -> np.ndarray:
    """Read bytes as samples: float32."""
    if form.kind == FLOAT:
        x: np.ndarray = raw.view(f"<f{form.bits // 8}").astype(np.float32)
    elif form.bits == 8:  # alone without a sign
        x = (raw.astype(np.float32) - 128) / 128
    elif form.bits == 24:
        wide = np.zeros((len(raw) // 3, 4), np.uint8)
        wide[:, 1:] = raw.reshape(-1, 3)
        x = (wide.view("<i4")[:, 0] >> 8).astype(np.float32) / 2**23
    else:
        x = raw.view(f"<i{form.bits // 8}").astype(np.float32) / 2 ** (form.bits - 1)
    return x
