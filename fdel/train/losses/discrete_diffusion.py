"""The loss of discrete diffusion: a bidirectional model predicts the tokens that `ops.diffusion` has hidden."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from fdel import ops
from fdel.ops.diffusion import Noise, corrupt, elbo, log_snr_at
from fdel.train.given import Given, lookup
from fdel.train.losses.forward import Batch, forward_pass, rows
from fdel.train.losses.stats import check_range

Sums = dict[str, Array]


def diffusion(
    family: ModuleType,
    cfg: Any,
    noise: Noise,
    *,
    weighting: str = "log_snr",
    most: float = 1e3,
    remat: str | None = None,
) -> Callable:
    """Build `loss(params, batch, given) -> (sum, sums)` for `train.grads`; needs the key that a step gives.

    Each row has a log-SNR of its own, drawn so that alpha is uniform; tokens that are not learnt stay as they are. A token
    adds its weight, cut off at `most`, times its divergence (`ops.diffusion.elbo`). `weighting` "elbo" divides by the
    density of the log-SNR, so that the loss is the negative ELBO of the tokens; "log_snr" does not, as arXiv:2512.10858
    trains. Metrics: "elbo", without a cut. Logits of whole rows are in memory, [R T V].
    """
    if weighting not in ("elbo", "log_snr"):
        raise ValueError(f"{weighting=}; expected 'elbo' or 'log_snr'")
    check_range(most=most)
    forward = forward_pass(family, cfg, remat=remat)

    def loss(params: Any, batch: Batch, given: Given) -> tuple[Array, Sums]:
        tokens, packed, _ = rows(batch)
        learn = packed.segment_ids >= 0
        if "mask" in batch:
            learn &= batch["mask"].reshape(tokens.shape) != 0
        when, what = jax.random.split(lookup(given, "key"))
        log_snr = log_snr_at(noise, jax.random.uniform(when, (len(tokens), 1)))
        noisy = jnp.where(learn, corrupt(noise, what, tokens, log_snr), tokens)
        logits = ops.logits(forward(params, noisy, packed).hidden, family.head(params, cfg))
        weight, divergence = elbo(noise, logits, noisy, tokens, jnp.broadcast_to(log_snr, tokens.shape))
        span = jax.nn.sigmoid(noise.high) - jax.nn.sigmoid(noise.low)
        density = jax.nn.sigmoid(log_snr) * jax.nn.sigmoid(-log_snr) / span
        full = weight / density
        scale = jnp.minimum(full if weighting == "elbo" else weight, most)
        total = lambda scale: jnp.where(learn, scale * divergence, 0).sum()
        return total(scale), {"loss": total(scale), "weight": learn.sum().astype(jnp.float32), "elbo": total(full)}

    return loss
