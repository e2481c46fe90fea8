"""Learn from samples: the losses of `losses.policy` on a model.

    loss = losses.policy_gradient(llama, cfg, losses.Policy(loss_type="dapo", epsilon_high=0.28))
    g = train.accumulate(train.grads(loss), n)

    options = losses.Policy(top_entropy_quantile=0.2)  # `coupled`: the loss of one row depends on the others
    g = train.gradcache(losses.policy_outputs(llama, cfg), losses.policy_objective(options), n)

Beside the keys of `losses.forward`, whose mask tells the tokens that the policy drew, a batch has these, all float, as
tokens, each at the token that it is about. Rows may be packed.

    advantages  how much better than expected
    old         log-probabilities under the trainer's weights before the first step on this batch (`token_logps`); absent:
                those of this step, so that ratios are 1
    logps       log-probabilities of the distribution that the sampler drew from; NaN where it told none
    kept        log of the mass that top-k, top-p or min-p left, so that logps + kept is of the whole distribution; absent:
                0, what was cut off is then corrected for too
    ref_logps   log-probabilities under the reference, for beta != 0, or the step is given reference=params
    turns       int: where in its row the turn begins that drew the token, for penalties that count (`losses.penalties`);
                absent: learnt tokens that stand side by side are one turn
"""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from fdel.train.extras import carry
from fdel.train.given import NOTHING, Given
from fdel.train.losses.forward import Batch, router_terms, rows, token_scores, undisturbed
from fdel.train.losses.head import CHUNK
from fdel.train.losses.policy import Policy, policy
from fdel.train.losses.sequences import Tokens
from fdel.train.losses.stats import check_range
from fdel.train.steps import Step

Outputs = dict[str, Array]
Sums = dict[str, Any]


def policy_outputs(
    family: ModuleType,
    cfg: Any,
    *,
    temperature: float = 1.0,
    reference: bool = True,
    router: bool = False,
    chunk: int = CHUNK,
    remat: str | None = None,
    **penalties: float,
) -> Callable[..., Outputs]:
    """Build `outputs(params, batch, given)`: "logp" and "entropy" of the next token, [R T], 0 where it is not learnt.

    They are of softmax(logits / temperature) after `penalties`, which are fields of `losses.penalties.Penalties`: what was
    drawn from, if the sampler had the same temperature and penalties, but for what it cut off ("kept"). If the step is
    given a reference and the batch has no "ref_logps", "reference" are its log-probabilities; reference=False leaves them
    away. With `router` there is "balance", float[R 3], of the microbatch, see `router_terms`; where routers have a
    capacity, float[R 5] in any case.
    """
    scores = token_scores(family, cfg, router=router, chunk=chunk, remat=remat, temperature=temperature, **penalties)

    def outputs(params: Any, batch: Batch, given: Given = NOTHING) -> Outputs:
        if batch["tokens"].ndim != 2:
            raise ValueError(f"found tokens {batch['tokens'].shape}; a policy loss takes [rows, tokens], packed or not")
        s = scores(params, batch)
        out = {"logp": s.stats.logp, "entropy": s.stats.entropy}
        if reference and "reference" in given and "ref_logps" not in batch:
            told = scores(jax.lax.stop_gradient(given["reference"]), undisturbed(batch))
            out["reference"] = jax.lax.stop_gradient(told.stats.logp)
        if s.balance is not None:
            out["balance"] = jnp.broadcast_to(s.balance, (len(s.weights), *s.balance.shape))
        return out

    return outputs


def policy_objective(
    options: Policy, *, router_aux_loss_coef: float = 0.0, router_z_loss_coef: float = 0.0
) -> Callable[..., tuple[Array, Sums]]:
    """Build the objective `(outputs, batch, given) -> (sum, sums)` of `policy`; outputs are those of `policy_outputs`.

    `router_aux_loss_coef` times the router's balance, `router_z_loss_coef` times its z-loss are added per unit of
    weight. Given "entropy", the state of `adaptive_entropy`, its coefficient takes the place of a `Policy.entropy_coef`
    that is not 0.
    """
    with_routers = routers_of(router_aux_loss_coef, router_z_loss_coef)[1]

    def objective(o: Outputs, batch: Batch, given: Given = NOTHING) -> tuple[Array, Sums]:
        coef = given["entropy"]["applied"] if "entropy" in given else None
        return with_routers(*policy(sampled_tokens(o, batch), options, coef), o)

    return objective


def routers_of(
    router_aux_loss_coef: float = 0.0, router_z_loss_coef: float = 0.0
) -> tuple[bool, Callable[[Array, Sums, Outputs], tuple[Array, Sums]]]:
    """Say whether `policy_outputs` need `router`, and give f(sum, sums, outputs), which adds `router_terms` to a loss."""
    aux, z = router_aux_loss_coef, router_z_loss_coef
    check_range(router_aux_loss_coef=aux, router_z_loss_coef=z)
    needed = aux + z != 0

    def with_routers(total: Array, sums: Sums, o: Outputs) -> tuple[Array, Sums]:
        if needed and "balance" not in o:
            raise ValueError("router_aux_loss_coef is not 0, but there is no balance; give policy_outputs router=True")
        return router_terms(total, sums, o["balance"].mean(0) if "balance" in o else None, aux, z)

    return needed, with_routers


def policy_gradient(
    family: ModuleType,
    cfg: Any,
    options: Policy | None = None,
    *,
    router_aux_loss_coef: float = 0.0,
    router_z_loss_coef: float = 0.0,
    **settings: Any,
) -> Callable[..., tuple[Array, Sums]]:
    """Build `loss(params, batch, given) -> (sum, sums)` for `train.grads`; `settings` are those of `policy_outputs`.

    ValueError for options that are `coupled`: they would come out differently in microbatches.
    >>> batch = {"tokens": tokens, "advantages": jnp.ones(tokens.shape)}
    >>> losses.policy_gradient(llama, cfg)(weights, batch, {})[0]  # 4 rows of 6 tokens, 5 of them drawn
    Array(-20., dtype=float32)
    """
    options = Policy() if options is None else options
    if options.coupled:
        raise ValueError(
            "top_entropy_quantile, and entropy_coef with a loss that is no mean over tokens, couple all rows; use "
            "train.gradcache(policy_outputs(...), policy_objective(options), n)"
        )
    router = routers_of(router_aux_loss_coef, router_z_loss_coef)[0]
    outputs = policy_outputs(family, cfg, **{"reference": options.beta > 0, "router": router} | settings)
    coefs = {"router_aux_loss_coef": router_aux_loss_coef, "router_z_loss_coef": router_z_loss_coef}
    objective = policy_objective(options, **coefs)
    return lambda params, batch, given=NOTHING: objective(outputs(params, batch, given), batch, given)


def token_logps(family: ModuleType, cfg: Any, **settings: Any) -> Callable[[Any, Batch], Float[Array, "B T"]]:
    """Build `logps(params, batch)`, what "old" and "ref_logps" hold: log-probabilities, as tokens, each at its token.

    `settings` are those of `policy_outputs`; 0 at tokens that are not to be learnt.
    """
    outputs = policy_outputs(family, cfg, **settings)

    def logps(params: Any, batch: Batch) -> Float[Array, "B T"]:
        x = outputs(params, batch)["logp"]
        return jnp.pad(x[:, :-1], ((0, 0), (1, 0)))

    return logps


def adaptive_entropy(
    step: Step, *, target: float = 0.2, delta: float = 0.005, low: float = 0.0, high: float = 1.0
) -> Step:
    """Let the entropy bonus follow a target (Skywork-OR1, arXiv:2505.22312; defaults as TRL's): wraps a step.

    extra["entropy"], `start_entropy(coef)` at first, holds the coefficient. After a step whose mean entropy is not above
    `target` it grows by `delta`, up to `high`, and is applied in the next one; after another it shrinks, down to `low`, and
    is not. The inner step needs reads=("entropy",) and an entropy_coef that is not 0.
    """
    check_range(target=target, delta=delta)
    if not 0 <= low <= high:
        raise ValueError(f"low={low}, high={high}; expected numbers from 0, in this order")

    def fold(old: dict[str, Array], metrics: dict[str, Array]) -> dict[str, Array]:
        scarce = metrics["entropy_of_learnt"] <= target
        coef = jnp.clip(old["coef"] + jnp.where(scarce, delta, -delta), low, high)
        return {"coef": coef, "applied": jnp.where(scarce, coef, 0.0)}

    return carry(step, "entropy", fold)


def start_entropy(coef: float) -> dict[str, Array]:
    """Make the state of `adaptive_entropy`; nothing is applied in the first step, before any entropy is known.
    >>> losses.start_entropy(0.01)["applied"]
    Array(0., dtype=float32)
    """
    check_range(entropy_coef=coef)
    return {"coef": jnp.float32(coef), "applied": jnp.float32(0)}


def at_next(batch: Batch, name: str, mask: Float[Array, "R T"]) -> Array:
    """Read a batch's column, moved so that place t speaks of token t + 1; 0 where the mask is."""
    if name not in batch:
        raise ValueError(f"the batch has {sorted(batch)}; expected a column {name!r}, as tokens")
    if batch[name].shape != mask.shape:
        raise ValueError(f"{name!r} has shape {batch[name].shape}; expected that of the tokens, {mask.shape}")
    return jnp.where(mask > 0, jnp.pad(batch[name][:, 1:], ((0, 0), (0, 1))), 0)


def sampled_tokens(o: Outputs, batch: Batch) -> Tokens:
    """Join outputs and a batch's columns; place t then speaks of token t + 1, as log-probabilities do."""
    packed, labels = rows(batch)[1:]
    mask = (labels >= 0).astype(jnp.float32)
    column = lambda name: at_next(batch, name, mask)
    reference = o.get("reference", column("ref_logps") if "ref_logps" in batch else None)
    sampled = column("logps") + (column("kept") if "kept" in batch else 0) if "logps" in batch else None
    return Tokens(
        logp=o["logp"],
        entropy=o["entropy"],
        mask=mask,
        advantages=column("advantages"),
        old=column("old") if "old" in batch else jax.lax.stop_gradient(o["logp"]),
        sampled=sampled,
        reference=reference,
        segments=None if packed.single else packed.segment_ids,
    )
