"""Masked language modelling: an encoder predicts tokens that were hidden from it (arXiv:1810.04805, section 3.1)."""

import json
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from fdel.train.given import Given, lookup
from fdel.train.losses.forward import Batch, forward_pass, rows
from fdel.train.losses.head import CHUNK, token_sum
from fdel.train.losses.stats import IGNORE, check_range
from fdel.train.losses.supervised import nll

REPLACED, RANDOM = 0.8, 0.1  # of the tokens that are asked for; the others stay as they are


def hide(
    key: Array,
    tokens: Int[Array, "R T"],
    learn: Bool[Array, "R T"],
    *,
    mask: int,
    vocab: int,
    probability: float = 0.15,
) -> tuple[Int[Array, "R T"], Int[Array, "R T"]]:
    """Draw which tokens are asked for, among `learn`, each with `probability`: (what the model sees, labels).

    Of those, 80 % become `mask`, 10 % any of `vocab` tokens, and 10 % stay. Labels are IGNORE elsewhere.
    """
    which, how, what = jax.random.split(key, 3)
    asked = learn & (jax.random.uniform(which, tokens.shape) < probability)
    u = jax.random.uniform(how, tokens.shape)
    other = jnp.where(u < REPLACED, mask, jax.random.randint(what, tokens.shape, 0, vocab, tokens.dtype))
    return jnp.where(asked & (u < REPLACED + RANDOM), other, tokens), jnp.where(asked, tokens, IGNORE)


def special_ids(cfg: Any) -> list[int]:
    """List the tokens that begin, end and fill texts, by the model's config.json; they are never asked for."""
    d = json.loads(cfg.source)
    found = [d.get(f"{name}_token_id") for name in ("bos", "eos", "pad", "cls", "sep")]
    return sorted({i for x in found for i in (x if isinstance(x, list) else [x]) if type(i) is int})


def masked_lm(
    family: ModuleType, cfg: Any, mask: int, *, probability: float = 0.15, special: Sequence[int] | None = None,
    chunk: int = CHUNK, remat: str | None = None,
) -> Callable:  # fmt: skip
    """Build `loss(params, batch, given) -> (sum, sums)` for `train.grads`; needs the key that a step gives.

    It is the cross-entropy of the tokens that `hide` asks for, all but `special` ones, by default `special_ids`. ValueError
    for a family whose tokens do not see later ones.
    """
    check_range(1, chunk=chunk)
    check_range(0, 1, above=True, probability=probability)
    state = family.state_spec(cfg, pages=1, rows=1)
    if state.pages is not None or state.slots is not None:
        name = family.__name__.rpartition(".")[2]
        raise ValueError(f"{name}: its tokens see no later ones, so there is nothing to fill in; train it by sft")
    if not 0 <= mask < cfg.vocab:
        raise ValueError(f"mask_token_id={mask}; expected the id of the mask token, below {cfg.vocab}")
    forward = forward_pass(family, cfg, remat=remat)
    kept = jnp.array(special_ids(cfg) if special is None else special, int)

    def loss(params: Any, batch: Batch, given: Given) -> tuple[Array, dict[str, Array]]:
        tokens, packed, _ = rows(batch)
        learn = (packed.segment_ids >= 0) & ~jnp.isin(tokens, kept)
        if "mask" in batch:
            learn &= batch["mask"].reshape(tokens.shape) != 0
        key = lookup(given, "key")
        seen, labels = hide(key, tokens, learn, mask=mask, vocab=cfg.vocab, probability=probability)
        x, head = forward(params, seen, packed).hidden, family.head(params, cfg)
        total, sums = token_sum(nll, x, head, labels, (labels >= 0).astype(jnp.float32), chunk=chunk)
        return total, {"weight": sums["weight"], "accuracy": sums["mean_token_accuracy"]}

    return loss
