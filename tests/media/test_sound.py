"""Sound: files that the standard library and scipy wrote, resampling against scipy, features against transformers."""

import io
import struct
import sys
import wave

import numpy as np
import pytest
from scipy import signal
from scipy.io import wavfile

from fdel.media import sound, spectrum
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


def written(x: np.ndarray, kind: str, subtype: str | None = None, rate: int = 16000) -> bytes:
    """A file, by soundfile."""
    out = io.BytesIO()
    pytest.importorskip("soundfile", reason="extra `media`").write(out, x, rate, format=kind, subtype=subtype)
    return out.getvalue()


def played(x: np.ndarray, container: str, codec: str, rate: int = 16000) -> bytes:
    """A file of a sound alone, int16[samples], by PyAV."""
    av, out = pytest.importorskip("av", reason="extra `video`"), io.BytesIO()
    with av.open(out, "w", format=container) as c:
        track = c.add_stream(codec, rate=rate, layout="mono")
        piece = av.AudioFrame.from_ndarray(x[None], "s16", "mono")
        piece.sample_rate, piece.pts = rate, 0
        c.mux([*track.encode(piece), *track.encode()])
    return out.getvalue()


@pytest.mark.parametrize(("kind", "subtype"), [("MP3", None), ("OGG", "VORBIS"), ("OGG", "OPUS"), ("FLAC", None)])
def test_blocks_are_what_one_reading_gives(kind, subtype):
    """Of several blocks; a seek between them would break the bits that frames of MP3 borrow from those before."""
    data = written(tone(9) / 2, kind, subtype)
    import soundfile

    whole, _ = soundfile.read(io.BytesIO(data), dtype="float32")
    assert len(whole) > 2 * sound.BLOCK
    np.testing.assert_allclose(sound.decode(data, most=10), np.clip(whole, -1, 1), atol=1e-6, rtol=0)


def unsaid(flac: bytes) -> bytes:
    """The same FLAC file without its number of samples, as programs write it to a pipe."""
    return flac[:21] + bytes([flac[21] & 0xF0, 0, 0, 0, 0]) + flac[26:]


def test_flac_that_does_not_say_its_length_is_read_up_to_the_limit(monkeypatch):
    data = written(np.tile(tone(1) / 2, 9), "FLAC")
    np.testing.assert_array_equal(sound.decode(unsaid(data), most=9), sound.decode(data, most=9))
    with pytest.raises(SoundError, match="found more than 8.99 seconds of sound .143840 samples a channel."):
        sound.decode(unsaid(data), most=8.99)
    with pytest.raises(SoundError, match="found 0.00 seconds"):
        sound.decode(unsaid(data)[: data.index(b"\xff\xf8")], most=1)  # no frame
    monkeypatch.setattr(sound, "FRAMES", 70_000)
    with pytest.raises(SoundError, match="found more than 4.375 seconds of sound .70000 samples a channel."):
        sound.decode(unsaid(data), most=60)


OTHERS = (
    "AIFF",
    "AU",
    "AVR",
    "CAF",
    "HTK",
    "SVX",
    "MAT4",
    "MAT5",
    "PAF",
    "PVF",
    "RF64",
    "SDS",
    "IRCAM",
    "VOC",
    "W64",
    "NIST",
)


def tagged(data: bytes) -> bytes:
    """A file behind a tag of MP3 of 300 bytes."""
    return b"ID3\4\0\0\0\0\2\54" + bytes(300) + data


def test_no_other_format_reaches_soundfile(monkeypatch):
    """Each that it would read is refused by its first bytes, also behind a tag; the refusal lists what is taken."""
    soundfile = pytest.importorskip("soundfile", reason="extra `media`")
    files = {kind: written(np.zeros(800), kind, "PCM_S8" if kind == "SVX" else "PCM_16") for kind in OTHERS}
    for data in files.values():
        soundfile.SoundFile(io.BytesIO(data)).close()
    taken = {kind: written(np.zeros(800), kind) for kind in ("FLAC", "OGG", "MP3")}
    calls, real = [], soundfile.SoundFile
    monkeypatch.setattr(soundfile, "SoundFile", lambda *given: [calls.append(1), real(*given)][1])
    aac = b"\xff\xf1\x50\x80" + bytes(99)
    for data in [*files.values(), *map(tagged, files.values()), aac, b"\xff", b"ID3", tagged(tagged(b"RIFF"))]:
        with pytest.raises(SoundError, match="WAV, FLAC, Ogg .Vorbis or Opus., MP3, MP4 .M4A. or WebM"):
            sound.decode(data, most=1)
    assert not calls
    for data in [*taken.values(), tagged(taken["MP3"])]:
        assert len(sound.decode(data, most=1)) >= 800
    assert len(calls) == 4


def test_what_soundfile_takes_for_something_else_is_refused(monkeypatch):
    monkeypatch.setattr(sound, "_signed", lambda data: "MP3")
    with pytest.raises(SoundError, match="found a file of AIFF that begins as MP3"):
        sound.decode(written(np.zeros(800), "AIFF"), most=1)


def test_damaged_files_are_said_to_be_damaged():
    """Nothing of what a library says of its own code."""
    pytest.importorskip("soundfile", reason="extra `media`")
    for name, data in {"MP3": b"\xff\xfb\x90\0" + bytes(400), "OGG": b"OggS" + bytes(99), "FLAC": b"fLaC"}.items():
        with pytest.raises(SoundError) as e:
            sound.decode(data, most=1)
        assert str(e.value) == f"the file begins as {name}, but is damaged or not a sound that can be read"


@pytest.mark.parametrize(
    ("container", "codec", "rate"),
    [("mp4", "aac", 16000), ("ipod", "aac", 44100), ("webm", "libopus", 48000), ("matroska", "pcm_s16le", 48000)],
)
def test_sounds_in_containers_are_heard(container, codec, rate):
    """A tone: exactly where it is stored as it is, else its strength and nothing else; no longer than is allowed."""
    x = (tone(1.5, rate) * 2**14).astype(np.int16)
    data = played(x, container, codec, rate)
    found = sound.decode(data, most=2)
    if codec == "pcm_s16le":
        np.testing.assert_array_equal(found, sound.resample(x.astype(np.float32) / 2**15, rate))
    strength = np.abs(np.fft.rfft(found[4000:20000])) / 8000
    assert abs(strength[440] - 0.5) < 0.02 and np.delete(strength, range(430, 451)).max() < 0.01
    with pytest.raises(SoundError, match="found more than 1 seconds of sound"):
        sound.decode(data, most=1)
    with pytest.raises(SoundError, match="the file is damaged or not a sound that can be read; it may be cut off$"):
        sound.decode(data[:60] + bytes(400), most=1)


def test_containers_without_a_sound_or_with_an_unknown_one():
    av, out = pytest.importorskip("av", reason="extra `video`"), io.BytesIO()
    with av.open(out, "w", format="mp4") as c:
        still = c.add_stream("mpeg4", rate=2)
        still.width, still.height, still.pix_fmt = 48, 32, "yuv420p"
        c.mux([*still.encode(av.VideoFrame(48, 32, "yuv420p")), *still.encode()])
    with pytest.raises(SoundError, match="the file plays nothing"):
        sound.decode(out.getvalue(), most=1)
    with pytest.raises(SoundError, match="found a sound of codec pcm_u8, expected one of aac, mp3"):
        sound.decode(played(np.zeros(4000, np.int16), "matroska", "pcm_u8"), most=1)


@pytest.mark.parametrize(
    ("module", "data", "extra"), [("av", b"\0\0\0\x18ftypM4A ", "video"), ("soundfile", b"fLaC", "media")]
)
def test_without_a_reader_the_error_names_the_extra(monkeypatch, module, data, extra):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(SoundError, match=rf"which is not WAV; .*pip install 'fdel\[{extra}\]'"):
        sound.decode(data, most=1)


@pytest.mark.parametrize("rate", [8000, 11025, 44100, 48000])
def test_long_sounds_are_resampled_in_pieces(rate, monkeypatch):
    """Whatever the pieces, the same; bit for bit where no BLAS takes part, which sums by where a row stands."""
    x = np.random.default_rng(rate).standard_normal(200_003).astype(np.float32)
    whole = sound.resample(x, rate)
    for piece in (1, 3000, 70_000):
        monkeypatch.setattr(spectrum, "PIECE", piece)
        np.testing.assert_allclose(sound.resample(x, rate), whole, atol=0 if rate % 1000 == 0 else 2e-6, rtol=0)


def test_features_of_long_sounds_are_those_of_transformers():
    """In numpy, of more than two pieces, in float32 and float64."""
    extractor = pytest.importorskip("transformers").WhisperFeatureExtractor()
    x = np.random.default_rng(0).standard_normal(65 * 16000 + 123) * np.linspace(0, 0.1, 65 * 16000 + 123)
    for samples in (x, x.astype(np.float32)):
        expected = extractor._np_extract_fbank_features([samples], "cpu")[0]
        np.testing.assert_allclose(sound.log_mel(samples, least=0), expected, atol=1e-6, rtol=0)
