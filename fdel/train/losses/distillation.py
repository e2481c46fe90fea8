"""Distillation: learn a teacher's next-token distributions. Neither model's logits [B, T, V] are ever built whole.

A target says how far the student's logits are from the teacher's, per token: `generalized_jsd`, `soft_targets`,
`sparse_kl`. `distill` runs the teacher, and can match hidden states and attention weights too; `sparse_distill` reads
what the teacher stored in the batch. Sequence-level distillation (arXiv:1606.07947) is `sft` on the teacher's samples.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from fdel import ops
from fdel.ops.contraction import wide, widen
from fdel.train.given import NOTHING, Given, lookup
from fdel.train.losses.forward import Batch, attention_layers, forward_pass, router_terms, rows, still
from fdel.train.losses.head import CHUNK, logits_sum
from fdel.train.losses.stats import check_call, check_range

Logits = Float[Array, "... V"]
PerToken = Float[Array, "..."]
ABSENT = -1e9  # the log-probability of a token that the teacher did not return; -inf would give NaN gradients


# ---- targets: student's logits, teacher's -> per token -------------------------------------------------------------


def generalized_jsd(student: Logits, teacher: Logits, *, beta: float = 0.5, temperature: float = 1.0) -> PerToken:
    """Compute beta KL(T || M) + (1 - beta) KL(S || M), where M = beta T + (1 - beta) S (GKD, arXiv:2306.13649, eq. 1).

    S and T are the softmax of logits / temperature. As TRL has it, beta = 0 is the forward KL(T || S) and beta = 1 the
    reverse KL(S || T), the limits of the formula divided by beta and by 1 - beta. ValueError outside [0, 1].
    >>> s, t = jnp.log(jnp.array([[0.5, 0.5], [0.25, 0.75]]))
    >>> losses.generalized_jsd(s, t, beta=0.0)  # the forward KL
    Array(0.13081208, dtype=float32)
    """
    if not 0 <= beta <= 1:
        raise ValueError(f"beta={beta}; expected a number from 0 (forward KL) to 1 (reverse KL)")
    check_range(above=True, temperature=temperature)
    s, t = (jax.nn.log_softmax(z / temperature) for z in (student, teacher))
    if beta == 0:
        return _kl(t, s)
    if beta == 1:
        return _kl(s, t)
    mixture = jnp.logaddexp(s + math.log1p(-beta), t + math.log(beta))
    return beta * _kl(t, mixture) + (1 - beta) * _kl(s, mixture)


def soft_targets(student: Logits, teacher: Logits, *, temperature: float = 4.0) -> PerToken:
    """Compute temperature^2 KL(T || S) of softened distributions (arXiv:1503.02531).

    The square keeps gradients as large as those of hard labels, whatever the temperature.
    >>> losses.soft_targets(jnp.array([0.0, 0.0]), jnp.array([0.0, 1.0]), temperature=2.0)
    Array(0.12119949, dtype=float32)
    """
    return temperature**2 * generalized_jsd(student, teacher, beta=0.0, temperature=temperature)


def sparse_kl(
    student: Logits, ids: Int[Array, "... k"], logps: Float[Array, "... k"], *, support: str = "tail"
) -> PerToken:
    """Compute KL(T || S) from the teacher's k most likely tokens and their log-probabilities; -inf marks an absent one.

    `support` "tail" puts all other tokens into one more class, "renormalized" compares both models' distributions over
    the k alone (TRL's two), "full" the teacher's over the k with the student's over all tokens.
    >>> ids, logps = jnp.array([1]), jnp.log(jnp.array([0.75]))
    >>> sparse_kl(jnp.zeros(2), ids, logps)
    Array(0.130812, dtype=float32)
    """
    if support not in ("tail", "renormalized", "full"):
        raise ValueError(f"support={support!r}; expected 'tail', 'renormalized' or 'full'")
    there = logps > -jnp.inf
    t = jnp.where(there, logps, ABSENT)
    s = jnp.where(there, jnp.take_along_axis(jax.nn.log_softmax(student), ids, -1), ABSENT)
    if support == "tail":
        return _kl(_with_tail(t), _with_tail(s))
    return _kl(jax.nn.log_softmax(t), jax.nn.log_softmax(s) if support == "renormalized" else s)


def top_k_kl(student: Logits, teacher: Logits, *, k: int = 20, support: str = "tail") -> PerToken:
    """Compute `sparse_kl` against the k most likely tokens of a teacher that is at hand.
    >>> top_k_kl(jnp.zeros(3), jnp.array([0.0, 1.0, 2.0]), k=2)
    Array(0.2662167, dtype=float32)
    """
    check_range(1, teacher.shape[-1], k=k)
    logps, ids = jax.lax.top_k(jax.nn.log_softmax(teacher), k)
    return sparse_kl(student, ids, logps, support=support)


def student_top_k(student: Logits, teacher: Logits, *, k: int = 100, beta: float = 1.0, tail: bool = True) -> PerToken:
    """Compute `generalized_jsd` over the student's k most likely tokens, and one class for all others (`tail`) or without.

    Without, both are distributions over the k alone. This is self-distillation's (SDPO): the teacher may be the same model,
    told more.
    >>> student_top_k(jnp.array([2.0, 1.0, 0.0]), jnp.array([0.0, 1.0, 2.0]), k=3, tail=False)  # 2 (0.665 - 0.09)
    Array(1.1504, dtype=float32)
    """
    check_range(1, student.shape[-1], k=k)
    top = jax.lax.top_k(student, k)[1]
    s, t = (jnp.take_along_axis(jax.nn.log_softmax(z), top, -1) for z in (student, teacher))
    return generalized_jsd(_with_tail(s), _with_tail(t), beta=beta) if tail else generalized_jsd(s, t, beta=beta)


def _kl(p: Logits, q: Logits) -> PerToken:
    return (jnp.exp(p) * (p - q)).sum(-1)


def _with_tail(logp: Float[Array, "... k"]) -> Float[Array, "... k_plus_1"]:
    """Append the log-probability of everything else, which is at least 1e-7."""
    rest = jax.nn.log1mexp(jnp.maximum(-jax.nn.logsumexp(logp, -1, keepdims=True), 1e-7))
    return jnp.concatenate([logp, rest], -1)


# ---- matching what is inside ---------------------------------------------------------------------------------------


def hidden_mse(student: Float[Array, "... T D"], teacher: Float[Array, "... T D"]) -> Float[Array, "... T"]:
    """Compute the mean squared difference of hidden states per token, in float32.

    ValueError for different widths: project the student's to the teacher's first (arXiv:1909.10351).
    >>> hidden_mse(jnp.zeros((1, 2)), jnp.array([[1.0, 3.0]]))
    Array([5.], dtype=float32)
    """
    return _squares(student, teacher).mean(-1)


def attention_mse(student: Float[Array, "... N T S"], teacher: Float[Array, "... N T S"]) -> Float[Array, "... T"]:
    """Compute the squared difference of attention weights per query: summed over keys, averaged over heads, in float32.

    A mean over keys would depend on the padding. (TinyBERT, arXiv:1909.10351, matches the scores before the softmax.)
    If the numbers of heads differ, each model's weights are averaged over its heads first.
    >>> attention_mse(jnp.array([[[1.0, 0.0]]]), jnp.array([[[0.5, 0.5]]]))
    Array([0.5], dtype=float32)
    """
    if student.shape[-3] != teacher.shape[-3]:
        student, teacher = (x.mean(-3, keepdims=True, dtype=wide(x.dtype)) for x in (student, teacher))
    return _squares(student, teacher).sum(-1).mean(-2)


def _squares(student: Array, teacher: Array) -> Array:
    if student.shape != teacher.shape:
        raise ValueError(f"student {student.shape} and teacher {teacher.shape} differ; map one onto the other's shape")
    return (widen(student) - widen(jax.lax.stop_gradient(teacher))) ** 2


# ---- losses --------------------------------------------------------------------------------------------------------


class Terms(NamedTuple):
    """What `distill` adds to the divergence, per token; nothing by default.

    `hidden_weight` times the mean `hidden_mse` over the hidden states `hidden_layers`, each at the same index of both
    models (see `losses.forward`; the last one by default), and `router_aux_loss_coef` and `router_z_loss_coef` as in `sft`.
    `attention_weight` times the mean `attention_mse` over the layers `attention_layers`, each at the same index of both
    among those that attend;
    None: all, of two models with as many. Each takes float32 [B N T T] in both models.
    """

    hidden_weight: float = 0.0
    hidden_layers: tuple[int, ...] = (-1,)
    router_aux_loss_coef: float = 0.0
    attention_weight: float = 0.0
    attention_layers: tuple[int, ...] | None = None
    router_z_loss_coef: float = 0.0


NO_TERMS = Terms()


def distill(
    family: ModuleType,
    cfg: Any,
    teacher: ModuleType,
    teacher_cfg: Any,
    *,
    target: Callable[..., PerToken] = generalized_jsd,
    alpha: float = 1.0,
    terms: Terms = NO_TERMS,
    chunk: int = CHUNK,
    remat: str | None = None,
) -> Callable:
    """Build `loss(params, batch, given) -> (sum, sums)`: alpha * target + (1 - alpha) * -log p[next token].

    It is given "teacher", the teacher's parameters. The classic is `target=soft_targets, alpha=0.9`. Per token to be
    learnt, see `losses.forward`; a chunk takes up to 1.5 times the memory of `sft`'s. `terms` are added. To match hidden
    states of two widths, let params hold "projection", float[layers D_teacher D_student], with which the student's are
    multiplied first. `remat` is the student's. Vocabularies or unprojected widths of two sizes are a ValueError.
    """
    check_range(0, 1, alpha=alpha)
    check_range(1, chunk=chunk)
    check_range(**{k: v for k, v in terms._asdict().items() if not k.endswith("_layers")})
    check_call(target, *[(1, getattr(cfg, "vocab", 1000))] * 2)
    places = tuple(terms.hidden_layers) if terms.hidden_weight else ()
    if terms.hidden_weight and not places:
        raise ValueError("hidden_layers is empty; name the hidden states to match, as (-1,), or set hidden_weight to 0")
    inside: dict[str, Any] = {"places": places, "attention": _attending(terms, (family, cfg), (teacher, teacher_cfg))}
    forward = forward_pass(
        family, cfg, router=bool(terms.router_aux_loss_coef or terms.router_z_loss_coef), **inside, remat=remat
    )
    teach = forward_pass(teacher, still(teacher_cfg), **inside)

    def loss(params: Any, batch: Batch, given: Given = NOTHING) -> tuple[Array, dict[str, Array]]:
        teacher_params = lookup(given, "teacher")
        tokens, packed, labels = rows(batch)
        out = forward(params, tokens, packed)
        told = teach(teacher_params, tokens, replace(packed, routing=None))
        heads = family.head(params, cfg), teacher.head(teacher_params, teacher_cfg)
        sizes = [h.weight.shape[0] for h in heads]
        if sizes[0] != sizes[1]:
            raise ValueError(f"the student predicts {sizes[0]} tokens and the teacher {sizes[1]}; cut off the padding")
        of_teacher = lambda z, tx, head: target(z, ops.logits(tx, head))
        how: dict[str, Any] = {"fixed": (heads[1],), "chunk": chunk}
        total, sums = _mixed(of_teacher, alpha, out.hidden, heads[0], labels, told.hidden, **how)
        learnt = lambda errors: jnp.where(labels >= 0, sum(errors) / len(errors), 0).sum()
        if out.states:
            hidden = learnt([*map(hidden_mse, _projected(params, out.states), told.states)])
            total, sums = total + terms.hidden_weight * hidden, sums | {"hidden_loss": hidden}
        if out.attention:
            attention = learnt([*map(attention_mse, out.attention, told.attention)])
            total, sums = total + terms.attention_weight * attention, sums | {"attention_loss": attention}
        return router_terms(total, sums, out.balance, terms.router_aux_loss_coef, terms.router_z_loss_coef)

    return loss


def _attending(terms: Terms, *models: tuple[ModuleType, Any]) -> tuple[int, ...]:
    """Resolve which attention layers are matched; none of them if they weigh nothing."""
    if not terms.attention_weight:
        return ()
    if terms.attention_layers == ():
        raise ValueError("attention_layers is empty; name the layers to match, as (-1,), or set attention_weight to 0")
    if terms.attention_layers is not None:
        return tuple(terms.attention_layers)
    mine, theirs = (attention_layers(*m) for m in models)
    if mine != theirs:
        raise ValueError(
            f"the student has {mine} layers that attend and the teacher {theirs}; name those to match in attention_layers, "
            "each is taken at the same index of both"
        )
    return tuple(range(mine))


def _projected(params: Any, states: tuple[Array, ...]) -> tuple[Array, ...]:
    if "projection" not in params:
        return states
    return tuple(ops.einsum("...d,ed->...e", x, w) for x, w in zip(states, params["projection"], strict=True))


def sparse_distill(
    family: ModuleType,
    cfg: Any,
    *,
    target: Callable[..., PerToken] = sparse_kl,
    alpha: float = 1.0,
    chunk: int = CHUNK,
    remat: str | None = None,
) -> Callable:
    """Build `loss(params, batch, given) -> (sum, sums)` as `distill`, from a teacher's answers in the batch.

    "teacher_ids" int and "teacher_logps" float, both as tokens with one more axis [... T k]: at place t, what the teacher
    says of token t + 1.
    """
    check_range(0, 1, alpha=alpha)
    check_range(1, chunk=chunk)
    check_call(lambda z, p: target(z, jnp.zeros(p.shape, jnp.int32), p), (1, getattr(cfg, "vocab", 1000)), (1, 1))
    forward = forward_pass(family, cfg, remat=remat)

    def loss(params: Any, batch: Batch, given: Given = NOTHING) -> tuple[Array, dict[str, Array]]:
        tokens, packed, labels = rows(batch)
        x = forward(params, tokens, packed).hidden
        answers = [batch[k].reshape(*tokens.shape, -1) for k in ("teacher_ids", "teacher_logps")]
        return _mixed(target, alpha, x, family.head(params, cfg), labels, *answers, chunk=chunk)

    return loss


def _mixed(
    target: Callable, alpha: float, x: Array, head: ops.Head, labels: Array, *answers: Array, **settings: Any
) -> tuple[Array, dict[str, Array]]:
    """Sum alpha * target(logits, *answers) + (1 - alpha) * nll over the tokens with a label."""

    def loss(z: Array, stats: Any, weights: Array, *answers: Any) -> tuple[Array, dict[str, Array]]:
        divergence = jnp.where(weights > 0, target(z, *answers), 0).sum()
        total = divergence if alpha == 1 else alpha * divergence - (1 - alpha) * stats.logp.sum()
        metrics = {"divergence": divergence, "entropy": stats.entropy.sum(), "mean_token_accuracy": stats.top1.sum()}
        return total, {"weight": weights.sum(), **metrics}

    return logits_sum(loss, x, head, labels, (labels >= 0).astype(jnp.float32), *answers, **settings)
