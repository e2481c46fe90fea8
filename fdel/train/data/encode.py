"""From rows to token ids: every text is tokenized once, on all cores; truncation; a row that cannot be used is noted."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from fdel import text
from fdel.media import sight as sights
from fdel.train.data import images
from fdel.train.data.files import Row
from fdel.train.data.finish import Example, Ids, Sides, finished
from fdel.train.data.rows import Draft, drafts
from fdel.train.data.settings import Report, Settings, note

LONGEST = 2**24  # characters of a text: a tokenizer takes about 140 bytes for each
TOGETHER = 2**22  # characters that are tokenized together, if it is more than one text
SHOWN = 400  # characters of a complaint


class Refused(ValueError):
    """What no choice of rows can mend: a token that the model does not have."""


def encode_rows(
    rows: Sequence[tuple[str, Row | ValueError | None]], tok: text.Tokenizer, settings: Settings,
    folder: Path | None = None,
) -> tuple[list[Example], Report]:  # fmt: skip
    """Make examples of (place, row) pairs, in order; their images may be files below `folder`.

    A row that cannot be used is noted, or raised as a ValueError.
    A token that the model does not have is a ValueError, unless the row brings it as an id: `Settings.vocab`.
    """
    found: list[tuple[str, Sides, dict]] = []
    report = Report(read=len(rows))
    listed = settings.sight is not None and bool(tok.templates) and not images.takes_texts(tok)
    for place, row in rows:
        if row is None:
            report += note("left out by the transform", place)
            continue
        try:
            if isinstance(row, ValueError):
                raise row
            made = [(place, sides, numbers) for sides, numbers in _drafts(row, folder, tok, settings, listed)]
            _check([t for _, sides, _ in made for d in sides for t in (d.text, d.prompt) if t is not None])
            found += made
        except BaseException as e:
            report += note(_complaint(e, place, settings), place)
    between = [Draft(settings.separator, chat=True)] if settings.kind == "process" else []
    ids = _encode(tok, [*between, *(d for _, sides, _ in found for d in sides)])
    examples = []
    for place, sides, numbers in found:
        try:
            for side, said in ((d, said) for d in sides for said in (d.text, d.prompt)):
                if isinstance(failed := ids.get((side.chat, said or "")), ValueError):
                    raise failed
            example, complaint = finished(sides, numbers, ids, tok, settings)
            if example:
                _known(example, sides, tok, settings)
                examples.append(example)
        except BaseException as e:
            complaint = _complaint(e, place, settings)
        if complaint:
            report += note(complaint, place)
    tokens = sum(len(x) for e in examples for x in e.ids)
    return examples, report + Report(0, len(examples), tokens, *_learnt(examples, settings))


def _learnt(examples: Sequence[Example], settings: Settings) -> tuple[int, int]:
    """Count the tokens that masks have to be learnt, none of prompts, and those of them that stand for media."""
    if settings.kind == "prompt":
        return 0, 0
    pairs = [(t, x if x.dtype == bool else x >= 0) for e in examples for t, x in zip(e.ids, e.masks, strict=True)]
    entries = () if settings.sight is None else settings.sight.entries
    shown = sum(int(np.isin(t, entries)[x].sum()) for t, x in pairs) if entries else 0
    return sum(int(np.count_nonzero(x)) for _, x in pairs), shown


def _drafts(
    row: Row, folder: Path | None, tok: text.Tokenizer, settings: Settings, listed: bool
) -> Iterator[tuple[Sides, dict[str, Any]]]:
    """Draft what a row says, with what it shows and plays."""
    sight = settings.sight
    row, shown = images.taken(row, folder, settings.kind, sight, tok, listed)
    write: Any = lambda said: said if said is None else sights.written(sight, said)
    each = iter(shown)
    for sides, numbers in drafts(row, tok, settings):
        if shown and sight is not None and sight.around and any(d.ids is not None and not d.chat for d in sides):
            raise ValueError("this model's processor writes text around images, which input_ids lack; give texts")
        around = [replace(d, text=write(d.text), prompt=write(d.prompt)) for d in sides] if shown else sides
        yield tuple(replace(d, images=next(each)) for d in around) if shown else sides, numbers


def _complaint(error: BaseException, place: str, settings: Settings) -> str:
    """Say why a row cannot be used; ValueError if bad rows are to be raised, or all rows would be."""
    if not _of_row(error):
        raise error
    said = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
    if settings.bad_rows == "raise" or isinstance(error, Refused):
        raise ValueError(f"{place}: {said}") from error
    return said[:SHOWN]


def _of_row(error: BaseException) -> bool:
    """Whether it may be the row's fault; a tokenizer that panics raises what is no Exception."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def _check(texts: Sequence[Any]) -> None:
    for said in texts:
        if not isinstance(said, str):
            raise ValueError(f"expected a string, found {type(said).__name__}")
        if len(said) > LONGEST:
            raise ValueError(f"a text of {len(said):,} characters, the most is {LONGEST:,}; split the row")
        try:
            said.encode()
        except UnicodeEncodeError as e:
            raise ValueError("a text with a lone surrogate, which no tokenizer takes") from e


def _known(example: Example, sides: Sides, tok: text.Tokenizer, settings: Settings) -> None:
    """Raise ValueError for ids that the model does not have."""
    known = 2**31 if settings.vocab is None else settings.vocab
    for tokens in example.ids:
        if len(tokens) and tokens.max() >= known:
            wrong = int(tokens.max())
            if any(d.ids is not None and not d.chat for d in sides):
                raise ValueError(f"input_ids hold {wrong}; the model has the ids 0 to {known - 1}")
            raise Refused(
                f"token {wrong}, {tok.backend.id_to_token(wrong)!r}, is none of the model's {known}; the "
                f"tokenizer has {tok.backend.get_vocab_size()}: use the model's own, or a model with as many embeddings"
            )


# ---- tokens --------------------------------------------------------------------------------------------------------


def _encode(tok: text.Tokenizer, found: Sequence[Draft]) -> Ids:
    """Tokenize all texts, on all cores, each one once."""
    ids: Ids = {}
    for chat in (False, True):
        here = [d for d in found if d.chat == chat]
        texts = list({d.text for d in here if d.ids is None} | {d.prompt for d in here if d.prompt is not None})
        for some in _together(texts):
            ids |= {(chat, t): e for t, e in zip(some, _tokenize(tok, some, not chat), strict=True)}
    return ids


def _together(texts: Sequence[str]) -> Iterator[list[str]]:
    """Divide texts into lists of a bounded size."""
    here: list[str] = []
    size = 0
    for said in texts:
        if here and size + len(said) > TOGETHER:
            yield here
            here, size = [], 0
        here.append(said)
        size += len(said)
    if here:
        yield here


def _tokenize(tok: text.Tokenizer, texts: list[str], special: bool) -> list[Any]:
    """Tokenize texts; of one that the tokenizer fails on, give the ValueError."""
    try:
        return [e.ids for e in tok.backend.encode_batch_fast(texts, add_special_tokens=special)]
    except BaseException as e:
        if not _of_row(e):
            raise
        if len(texts) == 1:
            return [ValueError(f"the tokenizer fails on {texts[0]!r:.40} ({type(e).__name__}: {e})")]
    half = len(texts) // 2
    return _tokenize(tok, texts[:half], special) + _tokenize(tok, texts[half:], special)
