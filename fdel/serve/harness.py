"""An engine as a model of lm_eval (EleutherAI's lm-evaluation-harness, extra `eval`).

What lm_eval's own backend for transformers does to prompts, to contexts that are too long and to stop strings is done
here too, so that scores are comparable. https://github.com/EleutherAI/lm-evaluation-harness
"""

import functools
import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tqdm import tqdm

from fdel import text
from fdel.serve.engine import Engine
from fdel.serve.likelihood import likelihoods
from fdel.serve.request import SamplingParams

SEED = 1234  # of what is sampled, lm_eval's own
ROUND = 16  # batches of prompts that are generated before progress is told
SAMPLED = ("top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")


def check_installed() -> None:
    """ImportError with the remedy if lm_eval is not installed."""
    try:
        import lm_eval  # noqa: F401
    except ImportError as e:
        raise ImportError("benchmarks need lm_eval: pip install 'fdel[eval]'") from e


def language_model(
    engine: Engine, tokenizer: text.Tokenizer, name: str, *, batch: int = 32, adapter: str = "", progress: bool = True
) -> Any:
    """Make an lm_eval `LM` of an engine, as `lm_eval.simple_evaluate(model=...)` takes it."""
    check_installed()
    from lm_eval.api.model import TemplateLM
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

    answers = _Answers(engine, tokenizer, batch, adapter, progress)

    class EngineLM(TemplateLM):
        """`TemplateLM` divides pairs of texts into tokens and calls the rest."""

        eot_token_id = property(lambda self: answers.ends)
        prefix_token_id = property(lambda self: answers.begins)
        max_length = property(lambda self: engine.limit)
        max_gen_toks = 256
        tokenizer_name = property(lambda self: f"{name.replace('/', '__')}-{answers.digest}")

        def tok_encode(self, string: str, add_special_tokens: bool | None = None, **ignored: Any) -> list[int]:
            return answers.encode(string, add_special_tokens)

        def _loglikelihood_tokens(self, requests: list, disable_tqdm: bool = False, **ignored: Any) -> list:
            found = answers.likely([(context, wanted) for _, context, wanted in requests])
            for (pair, *_), answer in zip(requests, found, strict=True):
                self.cache_hook.add_partial("loglikelihood", pair, answer)
            return found

        def loglikelihood_rolling(self, requests: list, disable_tqdm: bool = False) -> list[float]:
            windows, owners = [], []
            for i, (said,) in enumerate(r.args for r in requests):
                for window in get_rolling_token_windows(self.tok_encode(said), answers.begins, engine.limit, 1):
                    windows.append(make_disjoint_window(window))
                    owners.append(i)
            totals = [0.0] * len(requests)
            for i, (logprob, _) in zip(owners, answers.likely(windows), strict=True):
                totals[i] += logprob
            for r, total in zip(requests, totals, strict=True):
                self.cache_hook.add_partial("loglikelihood_rolling", r.args, total)
            return totals

        def generate_until(self, requests: list, disable_tqdm: bool = False) -> list[str]:
            found = answers.say([r.args for r in requests])
            for r, said in zip(requests, found, strict=True):
                self.cache_hook.add_partial("generate_until", r.args, said)
            return found

        def apply_chat_template(self, chat_history: list[dict], add_generation_prompt: bool = True) -> str:
            return answers.render(chat_history, add_generation_prompt)

        def chat_template(self, chat_template: bool | str = False) -> str | None:
            chosen = chat_template if isinstance(chat_template, str) else "default"
            return tokenizer.templates.get(chosen) if chat_template else None

    return EngineLM()


@dataclass(frozen=True)
class _Answers:
    """How an engine answers each kind of request."""

    engine: Engine
    tokenizer: text.Tokenizer
    batch: int
    adapter: str
    progress: bool

    @property
    def ends(self) -> int:
        """The id of the token that ends a text."""
        found = self.tokenizer.ids.get("eos", next(iter(self.engine.eos), None))
        if found is None:
            raise ValueError("the tokenizer has no eos token, which lm_eval needs; name one in tokenizer_config.json")
        return found

    @property
    def begins(self) -> int:
        """The id that stands before a text that has no context."""
        return self.tokenizer.ids.get("bos", self.ends)

    @functools.cached_property
    def digest(self) -> str:
        """What distinguishes this tokenizer and its templates from others of the same name."""
        said = self.tokenizer.json + json.dumps(dict(self.tokenizer.templates), sort_keys=True)
        return hashlib.sha256(said.encode()).hexdigest()[:16]

    def encode(self, said: str, special: bool | None = None) -> list[int]:
        """Tokenize; bos is not added to a text that begins with it, unless `special` says so."""
        if special is None:
            special = not said.startswith(text.decode(self.tokenizer, [self.begins], skip_special=False))
        return text.encode(self.tokenizer, said, special=special)

    def likely(self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[tuple[float, bool]]:
        with tqdm(total=len(pairs), desc="scoring", disable=not self.progress) as bar:
            found = likelihoods(self.engine, pairs, batch=self.batch, adapter=self.adapter, progress=bar.update)
        return [(x.logprob, x.greedy) for x in found]

    def say(self, requests: Sequence[tuple[str, Mapping[str, Any]]]) -> list[str]:
        """Continue contexts; those that leave no room for the answer are cut from the left."""
        prompts: list[list[int]] = []
        sampling: list[SamplingParams] = []
        for i, (context, asked) in enumerate(requests):
            s = sampling_of(asked, SEED + i)
            if s.max_tokens >= self.engine.limit:
                raise ValueError(
                    f"a task asks for {s.max_tokens} new tokens, but the model's limit is {self.engine.limit}; "
                    "lower max_new_tokens"
                )
            prompts.append(self.encode(context)[-(self.engine.limit - s.max_tokens) :])
            sampling.append(s)
        out: list[str] = []
        step = ROUND * self.batch
        with tqdm(total=len(prompts), desc="generating", disable=not self.progress) as bar:
            for i in range(0, len(prompts), step):
                for g in self.engine.generate(prompts[i : i + step], sampling[i : i + step], adapter=self.adapter):
                    if g.error is not None:
                        raise RuntimeError(f"request {len(out)} failed: {g.error}")
                    out.append(g.text or "")
                bar.update(len(out) - bar.n)
        return out

    def render(self, messages: Sequence[Mapping[str, Any]], answer: bool) -> str:
        """Apply the chat template; without its system message if the template allows none, as lm_eval does."""
        how: dict[str, Any] = {"add_generation_prompt": answer, "continue_final_message": not answer}
        try:
            return text.render_chat(self.tokenizer, messages, **how)
        except text.ChatError as e:
            rest = [m for m in messages if m["role"] != "system"]
            if len(rest) == len(messages):
                raise
            logging.getLogger(__name__).warning("the chat template refused the system message (%s); left it out", e)
            return text.render_chat(self.tokenizer, rest, **how)


def sampling_of(asked: Mapping[str, Any], seed: int) -> SamplingParams:
    """Translate a task's generation_kwargs. ValueError for a key that means nothing here."""
    from lm_eval.models.utils import normalize_gen_kwargs

    kwargs: dict[str, Any] = dict(normalize_gen_kwargs(dict(asked), 256))
    sample, until = kwargs.pop("do_sample", False), kwargs.pop("until", None) or []
    length, temperature = kwargs.pop("max_gen_toks"), kwargs.pop("temperature", 0.0)
    given = {k: v for k, v in kwargs.items() if v is not None}
    if unknown := given.keys() - set(SAMPLED):
        raise ValueError(f"generation_kwargs {sorted(unknown)} are not supported; {', '.join(SAMPLED)} are")
    return SamplingParams(
        max_tokens=length, temperature=temperature if sample else 0.0, seed=seed,
        stop=[s for s in until if s],
        **(given if sample else {k: v for k, v in given.items() if k.endswith("penalty")}),
    )  # fmt: skip
