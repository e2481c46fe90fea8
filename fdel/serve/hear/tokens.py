"""The special tokens of a Whisper model, by their texts in its tokenizer and by generation_config.json."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LONGEST = 2**20  # bytes of a generation_config.json


@dataclass(frozen=True)
class Tokens:
    """Ids. From `first_time` on each id is a time within the window, 20 ms after the one before.

    A model of English alone has no languages and no tasks. `never` is not written at all, `not_first` not as the first;
    `latest_first` is the latest first time in steps of 20 ms, `alignment` names (layer, head) that follow the sound.
    """

    start: int  # of a transcript
    end: int
    no_times: int
    no_speech: int
    previous: int | None = None  # what was said before follows
    transcribe: int | None = None
    translate: int | None = None
    languages: tuple[tuple[str, int], ...] = ()  # ("en", id), ...
    never: tuple[int, ...] = ()
    not_first: tuple[int, ...] = ()
    latest_first: int | None = 50
    alignment: tuple[tuple[int, int], ...] = ()

    first_time = property(lambda self: self.no_times + 1)

    def prompt(self, language: str | None, task: str, times: bool) -> list[int]:
        """Give what a window's transcript begins with. ValueError for a language or task that the model does not have."""
        ids, known = [self.start], dict(self.languages)
        if language is not None and known:
            if language not in known:
                raise ValueError(f"found language {language!r}, expected one of {', '.join(sorted(known))}")
            ids.append(known[language])
        elif language not in (None, "en"):
            raise ValueError(f"found language {language!r}, expected 'en': this model knows no other")
        word = {"transcribe": self.transcribe, "translate": self.translate}[task]
        if word is not None:
            ids.append(word)
        elif task == "translate":
            raise ValueError("this model knows English alone and does not translate; use a multilingual one")
        return ids if times else [*ids, self.no_times]


def read(vocabulary: Mapping[str, int], config: Mapping[str, Any], layers: int, heads: int) -> Tokens:
    """Find the special tokens in a tokenizer's vocabulary {text: id} and the dict of a generation_config.json.

    Without `alignment_heads` in it, those of the upper half of the decoder's layers are meant, as the first files of
    Whisper were read. ValueError for a vocabulary that is not Whisper's, and for values that cannot be.
    """
    named = lambda *texts: next((vocabulary[f"<|{t}|>"] for t in texts if f"<|{t}|>" in vocabulary), None)
    start, end, no_times = named("startoftranscript"), named("endoftext"), named("notimestamps")
    if start is None or end is None or no_times is None:
        expected = "<|startoftranscript|>, <|endoftext|> and <|notimestamps|>"
        raise ValueError(f"the tokenizer is not Whisper's: expected {expected} in it")
    spoken = named("transcribe") is not None and config.get("is_multilingual", True)
    found = {t[2:-2]: i for t, i in vocabulary.items() if re.fullmatch(r"<\|[a-z]{2,3}\|>", t) and start < i < no_times}
    heads_ = config.get("alignment_heads") or [[i, h] for i in range(layers // 2, layers) for h in range(heads)]
    wrong = [x for x in heads_ if not (len(x) == 2 and 0 <= x[0] < layers and 0 <= x[1] < heads)]
    if wrong:
        raise ValueError(f"generation_config.json: alignment_heads has {wrong[0]}, of {layers} layers of {heads} heads")
    speech = named("nospeech", "nocaptions")
    return Tokens(
        start, end, no_times, no_times - 1 if speech is None else speech, named("startofprev"),
        named("transcribe") if spoken else None, named("translate") if spoken else None,
        tuple(sorted(found.items())) if spoken else (), tuple(config.get("suppress_tokens") or ()),
        tuple(config.get("begin_suppress_tokens") or ()), config.get("max_initial_timestamp_index", 50),
        tuple((a, b) for a, b in heads_),
    )  # fmt: skip


def of(directory: str | Path, vocabulary: Mapping[str, int], cfg: Any) -> Tokens:
    """Read them for a checkpoint directory, `cfg` its `whisper.Config`; without a generation_config.json by name alone."""
    file = Path(directory) / "generation_config.json"
    if file.is_file() and file.stat().st_size > LONGEST:
        raise ValueError(f"{file} has {file.stat().st_size} bytes, expected at most {LONGEST}")
    config = json.loads(file.read_bytes()) if file.is_file() else {}
    return read(vocabulary, config, cfg.layers, cfg.heads)
