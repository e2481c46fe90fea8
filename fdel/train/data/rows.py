"""From rows to token ids: columns, chat templates, where a completion begins, truncation.

Columns, as in TRL: `text` | `messages` | `prompt` and `completion` | `input_ids` (with `labels`, `completion_mask` or
`assistant_masks`) for "sft"; `chosen` and `rejected`, `prompt` or what both have in common, `margin` for "pairs"; `prompt`,
`completion`, `label`, or a pair, for "unpaired"; `prompt` for "prompt". Texts, or lists of messages; `tools` and
`chat_template_kwargs` go to the template. Texts alone: `anchor` (or `query`), `positive` and `negative` for "embedding";
`prompt`, `completions` and `labels`, both lists, for "process".
"""

import dataclasses
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fdel import text
from fdel.train.data import kinds
from fdel.train.data.files import Row
from fdel.train.data.settings import Report, Settings, note

NOT_A_PREFIX = "warning, the prompt's tokens are not the first of prompt and completion"

TOKENIZED = ("input_ids", "completion_mask", "assistant_masks", "labels")


@dataclass(frozen=True)
class Draft:
    """One sequence before it is tokenized: its text, that of its prompt, and what a chat template or file says already."""

    text: str = ""
    prompt: str | None = None
    chat: bool = False
    ids: Sequence[int] | None = None
    mask: Sequence[int] | None = None


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
    """Make examples of (place, row) pairs, in order. A row that cannot be used is noted, or raised as a ValueError."""
    drafts: list[tuple[str, tuple[Draft, ...], dict]] = []
    report = Report(read=len(rows))
    for place, row in rows:
        if row is None:
            report += note("left out by the transform", place)
            continue
        try:
            if isinstance(row, ValueError):
                raise row
            found = [(place, sides, numbers) for sides, numbers in _drafts(row, tok, settings)]
            _check([t for _, sides, _ in found for d in sides for t in (d.text, d.prompt) if t is not None])
            drafts += found
        except ValueError as e:  # bad values, and ChatError
            if settings.bad_rows == "raise":
                raise ValueError(f"{place}: {e}") from e
            report += note(str(e), place)
    between = [Draft(settings.separator, chat=True)] if settings.kind == "process" else []
    ids = _encode(tok, [*between, *(d for _, sides, _ in drafts for d in sides)])
    examples = []
    for place, sides, numbers in drafts:
        make = _special if settings.kind in ("embedding", "process") else _example
        example, complaint = make(sides, numbers, ids, tok, settings)
        if complaint:
            report += note(complaint, place)
        if example:
            examples.append(example)
    tokens = sum(len(x) for e in examples for x in e.ids)
    learnt = sum(int(np.count_nonzero(x if x.dtype == bool else x >= 0)) for e in examples for x in e.masks)
    return examples, report + Report(0, len(examples), tokens, learnt)


def _check(texts: Sequence[Any]) -> None:
    for said in texts:
        if not isinstance(said, str):
            raise ValueError(f"expected a string, found {type(said).__name__}")
        try:
            said.encode()
        except UnicodeEncodeError as e:
            raise ValueError("a text with a lone surrogate, which no tokenizer takes") from e


# ---- columns -------------------------------------------------------------------------------------------------------


def _drafts(row: Row, tok: text.Tokenizer, settings: Settings) -> Iterator[tuple[tuple[Draft, ...], dict]]:
    paired = "chosen" in row and "rejected" in row
    if settings.kind == "sft":
        yield (_sft(row, tok, settings.learn),), {}
    elif settings.kind == "prompt":
        yield (_join(_column(row, "prompt"), None, row, tok),), {}
    elif settings.kind == "embedding":
        yield tuple(Draft(t) for t in kinds.documents(row)), {}
    elif settings.kind == "process":
        said, labels = kinds.steps(row)
        yield tuple(Draft(t, chat=True) for t in said), {"labels": [int(_label(x)) for x in labels]}
    elif settings.kind == "pairs" or paired:
        prompt, chosen, rejected = _pair(row)
        sides = _join(prompt, chosen, row, tok), _join(prompt, rejected, row, tok)
        if settings.kind == "pairs":
            yield sides, {"margin": float(row.get("margin") or 0)}
        else:
            yield from (((side,), {"label": label}) for side, label in zip(sides, (True, False), strict=True))
    else:
        side = _join(_column(row, "prompt"), _column(row, "completion"), row, tok)
        yield (side,), {"label": _label(_column(row, "label"))}


def _column(row: Row, name: str) -> Any:
    if row.get(name) is None:
        raise ValueError(
            f"no column {name!r} (found {', '.join(k for k, v in row.items() if v is not None)}); rename one"
        )
    return row[name]


def _label(value: Any) -> bool:
    known = {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False}
    if str(value).lower() not in known:
        raise ValueError(f"label {value!r:.40}; expected true or false")
    return known[str(value).lower()]


def _sft(row: Row, tok: text.Tokenizer, learn: str) -> Draft:
    if row.get("input_ids") is not None:
        try:
            given = {k: np.array(row[k], np.int32) for k in TOKENIZED if row.get(k) is not None}
        except (ValueError, TypeError, OverflowError) as e:
            raise ValueError(f"{', '.join(TOKENIZED)} are lists of whole numbers, found others") from e
        if {m.shape for m in given.values()} != {(len(row["input_ids"]),)}:
            raise ValueError("input_ids and its masks or labels differ in length")
        masks = [m >= 0 if k == "labels" else m != 0 for k, m in given.items() if k != "input_ids"]
        return Draft(ids=given["input_ids"].tolist(), mask=np.all(masks, 0).tolist() if masks else None)
    chat, side = row.get("messages"), None
    if chat is None and row.get("prompt") is not None:
        side = _join(row["prompt"], _column(row, "completion"), row, tok)
        chat = [*_messages(row["prompt"]), *_messages(row["completion"])] if side.chat else None
    elif chat is None:
        side = Draft(_column(row, "text"))
    prompt = side.prompt if side and learn != "all" else None
    if learn == "completion" and prompt is None:
        raise ValueError("learn='completion' needs the columns prompt and completion")
    if learn == "assistant":
        if chat is None:
            raise ValueError("learn='assistant' needs messages, found texts")
        ids, mask = text.chat_tokens(tok, _messages(chat), **_options(row))
        return Draft("", prompt, True, ids, mask)
    side = side or Draft(text.render_chat(tok, _messages(chat), **_options(row)), chat=True)
    return dataclasses.replace(side, prompt=prompt)


def _join(prompt: Any, completion: Any, row: Row, tok: text.Tokenizer) -> Draft:
    """Put a prompt and its completion together, both texts or both lists of messages; without one, the prompt alone."""
    if isinstance(prompt, str) and isinstance(completion, str | None):
        return Draft(prompt + (completion or ""), prompt)
    if isinstance(prompt, str) or isinstance(completion, str):
        raise ValueError("expected prompt and completion both as strings, or both as lists of messages")
    before = text.render_chat(tok, _messages(prompt), **{**_options(row), "add_generation_prompt": True})
    if completion is None:
        return Draft(before, before, True)
    return Draft(text.render_chat(tok, [*_messages(prompt), *_messages(completion)], **_options(row)), before, True)


def _messages(value: Any) -> list:
    if isinstance(value, dict):  # a completion of one message
        return [value]
    if not isinstance(value, list):
        raise ValueError(f"expected a list of messages, found {value!r:.40}")
    return value


def _options(row: Row) -> dict[str, Any]:
    tools = row.get("tools")
    tools = json.loads(tools) if isinstance(tools, str) else tools
    variables = row.get("chat_template_kwargs") or {}
    if not isinstance(variables, dict):
        raise ValueError(f"expected chat_template_kwargs as a dict, found {variables!r:.40}")
    return {"tools": tools or None, **variables}


def _pair(row: Row) -> tuple[Any, Any, Any]:
    """Find prompt, chosen and rejected; without a prompt it is what the two begin with."""
    chosen, rejected = _column(row, "chosen"), _column(row, "rejected")
    if row.get("prompt") is not None:
        return row["prompt"], chosen, rejected
    if type(chosen) is not type(rejected) or not isinstance(chosen, str | list):
        raise ValueError("expected chosen and rejected both as strings, or both as lists of messages")
    same = _common(chosen, rejected)
    if isinstance(chosen, str) and chosen[:same].endswith(" "):  # a space belongs to the word after it
        same -= 1
    return chosen[:same], chosen[same:], rejected[same:]


def _common(a: Any, b: Any) -> int:
    shorter = min(len(a), len(b))
    return next((i for i in range(shorter) if a[i] != b[i]), shorter)


# ---- tokens --------------------------------------------------------------------------------------------------------


def _encode(tok: text.Tokenizer, drafts: Sequence[Draft]) -> dict[tuple[bool, str], list[int]]:
    """Tokenize all texts at once, on all cores, each one once."""
    ids: dict[tuple[bool, str], list[int]] = {}
    for chat in (False, True):
        here = [d for d in drafts if d.chat == chat]
        texts = list({d.text for d in here if d.ids is None} | {d.prompt for d in here if d.prompt is not None})
        found = tok.backend.encode_batch_fast(texts, add_special_tokens=not chat)
        ids |= {(chat, t): e.ids for t, e in zip(texts, found, strict=True)}
    return ids


def _example(
    sides: tuple[Draft, ...], numbers: dict, ids: dict, tok: text.Tokenizer, settings: Settings
) -> tuple[Example | None, str | None]:
    """Finish one example; or say why there is none, or what is odd about it."""
    tokens, starts, complaint = [], [], None
    for d in sides:
        found = d.ids if d.ids is not None else ids[d.chat, d.text]
        before = [] if d.prompt is None else ids[d.chat, d.prompt]
        same = _common(before, found)
        if settings.kind != "prompt":
            complaint = NOT_A_PREFIX if same < len(before) else complaint
            if not d.chat and d.ids is None and "eos" in tok.ids and found[-1:] != [tok.ids["eos"]]:
                found = [*found, tok.ids["eos"]]
        tokens.append(np.asarray(found, np.int32))
        starts.append(same)
    start, most = min(starts), max(map(len, tokens))
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
