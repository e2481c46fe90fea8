"""From rows to token ids: every text is tokenized once, on all cores; truncation; a row that cannot be used is noted."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fdel import text
from fdel.train.data import kinds
from fdel.train.data.files import Row
from fdel.train.data.rows import Draft, common, drafts
from fdel.train.data.settings import Report, Settings, note

NOT_A_PREFIX = "warning, the prompt's tokens are not the first of prompt and completion"
LONGEST = 2**24  # characters of a text: a tokenizer takes about 140 bytes for each
TOGETHER = 2**22  # characters that are tokenized together, if it is more than one text
SHOWN = 400  # characters of a complaint

Ids = dict[tuple[bool, str], Any]  # whether it is a chat, and the text -> ids, or the ValueError that there are none


class UnknownToken(ValueError):
    """A token of the tokenizer that the model does not have, which no choice of rows can mend."""


@dataclass(frozen=True)
class Example:
    """Sequences that belong together (one, or chosen and rejected), as int32 ids and bool masks of what is learnt.

    The mask of judged steps is their labels, int32.
    """

    ids: tuple[np.ndarray, ...]
    masks: tuple[np.ndarray, ...]
    numbers: dict[str, Any] = field(default_factory=dict)


def encode_rows(
    rows: Sequence[tuple[str, Row | ValueError | None]], tok: text.Tokenizer, settings: Settings
) -> tuple[list[Example], Report]:
    """Make examples of (place, row) pairs, in order. A row that cannot be used is noted, or raised as a ValueError.

    A token that the model does not have is a ValueError, unless the row brings it as an id: `Settings.vocab`.
    """
    found: list[tuple[str, tuple[Draft, ...], dict]] = []
    report = Report(read=len(rows))
    for place, row in rows:
        if row is None:
            report += note("left out by the transform", place)
            continue
        try:
            if isinstance(row, ValueError):
                raise row
            made = [(place, sides, numbers) for sides, numbers in drafts(row, tok, settings)]
            _check([t for _, sides, _ in made for d in sides for t in (d.text, d.prompt) if t is not None])
            found += made
        except BaseException as e:
            if not _of_row(e):
                raise
            report += note(_complaint(e, place, settings), place)
    between = [Draft(settings.separator, chat=True)] if settings.kind == "process" else []
    ids = _encode(tok, [*between, *(d for _, sides, _ in found for d in sides)])
    examples = []
    for place, sides, numbers in found:
        try:
            _raise_failed(sides, ids)
            make = _special if settings.kind in ("embedding", "process") else _example
            example, complaint = make(sides, numbers, ids, tok, settings)
            if example:
                _known(example, sides, tok, settings)
                examples.append(example)
        except BaseException as e:
            if not _of_row(e):
                raise
            complaint = _complaint(e, place, settings)
        if complaint:
            report += note(complaint, place)
    tokens = sum(len(x) for e in examples for x in e.ids)
    learnt = sum(int(np.count_nonzero(x if x.dtype == bool else x >= 0)) for e in examples for x in e.masks)
    return examples, report + Report(0, len(examples), tokens, learnt)


def _complaint(error: BaseException, place: str, settings: Settings) -> str:
    """Say why a row cannot be used; ValueError if bad rows are to be raised, or all rows would be."""
    said = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
    if settings.bad_rows == "raise" or isinstance(error, UnknownToken):
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


def _known(example: Example, sides: tuple[Draft, ...], tok: text.Tokenizer, settings: Settings) -> None:
    """Raise ValueError for ids that the model does not have."""
    known = 2**31 if settings.vocab is None else settings.vocab
    for tokens in example.ids:
        if len(tokens) and tokens.max() >= known:
            wrong = int(tokens.max())
            if any(d.ids is not None and not d.chat for d in sides):
                raise ValueError(f"input_ids hold {wrong}; the model has the ids 0 to {known - 1}")
            raise UnknownToken(
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


def _raise_failed(sides: tuple[Draft, ...], ids: Ids) -> None:
    for d in sides:
        for said in (d.text, d.prompt):
            if isinstance(e := ids.get((d.chat, said or "")), ValueError):
                raise e


def _example(
    sides: tuple[Draft, ...], numbers: dict, ids: dict, tok: text.Tokenizer, settings: Settings
) -> tuple[Example | None, str | None]:
    """Finish one example; or say why there is none, or what is odd about it."""
    tokens, starts, complaint = [], [], None
    for d in sides:
        found = d.ids if d.ids is not None else ids[d.chat, d.text]
        before = [] if d.prompt is None else ids[d.chat, d.prompt]
        same = common(before, found)
        if settings.kind != "prompt":
            complaint = NOT_A_PREFIX if same < len(before) else complaint
            if not d.chat and d.ids is None and "eos" in tok.ids and found[-1:] != [tok.ids["eos"]]:
                found = [*found, tok.ids["eos"]]
        tokens.append(np.asarray(found, np.int32))
        starts.append(same)
    start = min(starts)
    kept = settings.max_prompt or start, settings.max_completion or max(map(len, tokens))
    tokens = [t[max(0, start - kept[0]) : start + kept[1]] for t in tokens]
    start, most = min(start, kept[0]), max(map(len, tokens))
    if min(map(len, tokens)) == 0:
        return None, "no tokens"
    if most > settings.length and (settings.overlong == "drop" or settings.kind == "prompt"):
        return None, f"longer than length={settings.length}"
    end = None if settings.whole else settings.length
    masks = []
    for d, t in zip(sides, tokens, strict=True):
        mask = np.ones(len(t), bool) if d.mask is None else np.asarray(d.mask, bool)
        masks.append(mask & (np.arange(len(t)) >= start))
    if settings.kind == "prompt":
        return Example(tuple(tokens), tuple(np.ones(len(t), bool) for t in tokens)), None
    if not all(m[1:end].any() for m in masks):  # nothing predicts the first token
        reason = "no token to learn" if settings.whole else f"no token to learn within length={settings.length}"
        return None, reason
    if settings.kind == "unpaired":
        numbers = numbers | {"prompt": start}
    return Example(tuple(t[:end] for t in tokens), tuple(m[:end] for m in masks), numbers), complaint


def _special(
    sides: tuple[Draft, ...], numbers: dict, ids: dict, tok: text.Tokenizer, settings: Settings
) -> tuple[Example | None, str | None]:
    """Finish an example of documents, or of judged steps; or say why there is none, or what is odd about it."""
    texts, of, odd = [d.text for d in sides], lambda t: ids[sides[0].chat, t], None
    if settings.kind == "process":
        tokens, masks = kinds.judged(texts, numbers["labels"], of, tok, settings)
        longest = len(tokens[0])
        tokens, masks = [x[: settings.length] for x in tokens], [x[: settings.length] for x in masks]
    else:
        longest = max(len(of(t)) for t in texts[: settings.sides])
        (tokens, masks), odd = kinds.embedded(texts, of, tok, settings)
    if longest > settings.length and settings.overlong == "drop":
        return None, f"longer than length={settings.length}"
    if min(len(x) for x in tokens[:2]) == 0:
        return None, "no tokens"
    if settings.kind == "process" and not (masks[0] >= 0).any():
        return None, f"no token to learn within length={settings.length}"
    return Example(tuple(tokens), tuple(masks)), odd
