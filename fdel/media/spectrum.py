"""Resampling, and the log-mel features of Whisper (arXiv:2212.04356, section 2.2).

Long sounds are worked on in pieces: beside one and what becomes of it, little memory is taken.
"""

import functools
import math

import numpy as np

RATE = 16_000  # samples a second, of all features here
FRAME, HOP = 400, 160  # samples: 25 ms windows every 10 ms
ZEROS = 64  # zero crossings of the resampling filter's sinc on either side
BETA = 9.0  # of its Kaiser window: what folds back is 90 dB lower
PIECE = 2**20  # samples resampled at a time


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
        return x.astype(np.float32, copy=False)
    common = math.gcd(rate, to)
    up, down = to // common, rate // common
    h = lowpass(up, down)
    half, count = len(h) // 2, -(-len(x) * up // down)
    reach = half // up + 1  # inputs on either side
    taps = half + np.arange(up)[:, None] - up * np.arange(-reach, reach + 1)  # of each phase, places in h of the inputs
    filters = np.where((taps >= 0) & (taps < len(h)), h[np.clip(taps, 0, len(h) - 1)], 0.0).astype(np.float32)
    out = np.empty(count, np.float32)
    size = -(-PIECE // (64 * down)) * 64 * up
    starts = range(0, max(1, count - 2 * up), size)  # the last piece has the rest: no product of a single row
    for start in starts:
        piece = out[start:] if start == starts[-1] else out[start : start + size]
        before = start // up * down - reach  # the first input, and behind the last one
        after = before + 2 * reach + (len(piece) // up + 2) * down
        inputs = np.zeros(after - before, np.float32)
        known = x[max(0, before) : after]
        inputs[max(0, -before) :][: len(known)] = known
        windows = np.lib.stride_tricks.sliding_window_view(inputs, 2 * reach + 1)
        for first in range(min(up, len(piece))):
            at, phase = divmod(first * down, up)
            n = len(range(first, len(piece), up))
            piece[first::up] = windows[at : at + n * down : down][:n] @ filters[phase]
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
    length = max(len(x), least, FRAME)
    window = np.hanning(FRAME + 1)[:-1]  # periodic
    out = np.empty((bins, length // HOP), np.float64)
    for at in range(0, out.shape[1], 3000):  # half a minute at a time: the transforms are large
        n = min(3000, out.shape[1] - at)
        places = np.abs(np.arange((n - 1) * HOP + FRAME) + at * HOP - FRAME // 2)
        places = np.minimum(places, 2 * (length - 1) - places)  # the end too is reflected
        sounds = places < len(x)
        piece = np.zeros(len(places), np.float64)
        piece[sounds] = x[places[sounds]]
        frames = np.lib.stride_tricks.sliding_window_view(piece, FRAME)[::HOP]
        power = np.abs(np.fft.rfft(frames * window)) ** 2
        out[:, at : at + n] = np.log10(np.maximum(power @ mel_filters(bins), 1e-10)).T
    np.maximum(out, out.max() - 8.0, out=out)
    out += 4.0
    out /= 4.0
    return out.astype(np.float32)
