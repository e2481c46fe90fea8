"""Sizes and formats of an engine, and which models can be served with which of them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import jax

from fdel import ops
from fdel.models import Model, classifier
from fdel.ops import quantized_pages
from fdel.serve.request import length_limit, whole
from fdel.serve.step import PAGE

LENGTH = 4096  # most tokens of a sequence if neither the model nor the settings limit it


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Sizes of an engine, fixed when it is made; `unsupported` says which cannot work.

    rows: sequences that run at a time. pages: cache pages of 64 tokens; None: for all rows at 1024 tokens each, or at
    max_length if that is less. max_length: the most tokens of prompt and output, at most the model's context; None:
    that. budget: prompt tokens computed in one step. chunk: the same beside at most 8 sequences that decode, which
    bounds how long these wait for others' prompts; None: 128 on CPU, the budget on accelerators. queue: waiting outputs
    before `QueueFull`, where n outputs of a prompt are n and enter together. overlap: launch a step before the last one
    is read. cache: share pages between prompts that begin alike; None: where the model allows it. drafts: tokens
    guessed ahead, by a draft model or from earlier occurrences of the newest three; 0: none. decode_steps: tokens that
    one call adds to each sequence while no prompt waits, which saves the host's part of the steps between; readers get
    them together. batches: the numbers of rows that decode is compiled for, the largest last; None: 1, 8, 64, ...,
    rows. kv_cache_dtype: "int8" or "fp8" keeps keys and values in 8 bits, with a scale for each token and head; None:
    in the dtype of the activations. max_lora_rank: adapters of a greater rank are refused; None or 0: 64. max_loras: so
    many adapters, of max_lora_rank or by default of 16, have room from the start, so that adding one compiles nothing;
    more work all the same.
    """

    rows: int = 32
    pages: int | None = None
    max_length: int | None = None
    budget: int = 512
    chunk: int | None = None
    queue: int = 1024
    overlap: bool = True
    cache: bool | None = None
    drafts: int = 0
    decode_steps: int = 1
    batches: Sequence[int] | None = None
    kv_cache_dtype: str | None = None
    max_loras: int = 0
    max_lora_rank: int | None = None

    @property
    def lora_rank(self) -> int:
        """The greatest rank of an adapter."""
        return self.max_lora_rank or 64


def unsupported(model: Model, settings: Settings, draft: Model | None = None) -> str | None:
    """Say why an engine cannot serve a model with these settings and this draft model; None if it can."""
    if reason := classifier.no_text(model.params):
        return reason
    if (reason := _sizes(settings)) is not None:
        return reason
    try:
        limit = length_limit(model, settings.max_length)
    except ValueError as e:
        return str(e)
    if limit == math.inf:
        limit = LENGTH if settings.pages is None else min(LENGTH, settings.pages * PAGE)
    if settings.pages is not None and settings.pages * PAGE < limit:
        return (
            f"pages={settings.pages} hold {settings.pages * PAGE} tokens, but one sequence may have {limit:g}; expected "
            f"at least {-(-limit // PAGE):g} pages, or max_length={settings.pages * PAGE}"
        )
    for name in ("drafts", "decode_steps"):
        if (value := getattr(settings, name)) >= limit > 1:
            return f"{name}={value}; expected less than the {limit:g} tokens that a sequence may have"
    if settings.drafts and settings.decode_steps > 1:
        return f"drafts={settings.drafts} and decode_steps={settings.decode_steps}; both add several tokens, use one"
    if draft is not None and not settings.drafts:
        return "a draft model with drafts=0; say how many tokens it guesses ahead, such as drafts=3"
    if draft is not None and (draft.cfg.vocab != model.cfg.vocab or recurrent(draft)):
        return (
            f"the draft model needs attention and the vocabulary of {model.cfg.vocab} ids; found {draft.cfg.vocab} ids"
        )
    if s := settings.kv_cache_dtype:
        if not isinstance(s, str) or s not in quantized_pages.FORMATS:
            return f"kv_cache_dtype={s!r}; expected None, {', '.join(map(repr, quantized_pages.FORMATS))}"
        if not keeps(model, ops.Pages):
            return f"kv_cache_dtype={s!r}, but {model.family.MODEL_TYPE} has no keys and values to keep; use None"
    kept = f"but {model.family.MODEL_TYPE} keeps recurrent state of whole sequences, which"
    if recurrent(model) and settings.cache:
        return f"cache=True, {kept} cannot be shared by their beginnings; use cache=None"
    if recurrent(model) and settings.drafts:
        return f"drafts={settings.drafts}, {kept} cannot take a rejected token back; use drafts=0"
    return None


def _sizes(settings: Settings) -> str | None:
    """Say which number is none, or too small."""
    least = {"drafts": 0, "max_loras": 0, "max_lora_rank": 0}
    for name in ("rows", "pages", "budget", "chunk", "queue", "drafts", "decode_steps", "max_loras", "max_lora_rank"):
        value, low = getattr(settings, name), least.get(name, 1)
        if not (whole(value) and value >= low or (name in ("pages", "chunk", "max_lora_rank") and value is None)):
            return f"{name}={value!r}; expected at least {low}"
    for name, known in (("overlap", (True, False)), ("cache", (True, False, None))):
        if not any(getattr(settings, name) is k for k in known):
            return f"{name}={getattr(settings, name)!r}; expected one of {known}"
    batches = settings.batches
    if batches is not None:
        rising = isinstance(batches, Sequence) and len(batches) and all(map(whole, batches)) and batches[0] >= 1
        if not rising or any(a >= b for a, b in pairwise(batches)) or batches[-1] < settings.rows:
            return f"batches={batches!r}; expected rising numbers of rows, the last at least rows={settings.rows}"
    return None


def keeps(model: Model, kind: type) -> bool:
    """Tell whether a model's state holds `ops.Pages`, or `ops.Slots`."""
    spec = model.family.state_spec(model.cfg, pages=1, page=PAGE, rows=1)
    leaves = jax.tree.leaves(spec, is_leaf=lambda x: isinstance(x, ops.Pages | ops.Slots))
    return any(isinstance(x, kind) for x in leaves)


def recurrent(model: Model) -> bool:
    """Tell whether a model keeps recurrent state, which no two sequences can share and no step can take back."""
    return keeps(model, ops.Slots)
