"""Sizes and formats of an engine, and which models can be served with which of them."""

from collections.abc import Sequence
from dataclasses import dataclass

import jax

from fdel import ops
from fdel.models import Model, classifier
from fdel.ops import quantized_pages
from fdel.serve.step import PAGE


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Sizes of an engine, fixed when it is made.

    rows: sequences that run at a time. pages: cache pages of 64 tokens; None: for all rows at 1024 tokens each, or at
    max_length if that is less. max_length: the most tokens of prompt and output; None: the model's context. budget:
    prompt tokens computed in one step. chunk: the same beside at most 8 sequences that decode, which bounds how long
    these wait for others' prompts; None: 64 on CPU, the budget on accelerators. queue: waiting requests before
    `QueueFull`. overlap: launch a step before the last one is read. cache: share pages between prompts that begin
    alike; None: where the model allows it. drafts: tokens guessed ahead, by a draft model or from earlier occurrences
    of the newest three; 0: none. decode_steps: tokens that one call adds to each sequence while no prompt waits,
    which saves the host's part of the steps between; readers get them together. batches: the numbers of rows that
    decode is compiled for, the largest last; None: 1, 8, 64, ..., rows. kv_cache_dtype: "int8" or "fp8" keeps keys
    and values in 8 bits, with a scale for each token and head; None: in the dtype of the activations. max_lora_rank:
    adapters of a greater rank are refused; None or 0: 64. max_loras: so many adapters, of max_lora_rank or by default
    of 16, have room from the start, so that adding one compiles nothing; more work all the same.
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
    for name in ("rows", "pages", "max_length", "budget", "chunk", "queue", "decode_steps"):
        value = getattr(settings, name)
        if value is not None and value < 1:
            return f"{name}={value}; expected at least 1"
    if settings.drafts < 0:
        return f"drafts={settings.drafts}; expected 0 or more"
    if settings.drafts and settings.decode_steps > 1:
        return f"drafts={settings.drafts} and decode_steps={settings.decode_steps}; both add several tokens, use one"
    if settings.max_loras < 0 or (settings.max_lora_rank or 0) < 0:
        return f"max_loras={settings.max_loras}, max_lora_rank={settings.max_lora_rank}; expected 0 or more"
    if draft is not None and not settings.drafts:
        return "a draft model with drafts=0; say how many tokens it guesses ahead, such as drafts=3"
    if draft is not None and (draft.cfg.vocab != model.cfg.vocab or recurrent(draft)):
        return (
            f"the draft model needs attention and the vocabulary of {model.cfg.vocab} ids; found {draft.cfg.vocab} ids"
        )
    if s := settings.kv_cache_dtype:
        if s not in quantized_pages.FORMATS:
            return f"kv_cache_dtype={s!r}; expected None, {', '.join(map(repr, quantized_pages.FORMATS))}"
        if not keeps(model, ops.Pages):
            return f"kv_cache_dtype={s!r}, but {model.family.MODEL_TYPE} has no keys and values to keep; use None"
    kept = f"but {model.family.MODEL_TYPE} keeps recurrent state of whole sequences, which"
    if recurrent(model) and settings.cache:
        return f"cache=True, {kept} cannot be shared by their beginnings; use cache=None"
    if recurrent(model) and settings.drafts:
        return f"drafts={settings.drafts}, {kept} cannot take a rejected token back; use drafts=0"
    return None


def keeps(model: Model, kind: type) -> bool:
    """Tell whether a model's state holds `ops.Pages`, or `ops.Slots`."""
    spec = model.family.state_spec(model.cfg, pages=1, page=PAGE, rows=1)
    leaves = jax.tree.leaves(spec, is_leaf=lambda x: isinstance(x, ops.Pages | ops.Slots))
    return any(isinstance(x, kind) for x in leaves)


def recurrent(model: Model) -> bool:
    """Tell whether a model keeps recurrent state, which no two sequences can share and no step can take back."""
    return keeps(model, ops.Slots)
