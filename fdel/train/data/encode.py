"""From rows to token ids: every text is tokenized once, on all cores; truncation; a row that cannot be used is noted."""

from bisect import bisect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fdel import text
from fdel.text.tokenizer import encoding
from fdel.train.data.files import Row
from fdel.train.data.rows import Draft, common, drafts
from fdel.train.data.settings import Report, Settings, note
from fdel.train.losses.reward_model import process_row
from fdel.train.losses.spans import ENDS, STARTS
from fdel.train.losses.stats import IGNORE

NOT_A_PREFIX = "warning, the prompt's tokens are not the first of prompt and completion"
LONGEST = 2**24  # characters of a text: a tokenizer takes about 140 bytes for each
TOGETHER = 2**22  # characters that are tokenized together, if it is more than one text
SHOWN = 400  # characters of a complaint

Ids = dict[tuple[bool, str], Any]  # whether it is a chat, and the text -> ids, or the ValueError that there are none
Sides = tuple[Draft, ...]
Finished = tuple["Example | None", str | None]  # why there is none, or what is odd about it


class UnknownToken(ValueError):
    """A token of the tokenizer that the model does not have, which no choice of rows can mend."""


@dataclass(frozen=True)
class Example:
    """Sequences that belong together (one, or chosen and rejected), as int32 ids and bool masks of what is learnt.

    The mask of judged steps, and of words, is their labels, int32.
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
    found: list[tuple[str, Sides, dict]] = []
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
            report += note(_complaint(e, place, settings), place)
    between = [Draft(settings.separator, chat=True)] if settings.kind == "process" else []
    ids = _encode(tok, [*between, *(d for _, sides, _ in found for d in sides)])
    ways = {"embedding": _documents, "process": _judged, "labelled": _labelled, "tagged": _tagged, "spans": _span}
    finish = ways.get(settings.kind, _example)
    examples = []
    for place, sides, numbers in found:
        try:
            for side, said in ((d, said) for d in sides for said in (d.text, d.prompt)):
                if isinstance(failed := ids.get((side.chat, said or "")), ValueError):
                    raise failed
            example, complaint = finish(sides, numbers, ids, tok, settings)
            if example:
                _known(example, sides, tok, settings)
                examples.append(example)
        except BaseException as e:
            complaint = _complaint(e, place, settings)
        if complaint:
            report += note(complaint, place)
    tokens = sum(len(x) for e in examples for x in e.ids)
    learnt = sum(int(np.count_nonzero(x if x.dtype == bool else x >= 0)) for e in examples for x in e.masks)
    return examples, report + Report(0, len(examples), tokens, learnt)


def _complaint(error: BaseException, place: str, settings: Settings) -> str:
    """Say why a row cannot be used; ValueError if bad rows are to be raised, or all rows would be."""
    if not _of_row(error):
        raise error
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


def _known(example: Example, sides: Sides, tok: text.Tokenizer, settings: Settings) -> None:
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


def _example(sides: Sides, numbers: dict, ids: Ids, tok: text.Tokenizer, settings: Settings) -> Finished:
    """Finish one example of a text or a chat, of a pair of them, or of a prompt."""
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
        return Example(tuple(tokens), tuple(np.ones(len(t), bool) for t in tokens), numbers), None
    if not all(m[1:end].any() for m in masks):  # nothing predicts the first token
        return None, "no token to learn" + ("" if settings.whole else f" within length={settings.length}")
    if settings.kind == "unpaired":
        numbers = numbers | {"prompt": start}
    return Example(tuple(t[:end] for t in tokens), tuple(m[:end] for m in masks), numbers), complaint


def _documents(sides: Sides, numbers: dict, ids: Ids, tok: text.Tokenizer, settings: Settings) -> Finished:
    """Finish an example of documents, with what the tokenizer puts around each; absent negatives are empty.

    A document that is too long loses the end of its text, as with transformers, not of what stands around it.
    """
    found = []
    for d in sides[: settings.sides]:
        tokens = ids[d.chat, d.text]
        if len(tokens) > settings.length and settings.overlong == "drop":
            return None, f"longer than length={settings.length}"
        if len(tokens) > settings.length and not d.chat:
            tokens = _shortened(d.text, tok, settings.length).ids
        found.append(np.asarray(tokens[: settings.length], np.int32))
    if min(len(x) for x in found[:2]) == 0:
        return None, "no tokens"
    odd = f"warning, more hard negatives than negatives={settings.negatives}" if len(sides) > settings.sides else None
    found += [np.zeros(0, np.int32)] * (settings.sides - len(found))
    return Example(tuple(found), tuple(np.ones(len(x), bool) for x in found)), odd


def _shortened(said: str, tok: text.Tokenizer, length: int) -> Any:
    """Tokenize the start of a text that fits into `length` with what the tokenizer puts around it."""
    inner = tok.backend.encode(said, add_special_tokens=False)
    inner.truncate(max(0, length - tok.backend.num_special_tokens_to_add(False)))
    return tok.backend.post_process(inner)


def _labelled(sides: Sides, numbers: dict, ids: Ids, tok: text.Tokenizer, settings: Settings) -> Finished:
    """Finish an example of a text or chat with its label, as it is classified: nothing is put at its end."""
    found, why = _documents(sides, numbers, ids, tok, settings)
    return (None, why) if found is None else (Example(found.ids, found.masks, numbers), None)


def _tagged(sides: Sides, numbers: dict, ids: Ids, tok: text.Tokenizer, settings: Settings) -> Finished:
    """Finish an example of words with spaces between, each label at the first token that ends inside of its word.

    So a served text gets the same tokens, and a tokenizer needs no rule of its own for words.
    """
    (d,) = sides
    if len(ids[d.chat, d.text]) > settings.length and settings.overlong == "drop":
        return None, f"longer than length={settings.length}"
    e = _shortened(d.text, tok, settings.length)
    starts = np.cumsum([0, *(len(w) + 1 for w in numbers["words"])]).tolist()
    marks, seen = list[int](), set[int]()
    for first, last in e.offsets:  # of what the tokenizer puts around texts, both are 0
        word = bisect(starts, last - 1) - 1
        new = last > first and word not in seen and last - 1 < starts[word + 1] - 1  # a space belongs to no word
        seen |= {word} if new else set()
        marks.append(numbers["labels"][word] if new else IGNORE)
    labels = np.asarray(marks[: settings.length], np.int32)
    if not (labels >= 0).any():
        return None, f"no token to learn within length={settings.length}"
    return Example((np.asarray(e.ids[: settings.length], np.int32),), (labels,)), None


def _span(sides: Sides, numbers: dict, ids: Ids, tok: text.Tokenizer, settings: Settings) -> Finished:
    """Finish an example of a question and a context, a pair of texts, with `STARTS` and `ENDS` at the answer's tokens.

    Both stand at the first token of all where the context has no answer, as transformers' models learn it.
    """
    question, context = (d.text for d in sides)
    e, answer = encoding(tok, (question, context), special=True), numbers["answer"]
    labels = np.zeros(len(e.ids), np.int32)
    if answer is None:
        labels[0] = STARTS | ENDS
    else:
        begin, end = answer
        inside = [
            i for i, (first, last) in enumerate(e.offsets) if e.sequence_ids[i] == 1 and first < end and last > begin
        ]
        labels[inside[0]] |= STARTS
        labels[inside[-1]] |= ENDS
    if len(labels) > settings.length and (settings.overlong == "drop" or labels[settings.length :].any()):
        return None, f"its answer is not within length={settings.length}"
    return Example((np.asarray(e.ids[: settings.length], np.int32),), (labels[: settings.length],)), None


def _judged(sides: Sides, numbers: dict, ids: Ids, tok: text.Tokenizer, settings: Settings) -> Finished:
    """Finish an example of a prompt and its steps, with each step's label at the end of the separator after it.

    As TRL has it: each text is tokenized alone, a bos in front if there is one, and nothing at the end.
    """
    prompt, *steps = (ids[True, d.text] for d in sides)
    bos, separator = ([tok.ids["bos"]] if "bos" in tok.ids else []), ids[True, settings.separator]
    row = process_row([*bos, *prompt], steps, numbers["labels"], separator, last_only=settings.last_only)
    if len(row[0]) > settings.length and settings.overlong == "drop":
        return None, f"longer than length={settings.length}"
    tokens, labels = (np.asarray(x[: settings.length], np.int32) for x in row)
    if not (labels >= 0).any():
        return None, f"no token to learn within length={settings.length}"
    return Example((tokens,), (labels,)), None
