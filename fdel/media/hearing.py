"""Sounds for models that see and hear, as Qwen3-Omni does: features in chunks of a second, and their tokens in a prompt.

A `Sound` stands in a prompt as a `Picture` does: `sight.expand` puts both in their places, `senses.gather` makes arrays.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from fdel.media import sound
from fdel.media.image import Picture

FIXED = {"sampling_rate": sound.RATE, "hop_length": sound.HOP, "n_fft": sound.FRAME, "dither": 0.0}

# Keys of a feature extractor in a file that says what is done to images too.
KEYS = frozenset(
    """feature_extractor_type feature_size sampling_rate hop_length n_fft dither chunk_length n_samples nb_max_frames
    padding_side padding_value padding return_attention_mask mel_filters truncation""".split()
)


@dataclass(frozen=True)
class Settings:
    """What is done to a sound: `bins` of mel, chunks of so many `frames`. `marks` stand around one that is in a video."""

    token: int  # of an entry
    bins: int = 128
    frames: int = 100
    marks: tuple[int, ...] = ()


@dataclass(frozen=True)
class Sound:
    """A sound as a family's tower takes it, and the tokens that stand for it in a prompt; see `Picture`."""

    features: np.ndarray  # float32[chunks bins frames]
    lengths: np.ndarray  # int32[chunks], frames of each
    run: tuple[int, ...]
    turns: np.ndarray | None = None


@dataclass(frozen=True)
class Film:
    """A video and its sound, whose tokens stand in the order of their times."""

    picture: Picture
    sound: Sound
    run: tuple[int, ...]
    turns: np.ndarray


def read(config: Mapping[str, Any], processor: Mapping[str, Any]) -> Settings | None:
    """Read the settings for the tower of a thinker_config's audio_config from a preprocessor_config.json.

    None for a model that does not hear. ValueError for features that are not those of `sound.log_mel`.
    """
    audio, token = config.get("audio_config"), config.get("audio_token_id")
    if not isinstance(audio, Mapping) or not isinstance(token, int):
        return None
    bins = audio.get("num_mel_bins", 128)
    for key, want in ({"feature_size": bins} | FIXED).items():
        if processor.get(key, want) != want:
            raise ValueError(f"{key!r}: found {processor[key]} in the feature extractor's file, expected {want}")
    marks = tuple(config[k] for k in ("audio_start_token_id", "audio_end_token_id") if isinstance(config.get(k), int))
    return Settings(token, bins, 2 * audio.get("n_window", 50), marks if len(marks) == 2 else ())


def states(frames: np.ndarray) -> np.ndarray:
    """Count the entries of chunks of so many frames: what three convolutions of stride 2 leave."""
    for _ in range(3):
        frames = (frames - 1) // 2 + 1
    return frames


def longest(s: Settings, tokens: int) -> float:
    """Give the length in seconds of the longest sound that so many tokens stand for."""
    whole, rest = divmod(max(0, tokens), int(states(np.array(s.frames))))
    frames = whole * s.frames + int(np.searchsorted(states(np.arange(s.frames)), rest, "right")) - 1
    return ((frames + 1) * sound.HOP - 1) / sound.RATE


def prepare(s: Settings, samples: np.ndarray) -> Sound:
    """Prepare a sound, float32[samples] at 16 kHz (`sound.decode`), for the tower.

    ValueError for one shorter than a window of the Fourier transform.
    """
    if len(samples) < sound.FRAME:
        raise ValueError(
            f"found {len(samples)} samples, expected at least {sound.FRAME}: {sound.FRAME / sound.RATE:g} seconds"
        )
    mel = sound.log_mel(samples, s.bins, least=0)
    chunks = -(-mel.shape[1] // s.frames)
    lengths = np.minimum(s.frames, mel.shape[1] - s.frames * np.arange(chunks)).astype(np.int32)
    mel = np.pad(mel, ((0, 0), (0, chunks * s.frames - mel.shape[1])))
    features = mel.reshape(s.bins, chunks, s.frames).swapaxes(0, 1)
    return Sound(features, lengths, (s.token,) * int(states(lengths).sum()))


def together(s: Settings, picture: Picture, heard: Sound) -> Film:
    """Put a video and its sound in the order of their times; frames stand before what is heard at the same time."""
    if picture.turns is None or len(s.marks) != 2:
        raise ValueError(
            f"found a video without turns, or marks {s.marks}: expected a model whose sounds stand in videos"
        )
    at = np.arange(len(heard.run), dtype=np.int32)
    turns = np.concatenate([picture.turns, np.repeat(at[:, None], 3, 1)])
    order = np.argsort(turns[:, 0], kind="stable")
    run = np.array(picture.run + heard.run)[order]
    begin, end = (np.full((1, 3), n) for n in (0, turns.max() + 2))
    return Film(picture, heard, (s.marks[0], *run.tolist(), s.marks[1]), np.concatenate([begin, turns[order] + 1, end]))
