"""Sound: files that the standard library and scipy wrote, resampling against scipy, features against transformers."""

import io
import struct
import wave

import numpy as np
import pytest
from scipy import signal
from scipy.io import wavfile

from fdel.media import sound
from fdel.media.sound import SoundError


def tone(seconds: float, rate: int = 16000, hertz: float = 440.0) -> np.ndarray:
    return np.sin(2 * np.pi * hertz * np.arange(int(seconds * rate)) / rate)


def wav(raw: bytes, bits: int = 16, channels: int = 1, rate: int = 16000) -> bytes:
    """A WAV file, by the standard library."""
    out = io.BytesIO()
    with wave.open(out, "wb") as file:
        file.setparams((channels, bits // 8, rate, 0, "NONE", ""))
        file.writeframes(raw)
    return out.getvalue()


def test_samples_of_every_width_are_read() -> None:
    """Each format gives back the numbers it was made of, within half of its own step; two channels give their mean."""
    x = np.random.default_rng(0).uniform(-0.99, 0.99, (501, 2))
    whole = {n: np.round(x * 2 ** (n - 1)).astype("<i4") for n in (8, 16, 24, 32)}
    raw = {
        8: (whole[8] + 128).astype(np.uint8).tobytes(),
        16: whole[16].astype("<i2").tobytes(),
        24: np.ascontiguousarray(whole[24].view(np.uint8).reshape(-1, 4)[:, :3]).tobytes(),
        32: whole[32].tobytes(),
    }
    for bits, samples in raw.items():
        found = sound.decode(wav(samples, bits, channels=2), most=1)
        assert found.dtype == np.float32 and np.abs(found - x.mean(1)).max() <= 2.0**-bits + 1e-7, bits
    for dtype in (np.float32, np.float64):
        out = io.BytesIO()
        wavfile.write(out, 16000, x.astype(dtype))
        np.testing.assert_allclose(sound.decode(out.getvalue(), most=1), x.mean(1), atol=1e-7)


def test_chunks_that_nobody_knows_are_passed_over() -> None:
    """A chunk of odd length before the samples, the extensible format, and a length that a pipe left open."""
    x = (tone(0.01) * 30000).astype("<i2").tobytes()
    plain = sound.decode(wav(x), most=1)
    extensible = struct.pack("<HHIIHHHHIH", 0xFFFE, 1, 16000, 32000, 2, 16, 22, 16, 4, 1) + bytes(14)
    body = b"odd!\3\0\0\0abc\0fmt " + struct.pack("<I", len(extensible)) + extensible + b"data\xff\xff\xff\xff" + x
    data = b"RIFF\xff\xff\xff\xffWAVE" + body
    np.testing.assert_array_equal(sound.decode(data, most=1), plain)


def test_files_that_are_no_sound_are_refused() -> None:
    """Each hostile file gets an error that says what is wrong, and a header of ten hours allocates nothing."""
    good = wav(bytes(32000))
    long = wav(b"", rate=16000)
    hours = long[:40] + struct.pack("<I", 36000 * 32000)
    cases = {
        "cut off: its header says 32000": good[:-1],
        "1152000000 bytes of samples, found 0": hours,
        "found 1.00 seconds of sound, expected more than 0 and at most 0.5": good,
        "found 0.00 seconds": long,
        "no samples: expected a chunk": good[:40],
        "format has 8 bytes": good[:16] + struct.pack("<I", 8) + good[20:28] + good[36:],
        "samples before its format": good[:12] + good[36:],
        "format 85 with 16 bits": good[:20] + b"\x55" + good[21:],
        "format 1 with 12 bits": good[:34] + b"\x0c" + good[35:],
        "found 0 channels": good[:22] + b"\0\0" + good[24:],
        "found 0 samples a second": good[:24] + bytes(4) + good[28:],
        "found b'<svg' at the beginning|not a sound that can be read": b"<svg xmlns=''/>",
        "b'' at the beginning|not a sound that can be read": b"",
    }
    for message, data in cases.items():
        with pytest.raises(SoundError, match=message):
            sound.decode(data, most=0.5 if "1.00" in message else 60)
    out = io.BytesIO()
    wavfile.write(out, 16000, np.array([0.0, np.nan], np.float32))
    with pytest.raises(SoundError, match="not finite"):
        sound.decode(out.getvalue(), most=1)


@pytest.mark.parametrize("rate", [8000, 11025, 22050, 44100, 48000, 96000])
def test_resampling_is_that_of_scipy_with_the_same_filter(rate: int) -> None:
    """Equal to scipy's polyphase filter to 2e-6 (sums in float32), and to the tone at the new rate to 1e-3."""
    x = np.random.default_rng(rate).standard_normal(rate // 10 + 7).astype(np.float32)
    found = sound.resample(x, rate)
    common = np.gcd(rate, 16000)
    up, down = 16000 // common, rate // common
    expected = signal.resample_poly(x.astype(np.float64), up, down, window=sound.lowpass(up, down) / up)
    assert found.dtype == np.float32 and len(found) == len(expected)
    np.testing.assert_allclose(found, expected, atol=5e-6)
    middle = slice(400, -400)
    found = sound.resample(tone(0.2, rate), rate)
    np.testing.assert_allclose(found[middle], tone(0.2)[middle], atol=1e-3)


def test_what_a_lower_rate_cannot_hold_is_gone() -> None:
    """A tone of 10 kHz is 60 dB lower at 16 kHz, where it would be heard as 6 kHz; one at 7 kHz keeps its strength."""
    strength = lambda hertz: np.abs(sound.resample(tone(0.2, 48000, hertz), 48000)[400:-400]).max()
    assert strength(10_000) < 1e-3 and 0.98 < strength(7_000) < 1.02


@pytest.mark.parametrize("bins", [80, 128])
def test_features_are_those_of_transformers(bins: int) -> None:
    """Equal to WhisperFeatureExtractor in numpy to 1e-6, with torch (float32) to 1e-3; also beyond half a minute."""
    extractor = pytest.importorskip("transformers").WhisperFeatureExtractor(feature_size=bins)
    rng = np.random.default_rng(bins)
    x = (tone(3.3) * 0.3 + 0.05 * rng.standard_normal(int(3.3 * 16000))).astype(np.float32)
    found = sound.log_mel(x, bins)
    assert found.shape == (bins, 3000) and found.dtype == np.float32
    padded = np.pad(x, (0, 30 * 16000 - len(x)))
    np.testing.assert_allclose(found, extractor._np_extract_fbank_features([padded], "cpu")[0], atol=1e-6)
    np.testing.assert_allclose(found, extractor(x, sampling_rate=16000).input_features[0], atol=1e-3)
    long = np.tile(x, 10)[: 31 * 16000]
    expected = extractor(long, sampling_rate=16000, truncation=False, padding="longest").input_features[0]
    np.testing.assert_allclose(sound.log_mel(long, bins), expected, atol=1e-3)


def test_other_formats_are_read_by_soundfile() -> None:
    """FLAC keeps 16-bit samples as they are; its length is looked at first, and a file cut short is refused."""
    soundfile, x, out = pytest.importorskip("soundfile"), np.round(tone(0.3) * 2**15 * 0.9) / 2**15, io.BytesIO()
    soundfile.write(out, np.stack([x, x], 1), 16000, format="FLAC", subtype="PCM_16")
    np.testing.assert_allclose(sound.decode(out.getvalue(), most=1), x, atol=1e-7)
    with pytest.raises(SoundError, match="found 0.30 seconds of sound, expected more than 0 and at most 0.2"):
        sound.decode(out.getvalue(), most=0.2)
    with pytest.raises(SoundError, match="not a sound that can be read"):
        sound.decode(out.getvalue()[:30], most=1)
