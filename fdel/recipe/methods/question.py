"""Question answering: where in a text the answer to a question stands."""

from fdel import models
from fdel.recipe.methods.method import Adapted, Method, Objective
from fdel.train import losses


def question_answering(k: Adapted, model: models.Model, *, remat: str | None) -> Objective:
    """Compose the loss of answers' first and last tokens."""
    return Objective(losses.question_answering(*model[:2], remat=remat))


METHODS = (
    Method(
        "question_answering", Adapted, 2e-5, question_answering, column="question",
        data=lambda k: {"kind": "spans"}, head=lambda k: ("question", 2),
    ),
)  # fmt: skip
