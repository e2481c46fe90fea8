"""Sizes and formats of an engine, each declared once, and which models can be served with which of them."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import pairwise
from typing import Any, TypeVar

from fdel import ops
from fdel.models import Model, heads
from fdel.ops import quantized_pages
from fdel.serve.engine.request import length_limit, whole
from fdel.serve.engine.step import PAGE

LENGTH = 4096  # most tokens of a sequence if neither the model nor the settings limit it

Record = TypeVar("Record")


def setting(default: Any, doc: str, flag: str | None = "", *, least: int | None = None, choices: Sequence = ()) -> Any:
    """Declare a field of a frozen dataclass: command line, run files, checks and documentation are readings of it.

    `flag` is the option of `fdel serve`, with the field's name unless another is given, and what its value is called; None:
    there is none. A number has to be whole and at least `least`; `choices` are all values but None.
    """
    meta = {"doc": doc, "flag": flag, "least": least, "choices": tuple(choices)}
    how: Any = {"default_factory": dict} if default == {} else {"default": default}
    return field(metadata=meta, **how)


def documented(cls: type[Record]) -> type[Record]:
    """Add the meaning of each field to a dataclass's docstring."""
    lines = [f"{f.name}: {f.metadata['doc']}" for f in fields(cls) if f.metadata]  # type: ignore[arg-type]
    cls.__doc__ = "\n\n    ".join([(cls.__doc__ or "").strip(), *lines])
    return cls


@documented
@dataclass(frozen=True, kw_only=True)
class Settings:
    """Sizes of an engine, fixed when it is made; `unsupported` says which cannot work."""

    rows: int = setting(32, "sequences that run at a time", least=1)
    pages: int | None = setting(None,
        "cache pages of 64 tokens (default: for all rows at 1024 tokens each, or max_length if less)", least=1)  # fmt: skip
    max_length: int | None = setting(None,
        "tokens of prompt and answer (default: the model's context, the most there are)", least=1)  # fmt: skip
    budget: int = setting(512, "prompt tokens of one step", least=1)
    chunk: int | None = setting(None, "the same beside at most 8 sequences that decode, which bounds how long these "
        "wait for others' prompts (default: 128 on CPU, else budget)", least=1)  # fmt: skip
    queue: int = setting(1024, "outputs that may wait, of one key at most half; n outputs of a prompt are n and "
        "enter together", least=1)  # fmt: skip
    overlap: bool = setting(True, "launch a step before the last one's tokens are read", None, choices=(True, False))
    cache: bool | None = setting(None,
        "share the pages of prompts that begin alike (default: where the model allows it)", None,
        choices=(True, False))  # fmt: skip
    drafts: int = setting(0, "tokens guessed ahead, by a draft model or from earlier occurrences of the newest "
        "three; 0: none", least=0)  # fmt: skip
    decode_steps: int = setting(1, "tokens that one call adds to each sequence while no prompt waits, which saves "
        "the host's part of the steps between; readers get them together", least=1)  # fmt: skip
    batches: Sequence[int] | None = setting(None,
        "numbers of rows that decode is compiled for, the largest last (default: 1, 8, 64, ..., rows)", None)  # fmt: skip
    kv_cache_dtype: str | None = setting(None,
        "keep keys and values in 8 bits, with a scale for each token and head (default: as activations)",
        choices=tuple(quantized_pages.FORMATS))  # fmt: skip
    max_loras: int = setting(0, "adapters, of max_lora_rank or by default of 16, that have room from the start, so "
        "that adding one compiles nothing; more work all the same", least=0)  # fmt: skip
    media_bytes: int = setting(2**28, "memory for what a model that sees has encoded of pictures, which are encoded again "
        "where they no longer fit; the pictures of one prompt have to fit", least=1)  # fmt: skip
    kernels: Mapping[str, str] = setting(
        {}, "the implementation of an operation, as attend=flash; see fdel.ops.explain", "--kernel OPERATION=NAME"
    )
    max_lora_rank: int | None = setting(None, "greatest rank of adapters; others are refused (default: 64)", least=0)

    @property
    def lora_rank(self) -> int:
        """The greatest rank of an adapter."""
        return self.max_lora_rank or 64


def unsupported(model: Model, settings: Settings, draft: Model | None = None) -> str | None:
    """Say why an engine cannot serve a model with these settings and this draft model; None if it can."""
    if (reason := _sizes(settings)) is not None:
        return reason
    try:
        limit = length_limit(model, settings.max_length)
    except ValueError as e:
        return str(e)
    if limit == math.inf:
        limit = LENGTH if settings.pages is None else min(LENGTH, settings.pages * PAGE)
    if heads.no_text(model) is not None:
        return None if draft is None else "a draft model for one that writes no text; remove it"
    if settings.pages is not None and settings.pages * PAGE < limit:
        found = f"pages={settings.pages} hold {settings.pages * PAGE} tokens, but one sequence may have {limit:g}"
        return f"{found}; expected at least {-(-limit // PAGE):g} pages, or max_length={settings.pages * PAGE}"
    for name in ("drafts", "decode_steps"):
        if (value := getattr(settings, name)) >= limit > 1:
            return f"{name}={value}; expected less than the {limit:g} tokens that a sequence may have"
    if settings.drafts and settings.decode_steps > 1:
        return f"drafts={settings.drafts} and decode_steps={settings.decode_steps}; both add several tokens, use one"
    if draft is not None and not settings.drafts:
        return "a draft model with drafts=0; say how many tokens it guesses ahead, such as drafts=3"
    if draft is not None and (draft.cfg.vocab != model.cfg.vocab or recurrent(draft)):
        needed = f"attention and the vocabulary of {model.cfg.vocab} ids"
        return f"the draft model needs {needed}; found {draft.cfg.vocab} ids"
    if s := settings.kv_cache_dtype:
        if model.family.state_spec(model.cfg, pages=1, page=PAGE, rows=1).pages is None:
            return f"kv_cache_dtype={s!r}, but {model.family.MODEL_TYPE} has no keys and values to keep; use None"
    kept = f"but {model.family.MODEL_TYPE} keeps recurrent state of whole sequences, which"
    if recurrent(model) and settings.cache:
        return f"cache=True, {kept} cannot be shared by their beginnings; use cache=None"
    if recurrent(model) and settings.drafts:
        return f"drafts={settings.drafts}, {kept} cannot take a rejected token back; use drafts=0"
    return None


def _sizes(settings: Settings) -> str | None:
    """Say which value is none of those that can be."""
    for f in fields(settings):
        value, m = getattr(settings, f.name), f.metadata
        if value is None and f.default is None:
            continue
        if m["least"] is not None and not (whole(value) and value >= m["least"]):
            return f"{f.name}={value!r}; expected at least {m['least']}"
        known = [*[None] * (f.default is None), *m["choices"]]
        if m["choices"] and not any(value is k or (value == k and isinstance(value, str)) for k in known):
            return f"{f.name}={value!r}; expected one of {', '.join(map(repr, known))}"
    try:
        with ops.use(**settings.kernels):
            pass
    except ValueError as e:
        return f"kernels: {e}"
    batches = settings.batches
    if batches is not None:
        rising = isinstance(batches, Sequence) and len(batches) and all(map(whole, batches)) and batches[0] >= 1
        if not rising or any(a >= b for a, b in pairwise(batches)) or batches[-1] < settings.rows:
            return f"batches={batches!r}; expected rising numbers of rows, the last at least rows={settings.rows}"
    return None


def recurrent(model: Model) -> bool:
    """Tell whether a model keeps recurrent state, which no two sequences can share and no step can take back."""
    return model.family.state_spec(model.cfg, pages=1, page=PAGE, rows=1).slots is not None
