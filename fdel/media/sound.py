"""Sounds as arrays: decoding, resampling, and the log-mel features of Whisper (arXiv:2212.04356, section 2.2).

What a file says of itself is checked before anything of its size is allocated.
"""

import functools
import io
import math
import struct
from typing import NamedTuple

import numpy as np

RATE = 16_000  # samples a second, of all features here
FRAME, HOP = 400, 160  # samples: 25 ms windows every 10 ms
CHANNELS = 32  # the most of a file
RATES = (
    1_000,
    384_000,
    25,
)  # samples a second of a file: the least, the most, and what divides them, which bounds filters
FRAMES = 75_000_000  # the most of a compressed file: 26 minutes at 48 kHz
BLOCK = 2**16  # frames decoded at a time
ZEROS = 64  # zero crossings of the resampling filter's sinc on either side
BETA = 9.0  # of its Kaiser window: what folds back is 90 dB lower
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

    WAV is read here; all else (FLAC, Ogg, MP3) by soundfile, extra `media`. SoundError says what is wrong with a file.
    """
    if data[:4] == b"RIFF" and data[8:12] == b"WAVE":
        form = header(data)
        bound(form.seconds, most)
        return resample(samples(data, form), form.rate)
    try:
        import soundfile
    except ImportError as e:
        found = f"found {data[:4]!r} at the beginning of the file, which is not WAV"
        raise SoundError(f"{found}; other formats need the extra `media` where this runs") from e
    try:
        with soundfile.SoundFile(io.BytesIO(data)) as file:
            sane(file.channels, file.samplerate)
            bound(file.frames / file.samplerate, most)
            if file.frames > FRAMES:
                raise SoundError(
                    f"found {file.frames} samples a channel, expected at most {FRAMES}; lower the rate or cut the file"
                )
            # Of as many channels as a header likes to say, only the mean is kept. No more is read than it says.
            blocks = file.blocks(BLOCK, frames=file.frames, dtype="float32", always_2d=True)
            return resample(finite(np.concatenate([x.mean(1) for x in blocks])), file.samplerate)
    except (soundfile.SoundFileError, RuntimeError) as e:
        raise SoundError(f"the file is not a sound that can be read: {getattr(e, 'error_string', e)}") from e


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


def finite(x: np.ndarray) -> np.ndarray:
    """Clip float32[samples] to [-1, 1]; SoundError for what is no number."""
    if not np.isfinite(x).all():
        raise SoundError("the file has samples that are not finite numbers")
    return np.clip(x, -1.0, 1.0)


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
    raw = np.frombuffer(data, np.uint8, form.size, form.start)
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
    return finite(x.reshape(-1, form.channels).mean(1))


@functools.lru_cache(16)
def lowpass(up: int, down: int) -> np.ndarray:
    """Design the filter of a change of rate by up / down: a sinc in a Kaiser window, float64[2 half + 1].

    It is at `up` times the rate. Its cutoff is the lower of both Nyquist frequencies, less half the width of its slope.
    """
    wide = max(up, down)
    half = ZEROS * wide
    cutoff = 1.0 - 3.0 / ZEROS
    return cutoff * up / wide * np.sinc(cutoff * np.arange(-half, half + 1) / wide) * np.kaiser(2 * half + 1, BETA)


def resample(x: np.ndarray, rate: int, to: int = RATE) -> np.ndarray:
    """Change the rate of float32[samples]: ceil(samples * to / rate) of them, float32.

    Output n is the sum over m of x[m] h[n down - m up], h of `lowpass`. All outputs with the same n mod up take the same
    filter values, of inputs that lie `down` apart: one product of a matrix and a vector each.
    """
    if rate == to or not len(x):
        return x.astype(np.float32)
    common = math.gcd(rate, to)
    up, down = to // common, rate // common
    h = lowpass(up, down)
    half, count = len(h) // 2, -(-len(x) * up // down)
    reach = half // up + 1  # inputs on either side
    padded = np.pad(x, (reach, reach + down)).astype(np.float32)
    windows = np.lib.stride_tricks.sliding_window_view(padded, 2 * reach + 1)
    out = np.zeros(count, np.float32)
    for first in range(min(up, count)):
        at, phase = divmod(first * down, up)
        taps = half + phase - up * np.arange(-reach, reach + 1)  # places in h of the inputs around `at`
        filter = np.where((taps >= 0) & (taps < len(h)), h[np.clip(taps, 0, len(h) - 1)], 0.0)
        n = len(range(first, count, up))
        out[first::up] = windows[at : at + n * down : down][:n] @ filter.astype(np.float32)
    return out


@functools.cache
def mel_filters(bins: int) -> np.ndarray:
    """Triangles on the mel scale of Slaney's Auditory Toolbox, each of area 1 in Hz: float64[FRAME // 2 + 1, bins].

    Linear below 1 kHz, with 15 mels there, and logarithmic above, with 27 for a factor of 6.4.
    """
    mels = np.linspace(0.0, 15 + 27 * math.log(RATE / 2 / 1000) / math.log(6.4), bins + 2)
    edges = np.where(mels < 15, mels * 200 / 3, 1000 * np.exp((mels - 15) * math.log(6.4) / 27))
    low, peak, high = edges[:-2], edges[1:-1], edges[2:]
    hertz = np.linspace(0, RATE / 2, FRAME // 2 + 1)[:, None]
    triangles = np.minimum((hertz - low) / (peak - low), (high - hertz) / (high - peak))
    return np.maximum(triangles, 0) * 2 / (high - low)


def log_mel(x: np.ndarray, bins: int = 80, *, least: int = 30 * RATE) -> np.ndarray:
    """Compute Whisper's features of a sound at 16 kHz: float32[bins, samples // HOP], of silence up to `least` samples.

    Powers of a short-time Fourier transform (Hann windows, centred, the ends reflected) through `mel_filters`, log10, no
    lower than 8 below the loudest of the whole sound, and scaled: (x + 4) / 4. Equal to transformers'
    WhisperFeatureExtractor in numpy; with torch that is in float32, 1e-4 away.
    """
    if x.ndim != 1:
        raise ValueError(f"found samples of shape {x.shape}, expected one axis; average the channels")
    x = np.pad(x, (0, max(0, max(least, FRAME) - len(x))))
    x = np.pad(x.astype(np.float64), FRAME // 2, mode="reflect")
    frames = np.lib.stride_tricks.sliding_window_view(x, FRAME)[::HOP][:-1]
    window = np.hanning(FRAME + 1)[:-1]  # periodic
    out = np.empty((bins, len(frames)), np.float64)
    for at in range(0, len(frames), 3000):  # half a minute at a time: the transforms are large
        power = np.abs(np.fft.rfft(frames[at : at + 3000] * window)) ** 2
        out[:, at : at + 3000] = np.log10(np.maximum(power @ mel_filters(bins), 1e-10)).T
    return ((np.maximum(out, out.max() - 8.0) + 4.0) / 4.0).astype(np.float32)
