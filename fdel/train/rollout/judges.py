"""Rewards by models: a reward model scores texts, a judge is asked about them in words, one by one or two at a time.

reward_model(row_scores(models.load("reward"), length=1024), text_ids(tokenizer))
reward_model(lambda rows: [x[0] for x in engine.classify_all(rows)], text_ids(tokenizer))
judge(ask_engine(engine, tokenizer, SamplingParams(max_tokens=8)), RATE, rating(1, 10))
judge(ask_endpoint("http://127.0.0.1:8000/v1", "judge"), RATE, rating(1, 10))
"""

import logging
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Float

from fdel import text
from fdel.models import Model, heads
from fdel.serve import Engine, SamplingParams
from fdel.train import losses
from fdel.train.rollout.collate import power
from fdel.train.rollout.verify import Verifier, texts

log = logging.getLogger(__name__)

Ids = Callable[[Any, Any], Sequence[int]]  # of a prompt and its completion, both texts or both messages
Ask = Callable[[list[str]], Sequence[str | None]]  # None where no answer came
Parse = Callable[[str], float | None]
Preference = Callable[..., Float[np.ndarray, " B"]]  # f(prompts=, first=, second=, **columns): P(first is better)

SHORTEST = 32  # tokens of a row: shorter texts share its program
RATE = """Question:\n{prompt}\n\nAnswer:\n{completion}\n
How good is this answer? Say a whole number from 1 (useless) to 10 (perfect), and nothing else."""
COMPARE = """Question:\n{prompt}\n\nAnswer A:\n{first}\n\nAnswer B:\n{second}\n
Which answer is better? Say A or B, and nothing else."""


# ---- a reward model ------------------------------------------------------------------------------------------------


def row_scores(
    model: Model, *, length: int, rows: int = 8
) -> Callable[[Sequence[Sequence[int]]], Float[np.ndarray, " B"]]:
    """Build `scores(token ids of B texts) -> float32[B]` of a model with a head for sequences of one label.

    It runs `rows` texts at a time, of like lengths, in rows of a power of two of tokens, so that few programs are
    compiled. ValueError for another head, for an empty text, and for one of more than `length` tokens.
    """
    kind, labels = heads.kind_of(model.params), heads.count(model.params)
    if kind != "sequence" or labels != 1:
        raise ValueError(f"the model has {f'a head for a {kind} of {labels} labels' if kind else 'no head'}; "
                         "expected a reward model: a head for a sequence, of one label")  # fmt: skip
    program = jax.jit(losses.score_rows(model.family, model.cfg))

    def scores(given: Sequence[Sequence[int]]) -> Float[np.ndarray, " B"]:
        sizes = [len(x) for x in given]
        if given and not 1 <= min(sizes) <= max(sizes) <= length:
            raise ValueError(f"texts of {min(sizes)} to {max(sizes)} tokens; expected 1 to length={length}")
        order, out = np.argsort(sizes, kind="stable"), np.zeros(len(given), np.float32)
        for start in range(0, len(given), rows):
            some = order[start : start + rows]
            width = min(length, max(SHORTEST, power(sizes[some[-1]])))
            tokens, lengths = np.zeros((rows, width), np.int32), np.zeros(rows, np.int32)
            for row, i in enumerate(some):
                tokens[row, : sizes[i]], lengths[row] = given[i], sizes[i]
            out[some] = np.asarray(program(model.params, {"tokens": tokens, "lengths": lengths}))[: len(some), 0]
        return out

    return scores


def reward_model(scores: Callable[[Sequence[Sequence[int]]], Any], ids: Ids) -> Verifier:
    """Reward completions by the score of their prompt and them together, which `ids` tokenizes as the model learnt it."""

    def reward(prompts: Sequence[Any], completions: Sequence[Any], **columns: Any) -> list[float | None]:
        return [float(x) for x in scores([ids(p, c) for p, c in zip(prompts, completions, strict=True)])]

    return reward


def text_ids(tok: text.Tokenizer) -> Ids:
    """Tokenize a prompt with its completion as `train.data` does for reward models: a chat's template, or text and eos."""

    def ids(prompt: Any, completion: Any) -> list[int]:
        if not isinstance(prompt, str):
            return text.encode(tok, text.render_chat(tok, [*prompt, *completion]), special=False)
        found, eos = text.encode(tok, prompt + completion), tok.ids.get("eos")
        return found if eos is None or found[-1:] == [eos] else [*found, eos]

    return ids


# ---- a judge that is asked in words --------------------------------------------------------------------------------


def judge(ask: Ask, template: str = RATE, parse: Parse | None = None) -> Verifier:
    """Reward completions by what a judge answers: `parse` (default: `rating(1, 10)`) reads a number, or None abstains.

    `template` names what stands in the question: {prompt}, {completion}, and columns of the rows; see `str.format`. Of a
    prompt of messages it shows each with its role.
    """
    read = rating(1, 10) if parse is None else parse

    def reward(prompts: Sequence[Any], completions: Sequence[Any], **columns: Any) -> list[float | None]:
        told = {**columns, "prompt": list(map(spoken, prompts)), "completion": texts(completions)}
        return [None if x is None else read(x) for x in _answers(ask, template, told)]

    return reward


def preference(ask: Ask, template: str = COMPARE, parse: Parse | None = None) -> Preference:
    """Build `P(first is better)` of pairs by what a judge answers to {prompt}, {first}, {second}; NaN without an answer.

    `parse` (default: `choice`) reads the probability of the first. Each pair is asked about in both orders, and the
    mean taken, since judges favour a place (arXiv:2306.05685, section 3.3).
    """
    read = choice if parse is None else parse

    def compare(prompts: Sequence[Any], first: Sequence[Any], second: Sequence[Any], **columns: Any) -> np.ndarray:
        said = list(map(spoken, prompts)), texts(first), texts(second)
        told: dict[str, Sequence[Any]] = {k: [*v, *v] for k, v in columns.items()}
        told |= {"prompt": said[0] * 2, "first": said[1] + said[2], "second": said[2] + said[1]}
        given = [None if x is None else read(x) for x in _answers(ask, template, told)]
        p = np.array([math.nan if x is None else x for x in given], np.float64).reshape(2, -1)
        return (p[0] + 1 - p[1]) / 2

    return compare


def by_rewards(reward: Verifier) -> Preference:
    """Build `P(first is better)` = sigmoid(its reward - that of the second): Bradley and Terry's model."""

    def compare(prompts: Sequence[Any], first: Sequence[Any], second: Sequence[Any], **columns: Any) -> np.ndarray:
        both = {k: [*v, *v] for k, v in columns.items()}
        given = reward(prompts=[*prompts, *prompts], completions=[*first, *second], **both)
        r = np.array([math.nan if x is None else x for x in given], np.float64).reshape(2, -1)
        return 0.5 + 0.5 * np.tanh((r[0] - r[1]) / 2)  # a sigmoid that does not overflow

    return compare


def rating(low: float, high: float) -> Parse:
    """Read the last number of an answer, as 0 for `low` to 1 for `high`; None without one in that range.
    >>> rating(1, 5)("I say 4."), rating(1, 5)("9")
    (0.75, None)
    """
    if not low < high:
        raise ValueError(f"rating from {low} to {high}; expected two numbers, the lower one first")

    def read(answer: str) -> float | None:
        found = re.findall(r"-?\d{1,15}(?:\.\d{1,15})?", answer)
        value = float(found[-1]) if found else math.nan
        return (value - low) / (high - low) if low <= value <= high else None

    return read


def choice(answer: str) -> float | None:
    """Read the last word of an answer that is A or B: 1 for A, 0 for B, None without one.
    >>> choice("The better one is B."), choice("Both")
    (0.0, None)
    """
    found = re.findall(r"\b[AB]\b", answer)
    return None if not found else float(found[-1] == "A")


def spoken(prompt: Any) -> str:
    """Give a prompt as a judge reads it: its text, or of each message its role and content."""
    return (
        prompt if isinstance(prompt, str) else "\n".join(f"{m.get('role')}: {m.get('content') or ''}" for m in prompt)
    )


def _answers(ask: Ask, template: str, told: dict[str, Sequence[Any]]) -> Sequence[str | None]:
    """Ask about each row; RuntimeError if the judge answers none, or another number of questions."""
    try:
        asked = [template.format(**dict(zip(told, row, strict=True))) for row in zip(*told.values(), strict=True)]
    except (KeyError, IndexError) as e:
        raise ValueError(
            f"the judge's template asks for {e}; there is {', '.join(told)} (write {{{{ for a brace)"
        ) from e
    found = ask(asked)
    if len(found) != len(asked):
        raise RuntimeError(f"the judge gave {len(found)} answers to {len(asked)} questions")
    if asked and all(x is None for x in found):
        raise RuntimeError(f"the judge answered none of {len(asked)} questions")
    return found


def ask_engine(engine: Engine, tok: text.Tokenizer, sampling: SamplingParams, **where: Any) -> Ask:
    """Build a way to ask an engine's model, by its chat template if it has one; `where` is as in `Engine.submit_all`.

    With an `adapter`, the policy's own engine serves its judge. A request that failed has no answer.
    """

    def ask(questions: list[str]) -> list[str | None]:
        found = engine.generate([_asked(tok, x) for x in questions], sampling, **where)
        for reason in {x.error for x in found if x.error is not None}:
            log.warning("a judge's answer failed: %s", reason)
        stop = set(tok.eos_ids)
        said = [[t for t in x.tokens if t not in stop] for x in found]
        return [None if x.error is not None else text.decode(tok, ids) for x, ids in zip(found, said, strict=True)]

    return ask


def _asked(tok: text.Tokenizer, question: str) -> list[int]:
    if "default" not in tok.templates:
        return text.encode(tok, question)
    message = [{"role": "user", "content": question}]
    return text.encode(tok, text.render_chat(tok, message, add_generation_prompt=True), special=False)
