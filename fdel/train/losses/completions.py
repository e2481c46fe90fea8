"""What a model, and its reference, say of every completion: the sums over tokens from which preference losses are made.

Beside the keys of `losses.forward`, a batch (pairs with tokens int[B 2 T], or single completions with tokens int[B T]) has

    ref_logps  float[B 2] or float[B]: log-probabilities under the reference, if they were computed before
    label      bool[B], single completions only: whether it is desirable
    kl         a batch of as many rows, each a completion after another row's prompt, for KTO; with its own "ref_logps", if
               they were computed before, as "kl_ref_logps"
    udm        float[B], optional: BCO's `udm_weights`

A row without any token to be learnt fills up the batch: it has weight 0, and no other row's loss depends on it.
"""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from fdel.params import lora
from fdel.train.given import NOTHING, Given, lookup
from fdel.train.losses.forward import SEEN, Batch, router_terms, rows, token_scores, undisturbed
from fdel.train.losses.head import CHUNK
from fdel.train.losses.preference import ld_weights, mean_length
from fdel.train.losses.stats import TokenStats, check_range

Outputs = dict[str, Array]
Objective = Callable[..., tuple[Array, dict[str, Any]]]


def completion_logps(
    family: ModuleType,
    cfg: Any,
    *,
    ld_alpha: float | None = None,
    router: bool = False,
    chunk: int = CHUNK,
    remat: str | None = None,
) -> Callable[..., Outputs]:
    """Build `outputs(params, batch, given)`: `completion_sums` of each row, and "ref_logps", the reference's.

    Those in the batch come first, then those under given["reference"], a tree like `params`; without both there are none.
    `ld_alpha` is that of `ld_weights`, `remat` that of `losses.forward`. With `router` each
    row has "balance" too, that of its microbatch, see `with_balance`; so it has where routers have a capacity.
    """
    check_range(0, 1, ld_alpha=ld_alpha)
    scores = token_scores(family, cfg, chunk=chunk, router=router, remat=remat)

    def sums(params: Any, batch: Batch) -> Outputs:
        stats, text, balance = scores(params, _text(batch))
        completion = (rows(batch)[2] >= 0).reshape(text.shape).astype(text.dtype)
        found = completion_sums(stats, completion, text, ld_alpha)
        return found if balance is None else found | {"balance": jnp.broadcast_to(balance, (len(text), *balance.shape))}

    def outputs(params: Any, batch: Batch, given: Given = NOTHING) -> Outputs:
        if "packed" in batch:
            raise ValueError("the batch is packed; preference losses need one sequence per row: give 'lengths' instead")
        out = sums(params, batch)
        if "ref_logps" in batch:
            out["ref_logps"] = batch["ref_logps"]
        elif "reference" in given:
            out["ref_logps"] = jax.lax.stop_gradient(sums(given["reference"], undisturbed(batch))["logps"])
        if "kl" in batch:
            before = {"ref_logps": batch["kl_ref_logps"]} if "kl_ref_logps" in batch else {}
            kl = outputs(jax.lax.stop_gradient(params), batch["kl"] | before, given)
            out |= {"kl_logps": kl["logps"], "kl_ref_logps": ref_logps(kl)}
        return out

    return outputs


def with_balance(objective: Objective, coef: float, z: float = 0.0) -> Objective:
    """Add coef times `ops.load_balancing`, z times the z-loss, to an objective's mean, of `completion_logps(router=True)`.

    The policy's router alone counts, on prompts and completions, each microbatch's by itself: as in TRL. With both 0 it
    tells, where there is a balance, and adds nothing.
    """
    check_range(coef=coef, z=z)

    def balanced(o: Outputs, batch: Batch, given: Given = NOTHING) -> tuple[Array, dict[str, Any]]:
        total, sums = objective(o, batch, given)
        if "balance" not in o and not coef and not z:
            return total, sums
        mean = jnp.where(counted(o)[:, None], o["balance"], 0).sum(0) / jnp.maximum(counted(o).sum(), 1)
        return router_terms(total, sums, mean, coef, z)

    return balanced


def completion_sums(
    stats: TokenStats, completion: Float[Array, "... T"], text: Float[Array, "... T"], ld_alpha: float | None = None
) -> Outputs:
    """Sum statistics over each row's tokens: those of the completion, for "text_*" those of prompt and completion.

    `completion` and `text` are 1 at those tokens, 0 elsewhere.
    """
    total = lambda x: (completion * x).sum(-1)
    weights = completion if ld_alpha is None else ld_weights(completion, ld_alpha)
    return {
        "logps": (weights * stats.logp).sum(-1),
        "nll": -total(stats.logp),
        "lengths": completion.sum(-1),
        "text_nll": -(text * stats.logp).sum(-1),
        "text_lengths": text.sum(-1),
        "aligned": total(stats.logp - stats.logsumsq),
        "entropy": total(stats.entropy),
        "logits": total(stats.mean_logit),
        "top1": total(stats.top1),
    }


def ref_logps(o: Outputs) -> Array:
    """The reference's log-probabilities among `outputs`; ValueError if there are none."""
    if "ref_logps" not in o:
        raise ValueError("no reference: give the batch a column 'ref_logps', or the step reference=params")
    return o["ref_logps"]


def counted(o: Outputs) -> Bool[Array, " B"]:
    """Which rows count: those with a token to be learnt, of pairs on either side. The others fill up a batch."""
    return (o["lengths"] > 0).reshape(len(o["lengths"]), -1).any(1)


def completion_metrics(o: Outputs, logps: Array, rewards: Array, chosen: Bool[Array, "..."]) -> dict[str, Any]:
    """Sums for TRL's metrics, over the chosen and the rejected rows; `logits/*` are means over completions' tokens."""
    rows = counted(o)
    metrics: dict[str, Any] = {"weight": rows.sum(dtype=jnp.float32)}
    metrics["entropy"] = o["entropy"].sum(), o["lengths"].sum()
    rows = rows.reshape(-1, *[1] * (chosen.ndim - 1))
    for side, there in (("chosen", chosen & rows), ("rejected", ~chosen & rows)):
        total = lambda x, there=there: jnp.where(there, x, 0.0).sum()
        metrics[f"rewards/{side}"] = total(rewards), total(1.0)
        metrics[f"logps/{side}"] = total(logps), total(1.0)
        metrics[f"logits/{side}"] = total(o["logits"]), total(o["lengths"])
    return metrics


def with_mean_lengths(batch: Batch) -> Batch:
    """Add to a batch of pairs the denominators of means over chosen tokens, so that each microbatch knows the whole's.

    With them, losses with an NLL term ("sft", CPO, ORPO, TPO) are exact under `accumulate` too, without `gradcache`. Of
    triples they are of the gold completions, the third. Other rows are a ValueError.
    """
    shape = batch["tokens"].shape
    if "packed" in batch or len(shape) != 3 or shape[1] not in (2, 3):
        raise ValueError(
            f"the batch has tokens {shape}; means over chosen tokens are of pairs, [B 2 T], or triples, [B 3 T], one "
            "sequence a row"
        )
    b, sides, learnt = shape[0], shape[1], {2: 0, 3: 2}[shape[1]]
    count = lambda batch: (rows(batch)[2] >= 0).reshape(b, sides, -1).sum(-1, dtype=jnp.float32)
    there = counted({"lengths": count(batch)})
    mean = lambda batch: jnp.broadcast_to(mean_length(count(batch)[:, learnt], there), b)
    return {**batch, "mean_length": mean(batch), "mean_text_length": mean(_text(batch))}


def _text(batch: Batch) -> Batch:
    """The batch with prompts to be scored too."""
    return {k: batch[k] for k in ("tokens", "lengths", "routing", *SEEN) if k in batch}


def on_adapters(f: Callable, *, reference: bool = True) -> Callable:
    """Make f(params, batch, given) a function of adapters in place of params, given "base", the other part of `lora.split`.

    Unless it is given a "reference", that is the base without adapters; with reference=False there is none.
    """

    def adapted(adapters: Any, batch: Batch, given: Given = NOTHING) -> Any:
        frozen = lookup(given, "base")
        known = {"reference": lora.unload(frozen)} if reference else {}
        return f(lora.join(adapters, frozen), batch, {**known, **given})

    return adapted
