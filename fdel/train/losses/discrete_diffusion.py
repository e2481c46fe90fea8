"""The loss of discrete diffusion: a bidirectional model predicts the tokens that `ops.diffusion` has hidden."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from fdel.ops.diffusion import Noise, corrupt, elbo, log_snr_at
from fdel.train.given import Given, lookup
from fdel.train.losses.forward import Batch, forward_pass, rows
from fdel.train.losses.head import CHUNK, logits_sum
from fdel.train.losses.stats import IGNORE, TokenStats, check_range

Sums = dict[str, Array]


def diffusion(
    family: ModuleType,
    cfg: Any,
    noise: Noise,
    *,
    weighting: str = "log_snr",
    most: float = 1e3,
    remat: str | None = None,
    chunk: int = CHUNK,
) -> Callable:
    """Build `loss(params, batch, given) -> (sum, sums)` for `train.grads`; needs the key that a step gives.

    Each row has a log-SNR of its own, drawn so that alpha is uniform; tokens that are not learnt stay as they are. A token
    adds its weight, cut off at `most`, times its divergence (`ops.diffusion.elbo`). `weighting` "elbo" divides by the
    density of the log-SNR, so that the loss is the negative ELBO of the tokens; "log_snr" does not, as arXiv:2512.10858
    trains. Metrics: "elbo", without a cut. Logits are computed for `chunk` tokens at a time.
    """
    if weighting not in ("elbo", "log_snr"):
        raise ValueError(f"{weighting=}; expected 'elbo' or 'log_snr'")
    check_range(most=most)
    forward = forward_pass(family, cfg, remat=remat)
    span = jax.nn.sigmoid(noise.high) - jax.nn.sigmoid(noise.low)

    def tokens_of(
        z: Array, _: TokenStats, noisy: Array, tokens: Array, log_snr: Array, learn: Array
    ) -> tuple[Array, Sums]:
        """Sum over a chunk's tokens with logits z."""
        weight, divergence = elbo(noise, z, noisy, tokens, log_snr)
        full = weight * span / (jax.nn.sigmoid(log_snr) * jax.nn.sigmoid(-log_snr))
        total = lambda scale: jnp.where(learn, scale * divergence, 0).sum()
        value = total(jnp.minimum(full if weighting == "elbo" else weight, most))
        return value, {"loss": value, "weight": learn.sum().astype(jnp.float32), "elbo": total(full)}

    def loss(params: Any, batch: Batch, given: Given) -> tuple[Array, Sums]:
        tokens, packed, _ = rows(batch)
        learn = packed.segment_ids >= 0
        if "mask" in batch:
            learn &= batch["mask"].reshape(tokens.shape) != 0
        when, what = jax.random.split(lookup(given, "key"))
        log_snr = log_snr_at(noise, jax.random.uniform(when, (len(tokens), 1)))
        noisy = jnp.where(learn, corrupt(noise, what, tokens, log_snr), tokens)
        each = noisy, tokens, jnp.broadcast_to(log_snr, tokens.shape), learn
        x, head = forward(params, noisy, packed).hidden, family.head(params, cfg)
        return logits_sum(tokens_of, x, head, jnp.where(learn, tokens, IGNORE), *each, chunk=chunk)

    return loss
