"""Requests about whole texts as records: embeddings, classes, scores of pairs; and of images, by models that score both."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fdel.serve.engine.request import SamplingParams
from fdel.serve.server.openai.checks import refuse
from fdel.serve.server.openai.media import taken
from fdel.serve.server.openai.request import Chat, message
from fdel.serve.server.openai.tables import Limits, requests

PHOTO = "This is a photo of {}."  # as transformers' pipeline for labels of images


@dataclass(frozen=True)
class Ranking:
    """A request for scores of pairs of texts, or for the order of documents (`top` of them)."""

    model: str
    pairs: Sequence[tuple[str, str]]
    top: int | None = None
    documents: bool = True  # whether the answer repeats them
    activation: bool = True  # whether a classifier's scores are probabilities


@dataclass(frozen=True)
class Pooled:
    """A request for classes, or for what a model says of texts, token ids or one conversation."""

    model: str
    prompts: Sequence[str | Sequence[int]] | Chat
    activation: bool = True
    base64: bool = False
    dimensions: int | None = None  # of an embedding
    labels: Sequence[str] = ()  # texts, one of which may be of an image


def parse_embeddings(body: Mapping[str, Any], limits: Limits) -> Pooled:
    """Check a request for embeddings, as `parse_classify` does."""
    return parse_classify(body, limits, "embeddings")


def parse_score(body: Mapping[str, Any], limits: Limits) -> Ranking:
    """Check a request for scores: text_1 with each of text_2, or pair by pair. APIError as above."""
    r = requests(limits)["score"](body)
    first, second = ([v] if isinstance(v, str) else v for v in (r["text_1"], r["text_2"]))
    first = first * len(second) if len(first) == 1 else first
    if len(first) != len(second):
        refuse("text_2", f"found {len(second)} texts for {len(first)} in text_1; expected as many, or one in text_1")
    return Ranking(r["model"], list(zip(first, second, strict=True)), activation=r.get("use_activation", True))


def parse_rerank(body: Mapping[str, Any], limits: Limits) -> Ranking:
    """Check a request to order documents by a query. APIError as above."""
    r = requests(limits)["rerank"](body)
    pairs = [(r["query"], d) for d in r["documents"]]
    return Ranking(
        r["model"], pairs, r.get("top_n", len(pairs)), r.get("return_documents", True), r.get("use_activation", True)
    )


def parse_classify(body: Mapping[str, Any], limits: Limits, kind: str = "classify") -> Pooled:
    """Check a request to classify `input`, or the conversation `messages`. APIError as above."""
    r = requests(limits)[kind](body)
    if ("input" in r) == ("messages" in r):
        refuse("input", "expected either input or messages", "missing_required_parameter")
    said = r.get("input") or _conversation(r, limits)
    template = r.get("hypothesis_template", PHOTO)
    if template.count("{}") != 1:
        refuse("hypothesis_template", "expected a text with one {}, where the label stands")
    labels = [template.replace("{}", label) for label in r.get("candidate_labels", ())]
    if "hypothesis_template" in r and not labels:
        refuse("hypothesis_template", "needs candidate_labels")
    base64 = r.get("encoding_format") == "base64"
    return Pooled(r["model"], said, r.get("use_activation", True), base64, r.get("dimensions"), labels)


def _conversation(r: Mapping[str, Any], limits: Limits) -> Chat:
    """Read the messages of a request as a chat that nobody continues."""
    messages, shown = taken([message(m, i) for i, m in enumerate(r["messages"])], limits.media)
    return Chat(r["model"], messages, SamplingParams(), template={"add_generation_prompt": False}, shown=shown)


def parse_pooling(body: Mapping[str, Any], limits: Limits) -> Pooled:
    """Check a request for what a model says of texts, as `parse_classify` does."""
    return parse_classify(body, limits, "pooling")
