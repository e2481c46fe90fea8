"""What stands on a family's hidden states in place of its output projection: classes, rewards, spans of answers, values.

A model with such a head has the parameters {"model": the family's, kind: {"weight": [labels D], "bias": [labels]}}, the
bias where `HEADS` says so. One without any, of kind "base", has the family's without its output projection: embeddings.
"""

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from fdel import ops
from fdel.models.keys import ConfigError, show
from fdel.params.spec import Param, normal, zeros

MOST = 2**20  # labels
STEMS = {"gemma3_text": "Gemma3Text"}  # what classes below a head are called, where the language model's differs
TASKS: dict[str | None, str] = {
    "sequence": "SEQ_CLS",
    "token": "TOKEN_CLS",
    "question": "QUESTION_ANS",
}  # as PEFT names them
CAUSAL = "(ForCausalLM|LMHeadModel|ForMaskedLM)$"


@dataclass(frozen=True)
class Head:
    """One kind: what transformers' class for it is called at its end, and its tensors in a file.

    `pool` is the token that it is computed for, "last" or "first", or "every". `labels` is None where the config tells.
    `dense` is a square layer with tanh before it (RoBERTa). A family's own are in its `HEADS`, by kind.
    """

    ending: str
    name: str
    bias: bool = True
    pool: str = "every"
    labels: int | None = None
    dense: str = ""


HEADS = {
    "sequence": Head("ForSequenceClassification", "score", bias=False, pool="last"),
    "token": Head("ForTokenClassification", "score"),
    "question": Head("ForQuestionAnswering", "qa_outputs", labels=2),  # logits of a span's first and last token
    "value": Head("", "v_head.summary", labels=1),  # TRL's, beside the output projection
}
WHOLE = rf"^({'|'.join(HEADS)})\."  # paths of a head, which is trained whole beside adapters
# Families whose classes in transformers call the head for tokens "classifier", and those that call the model below the
# head for questions "transformer".
CLASSIFIER = frozenset("bloom falcon gpt2 gpt_bigcode gpt_neo gpt_neox mpt".split())
TRANSFORMER = frozenset(
    "arcee diffllama exaone4 llama ministral nemotron qwen2 qwen3 qwen3_moe qwen3_next seed_oss smollm3".split()
)


def of(family: ModuleType, kind: str) -> Head:
    """Give a family's head of a kind."""
    head = getattr(family, "HEADS", {}).get(kind, HEADS[kind])
    return replace(head, name="classifier") if kind == "token" and family.MODEL_TYPE in CLASSIFIER else head


def kind_of(params: Any) -> str | None:
    """Name the head of a model's parameters; None without one."""
    return next((kind for kind in HEADS if kind in params), None)


def inner(params: Any) -> Any:
    """Give the family's parameters of a model, with a head or without."""
    return params if kind_of(params) is None else params["model"]


def count(params: Any) -> int:
    """Count the labels of a head; 0 without one."""
    kind = kind_of(params)
    return 0 if kind is None else len(params[kind]["weight"])


def outputs(params: Any, x: Float[Array, "... D"]) -> Float[Array, "... labels"]:
    """Compute float32 logits of a model's head on hidden states; (first, last) of a span's for questions."""
    head = params[kind_of(params)]
    if "dense" in head:
        x = jnp.tanh(ops.linear("...d,ed->...e", x, head["dense"], head["dense_bias"]))
    return ops.logits(x, ops.Head(head["weight"], bias=head.get("bias")))


def read(d: Mapping[str, Any], family: ModuleType, names: Collection[str]) -> tuple[str | None, int]:
    """Find (kind, number of labels) by a config.json and the names of a file's tensors; None for a language model."""
    classes = d.get("architectures")
    if classes is not None and not (isinstance(classes, list) and all(isinstance(c, str) for c in classes)):
        raise ConfigError(f"config field 'architectures': found {show(classes)}, expected a list of names")
    kind = next((k for k, h in HEADS.items() for c in classes or () if h.ending and c.endswith(h.ending)), None)
    if kind is None and f"{HEADS['value'].name}.weight" in names:
        kind = "value"
    if kind is None:
        bare = any(c.endswith("Model") and not re.search("Heads?Model$", c) for c in classes or ())
        return ("base" if bare and not any("lm_head" in name for name in names) else None), 0
    return kind, of(family, kind).labels or label_count(d)


def label_count(d: Mapping[str, Any]) -> int:
    """Count the labels that a config.json names; 2 where it says nothing, as transformers assumes."""
    labels = d.get("id2label")
    n = len(labels) if isinstance(labels, Mapping) and labels else d.get("num_labels", 2)
    if type(n) is not int or not 1 <= n <= MOST:
        raise ConfigError(f"config field 'num_labels': found {show(n)}, expected 1 to {MOST}")
    return n


def spec(family: ModuleType, cfg: Any, kind: str | None, labels: int = 1) -> dict[str, Any]:
    """Declare the arrays of a model with a head, of a "base" model, or (None) of the language model.

    One label for a sequence is a reward; process rewards have one label per class of each token.
    """
    model = family.spec(cfg)
    if kind is None:
        return model
    if kind != "value":
        model = {k: v for k, v in model.items() if not k.startswith("head")}
    old = prefix(model)
    new = {"base": "", "question": "transformer." if family.MODEL_TYPE in TRANSFORMER else old}.get(kind, old)
    model = jax.tree.map(lambda p: p.renamed(lambda name: re.sub(f"^{re.escape(old)}", new, name)), model)
    if kind == "base":
        return model
    h, d = of(family, kind), getattr(cfg, "width", cfg.embed)
    one = lambda name, axes, shape: {
        "weight": Param(axes, shape, normal(0.02), f"{name}.weight"),
        "bias": Param(axes.split()[0], shape[:1], zeros, f"{name}.bias"),
    }
    head = one(h.name, "labels embed", (h.labels or labels, d))
    head = head if h.bias else {"weight": head["weight"]}
    if h.dense:
        dense = one(h.dense, "channels embed", (d, d))
        head |= {"dense": dense["weight"], "dense_bias": dense["bias"]}
    return {"model": model, kind: head}


def prefix(spec: Mapping[str, Any]) -> str:
    """Name what transformers puts before the tensors of a model below a head, "model." for most."""
    return jax.tree.leaves(spec.get("embed", spec))[0].hf.partition(".")[0] + "."


def rename(name: str, known: Collection[str], before: str) -> str:
    """Give the spec's name of a tensor below or in a head, which files spell in several ways; `before` is `prefix`."""
    short = name.removeprefix("transformer.").removeprefix(before)
    return next((form for form in (before + short, short, f"transformer.{short}") if form in known), name)


def config_dict(d: dict[str, Any], family: ModuleType, kind: str | None, labels: int) -> dict[str, Any]:
    """Turn a family's config.json into that of a model with a head; names of as many labels stay."""
    if kind is None or kind == "value":
        return d
    ending = "Model" if kind == "base" else of(family, kind).ending
    stem = STEMS.get(family.MODEL_TYPE, re.sub(CAUSAL, "", family.ARCHITECTURE))
    out = d | {"architectures": [stem + ending]}
    if kind == "base" or len(d.get("id2label") or ()) == labels:
        return out
    names = {str(i): f"LABEL_{i}" for i in range(labels)}
    return out | {"id2label": names, "label2id": {v: int(k) for k, v in names.items()}}


def label_names(cfg: Any, labels: int) -> list[str]:
    """Name the labels as config.json does, LABEL_0 and so on without it."""
    named = json.loads(cfg.source).get("id2label") or {}
    return [str(named.get(str(i), f"LABEL_{i}")) for i in range(labels)]


def probabilities(cfg: Any, logits: Float[np.ndarray, "... labels"]) -> Float[np.ndarray, "... labels"]:
    """Make probabilities of a classifier's logits, as vLLM does: softmax, or sigmoid of one label and of several at once.

    config.json's problem_type tells: "regression" has none, "multi_label_classification" has sigmoids.
    """
    kind = json.loads(cfg.source).get("problem_type")
    if kind == "regression":
        return logits
    if kind == "multi_label_classification" or logits.shape[-1] == 1:
        return 1 / (1 + np.exp(-logits))
    e = np.exp(logits - logits.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


class Span(NamedTuple):
    """An answer: its first and last token, and the product of their probabilities."""

    first: int
    last: int
    score: float


def spans(
    logits: Float[np.ndarray, "T 2"], context: Bool[np.ndarray, " T"], *, most: int = 15, count: int = 1,
    null: int | None = None,
) -> list[Span]:  # fmt: skip
    """Choose the best `count` answers by a head for questions, best first, each of at most `most` tokens of the context.

    A span's score is softmax(first)[i] * softmax(last)[j] over the tokens of the context (arXiv:1810.04805, section 4.3).
    `null` is a token whose own span says that there is no answer, the first one of BERT and RoBERTa, and takes part in
    the softmax; None where every question has one. ValueError for no context, and for numbers below 1.
    >>> models.heads.spans(jnp.array([[9.0, 0.0], [0.0, 9.0], [8.0, 5.0]]), jnp.ones(3, bool))[0][:2]
    (0, 1)
    """
    logits, context = np.asarray(logits, np.float64), np.asarray(context, bool)
    if logits.shape != (len(context), 2) or not context.any() or min(most, count) < 1:
        said = f"logits {logits.shape}, {context.sum()} of {len(context)} tokens, most={most}, count={count}"
        raise ValueError(f"{said}; expected logits [T 2], a token of a context at least, and numbers of at least 1")
    seen = context | (np.arange(len(context)) == null)
    z = np.where(seen[:, None], logits, -np.inf)
    p = np.exp(z - z.max(0))
    p /= p.sum(0)
    first, last = (p * context[:, None]).T
    scores = np.zeros((len(context), min(most, len(context))))  # of spans by their first token and length
    for n in range(scores.shape[1]):
        scores[: len(first) - n, n] = first[: len(first) - n] * last[n:]
    order = np.argsort(-scores, axis=None, kind="stable")[:count]
    places = zip(*np.unravel_index(order, scores.shape), strict=True)
    found = [Span(int(i), int(i + n), float(scores[i, n])) for i, n in places if scores[i, n] > 0]
    found += [] if null is None else [Span(null, null, float(p[null].prod()))]
    return sorted(found, key=lambda s: -s.score)[:count]


def no_text(model: Any) -> str | None:
    """Say why a model cannot generate, and what it is for, if it has no output projection."""
    kind, labels = kind_of(model.params), count(model.params)
    if kind == "value":
        return "this is a value model; its language model alone is model._replace(params=model.params['model'])"
    if kind is not None:
        found = f"this is a classifier or reward model ({labels} labels), which writes no text"
        return f"{found}; Engine.classify(tokens), /classify, /score and /pooling ask it"
    kept = model.family.state_spec(model.cfg, pages=1, rows=1)
    if kept.pages is None and kept.slots is None:
        return "this is an encoder, which writes no text; Engine.embed(tokens), /v1/embeddings and /pooling ask it"
    if "head" not in model.params and "head" in model.family.spec(model.cfg):
        return "this model has no output projection, and writes no text; Engine.embed(tokens) and /v1/embeddings ask it"
    return None
