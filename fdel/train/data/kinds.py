"""Rows that are neither one text nor a pair: documents to embed, and solutions whose steps are judged one by one."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from fdel import text
from fdel.train.data.files import Row
from fdel.train.data.settings import Settings
from fdel.train.losses.reward import process_row

Ids = Callable[[str], Sequence[int]]
Arrays = tuple[list[np.ndarray], list[np.ndarray]]  # ids int32 and masks (of judged steps: labels int32), per sequence


# ---- documents -----------------------------------------------------------------------------------------------------


def documents(row: Row) -> list[str]:
    """List a row's query, its positive, and its hard negatives: `negative`, one or a list, and `negative_1` and so on."""
    anchor = row.get("anchor") if row.get("anchor") is not None else row.get("query")
    numbered = sorted((k for k in row if k.removeprefix("negative_").isdecimal()), key=lambda k: int(k[9:]))
    found = [row.get(k) for k in ("negative", *numbered)]
    negatives = [n for x in found if x is not None for n in (x if isinstance(x, list) else [x])]
    if anchor is None or row.get("positive") is None:
        there = ", ".join(k for k, v in row.items() if v is not None)
        raise ValueError(f"expected the columns anchor (or query) and positive, found {there}; rename")
    return [anchor, row["positive"], *negatives]


def embedded(texts: Sequence[str], ids: Ids, tok: text.Tokenizer, settings: Settings) -> tuple[Arrays, str | None]:
    """Make one sequence of each document, with what the tokenizer puts around it, and empty ones for absent negatives.

    A document that is too long loses the end of its text, as with transformers, not of what stands around it.
    """
    fits = lambda x: len(x) <= settings.length
    whole = ((t, np.asarray(ids(t), np.int32)) for t in texts[: settings.sides])
    found = [x if fits(x) else _shortened(t, tok, settings.length) for t, x in whole]
    found += [np.zeros(0, np.int32)] * (settings.sides - len(found))
    odd = f"warning, more hard negatives than negatives={settings.negatives}" if len(texts) > settings.sides else None
    return (found, [np.ones(len(x), bool) for x in found]), odd


def _shortened(said: str, tok: text.Tokenizer, length: int) -> np.ndarray:
    found = tok.backend.encode(said, add_special_tokens=False)
    found.truncate(max(0, length - tok.backend.num_special_tokens_to_add(False)))
    return np.asarray(tok.backend.post_process(found).ids[:length], np.int32)


# ---- judged steps --------------------------------------------------------------------------------------------------


def steps(row: Row) -> tuple[list[str], list[Any]]:
    """List a row's prompt and steps (`completions`), and the label of each step."""
    prompt, said, labels = (row.get(k) for k in ("prompt", "completions", "labels"))
    if not isinstance(prompt, str) or not isinstance(said, list) or not isinstance(labels, list):
        there = ", ".join(f"{k} ({type(v).__name__})" for k, v in row.items() if v is not None)
        raise ValueError(f"expected prompt, a string, completions and labels, lists; found {there}")
    if len(said) != len(labels) or not said:
        raise ValueError(
            f"{len(said)} completions and {len(labels)} labels; expected one label for each, and at least one"
        )
    return [prompt, *said], labels


def judged(texts: Sequence[str], labels: list[int], ids: Ids, tok: text.Tokenizer, settings: Settings) -> Arrays:
    """Make one sequence of a prompt and its steps, with each step's label at the end of the separator after it.

    As TRL has it: each text is tokenized alone, a bos in front if there is one, and nothing at the end.
    """
    prompt, *found = (ids(t) for t in texts)
    bos = [tok.ids["bos"]] if "bos" in tok.ids else []
    row = process_row([*bos, *prompt], found, labels, ids(settings.separator), last_only=settings.last_only)
    tokens, marks = (np.asarray(x, np.int32) for x in row)
    return [tokens], [marks]
