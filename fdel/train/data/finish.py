"""From token ids to examples: what is learnt of a row's sequences, and what is cut off, for each kind of data."""

from bisect import bisect
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fdel import text
from fdel.text.tokenizer import encoding
from fdel.train.data import images
from fdel.train.data.images import Shown
from fdel.train.data.rows import Draft, common
from fdel.train.data.settings import Settings
from fdel.train.losses.reward_model import process_row
from fdel.train.losses.spans import ENDS, STARTS
from fdel.train.losses.stats import IGNORE

NOT_A_PREFIX = "warning, the prompt's tokens are not the first of prompt and completion"

Ids = dict[tuple[bool, str], Any]  # whether it is a chat, and the text -> ids, or the ValueError that there are none
Sides = tuple[Draft, ...]
Finished = tuple["Example | None", str | None]  # why there is none, or what is odd about it


@dataclass(frozen=True)
class Example:
    """Sequences that belong together (one, or chosen and rejected), as int32 ids and bool masks of what is learnt.

    The mask of judged steps, and of words, is their labels, int32. `images` are what each sequence shows and plays.
    """

    ids: tuple[np.ndarray, ...]
    masks: tuple[np.ndarray, ...]
    numbers: dict[str, Any] = field(default_factory=dict)
    images: tuple[tuple[Shown, ...], ...] = ()


def finished(sides: Sides, numbers: dict, ids: Ids, tok: text.Tokenizer, settings: Settings) -> Finished:
    """Finish an example of its drafts, whose texts have ids: the example, or why there is none."""
    ways = {"embedding": _documents, "process": _judged, "labelled": _labelled, "tagged": _tagged, "spans": _span}
    return ways.get(settings.kind, _example)(sides, numbers, ids, tok, settings)


def _example(sides: Sides, numbers: dict, ids: Ids, tok: text.Tokenizer, settings: Settings) -> Finished:
    """Finish one example of a text or a chat, of a pair of them, or of a prompt."""
    tokens, starts, masks, shown, complaint = [], [], [], [], None
    for d in sides:
        found = d.ids if d.ids is not None else ids[d.chat, d.text]
        before = [] if d.prompt is None else ids[d.chat, d.prompt]
        same = common(before, found)
        if settings.kind != "prompt":
            complaint = NOT_A_PREFIX if same < len(before) else complaint
            if not d.chat and d.ids is None and "eos" in tok.ids and found[-1:] != [tok.ids["eos"]]:
                found = [*found, tok.ids["eos"]]
        mask = np.ones(len(found), bool) if d.mask is None else np.asarray(d.mask, bool)
        seen = list[Shown]()
        if settings.sight is not None:
            found, widths, seen = images.expanded(settings.sight, found, d.images)
            same, mask = int(widths[:same].sum()), np.repeat(mask, widths)
        tokens.append(np.asarray(found, np.int32))
        starts.append(same)
        masks.append(mask)
        shown.append(seen)
    return _cut(tokens, masks, min(starts), shown, numbers, settings, complaint)


def _cut(
    tokens: list[np.ndarray], masks: list[np.ndarray], start: int, shown: list[list[Shown]], numbers: dict,
    settings: Settings, complaint: str | None,
) -> Finished:  # fmt: skip
    """Cut sequences, whose prompts end at `start`, as the settings ask for."""
    kept = settings.max_prompt or start, settings.max_completion or max(map(len, tokens))
    first, last = max(0, start - kept[0]), start + kept[1]
    tokens, masks = ([x[first:last] for x in each] for each in (tokens, masks))
    start, most = min(start, kept[0]), max(map(len, tokens))
    if min(map(len, tokens)) == 0:
        return None, "no tokens"
    if most > settings.length and (settings.overlong == "drop" or settings.kind == "prompt"):
        return None, f"longer than length={settings.length}"
    end = None if settings.whole else settings.length
    seen = tuple(
        images.cut(s, first, first + len(t[:end]), settings.length) for s, t in zip(shown, tokens, strict=True)
    )
    masks = [m & (np.arange(len(m)) >= start) for m in masks]
    if settings.kind == "prompt":
        return Example(tuple(tokens), tuple(np.ones(len(t), bool) for t in tokens), numbers, seen), None
    if not all(m[1:end].any() for m in masks):  # nothing predicts the first token
        return None, "no token to learn" + ("" if settings.whole else f" within length={settings.length}")
    if settings.kind == "unpaired":
        numbers = numbers | {"prompt": start}
    return Example(tuple(t[:end] for t in tokens), tuple(m[:end] for m in masks), numbers, seen), complaint


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
