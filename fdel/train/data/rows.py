"""What a row says: its columns, chat templates, where a completion begins.

Columns, as in TRL: `text` | `messages` | `prompt` and `completion` | `input_ids` (with `labels`, `completion_mask` or
`assistant_masks`) for "sft"; `chosen` and `rejected`, `prompt` or what both have in common, `margin` for "pairs"; `prompt`,
`chosen`, `rejected` and `reference`, a completion to imitate, for "triples"; `prompt`,
`completion`, `label`, or a pair, for "unpaired"; `prompt`, or the messages before a last reply, for "prompt". Texts, or
lists of messages; `tools` and `chat_template_kwargs` go to the template. Texts alone: `anchor` (or `query`), `positive` and
`negative` for "embedding"; `prompt`, `completions` and `labels`, both lists, for "process"; `text`, `messages` or `prompt`,
with `label` (or `labels`), for "labelled"; `tokens` (words) and `labels`, both lists, for "tagged"; `question`, `context`
and `answers` ({"text": [...], "answer_start": [...]}), as in SQuAD, for "spans". Labels are names or their numbers.
"""

import dataclasses
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from fdel import text
from fdel.media import sight as sights
from fdel.train.data.files import Row
from fdel.train.data.images import Shown
from fdel.train.data.settings import CHOICES, Settings
from fdel.train.losses.stats import IGNORE

TOKENIZED = ("input_ids", "completion_mask", "assistant_masks", "labels")


@dataclass(frozen=True)
class Draft:
    """One sequence before it is tokenized: its text, that of its prompt, and what a chat template or file says already."""

    text: str = ""
    prompt: str | None = None
    chat: bool = False
    ids: Sequence[int] | None = None
    mask: Sequence[int] | None = None
    images: tuple[Shown, ...] = ()


def drafts(row: Row, tok: text.Tokenizer, settings: Settings) -> Iterator[tuple[tuple[Draft, ...], dict]]:
    """Yield what becomes an example: its sequences, and its numbers. ValueError for what a row should not hold."""
    paired = "chosen" in row and "rejected" in row
    if settings.kind == "sft":
        yield (_sft(row, tok, settings),), {}
    elif settings.kind == "prompt":
        row = {"prompt": _asked_of(row), **row}
        yield (_join(_column(row, "prompt"), None, row, tok),), {"row": row}
    elif settings.kind == "embedding":
        yield tuple(map(Draft, _documents(row))), {}
    elif settings.kind == "process":
        said, labels = _steps(row)
        yield tuple(Draft(t, chat=True) for t in said), {"labels": [int(_label(x)) for x in labels]}
    elif settings.kind == "labelled":
        yield (_asked(row, tok),), {"labels": _targets(row, settings)}
    elif settings.kind == "tagged":
        words, labels = _words(row)
        yield (
            (Draft(" ".join(words)),),
            {"words": words, "labels": [_class(x, settings.labels, IGNORE) for x in labels]},
        )
    elif settings.kind == "spans":
        question, context, answer = _answered(row)
        yield (Draft(question), Draft(context)), {"answer": answer}
    elif settings.kind == "triples":
        prompt, *said = (_column(row, name) for name in ("prompt", "chosen", "rejected", "reference"))
        yield tuple(_join(prompt, x, row, tok) for x in said), {}
    elif settings.kind == "pairs" or paired:
        prompt, chosen, rejected = _pair(row)
        sides = _join(prompt, chosen, row, tok), _join(prompt, rejected, row, tok)
        if settings.kind == "pairs":
            margin = float(row.get("margin") or 0)
            if not math.isfinite(margin):
                raise ValueError(f"margin {margin}; expected a finite number")
            yield sides, {"margin": margin}
        else:
            yield from (((side,), {"label": label}) for side, label in zip(sides, (True, False), strict=True))
    else:
        side = _join(_column(row, "prompt"), _column(row, "completion"), row, tok)
        yield (side,), {"label": _label(_column(row, "label"))}


def _column(row: Row, name: str) -> Any:
    if row.get(name) is None:
        found = ", ".join(k for k, v in row.items() if v is not None)
        raise ValueError(f"no column {name!r} (found {found}); rename one")
    return row[name]


def _asked_of(row: Row) -> Any:
    """The messages before the last reply, of a row that has no prompt."""
    messages = row.get("messages")
    if not messages:
        return None
    return messages[:-1] if messages[-1].get("role") == "assistant" else messages


def _answered(row: Row) -> tuple[str, str, tuple[int, int] | None]:
    """Find a question, its context, and where in this the first answer begins and ends, as SQuAD writes them."""
    question, context = (_column(row, name) for name in ("question", "context"))
    answers = row.get("answers") or {}
    said, starts = (list(answers.get(name) or ()) for name in ("text", "answer_start"))
    if not (isinstance(question, str) and isinstance(context, str)) or len(said) != len(starts):
        raise ValueError("expected question and context as texts, and as many answers.text as answers.answer_start")
    if not said:
        return question, context, None
    if not said[0] or context[starts[0] :][: len(said[0])] != said[0]:
        raise ValueError(f"the context has no {said[0]!r:.40} at {starts[0]}; answer_start counts characters")
    return question, context, (starts[0], starts[0] + len(said[0]))


def _label(value: Any) -> bool:
    known = {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False}
    if str(value).lower() not in known:
        raise ValueError(f"label {value!r:.40}; expected true or false")
    return known[str(value).lower()]


def _sft(row: Row, tok: text.Tokenizer, settings: Settings) -> Draft:
    learn = settings.learn
    if row.get("input_ids") is not None:
        given = {k: _whole(k, row[k]) for k in TOKENIZED if row.get(k) is not None}
        if given["input_ids"].size and given["input_ids"].min() < 0:
            raise ValueError(f"input_ids hold {given['input_ids'].min()}; expected ids from 0")
        if len({m.shape for m in given.values()}) > 1:
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
        written = partial(sights.written, settings.sight)
        ids, mask = text.chat_tokens(tok, _messages(chat), written=written, **_options(row))
        return Draft("", prompt, True, ids, mask)
    side = side or Draft(text.render_chat(tok, _messages(chat), **_options(row)), chat=True)
    return dataclasses.replace(side, prompt=prompt)


def _whole(name: str, values: Any) -> np.ndarray:
    found = np.asarray(values if isinstance(values, list | tuple | np.ndarray) else [None])
    small = found.dtype.kind in "iub" and (not found.size or -(2**31) <= found.min() <= found.max() < 2**31)
    if found.ndim != 1 or (found.size and not small):
        raise ValueError(f"{name} is a list of whole numbers of 32 bits, found others")
    return found.astype(np.int32)


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
    return {"tools": tools or None, **text.template_variables(variables)}


def _pair(row: Row) -> tuple[Any, Any, Any]:
    """Find prompt, chosen and rejected; without a prompt it is what the two begin with."""
    chosen, rejected = _column(row, "chosen"), _column(row, "rejected")
    if row.get("prompt") is not None:
        return row["prompt"], chosen, rejected
    if type(chosen) is not type(rejected) or not isinstance(chosen, str | list):
        raise ValueError("expected chosen and rejected both as strings, or both as lists of messages")
    same = common(chosen, rejected)
    if isinstance(chosen, str) and chosen[:same].endswith(" "):  # a space belongs to the word after it
        same -= 1
    return chosen[:same], chosen[same:], rejected[same:]


def _documents(row: Row) -> list[str]:
    """List a row's query, its positive, and its hard negatives: `negative`, one or a list, and `negative_1` and so on."""
    anchor = row.get("anchor") if row.get("anchor") is not None else row.get("query")
    numbered = sorted((k for k in row if k.removeprefix("negative_").isdecimal()), key=lambda k: int(k[9:]))
    found = [row.get(k) for k in ("negative", *numbered)]
    negatives = [n for x in found if x is not None for n in (x if isinstance(x, list) else [x])]
    if anchor is None or row.get("positive") is None:
        there = ", ".join(k for k, v in row.items() if v is not None)
        raise ValueError(f"expected the columns anchor (or query) and positive, found {there}; rename")
    return [anchor, row["positive"], *negatives]


def _steps(row: Row) -> tuple[list[str], list[Any]]:
    """List a row's prompt and steps (`completions`), and the label of each step."""
    prompt, said, labels = (row.get(k) for k in ("prompt", "completions", "labels"))
    if not isinstance(prompt, str) or not isinstance(said, list) or not isinstance(labels, list):
        there = ", ".join(f"{k} ({type(v).__name__})" for k, v in row.items() if v is not None)
        raise ValueError(f"expected prompt, a string, completions and labels, lists; found {there}")
    if len(said) != len(labels) or not said:
        found = f"{len(said)} completions and {len(labels)} labels"
        raise ValueError(f"{found}; expected one label for each, and at least one")
    return [prompt, *said], labels


def _asked(row: Row, tok: text.Tokenizer) -> Draft:
    """Draft what is classified: a text, a chat, or a prompt, which ends where the answer would begin."""
    if row.get("messages") is not None:
        return Draft(text.render_chat(tok, _messages(row["messages"]), **_options(row)), chat=True)
    return Draft(row["text"]) if row.get("text") is not None else _join(_column(row, "prompt"), None, row, tok)


def _targets(row: Row, settings: Settings) -> list[float]:
    """Read what a text's label says, as `Settings.targets` numbers."""
    value, n = row.get("label", row.get("labels")), settings.targets
    if value is None:
        raise ValueError(f"no label (found {', '.join(k for k, v in row.items() if v is not None)}); rename one")
    if settings.problem == CHOICES["problem"][0]:
        return [_class(value, settings.labels)]
    several = settings.problem == CHOICES["problem"][1]
    if several and isinstance(value, list) and all(isinstance(x, str) for x in value):
        there = {_class(x, settings.labels) for x in value}
        return [float(i in there) for i in range(n)]
    found = value if isinstance(value, list) else [value]
    numbers = [float(x) for x in found if isinstance(x, int | float) and math.isfinite(x)]
    if len(numbers) != len(found) or len(found) != n or (several and not all(0 <= x <= 1 for x in numbers)):
        wanted = f"names of labels, or {n} numbers from 0 to 1" if several else f"{n} finite numbers"
        raise ValueError(f"label {value!r:.40}; expected {wanted}")
    return numbers


def _class(value: Any, labels: Sequence[str], *other: int) -> int:
    """Give the number of a label that a row names; `other` numbers pass as well, and None as the first of them."""
    if value is None and other:
        return other[0]
    if isinstance(value, str) and value in labels:
        return labels.index(value)
    if isinstance(value, int) and (0 <= value < len(labels) or value in other):
        return int(value)
    raise ValueError(f"label {value!r:.40}; expected one of {', '.join(labels[:8])}, or 0 to {len(labels) - 1}")


def _words(row: Row) -> tuple[list[str], list[Any]]:
    """List a row's words and their labels."""
    words, labels = row.get("tokens"), row.get("labels")
    if not (isinstance(words, list) and isinstance(labels, list) and all(isinstance(w, str) for w in words)):
        there = ", ".join(f"{k} ({type(v).__name__})" for k, v in row.items() if v is not None)
        raise ValueError(f"expected tokens, a list of words, and labels, a list; found {there}")
    if len(words) != len(labels):
        raise ValueError(f"{len(words)} tokens and {len(labels)} labels; expected one label for each word")
    return words, labels


def common(a: Any, b: Any) -> int:
    """Count the items that two sequences begin with alike."""
    shorter = min(len(a), len(b))
    return next((i for i in range(shorter) if a[i] != b[i]), shorter)
