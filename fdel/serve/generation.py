"""Generate from prompts of token ids in one call: an engine that is made for them and runs until they are done."""

from collections.abc import Iterator, Sequence
from typing import Any

from fdel import text
from fdel.models import Model
from fdel.serve.engine.engine import Engine
from fdel.serve.engine.pages import bucket
from fdel.serve.engine.reply import Delta, Generation
from fdel.serve.engine.request import SamplingParams, check_prompt, length_limit
from fdel.serve.engine.settings import Settings
from fdel.serve.engine.step import PAGE

BUDGET = 2048  # most prompt tokens of one step


def generate(
    model: Model,
    prompts: Sequence[Sequence[int]],
    sampling: SamplingParams | Sequence[SamplingParams] | None = None,
    *,
    tokenizer: text.Tokenizer | None = None,
    eos: Sequence[int] | None = None,
    max_length: int | None = None,
    batch_size: int = 32,
    **options: Any,
) -> list[Generation]:
    """Continue each prompt with a cache; greedy unless asked otherwise.

    `sampling` is one `SamplingParams` for all or one per prompt; or give its fields as options (`max_tokens=32`). A
    seed is used as it is for each prompt, so the same prompt twice gives the same output twice; results never depend
    on the other prompts. `eos` defaults to the tokenizer's, else to config.json's. `max_length` caps prompt and
    output together, by default at the model's context. Up to `batch_size` prompts run at a time, with cache for their
    longest possible output. Stacked layers are unstacked at each call, which copies them: for several calls pass
    `params.unstack(params)`, or keep an `Engine`. Raises ValueError for empty or too long prompts, wrong ids, and
    logits that are not finite.
    >>> serve.generate(model, [[1, 2, 3], [4, 5]], max_tokens=4)[1].tokens
    [18, 15, 27, 5]
    """
    requests = _requests(len(prompts), sampling, options)
    if not prompts:
        return []
    engine = _engine(model, prompts, requests, min(batch_size, len(prompts)), max_length, tokenizer=tokenizer, eos=eos)
    generations = engine.generate(prompts, requests)
    owners = [i for i, r in enumerate(requests) for _ in range(r.n)]
    for i, g in zip(owners, generations, strict=True):
        if g.error is not None:
            raise ValueError(f"prompt {i}: {g.error}")
    return generations


def stream(
    model: Model,
    prompt: Sequence[int],
    sampling: SamplingParams | None = None,
    *,
    tokenizer: text.Tokenizer | None = None,
    eos: Sequence[int] | None = None,
    max_length: int | None = None,
    **options: Any,
) -> Iterator[Delta]:
    """Continue one prompt as `generate` does and yield each token, with its text, when it is known.
    >>> [delta.tokens for delta in serve.stream(model, [4, 5], max_tokens=4)]
    [[18], [15], [27], [5]]
    """
    (request,) = _requests(1, sampling, options)
    engine = _engine(model, [prompt], [request], 1, max_length, tokenizer=tokenizer, eos=eos)
    job = engine.submit(prompt, request)

    def deltas() -> Iterator[Delta]:
        while job.reply.finish_reason is None:
            for _, delta in engine.step():
                if delta.error is not None:
                    raise ValueError(f"prompt 0: {delta.error}")
                yield delta

    return deltas()  # apart, so that errors of the arguments are raised by the call and not by the first token


def _requests(n: int, sampling: Any, options: dict[str, Any]) -> list[SamplingParams]:
    if sampling is not None and options:
        raise ValueError(f"got sampling and {', '.join(options)}; put these into the SamplingParams")
    sampling = SamplingParams(**options) if sampling is None else sampling
    requests = [sampling] * n if isinstance(sampling, SamplingParams) else list(sampling)
    if len(requests) != n:
        raise ValueError(f"{len(requests)} SamplingParams for {n} prompts; give one, or one per prompt")
    return requests


def _engine(
    model: Model,
    prompts: Sequence[Sequence[int]],
    requests: Sequence[SamplingParams],
    rows: int,
    max_length: int | None,
    **texts: Any,
) -> Engine:
    """Make an engine in which all prompts fit; check them before anything runs."""
    if rows < 1:
        raise ValueError(f"batch_size={rows}; expected at least 1")
    limit = length_limit(model, max_length)
    longest = 1
    for i, (prompt, r) in enumerate(zip(prompts, requests, strict=True)):
        if r.truncate is None:
            check_prompt(prompt, model.cfg.vocab, limit, f"prompt {i}")
        longest = int(max(longest, min(len(prompt) + r.max_tokens, limit)))
    rows, pages = 1 << (rows - 1).bit_length(), bucket(-(-longest // PAGE))
    settings = Settings(
        rows=rows, pages=rows * pages, max_length=int(min(pages * PAGE, limit)), budget=BUDGET, batches=(rows,),
        queue=sum(r.best_of or r.n for r in requests),
    )  # fmt: skip
    return Engine(model, settings, **texts)
