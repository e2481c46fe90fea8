"""Classifiers: the label of a text, several of them, a number, or the label of each word."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from fdel import models
from fdel.recipe.methods.method import Adapted, Method, Objective
from fdel.recipe.parse import key
from fdel.train import losses
from fdel.train.losses.classes import PROBLEMS


@dataclass(frozen=True)
class Tagger(Adapted):
    """Keys of trainer_type token_classification."""

    labels: tuple[str, ...] | None = key(None, "names of the labels, in the order of their numbers in the data")


@dataclass(frozen=True)
class Classifier(Tagger):
    """Keys of trainer_type classification."""

    problem_type: str | None = key(None, "what a label is, as in transformers; default: regression without labels, else "
        "single_label_classification", choices=tuple(PROBLEMS))  # fmt: skip


def problem(k: Classifier) -> str:
    """Say which of transformers' three problems it is."""
    return k.problem_type or ("single_label_classification" if k.labels else "regression")


def named(least: int, k: Tagger) -> None:
    """Refuse (ValueError) names that are no labels to choose from."""
    found = k.labels or ()
    if len(found) < least or len({*found}) != len(found):
        wanted = f"at least {least} different names" if least else "different names"
        raise ValueError(f"labels={[*found]}; expected {wanted}")


def check(k: Classifier) -> Callable:
    """Choose the loss of scores."""
    named({"regression": 0, "multi_label_classification": 1}.get(problem(k), 2), k)
    return PROBLEMS[problem(k)]


def classification(k: Classifier, model: models.Model, *, remat: str | None) -> Objective:
    """Compose the loss of texts."""
    return Objective(losses.classification(*model[:2], problem=problem(k), remat=remat))


def tagging(k: Tagger, model: models.Model, *, remat: str | None) -> Objective:
    """Compose the loss of words."""
    return Objective(losses.token_classification(*model[:2], remat=remat))


def config(k: Tagger) -> dict[str, Any]:
    """Name the labels in config.json."""
    names = k.labels or ()
    known = {"id2label": {str(i): n for i, n in enumerate(names)}, "label2id": {n: i for i, n in enumerate(names)}}
    return (known if names else {}) | ({"problem_type": problem(k)} if isinstance(k, Classifier) else {})


METHODS = (
    Method(
        "classification", Classifier, 2e-5, classification, check, column="text", config=config,
        data=lambda k: {"kind": "labelled", "labels": k.labels or (), "problem": problem(k)},
        head=lambda k: ("sequence", len(k.labels or "1")),
    ),
    Method(
        "token_classification", Tagger, 2e-5, tagging, partial(named, 2), column="tokens", config=config,
        data=lambda k: {"kind": "tagged", "labels": k.labels or ()}, head=lambda k: ("token", len(k.labels or "1")),
    ),
)  # fmt: skip
